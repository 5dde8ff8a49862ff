"""Deep Compression's container, .net: a Caffe network pruned and quantised to indices into a codebook.

Little-endian throughout. First how many entries each layer has, a uint32 for each in the network's order. Then layer by layer: 256
float32 of the codebook, whose first is 0; the biases; a byte for each entry, its place in the codebook; half a byte for each
entry, the lower half first, how many weights it skips. Where more than 15 are to be skipped, an entry of value 0 stands between.
The file has no names and no shapes: those are in the network's .prototxt.

Source: Han et al. 2015, https://arxiv.org/abs/1510.00149, section 2 and 3; https://github.com/songhan/SqueezeNet-Deep-Compression.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert import _guard
from convert.formats import _caffe_prototxt as prototxt
from convert.formats._caffe_graph import fed_channels, graph
from convert.formats._caffe_layers import CONVOLUTIONS, Layer, layers
from convert.formats._caffe_schema import one
from convert.formats._mapped import beside, mapped
from convert.graph import Graph
from convert.source import Source, Stored, in_memory
from convert.steps import Shape
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat

SUFFIXES = (".net",)
WRITES = False
WEAK = True

CODEBOOK = 256
MAX_WEIGHTS = 2**27
FIRES = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
"""Squeezed channels, and channels of each expansion, of SqueezeNet's fire2 to fire9 (https://arxiv.org/abs/1602.07360, Table 1)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer's data lie in the file.

    Attributes:
        name: of the layer.
        shape: of its weight.
        start: of its codebook.
        entries: how many there are.
    """

    name: str
    shape: Shape
    start: int
    entries: int

    @property
    def codes(self) -> int:
        """Where its entries begin."""
        return self.start + 4 * (CODEBOOK + self.shape[0])

    @property
    def skips(self) -> int:
        """Where what its entries skip begins."""
        return self.codes + self.entries

    @property
    def end(self) -> int:
        """Where the next layer begins."""
        return self.skips + (self.entries + 1) // 2


def sniff(path: Path, head: bytes) -> bool:
    """Tell a container by its ending, and by its size, which the counts at its beginning foretell where its layers are known."""
    if path.suffix != ".net" or len(head) < 8:
        return False
    known = list(squeezenet())
    return beside(path, ".prototxt") is not None or (len(head) >= 4 * len(known) and _places(head, known)[-1].end == path.stat().st_size)


def read(path: Path) -> Source:
    """Open a container; the .prototxt beside it says what its layers are, and SqueezeNet v1.0, the one published, needs none.

    Raises:
        UnsupportedFormat: the layers are unknown, or of a kind that no published container has.
        ConvertError: the file is not as long as its counts say, or claims more than it can hold.
    """
    with _guard.reading(path, "Deep Compression container"):
        data = mapped(path)
        size = len(data)
        known, network, described = _layers(path)
        if size < 4 * len(known):
            raise MalformedFile(f"{path} has {size} bytes, too few for the counts of {len(known)} layers")
        if sum(math.prod(shape) for _, shape in known) > MAX_WEIGHTS:
            raise LimitExceeded(f"{path}: {described} describes more than {MAX_WEIGHTS} weights")
        places = _places(data, known)
        if places[-1].end != size:
            raise MalformedFile(
                f"{path} has {size} bytes; the layers of {described} with its counts of entries need {places[-1].end}. "
                "It is damaged, or the description is of another network."
            )
        tensors: dict[str, Stored] = {}
        for place in places:
            tensors[f"{place.name}.weight"] = _weight(path, data, place)
            bias = np.frombuffer(data, "<f4", place.shape[0], place.start + 4 * CODEBOOK)
            tensors[f"{place.name}.bias"] = in_memory(f"{place.name} bias", bias)
        _guard.check(path, tensors.values(), size)
    entries = sum(place.entries for place in places)
    weights = sum(math.prod(place.shape) for place in places)
    return Source(
        path,
        "deepcompression",
        "Caffe, compressed by Deep Compression",
        tensors,
        graph=network,
        beside=(described,) if described.endswith(".prototxt") else (),
        facts={"layers": described, "stored": f"{entries} of {weights} weights, {CODEBOOK} values a layer"},
    )


def squeezenet() -> Iterator[tuple[str, Shape]]:
    """List the layers of SqueezeNet v1.0 as the published container has them."""
    yield "conv1", (96, 3, 7, 7)
    width = 96
    for number, (squeezed, expanded) in enumerate(FIRES, start=2):
        yield f"fire{number}/conv1x1_1", (squeezed, width, 1, 1)
        yield f"fire{number}/conv1x1_2", (expanded, squeezed, 1, 1)
        yield f"fire{number}/conv3x3_2", (expanded, squeezed, 3, 3)
        width = 2 * expanded
    yield "conv_final", (1000, width, 1, 1)


def _layers(path: Path) -> tuple[list[tuple[str, Shape]], Graph | None, str]:
    """List names and weight shapes of the layers, and tell who says so."""
    found = beside(path, ".prototxt")
    if found is None:
        return list(squeezenet()), None, "SqueezeNet v1.0"
    description = prototxt.read(found)
    running, _ = layers(description)
    channels = fed_channels(description, running)
    if dense := next((layer.name for layer in running if layer.kind in ("InnerProduct", "Deconvolution")), None):
        raise UnsupportedFormat(f"{path}: {found.name} has a layer {dense!r} of a kind that no published container holds")
    known = [(layer.name, _shape(layer, channels.get(layer.name), found)) for layer in running if layer.kind in CONVOLUTIONS]
    if not known:
        raise UnsupportedFormat(f"{path}: {found.name} describes no convolution, so it is no description of this network")
    return known, graph(description, running) if any(layer.bottoms for layer in running) else None, found.name


def _shape(layer: Layer, channels: int | None, found: Path) -> Shape:
    p = one(layer.message, "convolution_param", {})
    out, groups = one(p, "num_output", 0), one(p, "group", 1)
    kernel = (one(p, "kernel_h", 0), one(p, "kernel_w", 0)) if "kernel_h" in p else (one(p, "kernel_size", 0),) * 2
    if not channels or groups < 1 or channels % groups or min(out, *kernel) < 1 or not one(p, "bias_term", True):
        raise UnsupportedFormat(f"{found}: {layer.name!r} does not say how many weights it has, or has no bias")
    return out, channels // groups, *kernel


def _places(data: memoryview | bytes, known: Sequence[tuple[str, Shape]]) -> list[Place]:
    counts = np.frombuffer(data, "<u4", len(known))
    places: list[Place] = []
    start = 4 * len(known)
    for (name, shape), entries in zip(known, counts.tolist(), strict=True):
        places.append(Place(name, shape, start, entries))
        start = places[-1].end
    return places


def _weight(path: Path, data: memoryview, place: Place) -> Stored:
    def load() -> np.ndarray:
        codebook = np.frombuffer(data, "<f4", CODEBOOK, place.start)
        values = np.frombuffer(data, np.uint8, place.entries, place.codes)
        halves = np.frombuffer(data, np.uint8, place.end - place.skips, place.skips)
        skipped = np.stack([halves & 15, halves >> 4], axis=1).reshape(-1)[: place.entries]
        at = np.cumsum(skipped.astype(np.int64) + 1) - 1
        codes = np.zeros(math.prod(place.shape), np.uint8)
        if len(at) and at[-1] >= len(codes):
            raise MalformedFile(f"{path}: {place.name} has {len(codes)} weights, its entries lead to number {at[-1]}: it is damaged")
        codes[at] = values
        return codebook[codes].reshape(place.shape)

    return Stored(f"{place.name} codebook", place.shape, np.dtype("<f4"), load, convention="correlation")
