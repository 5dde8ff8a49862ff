"""Darknet's .cfg: sections of settings, the shapes that follow from them, and which numbers each section has in the .weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.formats._mapped import description
from convert.kinds import is_dict
from convert.source import Shape
from weights.documents import read_json
from weights.errors import ConvertError, LimitExceeded, MalformedFile, UnsupportedFormat

MAX_BYTES = 16 * 2**20
MAX_SECTIONS = 10_000
MARK = "# kernelzoo "
"""Begins a comment of ours: JSON that says what a section of a listing is, which Darknet passes over."""

ALIASES = {"conv": "convolutional", "deconv": "deconvolutional", "conn": "connected", "max": "maxpool", "avg": "avgpool", "soft": "softmax"}
LOSSES = ("cost", "yolo", "region", "detection", "gaussian_yolo", "iseg", "contrastive")
KEEP_SIZE = (*LOSSES, "dropout", "softmax", "activation", "normalization", "lrn", "l2norm", "logistic", "empty", "silence", "sam")
IMPLICIT = ("implicit", "implicit_add", "implicit_mul")
Map = tuple[int, int, int]
"""Channels, height, width."""


@dataclass(slots=True)
class Section:
    """One layer.

    Attributes:
        index: its number, as route and shortcut count.
        kind: "convolutional", without the brackets and abbreviations.
        settings: as written.
        mark: what our own comment says of it.
        reads, makes: the maps before and behind it.
        feeds: the numbers of the sections that it reads; -1 is the image.
    """

    index: int
    kind: str
    settings: dict[str, str] = field(default_factory=dict[str, str])
    mark: dict[str, Any] = field(default_factory=dict[str, Any])
    reads: Map = (0, 0, 0)
    makes: Map = (0, 0, 0)
    feeds: tuple[int, ...] = ()

    def number(self, name: str, default: int = 0) -> int:
        return int(float(self.settings.get(name, default)))

    def numbers(self, name: str) -> list[int]:
        return [int(float(value)) for value in self.settings.get(name, "").split(",") if value.strip()]

    @property
    def padding(self) -> int:
        """What a convolution pads on each side."""
        return self.number("size", 1) // 2 if self.number("pad") else self.number("padding")

    @property
    def stride(self) -> tuple[int, int]:
        """The stride down and across."""
        both = self.number("stride", 1)
        return self.number("stride_y", both), self.number("stride_x", both)


@dataclass(frozen=True, slots=True)
class Take:
    """A run of numbers in the .weights.

    Attributes:
        name: the module's and the leaf's: "3.conv.weight".
        shape: as they lie there.
        kind: "conv", "transposed", "linear", "vector".
        layout: of a weight.
    """

    name: str
    shape: Shape
    kind: str = "vector"
    layout: str = ""


def read(path: Path) -> list[Section]:
    """Read a description; the first section is [net].

    Raises:
        MalformedFile: it is none, or refers to sections that aren't there.
        UnsupportedFormat: it has a section of a kind that no one here knows.
    """
    text = description(path, MAX_BYTES)
    try:
        return parse(text)
    except ConvertError as error:
        raise type(error)(f"{path}: {error}") from error


def parse(text: str) -> list[Section]:
    """Read a description; raises as `read` does."""
    if "\0" in text:
        raise MalformedFile("is no description of a network: it holds bytes that are no text, as a .weights does")
    sections: list[Section] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if line.startswith("["):
            kind = line[1:].partition("]")[0].strip()
            sections.append(Section(len(sections) - 1, ALIASES.get(kind, kind)))
            if len(sections) > MAX_SECTIONS:
                raise LimitExceeded(f"more than {MAX_SECTIONS} sections")
        elif line.startswith(MARK) and sections:
            mark = read_json(line.removeprefix(MARK), f"line {number}")
            sections[-1].mark |= mark if is_dict(mark) else {}
        elif line and line[0] not in "#;":
            name, equals, value = line.partition("=")
            if not equals or not sections:
                raise MalformedFile(f"line {number}: {line[:40]!r} is no setting of a section")
            sections[-1].settings[name.strip()] = value.partition("#")[0].strip()
    if not sections or sections[0].kind not in ("net", "network"):
        raise MalformedFile("the first section is not [net]")
    net = sections[0]
    net.makes = (net.number("channels", 3), net.number("height"), net.number("width"))
    maps = {-1: net.makes}
    for section in sections[1:]:
        section.feeds = _feeds(section)
        section.reads = maps[section.feeds[0]]
        section.makes = _makes(section, [maps[index] for index in section.feeds])
        maps[section.index] = section.makes
    return sections


def _feeds(section: Section) -> tuple[int, ...]:
    before = section.index - 1
    if section.kind == "route":
        asked = section.numbers("layers")
    elif section.kind in ("shortcut", "scale_channels", "sam"):
        asked = section.numbers("from")
    else:
        return (before,)
    found = [index if index >= 0 else section.index + index for index in asked]
    if not found or any(not 0 <= index < section.index for index in found):
        raise MalformedFile(f"section {section.index}, [{section.kind}], refers to {asked}, which are no sections before it")
    return tuple(found) if section.kind == "route" else (before, *found)


def _makes(section: Section, maps: Sequence[Map]) -> Map:
    channels, height, width = maps[0]
    size, (down, across) = section.number("size", 1), section.stride
    if section.kind == "convolutional":
        pad, filters = section.padding, section.number("filters", 1)
        return filters, (height + 2 * pad - size) // down + 1, (width + 2 * pad - size) // across + 1
    if section.kind == "deconvolutional":
        pad, filters = section.padding, section.number("filters", 1)
        return filters, (height - 1) * down + size - 2 * pad, (width - 1) * across + size - 2 * pad
    if section.kind in ("maxpool", "local_avgpool"):
        size = section.number("size", down)
        pad = section.number("padding", size - 1)
        return section.number("out_channels") or channels, (height + pad - size) // down + 1, (width + pad - size) // across + 1
    if section.kind == "local":
        less = 1 if section.number("pad") else size
        return section.number("filters", 1), (height - less) // down + 1, (width - less) // down + 1
    if section.kind == "upsample":
        factor = section.number("stride", 2)
        return (channels, height * factor, width * factor) if factor > 0 else (channels, height // -factor, width // -factor)
    if section.kind in ("reorg", "reorg3d"):
        by = section.number("stride", 1)
        if section.number("reverse"):
            return channels // by**2, height * by, width * by
        return channels * by**2, height // by, width // by
    if section.kind == "route":
        return sum(each[0] for each in maps) // section.number("groups", 1), height, width
    simple: Mapping[str, Callable[[], Map]] = {
        **dict.fromkeys(("connected", "rnn", "gru", "lstm"), lambda: (section.number("output", 1), 1, 1)),
        "crnn": lambda: (section.number("output_filters", 1), height, width),
        "avgpool": lambda: (channels, 1, 1),
        "crop": lambda: (channels, section.number("crop_height", 1), section.number("crop_width", 1)),
        "scale_channels": lambda: maps[1],
        **dict.fromkeys(IMPLICIT, lambda: (section.number("filters", 128), section.number("atoms", 1), 1)),
        **dict.fromkeys(("shortcut", "batchnorm", *KEEP_SIZE), lambda: maps[0]),
    }
    if section.kind not in simple:
        raise UnsupportedFormat(f"section {section.index} is [{section.kind[:40]}], and nobody here knows its numbers in a .weights")
    return simple[section.kind]()


def takes(section: Section, *, transposed: bool, alexey: bool, bias_in_norm: bool) -> list[Take]:
    """List a section's runs of numbers, in the file's order.

    Args:
        section: with its maps.
        transposed: dense weights lie (inputs, outputs), as the oldest files have them.
        alexey: whether AlexeyAB's Darknet wrote it, and not pjreddie's.
        bias_in_norm: whether a [batchnorm] begins with its biases.
    """
    name, settings = str(section.index), section.settings
    if section.number("dontload"):
        return []
    channels = section.mark.get("channels", section.reads[0])
    if section.kind == "convolutional" and "share_index" not in settings:
        return _convolution(section, name, channels)
    if section.kind == "deconvolutional":
        filters, size = section.number("filters", 1), section.number("size", 1)
        weight = Take(f"{name}.conv.weight", (channels, filters, size, size), "transposed", "IOHW")
        return [*_before(section, name, "conv", filters), weight]
    if section.kind == "connected":
        inputs = section.mark.get("inputs", math.prod(section.reads))
        return _dense(section, name, inputs, section.makes[0], transposed)
    if section.kind == "batchnorm":
        leaves = ("weight", "running_mean", "running_var")
        return [Take(f"{name}.norm.{leaf}", (section.reads[0],)) for leaf in (("bias", *leaves) if bias_in_norm else leaves)]
    if section.kind == "local":
        filters, size = section.number("filters", 1), section.number("size", 1)
        places = section.makes[1] * section.makes[2]
        bias = Take(f"{name}.local.bias", (filters, *section.makes[1:]))
        return [bias, Take(f"{name}.local.weight", (places, filters, channels, size, size))]
    if section.kind == "shortcut" and settings.get("weights_type", "none") != "none":
        count = len(section.feeds)
        return [Take(f"{name}.shortcut.weight", (count, section.makes[0]) if "channel" in settings["weights_type"] else (count,))]
    if section.kind in IMPLICIT:
        return [Take(f"{name}.implicit.weight", (section.makes[0] * section.makes[1],))]
    return _recurrent(section, name, transposed, alexey)


def _convolution(section: Section, name: str, channels: int) -> list[Take]:
    filters, size, groups = section.number("filters", 1), section.number("size", 1), section.number("groups", 1)
    filters = section.number("numload") or filters
    if groups < 1 or channels % groups:
        raise MalformedFile(f"section {name}: {channels} channels don't make {groups} groups")
    shape = (filters, channels // groups, size, size)
    if section.number("flipped"):  # the matrix lies transposed: (weights of a filter, filters)
        return [*_before(section, name, "conv", filters), Take(f"{name}.conv.weight", (*shape[1:], filters), "conv", "IHWO")]
    return [*_before(section, name, "conv", filters), Take(f"{name}.conv.weight", shape, "conv", "OIHW")]


def _before(section: Section, name: str, module: str, width: int) -> list[Take]:
    """List what lies before a convolution's weights: with BatchNorm the biases are its beta."""
    if not section.number("batch_normalize"):
        return [Take(f"{name}.{module}.bias", (width,))]
    if section.number("dontloadscales"):
        return [Take(f"{name}.norm.bias", (width,))]
    return [Take(f"{name}.norm.{leaf}", (width,)) for leaf in ("bias", "weight", "running_mean", "running_var")]


