"""A writer of Torch7's binary files, from the description in its File.lua, and small networks; for tests and the fuzzer."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

CLASSES = {"<f4": "Float", "<f8": "Double", "<i8": "Long", "|u1": "Byte", "<i4": "Int"}


@dataclass(eq=False)
class Nn:
    """A module: its class and its fields."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Function:
    """A function: bytes that nobody runs."""


@dataclass(eq=False)
class Longs:
    """A LongStorage."""

    numbers: Sequence[int]


class Writer:
    """Writes objects one in the other; what came before is named by its number."""

    def __init__(self) -> None:
        self.content = b""
        self.indices: dict[tuple[int, str], int] = {}
        self.kept: list[Any] = []

    def int(self, value: int) -> None:
        self.content += struct.pack("<i", value)

    def longs(self, *values: int) -> None:
        self.content += struct.pack(f"<{len(values)}q", *values)

    def text(self, value: str) -> None:
        self.int(len(value.encode()))
        self.content += value.encode()

    def fresh(self, value: Any, what: str = "") -> bool:
        """Write an object's number; whether it is new."""
        known = (id(value), what) in self.indices
        self.kept.append(value)
        self.int(self.indices.setdefault((id(value), what), len(self.indices) + 1))
        return not known

    def object(self, value: Any) -> None:
        if value is None:
            self.int(0)
        elif isinstance(value, bool):
            self.int(5)
            self.int(int(value))
        elif isinstance(value, int | float):
            self.int(1)
            self.content += struct.pack("<d", value)
        elif isinstance(value, str):
            self.int(2)
            self.text(value)
        elif isinstance(value, Mapping):
            self.int(3)
            if self.fresh(value):
                self.int(len(value))
                for key, inner in value.items():
                    self.object(key)
                    self.object(inner)
        elif isinstance(value, list):
            self.object(dict(enumerate(value, start=1)))
        elif isinstance(value, Function):
            self.int(8)
            if self.fresh(value):
                self.text("bytecode")
                self.object({})
        else:
            self.int(4)
            if self.fresh(value):
                self.text("V 1")
                self.instance(value)

    def instance(self, value: Any) -> None:
        if isinstance(value, Nn):
            self.text(value.kind)
            self.object(dict(value.fields))
            return
        if isinstance(value, Longs):
            self.text("torch.LongStorage")
            self.longs(len(value.numbers), *value.numbers)
            return
        array = np.asarray(value)
        kind = CLASSES[array.dtype.str]
        self.text(f"torch.{kind}Tensor")
        base = array if array.base is None else array.base
        self.int(array.ndim)
        self.longs(*array.shape, *(step // array.itemsize for step in array.strides))
        start = (array.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // array.itemsize
        self.longs(start + 1)
        self.int(4)
        if self.fresh(base, "numbers"):
            self.text("V 1")
            self.text(f"torch.{kind}Storage")
            self.longs(base.size)
            self.content += base.tobytes()


def saved(path: Path, value: Any) -> Path:
    writer = Writer()
    writer.object(value)
    path.write_bytes(writer.content)
    return path


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.array(np.random.default_rng(seed).normal(size=shape), np.float32)


def conv(into: int, out: int, kh: int, kw: int, *, flat: bool = False, **more: Any) -> Nn:
    weight = draw(out, into * kh * kw, seed=into) if flat else draw(out, into, kh, kw, seed=into)
    how = {"nInputPlane": into, "nOutputPlane": out, "kH": kh, "kW": kw, "dH": 1, "dW": 1, "padH": 0, "padW": 0, **more}
    return Nn("nn.SpatialConvolutionMM" if flat else "nn.SpatialConvolution", {"weight": weight, "bias": draw(out, seed=out), **how})


def norm(channels: int, spread: str = "running_var") -> Nn:
    numbers = {"weight": draw(channels), "bias": draw(channels, seed=1), "running_mean": draw(channels, seed=2), "eps": 1e-3}
    return Nn(
        "nn.SpatialBatchNormalization", {**numbers, spread: np.array(np.abs(draw(channels, seed=3)) + 0.5), "train": False, "affine": True}
    )


def linear(into: int, out: int) -> Nn:
    return Nn("nn.Linear", {"weight": draw(out, into, seed=into), "bias": draw(out, seed=out), "gradWeight": draw(out, into)})


def sequential(*modules: Nn) -> Nn:
    return Nn("nn.Sequential", {"modules": list(modules), "train": False, "_type": "torch.FloatTensor"})


def pool(kind: str = "Max", **more: Any) -> Nn:
    how = {"kH": 2, "kW": 2, "dH": 2, "dW": 2, "padH": 0, "padW": 0, "ceil_mode": False, **more}
    return Nn(f"nn.Spatial{kind}Pooling", how)


def small_network() -> Nn:
    """Kernels that are neither square nor symmetric, a BatchNorm, a pool and a dense layer behind a map of 2 x 3."""
    return sequential(
        conv(3, 4, 3, 5, padH=1, padW=2), norm(4), Nn("nn.ReLU", {"inplace": True}), pool(),
        conv(4, 5, 3, 2, flat=True), Nn("nn.Tanh"), Nn("nn.View", {"size": Longs([30]), "numElements": 30}), linear(30, 7),
    )  # fmt: skip


def seeds(folder: Path) -> list[Path]:
    shared = draw(6, 4)
    tables = {"epoch": 3, "state": {"conv.weight": draw(4, 3, 3, 3), "turned": shared.T, "part": shared[2:]}, "f": Function(), "done": True}
    branched = sequential(
        conv(3, 4, 3, 3),
        Nn("nn.ConcatTable", {"modules": [conv(4, 4, 1, 1), Nn("nn.Identity")]}),
        Nn("nn.CAddTable"),
        norm(4, "running_std"),
    )
    return [saved(folder / "net.t7", small_network()), saved(folder / "tables.t7", tables), saved(folder / "b.t7", {"model": branched})]
