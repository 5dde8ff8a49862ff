"""What a .param of ncnn's says of its layers, and the weights of a .bin, taken one after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from convert.source import Stored
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat

MOST_BYTES = 64 * 2**20
MOST_LAYERS = 200_000
MOST_SETTINGS = 1000
HALF, WHOLE, PLAIN = 0x01306B47, 0x000D4B38, 0x0002C056
"""Before a weight: of two bytes, of one with scales elsewhere, of four; nought is of four too."""
LIST = -23300
"""A setting whose number is so much below stands for a list."""


@dataclass(slots=True)
class Layer:
    """One layer; settings by their numbers."""

    type: str
    name: str
    inputs: list[str]
    outputs: list[str]
    settings: Mapping[int, list[float]]

    def whole(self, number: int, default: int = 0) -> int:
        return int(self.settings[number][0]) if self.settings.get(number) else default

    def real(self, number: int, default: float = 0.0) -> float:
        return self.settings[number][0] if self.settings.get(number) else default


def parse(text: memoryview) -> list[Layer]:
    """Read a description.

    Raises:
        MalformedFile, LimitExceeded: it is none, or larger than any network's.
    """
    if len(text) > MOST_BYTES:
        raise LimitExceeded(f"a description of {len(text)} bytes; at most {MOST_BYTES} are read")
    lines = str(bytes(text), "utf-8", "replace").split("\n")
    count = int(lines[1].split()[0])
    if not 0 < count <= MOST_LAYERS or count > len(lines):
        raise MalformedFile(f"it claims {count} layers in {len(lines)} lines")
    layers = [_layer(words) for line in lines[2:] if (words := line.split())]
    if len(layers) != count:
        raise MalformedFile(f"it claims {count} layers and has {len(layers)}")
    if len({layer.name for layer in layers}) < count:
        raise MalformedFile("two of its layers have one name")
    return layers


def _layer(words: list[str]) -> Layer:
    kind, name, ins, outs = words[0], words[1], int(words[2]), int(words[3])
    if min(ins, outs) < 0 or 4 + ins + outs > len(words) or len(words) > 4 + ins + outs + MOST_SETTINGS:
        raise MalformedFile(f"layer {name:.100} claims {ins} inputs and {outs} outputs in {len(words)} words")
    settings: dict[int, list[float]] = {}
    for word in words[4 + ins + outs :]:
        number, equals, values = word.partition("=")
        key, listed = int(number), [float(value) for value in values.split(",")] if '"' not in values else []
        if not equals:
            raise MalformedFile(f"layer {name:.100} has a setting {word!r:.40}")
        settings[LIST - key if key <= LIST else key] = listed[1:] if key <= LIST else listed
    return Layer(kind, name, words[4 : 4 + ins], words[4 + ins : 4 + ins + outs], settings)


class Numbers:
    """A .bin, from which each layer takes what is its."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, size: int, what: str) -> memoryview:
        if size < 0 or self.at + size > len(self.data):
            raise MalformedFile(f"{what} needs {size} bytes and {len(self.data) - self.at} are left: the two files don't belong together")
        found = self.data[self.at : self.at + size]
        self.at += size
        return found

    def plain(self, name: str, shape: tuple[int, ...]) -> Stored:
        """Take reals of four bytes."""
        raw = self.take(4 * math.prod(shape), name)
        return Stored(name, shape, np.dtype(np.float32), lambda: np.frombuffer(raw, "<f4").reshape(shape))

    def weight(self, name: str, shape: tuple[int, ...]) -> Stored:
        """Take a weight, before which stands how it is written."""
        flag, count = int.from_bytes(self.take(4, name), "little"), math.prod(shape)
        if flag in (0, PLAIN):
            return self.plain(name, shape)
        if flag == HALF:
            raw = self.take((2 * count + 3) // 4 * 4, name)[: 2 * count]
            return Stored(name, shape, np.dtype(np.float16), lambda: np.frombuffer(raw, "<f2").reshape(shape))
        if flag == WHOLE:
            raise UnsupportedFormat(f"{name:.100} is quantised to eight bits (ncnn2int8); read the network from before that")
        table, places = self.take(1024, name), self.take((count + 3) // 4 * 4, name)[:count]
        return Stored(
            f"{name}, of a table of 256",
            shape,
            np.dtype(np.float32),
            lambda: np.frombuffer(table, "<f4")[np.frombuffer(places, np.uint8)].reshape(shape),
        )
