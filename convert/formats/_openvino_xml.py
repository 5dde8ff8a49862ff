"""What an IR's .xml says, as plain objects: layers in an order in which they can be computed, and where constants lie in the .bin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from xml.parsers import expat

import numpy as np

from convert import _guard
from convert.formats._mapped import Maps
from convert.source import Stored
from weights.errors import LimitExceeded, MalformedFile, UnsafeFormat

MOST_BYTES = 256 * 2**20
MOST_ELEMENTS = 4_000_000
"""Of a description; a layer takes some fifty, each a microsecond."""
MOST_LAYERS = 200_000

DTYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8",
    "u64": "uint64", "u32": "uint32", "u16": "uint16", "u8": "uint8", "boolean": "uint8",
}  # fmt: skip
NOTES = "kernelzoo"
"""What is kept of a description's run-time information: what `export` has written."""
NIBBLES = {"i4": True, "u4": False}
"""Numbers of four bits, two to a byte, and whether they have a sign."""


@dataclass(slots=True)
class Layer:
    """One layer; an input is the layer and the port that it comes from."""

    id: str
    name: str
    type: str
    data: Mapping[str, str]
    inputs: list[str] = field(default_factory=list[str])
    outputs: list[tuple[str, tuple[int | None, ...]]] = field(default_factory=list[tuple[str, tuple[int | None, ...]]])

    def value(self, place: int = 0) -> str:
        """Name what it gives."""
        return f"{self.id}:{self.outputs[place][0]}" if place < len(self.outputs) else f"{self.id}:"


@dataclass(slots=True)
class Net:
    """A whole description, with the constants' file."""

    name: str
    version: int
    layers: list[Layer]
    files: Maps
    held: memoryview
    notes: str = ""


class _Reading:
    """Listens to the parser: layers and edges of the outermost network; the bodies of loops are passed over."""

    def __init__(self) -> None:
        self.path: list[str] = []
        self.count = 0
        self.name, self.version, self.notes = "", 0, ""
        self.layers: dict[str, Layer] = {}
        self.edges: list[tuple[str, str, str, str]] = []
        self.layer: Layer | None = None
        self.dims: list[int | None] = []
        self.text: list[str] = []

    def begin(self, tag: str, attrs: dict[str, str]) -> None:
        self.count += 1
        if self.count > MOST_ELEMENTS or len(self.path) > 2 * _guard.MAX_DEPTH:
            raise LimitExceeded(f"it has more than {MOST_ELEMENTS} elements, or they nest deeper than any network's")
        self.path.append(tag)
        depth = len(self.path)
        if depth == 1:
            if tag != "net":
                raise MalformedFile(f"it is no network but {tag!r:.40}")
            self.name, self.version = attrs.get("name", "")[:100], int(attrs.get("version", "0"))
        elif self.path[1:] == ["layers", "layer"]:
            number = attrs.get("id", "")
            if number in self.layers or len(self.layers) >= MOST_LAYERS:
                raise MalformedFile(f"two layers have the number {number!r:.40}, or there are more than {MOST_LAYERS}")
            self.layer = self.layers[number] = Layer(number, attrs.get("name", ""), attrs.get("type", ""), {})
        elif self.path[1:] == ["layers", "layer", "data"] and self.layer is not None:
            self.layer.data = attrs
        elif self.path[1:] == ["layers", "layer", "output", "port"] and self.layer is not None:
            self.dims = []
            self.layer.outputs.append((attrs.get("id", ""), ()))
        elif self.path[1:] == ["edges", "edge"]:
            self.edges.append((attrs["from-layer"], attrs["from-port"], attrs["to-layer"], attrs["to-port"]))
        elif self.path[1:] == ["rt_info", NOTES, NOTES]:
            self.notes = attrs.get("value", "")[: _guard.MAX_FACT]
        self.text = []

    def words(self, text: str) -> None:
        if self.path and self.path[-1] == "dim" and len(self.text) < 100:
            self.text.append(text)

    def end(self, tag: str) -> None:
        if self.path[1:] == ["layers", "layer", "output", "port", "dim"]:
            size = int("".join(self.text))
            self.dims.append(size if size >= 0 else None)
        elif self.path[1:] == ["layers", "layer", "output", "port"] and self.layer is not None:
            if len(self.dims) > 4 * _guard.MAX_RANK:
                raise LimitExceeded(f"{self.layer.name:.100} gives {len(self.dims)} axes")
            self.layer.outputs[-1] = (self.layer.outputs[-1][0], tuple(self.dims))
        self.path.pop()