def _dense(section: Section, name: str, inputs: int, outputs: int, transposed: bool) -> list[Take]:
    norm = section.number("batch_normalize")
    shape, layout = ((inputs, outputs), "IO") if transposed else ((outputs, inputs), "OI")
    found = [Take(f"{name}.norm.bias" if norm else f"{name}.dense.bias", (outputs,)), Take(f"{name}.dense.weight", shape, "linear", layout)]
    if norm and not section.number("dontloadscales"):
        found += [Take(f"{name}.norm.{leaf}", (outputs,)) for leaf in ("weight", "running_mean", "running_var")]
    return found


def _recurrent(section: Section, name: str, transposed: bool, alexey: bool) -> list[Take]:
    inputs, outputs = math.prod(section.reads), section.makes[0]
    hidden = section.number("hidden", 1)
    if section.kind == "crnn":
        filters, size = section.number("hidden_filters", 1), section.number("size", 3)
        widths = [(section.reads[0], filters), (filters, filters), (filters, outputs)]
        inner = [f"{name}.{part}" for part in ("input", "self", "output")]
        return [
            take
            for prefix, (before, after) in zip(inner, widths, strict=True)
            for take in (
                *_before(section, prefix, "conv", after),
                Take(f"{prefix}.conv.weight", (after, before, size, size), "conv", "OIHW"),
            )
        ]
    parts: list[tuple[str, int, int]] = []
    if section.kind == "rnn":
        parts = [("input", inputs, hidden), ("self", hidden, hidden), ("output", hidden, outputs)]
    elif section.kind in ("gru", "lstm"):
        gates = "zrh" if section.kind == "gru" else "figo" if alexey else "ifog"
        parts = [(f"{side}{gate}", width, outputs) for side, width in (("w", inputs), ("u", outputs)) for gate in gates]
    return [take for part, before, after in parts for take in _dense(section, f"{name}.{part}", before, after, transposed)]
