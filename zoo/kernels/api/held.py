"""Whether a network still holds the tensors and layers that plans were made of, asked at every call in as little time as that can take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

_version = attrgetter("_version")
"""Counts what was written into a tensor in place."""


def _dictionary_version() -> Callable[[dict[str, Any]], int] | None:
    """Return what tells a dictionary's version, which changes of it raise: PyTorch's compiler asks it too. None without it.

    From Python 3.12 on filling an empty dictionary at once raises none, and without the interpreter's lock nobody keeps count.
    """
    try:
        from torch._C._dynamo.guards import dict_version  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

        before = {"one": 1}
        first = dict_version(before)
        before["one"] = 2
        locked = getattr(sys, "_is_gil_enabled", lambda: True)()
        return dict_version if locked and dict_version(before) > first else None
    except (ImportError, TypeError, RuntimeError):
        return None


_dict_version = _dictionary_version()


class Held:
    """Parameters, buffers and layers of a network at one moment.

    Behind a call of some milliseconds the caches hold nothing of them. By a loop that was not kept, MobileNetV2's 314 tensors take 70 us
    to tell their versions, its 642 dictionaries 26, and comparing all objects in them takes 80. So objects are compared where a dictionary
    was changed.

    Args:
        network: in it, TorchScript's modules hold no dictionaries, and can't be changed.
    """

    def __init__(self, network: nn.Module) -> None:
        held = ((module._parameters, module._buffers, module._modules) for module in network.modules())
        self._every = [one for some in held for one in some if isinstance(one, dict)]
        self._changes = self._counted()
        self._holders, self._empty = [one for one in self._every if one], [one for one in self._every if not one]
        self._objects = [*chain.from_iterable(map(dict.values, self._holders))]
        self._tensors = [
            value for value in self._objects if isinstance(value, Tensor) and not value.is_inference()
        ]  # which have no versions
        self._written = sum(map(_version, self._tensors))

    def _counted(self) -> int | None:
        return None if _dict_version is None else sum(map(_dict_version, self._every))

    def is_written(self) -> bool:
        """Tell whether a tensor was written to in place."""
        return sum(map(_version, self._tensors)) != self._written

    def is_replaced(self) -> bool:
        """Tell whether a parameter, buffer or layer is another one now, is gone or has come."""
        changes = self._counted()
        filled = any(self._empty)
        if changes is not None and changes == self._changes and not filled:
            return False
        as_many = sum(map(len, self._holders)) == len(self._objects) and not filled
        if as_many and all(map(is_, chain.from_iterable(map(dict.values, self._holders)), self._objects)):
            self._changes = changes  # something was put back
            return False
        return True
