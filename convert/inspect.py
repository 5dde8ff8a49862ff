"""What a weight file holds, as far as its own words tell, and which of several networks it probably is."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from convert import names, sandbox
from convert.core import COUNTER, Shape
from convert.kinds import is_dict
from convert.source import Source, Stored

VERSION = re.compile(r",| (?=v?\d|version|specification|IR\b)")
"""What stands between a framework's name and what else a reader says of it."""
LEARNT = {
    "keras": "the backend that trained it: Theano convolved, every other one correlates",
    "bson": "the types of its layers: Flux's Conv convolves, CrossCor correlates",
    "jld2": "the types of its layers: Flux's Conv convolves, CrossCor correlates",
    "theano": "the layers of its framework: Theano's conv2d and Lasagne's Conv2DLayer convolve by default",
    "npz": "names and facts in it, where there are any",
    "flax": "Flax's convolutions correlate; its transposed ones are kept turned, unless they say transpose_kernel",
}
"""By what a format's reader tells the kernel convention; of the others, whose layers all correlate, there is nothing to tell."""

WITH = " with "
"""Stands between a network's name and its constructor keywords."""
SHOWN = 5
"""Networks that are named at most."""
LEAST = 0.5
"""Part of its shapes that a network must share with the file to be named: relatives share more, and below it the guess is of no use."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file.

    Attributes:
        name: canonical: module and PyTorch's leaf.
        origin: the file's own name.
        shape: in PyTorch's form.
        stored_shape: in the file.
        dtype: in the file.
        size_bytes: in the file, uncompressed.
        convention: of a spatial kernel.
        steps: what leads from the file to PyTorch's form.
    """

    name: str
    origin: str
    shape: Shape
    stored_shape: Shape
    dtype: str
    size_bytes: int
    convention: str | None
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Likely:
    """A network that the file may be of.

    Attributes:
        name: the network's.
        confidence: shapes that both have, as a part of all shapes that either has, 0..1.
        naming: the table that explains all names of the file, "" where none does.
        options: constructor keywords that the network is built with, "shortcut='B'"; "" where with none.
    """

    name: str
    confidence: float
    naming: str = ""
    options: str = ""

    @property
    def called(self) -> str:
        """The network with its options."""
        return f"{self.name} with {self.options}" if self.options else self.name


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a file holds.

    Attributes:
        path, format, framework: which file, who reads it, who wrote it.
        tensors: in the file's order.
        conventions: how many kernels there are of each convention.
        convention_reason: why these.
        spatial, flatten: the orders of axes that the file's network has, see `convert.source.Source`.
        positional: whether the file keeps only an order.
        layers: of its graph, by kind; None where it carries none.
        unknown_ops: operations of its graph that nothing here executes.
        preprocessing: what the file says of its images.
        metadata: what else it says.
        notes: what was left out, and why.
        likely: networks that it may be of, the likeliest first.
    """

    path: str
    format: str
    framework: str
    tensors: tuple[Tensor, ...]
    conventions: Mapping[str, int]
    convention_reason: str
    spatial: str
    flatten: str
    positional: bool
    layers: Mapping[str, int] | None
    unknown_ops: tuple[str, ...]
    preprocessing: Mapping[str, Any]
    metadata: Mapping[str, str]
    notes: tuple[str, ...]
    likely: tuple[Likely, ...] = field(default=())

    @property
    def parameters(self) -> int:
        """How many numbers the file holds."""
        return sum(math.prod(tensor.stored_shape) for tensor in self.tensors)

    @property
    def size_bytes(self) -> int:
        """How many bytes those are, uncompressed."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    def tree(self) -> dict[str, Any]:
        """Nest the tensors by their modules: a dict for each module, a `Tensor` for each leaf."""
        root: dict[str, Any] = {}
        for tensor in self.tensors:
            *modules, leaf = tensor.name.split(".")
            place = root
            for module in modules:
                inner = place.setdefault(module, {})
                if not is_dict(inner):  # a tensor and a module of one name
                    inner = place.setdefault(f"{module}.", {})
                place = inner
            place[leaf if leaf not in place else f"{leaf} (tensor)"] = tensor
        return root

    def to_json(self) -> dict[str, Any]:
        told = asdict(self)
        told |= {"parameters": self.parameters, "size_bytes": self.size_bytes, "preprocessing": _plain(self.preprocessing)}
        return told


