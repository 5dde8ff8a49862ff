"""A weight file as every reader returns it: its tensors, each with the steps to PyTorch's form, and what the file says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from convert.graph import Graph
from convert.steps import Cast, FlattenOrder, Flip, Reshape, Shape, Step, Transpose, flip, from_layout, stored_shape, undo

Convention = Literal["correlation", "convolution", "unknown"]
Spatial = Literal["hw", "wh"]
CONVENTIONS: Mapping[str, Convention | None] = {"auto": None, "correlation": "correlation", "convolution": "convolution"}
"""What may be said of a file's kernels, and what it is inside: None where the file is believed."""
SPATIALS: Mapping[str, Spatial | None] = {"auto": None, "hw": "hw", "wh": "wh"}
"""Likewise of the order of their two sides."""
T = TypeVar("T")


def meant(argument: str, word: str, allowed: Mapping[str, T]) -> T:
    """Return what a word of the caller's is inside.

    Raises:
        ValueError: there is no such word.
    """
    if word not in allowed:
        raise ValueError(f"{argument} is one of {', '.join(allowed)}, got {word!r}")
    return allowed[word]


@dataclass(frozen=True, slots=True)
class FromFile:
    """How a tensor is read, where its bytes may also be copied from file to file.

    Attributes:
        read: reads it, as it is stored.
        pour: copies its bytes, as they are stored, to the end of another file, which takes no memory; returns False, and does nothing,
            where it can't.
    """

    read: Callable[[], np.ndarray]
    pour: Callable[[FileIO], bool]

    def __call__(self) -> np.ndarray:
        return self.read()


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file, read when it is asked for.

    Attributes:
        origin: the file's own name for it, "block1_conv1/kernel:0".
        stored_shape: its shape as NumPy sees it in the file.
        stored_dtype: its dtype there.
        load: reads it, as it is stored.
        steps: lead from there to PyTorch's form.
        convention: of a spatial kernel: what the layer that trained it computes with it; None for everything else. A kernel of 1x1
            has one too, as it belongs to the same layer.
    """

    origin: str
    stored_shape: Shape
    stored_dtype: np.dtype[Any]
    load: Callable[[], np.ndarray]
    steps: tuple[Step, ...] = ()
    convention: Convention | None = None

    @property
    def shape(self) -> Shape:
        """The shape in PyTorch's form."""
        shape = self.stored_shape
        for step in self.steps:
            shape = step.shape(shape)
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in PyTorch's form: the file's, unless a step casts."""
        casts = [step.after for step in self.steps if isinstance(step, Cast)]
        return np.dtype(casts[-1]) if casts else self.stored_dtype

    def array(self) -> np.ndarray:
        """Read it and carry out its steps; the result may be a view with any strides."""
        array = self.load()
        for step in self.steps:
            array = step.do(array)
        return array

    @property
    def adds_nothing(self) -> bool:
        """Whether it is a vector of zeros, as formats have it in which every layer needs a bias."""
        return len(self.shape) == 1 and not bool(self.array().any())

    def spread(self) -> np.ndarray:
        """Read it as `array` does, but for a last reshape that would copy: in C order it is the tensor, its shape may differ."""
        if self.steps and isinstance(last := self.steps[-1], FlattenOrder):
            return last.spread(replace(self, steps=self.steps[:-1]).array())
        return self.array()

    @property
    def poured(self) -> bool:
        """Whether its bytes may be copied from file to file: they are the tensor's in C order and this machine's byte order.

        Truth values are not, for they are checked first.
        """
        plain = all(isinstance(step, Reshape) for step in self.steps)
        return isinstance(self.load, FromFile) and plain and self.stored_dtype.isnative and self.stored_dtype.kind != "b"

    def poured_into(self, file: FileIO) -> bool:
        """Copy the tensor to the end of a file without reading it; False, and nothing is done, where that can't be."""
        return self.poured and isinstance(self.load, FromFile) and self.load.pour(file)

    def reshape(self, *shape: int) -> Stored:
        """Add the step that gives it another shape, with the same numbers in the same order."""
        return self.then(Reshape(self.shape, tuple(shape)))

    def transpose(self, *axes: int) -> Stored:
        """Add the step that puts its axes into another order."""
        return self.then(Transpose(axes))

    def followed_by(self, others: Sequence[Stored | None]) -> Stored:
        """Describe this tensor and others behind it along the first axis; for None as many zeros as this has numbers."""
        every = (self, *others)

        def load() -> np.ndarray:
            first = self.array()
            return np.concatenate([first, *(np.zeros_like(first) if one is None else one.array() for one in others)])

        length = sum(self.shape[0] if one is None else one.shape[0] for one in every)
        origin = ", ".join(dict.fromkeys("zeros" if one is None else one.origin for one in every))
        return Stored(origin, (length, *self.shape[1:]), self.dtype, load)

    def part(self, first: int, end: int, count: int) -> Stored:
        """Describe some of `count` equal parts of its first axis, from the one numbered `first` to before `end`."""
        length = self.shape[0] // count
        shape = ((end - first) * length, *self.shape[1:])
        return Stored(self.origin, shape, self.dtype, lambda: self.array()[first * length : end * length])

    def new_zeros(self, length: int) -> Stored:
        """Describe so many zeros of its dtype, which no file holds."""
        return constant(0, (length,), self.dtype, "(none in the file: zeros)")

    def placed(self, token: Stored | None) -> Stored:
        """Describe a token with the first of these positions added to it; without a token, the other positions."""
        if token is not None:
            return Stored(token.origin, token.shape, token.dtype, lambda: token.array() + self.array()[:, :1])
        first, length, *rest = self.shape
        return Stored(self.origin, (first, length - 1, *rest), self.dtype, lambda: self.array()[:, 1:])

    def behind_zeros(self) -> Stored:
        """Describe these positions behind one of zeros."""
        first, length, *rest = self.shape

        def load() -> np.ndarray:
            array = self.array()
            return np.concatenate((np.zeros_like(array[:, :1]), array), 1)

        return Stored(self.origin, (first, length + 1, *rest), self.dtype, load)

    def then(self, *steps: Step) -> Stored:
        return replace(self, steps=(*self.steps, *steps))

    def as_correlation(self, convention: Convention | None = None) -> Stored:
        """Add the flip if the kernel is one of true convolution, by its own record or by the `convention` given."""
        if self.convention is None or (convention or self.convention) != "convolution":
            return self
        return self.then(Flip(tuple(range(2, len(self.shape)))))


