"""Signs that a network kept something of a call for the next, or drew random numbers that PyTorch knows nothing of.

They only say that it is worth recording the network again: whether the recordings differ decides. So what is kept and never read is
no fault, nor are numbers that another thread draws meanwhile.
"""

from __future__ import annotations

import random
import sys
from itertools import chain, islice
from typing import Any

from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MODULES = frozenset(vars(nn.Module()))
"""What every module keeps for itself."""
LOOKED_INTO = 1000
"""Elements of a list, tuple or set that are looked at, of a dictionary keys and values."""


class Signs:
    """What could tell, at one moment.

    Args:
        network: any module.
    """

    def __init__(self, network: nn.Module) -> None:
        self._held: list[Any] = []  # an address may be another's once its object is gone
        self._attributes = {
            (path, name): self._told(value)
            for path, module in network.named_modules()
            for name, value in vars(module).items()
            if name not in _MODULES
        }
        numpy = sys.modules.get("numpy")
        self._drawn = random.getstate(), None if numpy is None else repr(numpy.random.get_state(legacy=False))

    def _told(self, value: Any, inside: bool = True) -> Any:
        if isinstance(value, _PLAIN) or type(value).__module__ == "numpy":
            return repr(value)  # in which NaN is itself
        self._held.append(value)
        if not inside or not isinstance(value, list | tuple | set | dict):
            return id(value)
        parts = chain(value, value.values()) if isinstance(value, dict) else value
        return id(value), len(value), [self._told(each, inside=False) for each in islice(parts, LOOKED_INTO)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signs) and (self._attributes, self._drawn) == (other._attributes, other._drawn)

    __hash__ = None  # pyright: ignore[reportAssignmentType]