def inspect(
    path: Path | Source,
    candidates: Mapping[str, Mapping[str, Shape]] | None = None,
    families: Mapping[str, type | str] | None = None,
) -> Inspection:
    """Tell what a weight file of any format holds; no tensor is read, and a process of its own reads the rest.

    Args:
        path: the file, or what a reader has found in it.
        candidates: shapes of the state dicts of networks that it may be of, by name.
        families: class or family of each, with which namings are recognised.

    Raises:
        FileNotFoundError: there is nothing at this path.
        ConvertError: the file can't be read; the subclass and the message say why.
    """
    if not isinstance(path, Source):
        with sandbox.read(Path(path)) as source:
            return inspect(source, candidates, families)
    source = path
    kinds = Counter(node.op for node in source.graph.nodes) if source.graph else None
    return Inspection(
        path=str(source.path),
        format=source.format,
        framework=source.framework,
        tensors=tuple(_tensor(name, stored) for name, stored in source.tensors.items()),
        conventions=dict(_conventions(source)),
        convention_reason=_reason(source),
        spatial=source.spatial,
        flatten=source.flatten,
        positional=source.positional,
        layers=dict(kinds) if kinds is not None else None,
        unknown_ops=tuple(source.graph.unknown) if source.graph else (),
        preprocessing=dict(source.preprocessing),
        metadata=dict(source.facts),
        notes=tuple(source.notes),
        likely=tuple(likely(source, candidates or {}, families or {})),
    )


def likely(
    source: Source, candidates: Mapping[str, Mapping[str, Shape]], families: Mapping[str, type | str | tuple[str, ...]]
) -> list[Likely]:
    """Name the networks whose shapes are most like the file's, the likeliest first, at most `SHOWN`.

    A candidate may be called "ResNet20 with shortcut='B'", which is a network with constructor keywords.
    Dense layers and 1x1 convolutions are one here, as are the orders of a kernel's axes in a file that doesn't tell them; of two
    networks with the same shapes the one comes first whose names a table of `convert.names` finds in the file.
    """
    kernels = [stored for name, stored in source.tensors.items() if not name.endswith(COUNTER)]
    theirs = _shapes((stored.shape for stored in kernels), source.positional)
    found: list[Likely] = []
    for name, shapes in candidates.items():
        ours = _shapes((shape for key, shape in shapes.items() if not key.endswith(COUNTER)), source.positional)
        shared, either = sum((theirs & ours).values()), sum((theirs | ours).values())
        if either and shared / either >= LEAST:
            found.append(Likely(name, shared / either))
    found.sort(key=lambda one: -one.confidence)
    best: list[Likely] = []
    for one in found[:SHOWN]:
        named = one.name in families and not source.positional
        naming = names.recognise(source.tensors, families[one.name], candidates[one.name], source.format) if named else None
        network, _, options = one.name.partition(WITH)
        best.append(Likely(network, one.confidence, naming or "", options))
    return sorted(best, key=lambda one: (-one.confidence, not one.naming, bool(one.options)))


def _shapes(shapes: Iterable[Shape], positional: bool) -> Counter[Any]:
    """Reduce shapes to what is the same in every layout: of kernels and dense weights outputs and inputs, or the size alone."""
    if positional:
        return Counter(math.prod(shape) for shape in shapes)
    return Counter((shape[0], math.prod(shape[1:])) if len(shape) > 1 else shape for shape in shapes)


def _conventions(source: Source) -> Counter[str]:
    found = Counter(stored.convention for stored in source.tensors.values() if stored.convention is not None)
    if source.positional and source.layout is not None and not found:
        found[source.layout.convention] = sum(len(stored.stored_shape) > 2 for stored in source.tensors.values())
    return Counter({convention: count for convention, count in found.items() if count})


def _reason(source: Source) -> str:
    counts = _conventions(source)
    if not counts:
        return "there are no kernels"
    if set(counts) == {"unknown"}:
        return "the file does not say what its layers computed; reference outputs or photographs can tell"
    backend = source.facts.get("backend")
    if backend:
        return f"its backend is {backend}: Theano's convolved, every other one correlates"
    return LEARNT.get(
        source.format, f"all convolution layers of {VERSION.split(source.framework, maxsplit=1)[0] or source.format} correlate"
    )


def _tensor(name: str, stored: Stored) -> Tensor:
    size = stored.stored_dtype.itemsize * math.prod(stored.stored_shape)
    steps = tuple(str(step) for step in stored.steps)
    return Tensor(name, stored.origin, stored.shape, stored.stored_shape, str(stored.stored_dtype), size, stored.convention, steps)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn numbers and arrays of NumPy into Python's own."""
    return {key: value.tolist() if hasattr(value, "tolist") else value for key, value in values.items()}
