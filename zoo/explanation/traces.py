"""What a network computes, written down once for all calls: tracing takes longer than small images take to explain.

A trace holds no numbers of a network, but what its modules are and how they are set. Two networks that are alike in that have the same one,
and a network that was changed has another: everything that a trace may depend on is part of the key that it is kept under.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from threading import Lock
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from zoo.explanation.apart import apart
from zoo.extraction.taps import Places, Trace, trace, trace_module
from zoo.networks.model import Model

MOST = 16
"""Traces that are kept, the last used."""
UNSEEN = frozenset((*vars(nn.Module()), "checkpoint", "classes"))
"""Attributes of a module that are looked at otherwise, or that no trace depends on: what every module has, hooks among it."""
PLAIN = (bool, int, str, bytes)
"""Types whose values are equal where they are the same."""
_kept: OrderedDict[Hashable, tuple[Trace, Places | None]] = OrderedDict()
_lock = Lock()


class _Unknown(Exception):
    """A module has an attribute that can't be compared, so no trace of it is kept."""


def traced(own: nn.Module) -> tuple[Trace, Places | None]:
    """Write down what a network computes, and where its taps are, which only the zoo's networks have; or take what is kept of one alike.

    Nobody may change the graph but in a way that can be repeated.

    Args:
        own: what `apart` returns.

    Raises:
        ValueError: the network has no graph.
    """
    try:
        key = _looks(own)
        hash(key)
    except (_Unknown, TypeError):
        return _traced(own)
    with _lock:
        if (found := _kept.get(key)) is not None:
            _kept.move_to_end(key)
            return found
    try:
        found = _traced(apart(own, torch.device("meta")))  # so that what is kept holds no numbers
    except Exception:  # it may read some of its numbers; what is wrong with it is said below
        return _traced(own)
    if found[0].closed:  # likewise inside a module
        return _traced(own)
    with _lock:
        found = _kept.setdefault(key, found)
        while len(_kept) > MOST:
            _kept.popitem(last=False)
    return found


def _traced(own: nn.Module) -> tuple[Trace, Places | None]:
    if isinstance(own, Model):
        written = trace(own)
        return written, Places(own, written)
    return trace_module(own), None


def _looks(network: nn.Module) -> Hashable:
    """Tell all that a trace may depend on: each module's class and settings, which modules and tensors are one, and how tensors look."""
    first: dict[int, int] = {}

    def number(thing: object) -> int:
        return first.setdefault(id(thing), len(first))

    def told(name: str, module: nn.Module) -> tuple[Hashable, ...]:
        tensors: dict[str, Any] = {**module.__dict__["_parameters"], **module.__dict__["_buffers"]}
        same = tuple(None if tensor is None else number(tensor) for tensor in tensors.values())
        settings = {name: value for name, value in vars(module).items() if name not in UNSEEN}
        return name, number(module), type(module), type(module).forward, same, _token(tensors), _token(settings)

    return tuple(told(name, module) for name, module in network.named_modules(remove_duplicate=False))


def _token(value: Any) -> Hashable:
    if type(value) in PLAIN:
        return type(value), value
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return "mapping", *((key, _token(one)) for key, one in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), *map(_token, value)
    if isinstance(value, type | FunctionType | BuiltinFunctionType | torch.dtype | torch.device) or value is None:
        return value
    if isinstance(value, bool | int | float | str | bytes | slice | range):
        return type(value), repr(value)
    raise _Unknown
