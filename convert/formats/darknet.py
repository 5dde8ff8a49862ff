"""Darknet's .weights with its .cfg: float32 numbers without any name, in the order of the description's sections.

A header of three int32 (major, minor, revision) and what the training has seen (uint64 from 0.2 on, int32 before). A convolution
has its biases, which with BatchNorm are its beta, then gamma, mean and variance, and its weights OIHW; cross-correlation. A dense
layer has biases, weights (out, in), gamma, mean and variance. BatchNorm is (x - mean) / (sqrt(variance) + 1e-6) in pjreddie's
Darknet, and the variance has 1e-5 added under the root in AlexeyAB's, which writes revision 5.

What is written is a listing: the layers with weights, in order, under a .cfg beside the file that says their names, and nothing
of who reads whom, for which Darknet's sections lack words. What a section can't say is written as what computes the same: a
missing bias as zeros; a BatchNorm that follows no convolution, as in DenseNet, as a convolution of ones, one for each channel,
with BatchNorm; a kernel of 1x7 in the middle of 7x7. The comments say so, and reading takes it back, bit for bit.

Source: https://github.com/pjreddie/darknet and https://github.com/AlexeyAB/darknet, src/parser.c, src/blas.c, src/maxpool_layer.c.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert import _guard
from convert.formats import _darknet_cfg as cfg
from convert.formats._darknet_graph import graph
from convert.formats._darknet_write import KERNELS, NORM, write_listing
from convert.formats._mapped import beside, mapped
from convert.graph import Graph
from convert.kinds import is_dict
from convert.source import Convention, Part, Positional, Source, Stored
from convert.steps import Shape, from_layout
from weights.errors import MalformedFile
from weights.wording import counted

SUFFIXES = (".weights", ".backup")
WRITES = True
WEAK = True
SIDECARS = (".cfg",)
"""Endings of the files that `write` puts beside the one that it is asked for."""

ALEXEY = 5
"""AlexeyAB's revision of version 0.2."""


def sniff(path: Path, head: bytes) -> bool:
    """Tell a .weights by its version, its whole number of float32, and its ending or the .cfg beside it."""
    if len(head) < 20 or path.stat().st_size % 4:
        return False
    major, minor, revision = np.frombuffer(head, "<i4", 3).tolist()
    plain = 0 <= major <= 2 and 0 <= minor <= 10 and 0 <= revision <= 100
    version = plain or 1000 < major < 1010 or 1000 < minor < 1010
    named = path.suffix in SUFFIXES or ".conv." in path.name or path.with_suffix(".cfg").is_file()
    return version and named and (major, minor) != (0, 0)


