"""Writing a network as a listing for Darknet: its layers with weights in order, and a .cfg that names them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from convert.formats._darknet_cfg import MARK
from convert.source import Convention, Part, Stored
from convert.steps import flip
from weights.errors import ConvertError

HEADER = np.array([0, 2, 5], "<i4").tobytes() + bytes(8)
"""AlexeyAB's version, whose BatchNorm adds 1e-5 under the root, and no image seen."""
KERNELS = {"conv": "conv", "depthwise": "conv", "transposed": "conv", "linear": "dense"}
NORM = {"bias": 0.0, "weight": 1.0, "running_mean": 0.0, "running_var": 1.0}
"""A BatchNorm's leaves in the file's order, and what one that a layer lacks is filled with."""

ABOUT = """\
# A listing of the layers with weights, in the order of the numbers in the .weights of the same name; not a network to run,
# as it does not say which layer reads which. A comment with "kernelzoo" says what a section is: the names of its convolution or
# dense layer and of its BatchNorm; "filled" is what the network itself has not; "identity" a BatchNorm behind a convolution of
# ones, one a channel, that is none of the network's; "kernel" the size of a kernel that stands in the middle of zeros.
"""


@dataclass(frozen=True, slots=True)
class Unit:
    """What one section holds: a convolution or dense layer, a BatchNorm, or the first with the second behind it."""

    layer: Part | None
    norm: Part | None


def write_listing(parts: Sequence[Part], path: Path, description: Path, *, convention: Convention, metadata: Mapping[str, str]) -> None:
    """Write numbers and description; see `convert.formats.darknet.write`."""
    lines = [ABOUT + "[net]", MARK + json.dumps({"listing": True, "kernels": convention, "metadata": dict(metadata)})]
    with path.open("wb") as file:
        file.write(HEADER)
        for unit in _units(parts):
            settings, mark = _section(unit)
            lines += ["", f"[{settings.pop('section')}]", MARK + json.dumps(mark), *(f"{name}={value}" for name, value in settings.items())]
            _numbers(file, unit, mark, settings, convention)
    description.write_text("\n".join(lines) + "\n", "utf-8")


def _units(parts: Sequence[Part]) -> list[Unit]:
    """Put each BatchNorm into the section of the layer that it follows, where Darknet has such a section."""
    units: list[Unit] = []
    for part in parts:
        if part.kind == "norm":
            if set(part.leaves) - set(NORM) or not {"running_mean", "running_var"} <= set(part.leaves):
                raise ConvertError(
                    f"{part.name} is a norm with {', '.join(part.leaves)}: Darknet knows BatchNorm with mean and variance only"
                )
            before = units[-1] if units else None
            if before is not None and before.layer is not None and before.norm is None and _joins(before.layer, part):
                units[-1] = Unit(before.layer, part)
            else:
                units.append(Unit(None, part))
        elif part.kind in KERNELS and "weight" in part.leaves and not set(part.leaves) - {"weight", "bias"}:
            units.append(Unit(part, None))
        else:
            raise ConvertError(
                f"{part.name} is a layer of kind {part.kind!r} with {', '.join(part.leaves)}, for which Darknet has no section"
            )
    return units


def _joins(layer: Part, norm: Part) -> bool:
    shape = layer.leaves["weight"].shape
    width = shape[1] * layer.groups if layer.kind == "transposed" else shape[0]
    return "bias" not in layer.leaves and norm.leaves["running_var"].shape == (width,)


