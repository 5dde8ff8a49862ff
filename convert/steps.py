"""Named, invertible steps from a tensor as a file stores it to the same tensor as PyTorch stores it, and the flip.

A step carries out one thing, `do`, takes it back, `undo`, knows what it makes of a shape, and prints as what a reader of the
result's metadata should see. Everything here is NumPy and pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from convert.kinds import is_array

LARGE = 2**16
"""Numbers from which on a transposed copy is made in tiles."""
NEAR, TILE = 128, 2**15
"""Numbers that lie side by side in the source which a tile takes, and those of a tile in all: what a core's cache holds."""
PADDING = 16
"""Numbers left free behind each row of a tile."""
Shape = tuple[int, ...]

SPATIAL = "DHW"
"""Letters of a layout whose axes a kernel is flipped along; the others are I and O (or C and M of a depthwise kernel), G."""

LAYOUTS = {"conv": "OIHW", "depthwise": "OIHW", "transposed": "IOHW", "linear": "OI"}
"""How PyTorch stores the weight of each kind of layer."""


def flip(kernel: Any, layout: str = "OIHW") -> Any:
    """Turn a kernel of true convolution into the kernel of cross-correlation that computes the same, and back.

    True convolution (Flux's Conv, Theano, scipy.signal.convolve) runs over its kernel backwards; cross-correlation (PyTorch,
    TensorFlow, ONNX, Caffe, scipy.signal.correlate) forwards. Reversing every spatial axis leads from one to the other, for dense,
    grouped, depthwise and transposed kernels alike. Channels are left alone. docs/convert.md has the picture.

    Args:
        kernel: NumPy array or torch tensor; any dtype.
        layout: a letter for each axis: D, H, W are spatial, all others are not. "OIHW" is PyTorch's and Caffe's, "HWIO" Keras's,
            "HWCM" its depthwise kernels', "IOHW" PyTorch's transposed ones, "WHIO" Flux's as Julia shows it.

    Returns:
        The flipped kernel, of the same shape and dtype: a view in NumPy, a copy in torch.

    Raises:
        ValueError: the layout has another number of letters than the kernel has axes.

    Example:
        >>> import numpy as np
        >>> flip(np.arange(4.0).reshape(1, 1, 2, 2))[0, 0].tolist()
        [[3.0, 2.0], [1.0, 0.0]]
    """
    if len(layout) != len(kernel.shape):
        raise ValueError(f"layout {layout!r} names {len(layout)} axes, the kernel has {len(kernel.shape)}: {tuple(kernel.shape)}")
    axes = tuple(axis for axis, letter in enumerate(layout) if letter in SPATIAL)
    return np.flip(kernel, axes) if is_array(kernel) else kernel.flip(axes)


@dataclass(frozen=True, slots=True)
class Step:
    """One invertible thing that is done to a tensor.

    Attributes:
        exact: whether `undo` gives back every bit.
    """

    exact: ClassVar[bool] = True

    def do(self, array: np.ndarray) -> np.ndarray:
        """Carry it out: a view where strides allow it, else a copy. What rounds computes in float64 and keeps the dtype."""
        raise NotImplementedError

    def undo(self, array: np.ndarray) -> np.ndarray:
        """Take it back: by doing it once more, unless a step says otherwise."""
        return self.do(array)

    def shape(self, shape: Shape) -> Shape:
        """Tell the shape that `do` gives a tensor of `shape`; the same unless a step says otherwise."""
        return shape


@dataclass(frozen=True, slots=True)
class Transpose(Step):
    """Put the axes in another order, as `numpy.transpose` does."""

    axes: tuple[int, ...]

    def do(self, array: np.ndarray) -> np.ndarray:
        return array.transpose(self.axes)

    def undo(self, array: np.ndarray) -> np.ndarray:
        return array.transpose(tuple(np.argsort(self.axes)))

    def shape(self, shape: Shape) -> Shape:
        return tuple(shape[axis] for axis in self.axes)

    def __str__(self) -> str:
        return f"transpose({','.join(map(str, self.axes))})"