def in_memory(origin: str, array: np.ndarray, *steps: Step, convention: Convention | None = None) -> Stored:
    """Describe a tensor that is in memory already."""
    return Stored(origin, tuple(array.shape), array.dtype, lambda: array, tuple(steps), convention)


def constant(value: float, shape: Shape, dtype: np.dtype[Any], what: str) -> Stored:
    """Describe a tensor of one value, which no file holds; `what` says why."""
    return Stored(what, shape, dtype, lambda: np.full(shape, value, dtype))


def laid_out(stored: Stored, kind: str, layout: str, *, flipped: bool = False, multiplier: int = 1) -> Stored:
    """Describe a weight in PyTorch's form as a file keeps it whose axes lie as `layout` says: `from_layout` leads back from there.

    Args:
        stored: the weight.
        kind, layout: as `convert.steps.from_layout` takes them.
        flipped: turn the kernel to one of true convolution.
        multiplier: of a depthwise kernel whose layout names it.
    """
    shape = stored_shape(kind, layout, stored.shape, multiplier)
    steps = from_layout(kind, layout, shape)

    def load() -> np.ndarray:
        array = undo(steps, stored.array())
        return flip(array, layout) if flipped else array

    return Stored(stored.origin, shape, stored.dtype, load)


def reflattened(stored: Stored, grid: tuple[int, int, int], order: str = "hwc") -> Stored:
    """Describe a dense weight that reads a flattened map of `grid` as a network keeps it that flattens in another order than ours."""
    return Stored(stored.origin, stored.shape, stored.dtype, lambda: FlattenOrder(*grid, order).undo(stored.array()))


