"""Caffe's layers as its nets run them when testing: who reads whom, what shares a module, and each layer's tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from convert.formats import _caffe_schema as schema
from convert.formats._caffe_schema import Message, one, word
from convert.formats._caffe_wire import Blob
from convert.kinds import is_dict
from convert.source import Stored
from convert.steps import Scale, Shape, Step, from_layout

CONVOLUTIONS = ("Convolution", "DepthwiseConvolution", "ConvolutionDepthwise", "DepthwiseConv", "ConvolutionDW")
NORMS = ("BatchNorm", "BN", "CuDNNBatchNorm")
INPUTS = ("Input", "Data", "ImageData", "MemoryData", "HDF5Data", "DummyData", "WindowData", "AnnotatedData", "VideoData")
ALWAYS = (*CONVOLUTIONS, "Deconvolution", "InnerProduct", "BatchNorm", "PReLU")
NOBODYS = -1
LEFT_OUT = ("Accuracy", "Silence", "HDF5Output")
"""With everything that ends in Loss: layers that say something of the network and are no part of it."""


@dataclass(slots=True)
class Layer:
    """One layer.

    Attributes:
        name: the file's, made unique.
        kind: its type, "Convolution".
        message: its parameters.
        bottoms: the layers that it reads, each with which of their outputs; a blob that no layer makes, with `NOBODYS`.
        tops: the names of the blobs that it makes.
        blobs: its tensors.
        scale: the Scale layer that belongs to this BatchNorm.
    """

    name: str
    kind: str
    message: Message
    bottoms: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    tops: list[str] = field(default_factory=list[str])
    blobs: list[Blob] = field(default_factory=list[Blob])
    scale: Layer | None = None


def layers(net: Message, description: Message | None = None) -> tuple[list[Layer], list[Layer]]:
    """List the layers that run when testing, each reading the layers before it, in-place layers too.

    A BatchNorm and the Scale behind it become one. Split layers, which Caffe puts in by itself, disappear.

    Args:
        net: the file, whose layers have the tensors.
        description: what the layers are, where a .prototxt says it; without it the file's own layers do.

    Returns:
        The layers, and those with tensors that the description has not.
    """
    own = _chained(net)
    if description is None:
        return _merged(own), []
    described = _chained(description)
    blobs = {layer.name: layer.blobs for layer in own}
    for layer in described:
        layer.blobs = blobs.pop(layer.name, [])
    return _merged(described), _merged([layer for layer in own if layer.blobs and layer.name in blobs])


def lacking(net: Message, description: Message) -> str | None:
    """Name the first layer of a description that has tensors of a kind that every such layer has, and none in the file."""
    there = {one(message, "name", "") for message in schema.layers(net) if message.get("blobs")}
    return next((layer.name for layer in _chained(description) if layer.kind in ALWAYS and layer.name not in there), None)


def _chained(net: Message) -> list[Layer]:
    made: dict[str, tuple[str, int]] = {}
    found: list[Layer] = []
    names: set[str] = set()
    for message in schema.layers(net):
        kind = one(message, "type", "")
        if not included(message) or kind in LEFT_OUT or kind.endswith("Loss"):
            continue
        bottoms = [made.get(blob, (blob, NOBODYS)) for blob in map(str, message.get("bottom", []))]
        tops = [str(top) for top in message.get("top", [])]
        if kind == "Split" and bottoms:
            made.update(dict.fromkeys(tops, bottoms[0]))
            continue
        name = _unique(one(message, "name", "") or kind or "layer", names)
        blobs = [blob for blob in message.get("blobs", []) if isinstance(blob, Blob)]
        found.append(Layer(name, kind, message, bottoms, tops, blobs))
        made.update({top: (name, index) for index, top in enumerate(tops)})
    return found


def included(message: Message) -> bool:
    """Whether a layer runs when testing. Its own `phase` says nothing: a snapshot has the one it was trained in everywhere."""

    def applies(rule: Message) -> bool:
        return word(rule, "phase", ("TRAIN", "TEST")) == "TEST" if "phase" in rule else not rule.get("stage")

    include = [rule for rule in message.get("include", []) if is_dict(rule)]
    exclude = [rule for rule in message.get("exclude", []) if is_dict(rule)]
    return any(map(applies, include)) if include else not any(map(applies, exclude))


def _merged(found: list[Layer]) -> list[Layer]:
    """Join each BatchNorm with the Scale that alone reads it, or that follows it in a file that says nothing of who reads whom."""
    readers: dict[str, list[Layer]] = {}
    for layer in found:
        for name, _ in (bottom for bottom in layer.bottoms if bottom[1] != NOBODYS):
            readers.setdefault(name, []).append(layer)
    gone: dict[str, str] = {}
    for layer, after in itertools.zip_longest(found, found[1:]):
        behind = readers.get(layer.name, [])
        if not (layer.bottoms or layer.tops) and after is not None:
            behind = [after]
        if layer.kind in NORMS and len(layer.blobs) in (0, 3) and len(behind) == 1 and _scales_channels(behind[0]):
            layer.scale = behind[0]
            gone[behind[0].name] = layer.name
    for layer in found:
        layer.bottoms = [(name if index == NOBODYS else gone.get(name, name), index) for name, index in layer.bottoms]
    return [layer for layer in found if layer.name not in gone]


def _scales_channels(layer: Layer) -> bool:
    return layer.kind == "Scale" and len(layer.bottoms) < 2 and one(one(layer.message, "scale_param", {}), "axis", 1) == 1


def _unique(name: str, names: set[str]) -> str:
    number, unique = 1, name
    while unique in names:
        number += 1
        unique = f"{name}#{number}"
    names.add(unique)
    return unique


def factor(layer: Layer) -> float:
    """Read what a BatchNorm's mean and variance are to be divided by; 0 says that nothing was gathered."""
    place = {3: 2, 5: 4 if layer.blobs[-1].count == 1 else 2}.get(len(layer.blobs))
    if layer.kind not in NORMS or place is None or layer.blobs[place].count != 1:
        return 1.0
    return float(layer.blobs[place].load()[0])


