"""A value as what a map holds, in another order: the arithmetic of views, permutations, shifts and cuts, without a number moved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor

from zoo.kernels.passes.graph import Node

Factor = tuple[int, int, int]
"""A part of an axis of a map: the axis, 0 to 3, how many elements, and how many of the axis lie between two of them."""
Dims = tuple[tuple[Factor, ...], ...]


@dataclass(frozen=True, slots=True)
class Order:
    """A value as elements of a map in another order.

    Attributes:
        root: the map.
        dims: for each axis of the value, the parts of the map's axes that it runs over, the slowest first.
        roll: by how many elements each of the map's axes was shifted, cyclically.
        start: of each of the map's axes, the first element that the value has.
        factor: the map's elements are multiplied by.
        unit: the parts of axes whose vectors were divided by their norms; none if empty.
    """

    root: Node
    dims: Dims
    roll: tuple[int, int, int, int] = (0, 0, 0, 0)
    start: tuple[int, int, int, int] = (0, 0, 0, 0)
    factor: float = 1.0
    unit: tuple[Factor, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether only the order differs from the map's."""
        return self.start == (0, 0, 0, 0) and self.factor == 1.0 and not self.unit

    def is_map(self) -> bool:
        """Tell whether even the order is the map's."""
        return self.plain and not any(self.roll) and self.dims == own_dims(self.root.shape)

    def has_channels(self) -> bool:
        """Tell whether axis 1 runs over all channels, and nothing else does."""
        return self.plain and len(self.dims) == 4 and self.dims[1] == own_dims(self.root.shape)[1]


@dataclass(frozen=True, slots=True)
class Logits:
    """How much each pixel of a window looks at each other one; the last axis is of those that are looked at."""

    query: Order
    key: Order
    dims: Dims
    scale: Tensor | None = None
    bias: Tensor | None = None
    region: Tensor | None = None
    weighs: bool = False
    """Whether this is behind the softmax."""


@dataclass(frozen=True, slots=True)
class Several:
    """What `unbind` returns, elements of an axis, or `split`, parts of an axis of `size` elements each."""

    of: Order
    axis: int
    size: int | None = None


Known = Order | Logits | Several


def sizes_of(factors: Iterable[Factor]) -> int:
    """Count the elements that parts of axes have together."""
    return prod(size for _, size, _ in factors)


def own_dims(shape: Sequence[int]) -> Dims:
    """Return the axes of a map in its own order."""
    return tuple(((axis, size, 1),) if size > 1 else () for axis, size in enumerate(shape))


def seen(known: Known, shape: Sequence[int]) -> Known | None:
    """Give a value another shape."""
    if isinstance(known, Several):
        return None
    rest = list(_joined(factor for dim in known.dims for factor in dim))
    dims: list[tuple[Factor, ...]] = []
    for size in shape:
        taken: list[Factor] = []
        while size > 1:
            if not rest:
                return None
            axis, count, step = rest.pop(0)
            if size % count == 0:
                taken.append((axis, count, step))
                size //= count
            elif count % size == 0:
                taken.append((axis, size, step * (count // size)))
                rest.insert(0, (axis, count // size, step))
                size = 1
            else:
                return None
        dims.append(_joined(taken))
    return None if rest else replace(known, dims=tuple(dims))


def _joined(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    """Join parts of an axis that follow each other as one part would."""
    found: list[Factor] = []
    for axis, count, step in factors:
        if found and found[-1][0] == axis and found[-1][2] == count * step:
            found[-1] = (axis, found[-1][1] * count, step)
        else:
            found.append((axis, count, step))
    return tuple(found)


def permuted(known: Known, axes: Sequence[int]) -> Known | None:
    """Exchange axes."""
    if isinstance(known, Several):
        return None
    return replace(known, dims=tuple(known.dims[axis] for axis in axes))


def rolled(order: Order, shifts: Any, axes: Any, shape: Sequence[int]) -> Order | None:
    """Shift axes of the map cyclically."""
    roll = list(order.roll)
    shifts, axes = ([v] if isinstance(v, int) else list(v) for v in (shifts, axes))
    if len(shifts) != len(axes):  # of all elements as one row
        return None
    for shift, axis in zip(shifts, axes, strict=True):
        dim = order.dims[axis % len(shape)]
        if len(dim) != 1 or dim != own_dims(order.root.shape)[dim[0][0]]:
            return None
        size = dim[0][1]
        roll[dim[0][0]] = (roll[dim[0][0]] + shift + size // 2) % size - size // 2
    return replace(order, roll=tuple(roll))


def selected(order: Order, axis: int, index: int) -> Order | None:
    """Take one element of an axis."""
    start, dim = list(order.start), order.dims[axis]
    if len(dim) > 1:
        return None
    if dim:
        if order.roll[dim[0][0]]:
            return None
        start[dim[0][0]] += (index % dim[0][1]) * dim[0][2]
    return replace(order, dims=order.dims[:axis] + order.dims[axis + 1 :], start=tuple(start))


def part_of(several: Several, node: Node) -> Order | None:
    """Take one of several."""
    number = node.attrs["index"]
    if several.size is None:
        return selected(several.of, several.axis, number)
    return _cut(several.of, several.axis, number * several.size, node.shape[several.axis])


def sliced(order: Order, before: Sequence[int], after: Sequence[int], args: Sequence[Any]) -> Order | None:
    """Take a slice of an axis, of `aten.slice`'s arguments."""
    axis, begin, step = args[1] % len(before), args[2] or 0, args[4]
    if before[axis] == after[axis]:
        return order
    begin = max(0, begin + before[axis]) if begin < 0 else begin
    return _cut(order, axis, begin, after[axis]) if step == 1 else None


def _cut(order: Order, axis: int, begin: int, count: int) -> Order | None:
    """Take some elements of an axis, one behind the other."""
    dim = order.dims[axis]
    if len(dim) != 1 or order.roll[dim[0][0]]:
        return None
    start = list(order.start)
    start[dim[0][0]] += begin * dim[0][2]
    dims: list[tuple[Factor, ...]] = list(order.dims)
    dims[axis] = ((dim[0][0], count, dim[0][2]),) if count > 1 else ()
    return replace(order, dims=tuple(dims), start=tuple(start))