def _section(unit: Unit) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the settings of a section, its name among them, and our comment."""
    mark: dict[str, Any] = {}
    settings: dict[str, Any]
    if unit.norm is not None:
        mark = {"norm": unit.norm.name}
        if absent := [f"norm.{leaf}" for leaf in NORM if leaf not in unit.norm.leaves]:
            mark["filled"] = absent
    if unit.layer is None:
        assert unit.norm is not None
        (width,) = unit.norm.leaves["running_var"].shape
        mark |= {"channels": width, "identity": True, "filled": [*mark.get("filled", []), "conv.weight"]}
        return {
            "section": "convolutional",
            "batch_normalize": 1,
            "filters": width,
            "groups": width,
            "size": 1,
            "activation": "linear",
        }, mark
    part = unit.layer
    module, shape = KERNELS[part.kind], part.leaves["weight"].shape
    mark[module] = part.name
    settings = {"batch_normalize": 1} if unit.norm is not None else {}
    if unit.norm is None and "bias" not in part.leaves:
        mark["filled"] = [f"{module}.bias"]
    if part.kind == "linear":
        return {"section": "connected", **settings, "output": shape[0], "activation": "linear"}, mark | {"inputs": shape[1]}
    if len(shape) != 4:
        raise ConvertError(f"{part.name} has a kernel of {len(shape) - 2} axes; Darknet's have two")
    size = max(shape[2:])
    if any((size - side) % 2 for side in shape[2:]):
        raise ConvertError(f"{part.name} has a kernel of {shape[2]}x{shape[3]}, which has no middle in Darknet's square ones")
    if shape[2] != shape[3]:
        mark["kernel"] = list(shape[2:])
    if part.kind == "transposed":
        if part.groups != 1:
            raise ConvertError(f"{part.name} is a transposed convolution of {part.groups} groups; Darknet's have one")
        settings |= {"filters": shape[1], "size": size}
        return {"section": "deconvolutional", **settings, "activation": "linear"}, mark | {"channels": shape[0]}
    settings |= {"filters": shape[0], "groups": part.groups, "size": size, "pad": 1}
    return {"section": "convolutional", **settings, "activation": "linear"}, mark | {"channels": shape[1] * part.groups}


def _numbers(file: BinaryIO, unit: Unit, mark: Mapping[str, Any], settings: Mapping[str, Any], convention: Convention) -> None:
    """Write a section's numbers in Darknet's order."""
    dense = unit.layer is not None and unit.layer.kind == "linear"
    leaves = dict(unit.norm.leaves) if unit.norm is not None else {}
    norm = [_vector(leaves, leaf, filling) for leaf, filling in NORM.items()] if leaves else []
    if unit.layer is None:
        for vector in (*norm, np.ones(len(norm[0]), "<f4")):
            vector.tofile(file)
        return
    weight = _float32(unit.layer.name, unit.layer.leaves["weight"])
    if not dense and convention == "convolution":
        weight = flip(weight, "OIHW")
    if "kernel" in mark:
        weight = _among_zeros(weight, int(settings["size"]))
    width = weight.shape[1] if unit.layer.kind == "transposed" else weight.shape[0]
    bias = unit.layer.leaves.get("bias")
    first = norm[:1] or [np.zeros(width, "<f4") if bias is None else _float32(unit.layer.name, bias)]
    order = [*first, weight, *norm[1:]] if dense else [*first, *norm[1:], weight]
    for array in order:
        np.ascontiguousarray(array).tofile(file)


def _vector(leaves: Mapping[str, Stored], leaf: str, filling: float) -> np.ndarray:
    if leaf in leaves:
        return np.ascontiguousarray(_float32(leaf, leaves[leaf]))
    return np.full(leaves["running_var"].shape, filling, "<f4")


def _among_zeros(weight: np.ndarray, size: int) -> np.ndarray:
    whole = np.zeros((*weight.shape[:2], size, size), "<f4")
    top, left = ((size - side) // 2 for side in weight.shape[2:])
    whole[:, :, top : top + weight.shape[2], left : left + weight.shape[3]] = weight
    return whole


def _float32(name: str, stored: Stored) -> np.ndarray:
    """Read a tensor as the only type that Darknet has."""
    if stored.dtype.kind in "iub":
        raise ConvertError(f"{name} has {stored.dtype} numbers; Darknet has float32 only")
    return stored.array().astype("<f4", copy=False)
