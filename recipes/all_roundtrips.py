"""Write every network of the zoo in every format that is written, both conventions, and read it back: every bit must come home.

    python recipes/all_roundtrips.py [--model VGG19] [--format keras]

It needs as much disk as the largest network, and about half an hour. docs/notes/converting.md quotes what it printed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zoo.catalogue import CATALOGUE

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "zoo"))
trips: Any = importlib.import_module("roundtrips")


def main() -> int:
    """Print a line a network: how many files, how many tensors that came back otherwise, and the time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", action="append")
    parser.add_argument("--format", action="append")
    wanted = parser.parse_args()
    cases = [(f, c) for f, (_, conventions) in trips.COMBINATIONS.items() for c in conventions if not wanted.format or f in wanted.format]
    files = failed = 0
    for name in wanted.model or CATALOGUE:
        begun, network, wrong = time.monotonic(), trips.built(name), []
        for format, convention in cases:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    lost = trips.differences(network, format, convention, Path(folder))
                except Exception as error:  # the table is to be complete
                    lost = [f"{type(error).__name__}: {str(error)[:200]}"]
            wrong += [(format, convention, lost[:3])] if lost else []
        files, failed = files + len(cases), failed + len(wrong)
        print(
            f"{name:20} {len(cases) - len(wrong):3} of {len(cases)} bit for bit  {time.monotonic() - begun:6.1f} s  {wrong or ''}",
            flush=True,
        )
    print(f"{files} files, {failed} not bit for bit")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
