"""Operators on tensors without data, and no compiler: PyTorch says in Python what they return, and would load its compiler for that."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import CellType, FunctionType, ModuleType
from typing import Any

_KEPT = "__dynamo_disable"
"""Where such a function keeps itself as the compiler shall call it. The first call makes it, for which it loads the compiler."""


_lock = Lock()
_changed: list[Any] = []
_users = 0


@contextmanager
def compiler_unloaded() -> Iterator[None]:
    """Let functions that the compiler shall not look into run as they are, where nothing has loaded it yet.

    The first of several threads changes them, and the last puts them back as they were.
    """
    global _users
    try:
        with _lock:
            _users += 1
            if _users == 1 and "torch._dynamo" not in sys.modules:
                _changed.extend(_hidden())
                for function in _changed:
                    setattr(function, _KEPT, function)
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                for function in _changed:
                    if vars(function).get(_KEPT) is function:
                        delattr(function, _KEPT)
                _changed.clear()


def _hidden() -> list[Any]:
    """Return the functions behind `torch._disable_dynamo` among what PyTorch says of operators; none where that is built otherwise."""
    outer = getattr(sys.modules.get("torch._compile"), "_disable_dynamo", None)
    codes = {one for one in getattr(getattr(outer, "__code__", None), "co_consts", ()) if getattr(one, "co_name", "") == "inner"}
    refs: Any = sys.modules.get("torch._refs")
    modules: list[ModuleType] = [] if refs is None else [refs, refs.nn.functional, refs.special]
    waiting: list[Any] = [value for module in modules for value in vars(module).values() if isinstance(value, FunctionType)]
    seen, found = set[int](), list[Any]()
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        held = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
        inside = [one for one in held if isinstance(one, FunctionType)]
        if function.__code__ in codes:
            found += [one for one in inside if not hasattr(one, _KEPT)]
        waiting += inside
    return found


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a function that is not defined yet
        return False
