"""Count which ops win the steps of plans: the census by which an op that earns nothing is found.

    python recipes/ops_census.py                                    # of the choices that the package brings
    python recipes/ops_census.py ~/.cache/kernelzoo/kernels/*.json  # of what `fast` has found on this machine

A step counts once, whatever networks have it. The gain is the step's time by PyTorch's operators, with BatchNorm folded and in
channels_last, over the winner's. An op without a win is named apart; it may be that no step of these networks asks for it.
Ops that only training launches are left out: their choices are kept by chain.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.kernels.ops import discover
from zoo.kernels.tuning.choices import SHIPPED, SHIPPED_FIELDS

TRAINING = ("_grad", "_add", "_stats", "pointwise_norm", "cross_entropy", "batch_norm_act", "max_pool")
"""Ends of the names of ops that only training launches."""


@dataclass(slots=True)
class Census:
    """What was counted.

    Attributes:
        kinds: steps of each kind by the op that won them, "aten" among these.
        gains: of each op, how many times faster than PyTorch's operators it was at the steps where that was timed.
    """

    kinds: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    gains: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def wins(self) -> Counter[str]:
        """How many steps each op won."""
        return sum(self.kinds.values(), Counter())

    def add(self, choices: dict[str, Any]) -> None:
        """Count the choices of a file, as it has them: a list in the package's, a table in a machine's own."""
        for key, value in choices.items():
            choice = value if isinstance(value, dict) else dict(zip(SHIPPED_FIELDS, value, strict=True))
            self.kinds[key.partition(" ")[0]][choice["op"]] += 1
            if choice["us"] and choice["aten_us"]:
                self.gains[choice["op"]].append(choice["aten_us"] / choice["us"])

    def table(self) -> str:
        """Draw it in Markdown."""
        lines = ["| op | steps won | times as fast as PyTorch's operators, median | of steps |", "|---|--:|--:|---|"]
        for op, count in self.wins.most_common():
            gain = f"{statistics.median(self.gains[op]):.2f}" if self.gains[op] and op != "aten" else ""
            kinds = ", ".join(f"{kind} {won[op]}" for kind, won in self.kinds.items() if won[op])
            lines.append(f"| `{op}` | {count} | {gain} | {kinds} |")
        return "\n".join(lines)

    def without(self, ops: Iterable[str]) -> list[str]:
        """List those of some ops that won nothing."""
        return [op for op in ops if not self.wins[op]]


def content(path: Path) -> dict[str, Any]:
    """Read a file of choices."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["choices"]


def main() -> None:
    """Print the table, and what won nothing."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("files", nargs="*", type=Path, help="files of choices; the package's if left out")
    files = asked.parse_args().files or sorted(SHIPPED.glob("*.json.gz") if SHIPPED else ())
    found = Census()
    for path in files:
        found.add(content(path))
    print(found.table())
    print("\nWithout a win:", ", ".join(f"`{op}`" for op in found.without(op for op in discover() if not op.endswith(TRAINING))))


if __name__ == "__main__":
    main()