def tensors(layer: Layer) -> dict[str, Stored]:
    """Describe a layer's tensors by PyTorch's leaves, or by blob0, blob1 where PyTorch has no such layer."""
    found = _of_kind(layer)
    if layer.scale is not None:
        found |= _named(layer.scale, ("weight", "bias"))
    return found


def _of_kind(layer: Layer) -> dict[str, Stored]:
    blobs = layer.blobs
    if layer.kind in CONVOLUTIONS or layer.kind == "Deconvolution":
        return _kernel(layer) if blobs and len(blobs[0].shape) > 3 else _numbered(layer)
    if layer.kind == "InnerProduct":
        return _dense(layer)
    if layer.kind in NORMS:
        return _norm(layer)
    if layer.kind in ("Scale", "PReLU", "Normalize") or (layer.kind == "Parameter" and len(blobs) == 1):
        return _named(layer, ("weight", "bias"))
    if layer.kind == "Bias":
        return _named(layer, ("bias",))
    return _numbered(layer)


def _kernel(layer: Layer) -> dict[str, Stored]:
    weight = layer.blobs[0]
    return {"weight": _stored(layer, 0, weight.shape, convention=True), **_bias(layer)} if weight.count else {}


def _dense(layer: Layer) -> dict[str, Stored]:
    if not layer.blobs or not layer.blobs[0].count:
        return {}
    raw = _squeezed(layer.blobs[0].shape, 2)
    if len(raw) != 2:
        return _numbered(layer)
    transposed = one(one(layer.message, "inner_product_param", {}), "transpose", False)
    return {"weight": _stored(layer, 0, raw, from_layout("linear", "IO" if transposed else "OI", raw)), **_bias(layer)}


def _bias(layer: Layer) -> dict[str, Stored]:
    count = layer.blobs[1].count if len(layer.blobs) > 1 else 0
    return {"bias": _stored(layer, 1, (count,))} if count else {}


def _norm(layer: Layer) -> dict[str, Stored]:
    blobs = layer.blobs
    if len(blobs) == 3:
        order = ("running_mean", "running_var", "")
    elif len(blobs) == 5:
        # Two forks: the scalar, which corrects the moments, tells them apart.
        last = blobs[4].count == 1
        order = ("weight", "bias", "running_mean", "running_var", "") if last else ("running_mean", "running_var", "", "weight", "bias")
    elif len(blobs) == 4:
        order = ("weight", "bias", "running_mean", "running_var")
    else:
        return _numbered(layer)
    by = factor(layer)
    correct: tuple[Step, ...] = () if by == 1 else (Scale(1 / by if by else 0.0),)
    return {
        leaf: _stored(layer, place, (blobs[place].count,), correct if leaf.startswith("running") else ())
        for place, leaf in enumerate(order)
        if leaf and blobs[place].count
    }


def _named(layer: Layer, leaves: Iterable[str]) -> dict[str, Stored]:
    pairs = enumerate(zip(leaves, layer.blobs, strict=False))
    return {leaf: _stored(layer, place, _squeezed(blob.shape, 1)) for place, (leaf, blob) in pairs if blob.count}


def _numbered(layer: Layer) -> dict[str, Stored]:
    return {f"blob{place}": _stored(layer, place, blob.shape) for place, blob in enumerate(layer.blobs) if blob.count}


def _squeezed(shape: Shape, rank: int) -> Shape:
    """Drop the leading ones that Caffe's four-dimensional past put before vectors and matrices."""
    while len(shape) > rank and shape[0] == 1:
        shape = shape[1:]
    return shape


def _stored(layer: Layer, place: int, shape: Shape, steps: tuple[Step, ...] = (), convention: bool = False) -> Stored:
    blob = layer.blobs[place]

    def load() -> np.ndarray:
        return blob.load().reshape(shape)

    return Stored(f"{layer.name} blob {place}", shape, np.dtype(blob.dtype), load, steps, convention="correlation" if convention else None)
