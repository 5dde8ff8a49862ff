"""What kind of value a parsed file gave: as `isinstance`, and for the type checker with contents that may be anything.

`isinstance(value, dict)` leaves it with keys and items of no type at all, and it would stay silent about whatever is done with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # of Python 3.13's typing


def is_dict(value: object) -> TypeIs[dict[Any, Any]]:
    """Tell a dictionary."""
    return isinstance(value, dict)


def is_mapping(value: object) -> TypeIs[Mapping[Any, Any]]:
    """Tell a mapping of any class."""
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeIs[list[Any]]:
    """Tell a list."""
    return isinstance(value, list)


def is_tuple(value: object) -> TypeIs[tuple[Any, ...]]:
    """Tell a tuple."""
    return isinstance(value, tuple)


def is_row(value: object) -> TypeIs[list[Any] | tuple[Any, ...]]:
    """Tell a list or a tuple."""
    return isinstance(value, (list, tuple))


def is_array(value: object) -> TypeIs[np.ndarray[Any, Any]]:
    """Tell a NumPy array."""
    return isinstance(value, np.ndarray)


def is_scalar(value: object) -> TypeIs[np.generic[Any]]:
    """Tell one number of NumPy's."""
    return isinstance(value, np.generic)


def is_view(value: object) -> TypeIs[memoryview[int]]:
    """Tell a view of bytes."""
    return isinstance(value, memoryview)