def read(path: Path) -> Source:
    """Open a .weights; the .cfg of the same name, or the only one in the folder, says what its numbers are.

    Without it the numbers come as one tensor, "0".

    Raises:
        ConvertError: the file is damaged or the description is another network's; the message says by how many numbers they differ.
    """
    with _guard.reading(path, "Darknet file"):
        data = mapped(path)
        if len(data) < 20:
            raise MalformedFile(f"{path} has {len(data)} bytes, too few for a Darknet file")
        major, minor, revision = np.frombuffer(data, "<i4", 3).tolist()
        header = 20 if major * 10 + minor >= 2 and major < 1000 and minor < 1000 else 16
        if (len(data) - header) % 4:
            raise MalformedFile(f"{path}: behind the header of {header} bytes, {len(data) - header} are no whole number of float32")
        numbers = data[header:]
        facts = {"version": f"{major}.{minor}.{revision}", "images seen": str(int.from_bytes(data[12:header], "little"))}
        alexey = (major, minor) == (0, 2) and revision == ALEXEY
        framework = f"Darknet {facts['version']}" + (" (AlexeyAB's)" if alexey else "")
        found = beside(path, ".cfg")
        if found is None:
            return _unnamed(path, framework, numbers, facts)
        sections = cfg.read(found)
        marks = sections[0].mark
        taken, notes = _taken(path, found, sections, len(numbers) // 4, major > 1000 or minor > 1000, alexey)
        convention: Convention = "convolution" if marks.get("kernels") == "convolution" else "correlation"
        tensors = _tensors(path, numbers, sections, taken, convention, notes)
        _guard.check(path, tensors.values(), len(data))
    facts |= {"cfg": found.name} | _strings(marks.get("metadata"))
    plan = None if marks.get("listing") else _graph(sections, notes, alexey, major > 1000 or minor > 1000)
    preparation = {} if marks.get("listing") else {"channel_order": "rgb", "range": 1}
    how: Any = {"preprocessing": preparation, "notes": notes, "beside": (found.name,)}
    return Source(path, "darknet", framework, tensors, graph=plan, facts=facts, **how)


def write(parts: Sequence[Part], path: Path, *, convention: Convention = "correlation", metadata: Mapping[str, str]) -> None:
    """Write the parts as a listing: numbers here, names in a .cfg beside it.

    Args:
        parts: in order.
        path: of the .weights; the .cfg has its name but for the ending.
        convention: "convolution" flips the kernels, which the .cfg then says; Darknet itself computes cross-correlation.
        metadata: kept in the .cfg's comments.

    Raises:
        ConvertError: a layer is of a kind that Darknet has not; the message names it.
    """
    write_listing(parts, path, path.with_suffix(SIDECARS[0]), convention=convention, metadata=metadata)


def _unnamed(path: Path, framework: str, numbers: memoryview, facts: dict[str, str]) -> Source:
    shape = (len(numbers) // 4,)
    stored = Stored("all numbers", shape, np.dtype("<f4"), lambda: np.frombuffer(numbers, "<f4"))
    note = (
        f"The file holds {shape[0]} numbers and no word of what they are: that is in the network's .cfg, which must lie beside it under "
        f"the name {path.with_suffix('.cfg').name}."
    )
    order = {**dict.fromkeys(KERNELS, ("bias", "weight")), "norm": tuple(NORM)}
    layout = Positional(order, lambda kind, leaf, shape: (), "correlation")
    return Source(path, "darknet", framework, {"0": stored}, positional=True, facts=facts, notes=[note], layout=layout)


def _taken(
    path: Path, found: Path, sections: Sequence[cfg.Section], count: int, transposed: bool, alexey: bool
) -> tuple[list[tuple[cfg.Section, cfg.Take, int]], list[str]]:
    """Say where each tensor begins, reading a lone BatchNorm with or without biases as the file's length decides."""
    tries = [_walk(sections, count, transposed, alexey, bias_in_norm) for bias_in_norm in (alexey, not alexey)]
    best = next((walk for walk in tries if walk[1] == count), None)
    if best is not None:
        notes = [] if best is tries[0] else [f"A [batchnorm] has {'no ' * alexey}biases here, although version and length disagree on it."]
        return best[0], notes
    used, wanted, ended = tries[0][1:]
    if used > count:
        raise MalformedFile(
            f"{path} ends within section {ended}: it has {count} numbers, {found.name} describes {wanted}. It is cut short, or the "
            "description is another network's."
        )
    raise MalformedFile(f"{path} has {count} numbers, {found.name} describes {wanted}: it is another network's description")


def _walk(
    sections: Sequence[cfg.Section], count: int, transposed: bool, alexey: bool, bias_in_norm: bool
) -> tuple[list[tuple[cfg.Section, cfg.Take, int]], int, int, int]:
    """Place tensors until the numbers end: the places, how many numbers they use, how many are described, and the last section."""
    places: list[tuple[cfg.Section, cfg.Take, int]] = []
    used = wanted = 0
    last = -1
    for section in sections[1:]:
        runs = cfg.takes(section, transposed=transposed, alexey=alexey, bias_in_norm=bias_in_norm)
        if any(min(run.shape, default=1) < 1 for run in runs):
            raise MalformedFile(f"section {section.index}, [{section.kind}], has tensors of shapes {[list(run.shape) for run in runs]}")
        size = sum(math.prod(run.shape) for run in runs)
        wanted += size
        if runs and used < count:  # else a file that was cut off on purpose, darknet53.conv.74
            last = section.index
            for run in runs:
                places.append((section, run, used))
                used += math.prod(run.shape)
    return places, used, wanted, last


def _tensors(
    path: Path,
    numbers: memoryview,
    sections: Sequence[cfg.Section],
    taken: Sequence[tuple[cfg.Section, cfg.Take, int]],
    convention: Convention,
    notes: list[str],
) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for section, take, start in taken:
        name = _named(section, take.name)
        stored = _stored(path, numbers, section, take, start, convention)
        if take.name.endswith(tuple(section.mark.get("filled", ()))):
            if (stored.load() == take.name.endswith(("weight", "running_var"))).all():
                continue
            notes.append(f"{name} is said to be a filling, and is not: it is kept")
        tensors[name] = stored
    last = taken[-1][0].index if taken else -1
    left_out = [section for section in sections[1:] if section.number("dontload")]
    if left_out:
        notes.append(f"without numbers, since marked dontload: {counted(len(left_out), 'section')}, the first is {left_out[0].index}.")
    if unreached := [
        s.index for s in sections[1:] if s.index > last and s.kind in ("convolutional", "connected") and not s.number("dontload")
    ]:
        notes.append(
            f"The numbers end with section {last}; none are left for {counted(len(unreached), 'section')} behind, from {unreached[0]} on."
        )
    return tensors


def _named(section: cfg.Section, name: str) -> str:
    """Put the name that a listing gives a module in the place of its number."""
    module, _, leaf = name.rpartition(".")
    own = section.mark.get(module.rpartition(".")[2])
    return f"{own}.{leaf}" if isinstance(own, str) else name


def _stored(path: Path, numbers: memoryview, section: cfg.Section, take: cfg.Take, start: int, convention: Convention) -> Stored:
    count = math.prod(take.shape)
    kernel = section.mark.get("kernel") if take.kind in ("conv", "transposed") else None

    def load() -> np.ndarray:
        array = np.frombuffer(numbers, "<f4", count, 4 * start).reshape(take.shape)
        return _middle(path, take.name, array, kernel) if kernel else array

    shape: Shape = (*take.shape[:2], *(int(side) for side in kernel)) if kernel else take.shape
    if kernel and (len(shape) != 4 or any(side < 1 or (whole - side) % 2 for side, whole in zip(shape[2:], take.shape[2:], strict=True))):
        raise MalformedFile(f"{path}: section {section.index} says a kernel of {kernel} stands in {list(take.shape[2:])}")
    steps = from_layout(take.kind, take.layout, shape) if take.layout else ()
    said = convention if take.kind in ("conv", "transposed") else None
    return Stored(f"section {section.index}, {take.name.rpartition('.')[2]}", shape, np.dtype("<f4"), load, steps, said)


def _middle(path: Path, name: str, array: np.ndarray, kernel: Sequence[int]) -> np.ndarray:
    """Return the kernel that stands among zeros."""
    inside = tuple(slice((whole - side) // 2, (whole + side) // 2) for side, whole in zip(kernel, array.shape[2:], strict=True))
    if np.count_nonzero(array) != np.count_nonzero(array[:, :, inside[0], inside[1]]):
        raise MalformedFile(f"{path}: {name} is said to be a kernel of {list(kernel)} among zeros, and what is around it is not zero")
    return array[:, :, inside[0], inside[1]]


def _graph(sections: Sequence[cfg.Section], notes: list[str], alexey: bool, transposed: bool) -> Graph | None:
    try:
        return graph(sections, alexey=alexey, transposed=transposed)
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        notes.append(f"What the sections say does not make a graph: {error}")
        return None


def _strings(metadata: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in metadata.items()} if is_dict(metadata) else {}