def parse(path: Path) -> Net:
    """Read a description and map the constants beside it.

    Raises:
        ConvertError: it is damaged or beyond the limits, declares entities, or its .bin is not there.
    """
    files = Maps()
    text, heard = files.view(path), _Reading()
    if len(text) > MOST_BYTES:
        raise LimitExceeded(f"{path} has {len(text)} bytes; a description of a network has at most {MOST_BYTES}")
    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = heard.begin, heard.end, heard.words

    def declared(*_: Any) -> None:
        raise UnsafeFormat(f"{path} declares a document type, which no IR has, and which could make it endless")

    parser.StartDoctypeDeclHandler = declared
    for start in range(0, len(text), 1 << 16):
        parser.Parse(bytes(text[start : start + (1 << 16)]), False)
    parser.Parse(b"", True)
    layers = _ordered(heard)
    beside = path.with_suffix(".bin")
    needs = any(layer.type == "Const" for layer in layers)
    if needs and not beside.is_file():
        raise MalformedFile(f"{path} has its constants in {beside.name}, which is not beside it. Fetch it too")
    if needs and beside.is_symlink():
        raise UnsafeFormat(f"{beside} is a link; only plain files are read")
    return Net(heard.name, heard.version, layers, files, files.view(beside) if needs else memoryview(b""), heard.notes)


def _ordered(heard: _Reading) -> list[Layer]:
    """Give layers what they read, and put them in an order in which they can be computed."""
    readers: dict[str, list[str]] = {}
    given: dict[str, list[tuple[int, str]]] = {}
    for origin, port, target, place in heard.edges:
        if origin not in heard.layers or target not in heard.layers:
            raise MalformedFile(f"an edge leads from layer {origin!r:.40} to {target!r:.40}, of which one is not there")
        given.setdefault(target, []).append((int(place), f"{origin}:{port}"))
        readers.setdefault(origin, []).append(target)
    waits = {number: len(given.get(number, ())) for number in heard.layers}
    ready = [number for number, count in reversed(waits.items()) if not count]
    ordered: list[Layer] = []
    while ready:
        layer = heard.layers[ready.pop()]
        layer.inputs = [value for _, value in sorted(given.get(layer.id, ()))]
        ordered.append(layer)
        for reader in readers.get(layer.id, ()):
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    if len(ordered) < len(heard.layers):
        raise MalformedFile("layers read each other in a circle")
    return ordered


def constant(layer: Layer, held: memoryview) -> Stored | None:
    """Describe what a Const holds; None where it is nothing of numbers."""
    kind, offset, size = layer.data.get("element_type", ""), int(layer.data.get("offset", "-1")), int(layer.data.get("size", "-1"))
    shape = tuple(int(n) for n in layer.data.get("shape", "").split(",") if n.strip())
    if kind not in DTYPES and kind not in NIBBLES:
        return None
    if len(shape) > _guard.MAX_RANK:
        raise LimitExceeded(f"{layer.name:.100} has {len(shape)} axes; at most {_guard.MAX_RANK} are read")
    dtype = _guard.dtype_of(DTYPES.get(kind, "int8" if NIBBLES.get(kind) else "uint8"))
    needed = (math.prod(shape) + 1) // 2 if kind in NIBBLES else math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or offset < 0 or size < needed or offset + size > len(held):
        raise MalformedFile(f"{layer.name:.100} of shape {shape} needs {needed} bytes and claims {size} from {offset} of {len(held)}")
    return Stored(layer.name, shape, dtype, partial(_numbers, held[offset : offset + needed], dtype, shape, NIBBLES.get(kind)))


def _numbers(raw: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], signed: bool | None) -> np.ndarray:
    if signed is None:
        return np.frombuffer(raw, dtype).reshape(shape)
    pairs = np.frombuffer(raw, np.uint8)
    halves = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[: math.prod(shape)]
    return (((halves ^ 8).astype(np.int8) - 8).astype(np.int8) if signed else halves).reshape(shape)
