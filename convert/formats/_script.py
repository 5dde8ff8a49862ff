"""Programs of TorchScript: what their modules hold, by the names that a state dict would have. No code of theirs is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convert._guard import MAX_DEPTH, MAX_TENSORS
from convert.formats._picklearrays import Call, Name
from convert.formats._torchpickle import Described, Odd
from convert.kinds import is_mapping
from weights.errors import LimitExceeded, MalformedFile

MOST_VISITED = 10 * MAX_TENSORS
"""Of modules and what they hold: one that is held twice is visited twice, and that may double with each level."""


def tensors(content: Any, path: Path) -> dict[str, Any]:
    """Collect the tensors of a program's modules.

    Raises:
        MalformedFile: it holds none.
        LimitExceeded: modules nest deeper, or are more, than any network's.
    """
    found = dict(_inside(content, "", 0, [MOST_VISITED]))
    if not found:
        raise MalformedFile(
            f"{path} is a TorchScript program whose modules hold no tensors: frozen, they became constants of its code, without names. "
            "Ask for it as it was before torch.jit.freeze or optimize_for_inference, or for the state dict"
        )
    return found


def program(content: Any) -> str:
    """Name the class of the outermost module."""
    return str(content.what).removeprefix("__torch__.")[:200] if isinstance(content, Call) else type(content).__name__


def _inside(module: Any, prefix: str, depth: int, left: list[int]) -> Iterator[tuple[str, Any]]:
    state = module.state if isinstance(module, Call) and isinstance(module.what, Name) else None
    if not is_mapping(state):
        return
    if depth > MAX_DEPTH:
        raise LimitExceeded("its modules nest deeper than any network's")
    for name, value in state.items():
        left[0] -= 1
        if left[0] < 0:
            raise LimitExceeded(f"its modules hold more than {MOST_VISITED} things")
        if not isinstance(name, str):
            continue
        if isinstance(value, Described | Odd):
            yield f"{prefix}{name}", value
        else:
            yield from _inside(value, f"{prefix}{name}.", depth + 1, left)