@dataclass(frozen=True, slots=True)
class Reshape(Step):
    """Give the same numbers in the same (C) order another shape."""

    before: Shape
    after: Shape

    def do(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(self.after)

    def undo(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(self.before)

    def shape(self, shape: Shape) -> Shape:
        """Tell the new shape; ValueError where the numbers don't fit into it."""
        if math.prod(shape) != math.prod(self.after):
            raise ValueError(f"{shape} can't be reshaped to {self.after}")
        return self.after

    def __str__(self) -> str:
        return f"reshape({'x'.join(map(str, self.before))} to {'x'.join(map(str, self.after))})"


@dataclass(frozen=True, slots=True)
class Flip(Step):
    """Reverse the spatial axes of a kernel: true convolution to cross-correlation."""

    axes: tuple[int, ...] = (2, 3)

    def do(self, array: np.ndarray) -> np.ndarray:
        return np.flip(array, self.axes)

    def __str__(self) -> str:
        return f"flip({','.join(map(str, self.axes))})"


@dataclass(frozen=True, slots=True)
class SwapChannels(Step):
    """Reverse the input channels of the first convolution: BGR to RGB."""

    axis: int = 1

    def do(self, array: np.ndarray) -> np.ndarray:
        return np.flip(array, self.axis)

    def __str__(self) -> str:
        return f"swap channels({self.axis})"


@dataclass(frozen=True, slots=True)
class FlattenOrder(Step):
    """Reorder the inputs of a dense weight (out, in), which reads a flattened feature map, to PyTorch's order CHW.

    `order` is the order in which the file's network flattens its map of `channels` x `height` x `width`: "hwc" (TensorFlow),
    "cwh" (a network that has width where PyTorch has height), "whc" and so on.
    """

    channels: int
    height: int
    width: int
    order: str = "hwc"

    def do(self, array: np.ndarray) -> np.ndarray:
        return laid(self.spread(array)).reshape(array.shape)

    def spread(self, array: np.ndarray) -> np.ndarray:
        """Carry it out but for the last reshape, whose result is no view: (out, C, H, W)."""
        sizes = {"c": self.channels, "h": self.height, "w": self.width}
        split = array.reshape(array.shape[0], *(sizes[letter] for letter in self.order))
        return split.transpose(0, *(1 + self.order.index(letter) for letter in "chw"))

    def undo(self, array: np.ndarray) -> np.ndarray:
        split = array.reshape(array.shape[0], self.channels, self.height, self.width)
        return split.transpose(0, *(1 + "chw".index(letter) for letter in self.order)).reshape(array.shape)

    def shape(self, shape: Shape) -> Shape:
        """Keep the shape; ValueError where the map doesn't fill the inputs."""
        if len(shape) != 2 or shape[1] != self.channels * self.height * self.width:
            raise ValueError(f"a map of {self.channels}x{self.height}x{self.width} does not fill a dense weight of shape {shape}")
        return shape

    def __str__(self) -> str:
        return f"flatten {self.order} to chw({self.channels}x{self.height}x{self.width})"


@dataclass(frozen=True, slots=True)
class Moment(Step):
    """Turn what a file keeps of a BatchNorm's spread into a variance.

    `kind` is "std" (Flux before 0.7, MatConvNet: sqrt(variance + eps)) or "inv_std" (Lasagne: 1 / sqrt(variance + eps)); `eps` is
    what that framework had added before the root, and what our BatchNorm adds again.
    """

    exact: ClassVar[bool] = False

    kind: str
    eps: float

    def do(self, array: np.ndarray) -> np.ndarray:
        wide = array.astype(np.float64)
        return ((wide if self.kind == "std" else 1 / wide) ** 2 - self.eps).astype(array.dtype)

    def undo(self, array: np.ndarray) -> np.ndarray:
        wide = np.sqrt(array.astype(np.float64) + self.eps)
        return (wide if self.kind == "std" else 1 / wide).astype(array.dtype)

    def __str__(self) -> str:
        return f"variance from {self.kind}(eps {self.eps:g})"


class _Factors(Step):
    """Multiply by numbers; a factor of zero can't be taken back and gives infinity."""

    __slots__ = ()
    exact: ClassVar[bool] = False

    def _factors(self, axes: int) -> Any:
        raise NotImplementedError

    def do(self, array: np.ndarray) -> np.ndarray:
        return (array.astype(np.float64) * self._factors(array.ndim)).astype(array.dtype)

    def undo(self, array: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return (array.astype(np.float64) / self._factors(array.ndim)).astype(array.dtype)


@dataclass(frozen=True, slots=True)
class Scale(_Factors):
    """Multiply by a number: Caffe's BatchNorm keeps sums, and the factor that they must be divided by."""

    factor: float

    def _factors(self, axes: int) -> Any:
        return np.float64(self.factor)

    def __str__(self) -> str:
        return f"times {self.factor:.9g}"


@dataclass(frozen=True, slots=True)
class ScaleChannels(_Factors):
    """Multiply each input channel of the first convolution by a number: the division by a standard deviation goes into the weights."""

    factors: tuple[float, ...]

    def _factors(self, axes: int) -> Any:
        return np.array(self.factors).reshape(1, -1, *(1,) * (axes - 2))

    def __str__(self) -> str:
        return f"times {', '.join(f'{factor:g}' for factor in self.factors)} by input channel"


@dataclass(frozen=True, slots=True, eq=False)
class ScaleOutputs(_Factors):
    """Multiply each output channel by a number: the scale of a BatchNorm goes into the convolution and the mean before it."""

    factors: np.ndarray
    what: str

    def _factors(self, axes: int) -> Any:
        return self.factors.astype(np.float64).reshape(-1, *(1,) * (axes - 1))

    def __str__(self) -> str:
        return f"times {self.what}"


@dataclass(frozen=True, slots=True, eq=False)
class Minus(Step):
    """Subtract another tensor: the bias of a convolution goes into the mean of the BatchNorm behind it."""

    exact: ClassVar[bool] = False

    other: np.ndarray
    what: str

    def do(self, array: np.ndarray) -> np.ndarray:
        return (array.astype(np.float64) - self.other).astype(array.dtype)

    def undo(self, array: np.ndarray) -> np.ndarray:
        return (array.astype(np.float64) + self.other).astype(array.dtype)

    def __str__(self) -> str:
        return f"minus {self.what}"


@dataclass(frozen=True, slots=True)
class Cast(Step):
    """Store in another dtype."""

    before: str
    after: str

    def do(self, array: np.ndarray) -> np.ndarray:
        return array.astype(self.after)

    def undo(self, array: np.ndarray) -> np.ndarray:
        return array.astype(self.before)

    def __str__(self) -> str:
        return f"{self.before} to {self.after}"


def from_layout(kind: str, layout: str, shape: Shape) -> tuple[Step, ...]:
    """List the steps from a weight that a file stores as `layout` says to PyTorch's.

    Args:
        kind: "conv", "depthwise", "transposed" or "linear".
        layout: a letter for each axis, O I H W D in any order; of a depthwise kernel C (input channel) and M (multiplier), whose output
            channel c * multiplier + m comes out first: "HWCM" gives (C * M, 1, H, W).
        shape: of the weight in the file.

    Raises:
        ValueError: the layout's letters don't fit the kind or the shape.
    """
    if len(layout) != len(shape):
        raise ValueError(f"layout {layout!r} names {len(layout)} axes, the tensor has {len(shape)}: {shape}")
    if kind == "depthwise" and "M" in layout:
        spatial = "".join(letter for letter in SPATIAL if letter in layout)
        order = tuple(layout.index(letter) for letter in "CM" + spatial)
        moved = tuple(shape[axis] for axis in order)
        return *_moved(order), Reshape(moved, (moved[0] * moved[1], 1, *moved[2:]))
    spatial = "".join(letter for letter in SPATIAL if letter in layout)
    target = LAYOUTS[kind].rstrip(SPATIAL) + spatial
    if sorted(target) != sorted(layout):
        raise ValueError(f"a {kind} weight has axes {target}, not {layout!r}")
    return _moved(tuple(layout.index(letter) for letter in target))


def stored_shape(kind: str, layout: str, shape: Shape, multiplier: int = 1) -> Shape:
    """Tell the shape that a weight of PyTorch's `shape` has in a file of `layout`: `from_layout` of it leads back, and its undo there."""
    if kind == "depthwise" and "M" in layout:
        letters = dict(
            zip("CM" + "".join(s for s in SPATIAL if s in layout), (shape[0] // multiplier, multiplier, *shape[2:]), strict=True)
        )
    else:
        target = LAYOUTS[kind].rstrip(SPATIAL) + "".join(s for s in SPATIAL if s in layout)
        letters = dict(zip(target, shape, strict=True))
    return tuple(letters[letter] for letter in layout)


def undo(steps: Sequence[Step], array: np.ndarray) -> np.ndarray:
    """Take all steps back, the last one first."""
    for step in reversed(steps):
        array = step.undo(array)
    return array


def _moved(order: tuple[int, ...]) -> tuple[Step, ...]:
    return () if order == tuple(range(len(order))) else (Transpose(order),)


def laid(view: np.ndarray, made: np.ndarray | None = None) -> np.ndarray:
    """Copy an array into the order of its axes, tile by tile where they lie in another one: four times as fast for large ones.

    Row by row, a transposed copy reads one number of every cache line that it fetches, and comes back for the next when that is gone.
    So a tile is first fetched as it lies. Its rows get a length that is no power of two: else they share places in the cache.

    Args:
        view: the array.
        made: contiguous memory of its shape and dtype for the copy; None takes new memory, or `view` itself where nothing has to move.
    """
    near = min(range(view.ndim), key=lambda axis: abs(view.strides[axis]) if view.shape[axis] > 1 else 2**62, default=0)
    if made is None:
        if view.flags.c_contiguous:
            return view
        made = np.empty(view.shape, view.dtype)
    if view.size < LARGE or view.ndim < 2 or near == view.ndim - 1:
        np.copyto(made, view)
        return made
    other = 1 if near == 0 else 0
    rest = view.size // (view.shape[near] * view.shape[other])
    step = max(8, TILE // (NEAR * rest))
    order = sorted(range(view.ndim), key=lambda axis: (axis == near, -abs(view.strides[axis])))
    sizes = [NEAR if axis == near else min(step, view.shape[other]) if axis == other else view.shape[axis] for axis in order]
    fetched = np.empty((*sizes[:-1], NEAR + PADDING), view.dtype).transpose(np.argsort(order))
    for start in range(0, view.shape[near], NEAR):
        for begin in range(0, view.shape[other], step):
            place: list[slice] = [slice(None)] * view.ndim
            place[near], place[other] = slice(start, start + NEAR), slice(begin, begin + step)
            part = view[tuple(place)]
            tile = fetched[tuple(slice(0, side) for side in part.shape)]
            np.copyto(tile.transpose(order), part.transpose(order))
            made[tuple(place)] = tile
    return made