@dataclass(slots=True)
class Source:
    """What a reader found in a file.

    Attributes:
        path: the file, or the folder of a format that is one.
        format: the name of the reader, a key of `convert.formats.formats()`.
        framework: who wrote it, as far as the file says: "Keras 2.4.0, tensorflow backend".
        tensors: in the file's order, by module (the file's name, dots where it nests) and PyTorch's leaf: "block1_conv1.weight",
            "bn1.running_var". When `positional`, by position alone: "0", "1"; those have no steps until a naming has said what
            they are.
        positional: whether the file keeps only an order.
        graph: what the file says the network computes, if it does.
        flatten: the order in which its network flattens a feature map before a dense layer.
        spatial: "hw", or "wh" when the first spatial axis in PyTorch's form is the width of the images; "unknown" where only evidence
            can tell (Flux).
        facts: what else the file says and a reader of the report wants to know: "backend", "stored accuracy" …
        preprocessing: what the file says of its images: any of mean, std (per channel, on 0..1), channel_order, range.
        notes: what was left out, and why.
        beside: names of the other files that it was read from, an IR's .bin or a network's .prototxt, from its own folder on.
        layout: for a positional file, how a tensor of a kind is stored: (kind, leaf, shape) to steps; and the order of leaves.
        close: lets go of the file; tensors can't be read after it.
        reader: of a file that a process of its own reads, what the kernel keeps that process from; "" of one that is read here.

    Example:
        >>> with read(Path("vgg19.h5")) as source:  # doctest: +SKIP
        ...     print(source.framework, source.tensors["block1_conv1.weight"].shape)
        Keras 2.4.0, tensorflow backend (64, 3, 3, 3)
    """

    path: Path
    format: str
    framework: str
    tensors: dict[str, Stored]
    positional: bool = False
    graph: Graph | None = None
    flatten: str = "chw"
    spatial: Literal["hw", "wh", "unknown"] = "hw"
    facts: dict[str, str] = field(default_factory=dict[str, str])
    preprocessing: Mapping[str, Any] = field(default_factory=dict[str, Any])
    notes: list[str] = field(default_factory=list[str])
    beside: tuple[str, ...] = ()
    layout: Positional | None = None
    close: Callable[[], None] = lambda: None
    reader: str = ""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def conventions(self) -> set[Convention]:
        """The kernel conventions that occur in it."""
        return {stored.convention for stored in self.tensors.values() if stored.convention is not None}


WEIGHTED = dict.fromkeys(("conv", "depthwise", "transposed", "linear"), ("weight", "bias"))
"""The kinds of layers whose leaves are a weight and a bias, and their usual order."""


@dataclass(frozen=True, slots=True)
class Positional:
    """How a file that keeps only an order stores each kind of layer.

    Attributes:
        leaves: of each kind, PyTorch's leaf names in the file's order; a leaf that our module has not is skipped there too.
        steps: (kind, leaf, stored shape) to the steps that lead to PyTorch's form.
        convention: of its kernels.
    """

    leaves: Mapping[str, Sequence[str]]
    steps: Callable[[str, str, Shape], tuple[Step, ...]]
    convention: Convention = "unknown"


@dataclass(frozen=True, slots=True)
class Part:
    """One module of a network that a writer writes: PyTorch's form in, the format's out.

    Attributes:
        name: the module's name in the file.
        kind: "conv", "depthwise", "transposed", "linear", "norm", "parameter" for one tensor that it holds beside its layers, or "other".
        leaves: PyTorch's leaf names to tensors in PyTorch's form: cross-correlation, flattened CHW.
        groups: of a convolution.
        eps: of a norm, what it adds to its variance.
        grid: of a linear layer that reads a flattened feature map: its channels, height and width.
        ours: the module's name in our network.
        heads: of a layer of attention.
    """

    name: str
    kind: str
    leaves: Mapping[str, Stored]
    groups: int = 1
    eps: float | None = None
    grid: tuple[int, int, int] | None = None
    ours: str = ""
    heads: int = 0
