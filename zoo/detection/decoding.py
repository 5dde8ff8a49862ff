"""Darknet's heads: maps of numbers into boxes and the probabilities of their classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from convert.formats._darknet_cfg import Section
from weights.errors import MalformedFile, UnsupportedFormat


@dataclass(frozen=True, slots=True)
class Head:
    """A [yolo] or [region] section.

    Attributes:
        kind: which of them.
        anchors: widths and heights: in pixels of the network's image, of [region] in cells.
        classes: how many.
        scale: scale_x_y, how far a cell's box may leave it.
        new_coords: whether the map holds shares already, and sides are squares.
        softmax: whether classes exclude each other.
        power: of the distance that suppression takes off two boxes' overlap; None where it takes none off.
    """

    kind: str
    anchors: tuple[tuple[float, float], ...]
    classes: int
    scale: float = 1.0
    new_coords: bool = False
    softmax: bool = False
    power: float | None = None

    @property
    def channels(self) -> int:
        """Channels of the map that it reads."""
        return len(self.anchors) * (5 + self.classes)


def head(section: Section) -> Head:
    """Read a head.

    Raises:
        MalformedFile: its numbers contradict each other.
        UnsupportedFormat: it needs what nobody here computes.
    """
    settings, classes = section.settings, section.number("classes", 20)
    listed = [float(value) for value in settings.get("anchors", "").split(",") if value.strip()]
    pairs = list(zip(listed[::2], listed[1::2], strict=False))
    if section.number("coords", 4) != 4 or any(word in settings for word in ("tree", "map")) or section.number("background"):
        raise UnsupportedFormat(f"section {section.index}, [{section.kind}], has a tree of classes, a background or masks, unknown here")
    if section.kind == "region":
        chosen = pairs[: section.number("num", 1)]
        wanted = section.number("num", 1)
    else:
        mask = section.numbers("mask") or list(range(section.number("num", 1)))
        chosen = [pairs[place] for place in mask if 0 <= place < len(pairs)]
        wanted = len(mask)
    if len(chosen) != wanted or not wanted or classes < 1:
        raise MalformedFile(f"section {section.index}, [{section.kind}], wants {wanted} anchors of {len(pairs)} for {classes} classes")
    kind = settings.get("nms_kind", "default")
    power = {"greedynms": 0.6, "diounms": float(settings.get("beta_nms", 0.6))}.get(kind)
    told = Head(
        section.kind,
        tuple(chosen),
        classes,
        float(settings.get("scale_x_y", 1)),
        bool(section.number("new_coords")),
        bool(section.number("softmax")),
        power,
    )
    if section.reads[0] != told.channels:
        raise MalformedFile(
            f"section {section.index}, [{section.kind}], reads {section.reads[0]} channels; {wanted} anchors and {classes} classes need "
            f"{told.channels}"
        )
    return told


def decoded(found: Tensor, by: Head, image: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Turn a head's map into boxes.

    Args:
        found: (B, A (5 + classes), H, W), the map before the head.
        by: the head.
        image: width and height of the network's image in pixels.

    Returns:
        float32: boxes (B, A H W, 4), middle and sides as shares of the image; whether there is a thing (B, A H W), 0..1; how probable each
        class is where there is one (B, A H W, classes), 0..1. Rows come as Darknet has them, by row, column and anchor.
    """
    batch, _, height, width = found.shape
    anchors = torch.tensor(by.anchors, device=found.device)
    x = found.float().reshape(batch, len(by.anchors), 5 + by.classes, height, width).permute(0, 3, 4, 1, 2)
    place, sides, thing, classes = x[..., :2], x[..., 2:4], x[..., 4], x[..., 5:]
    if not by.new_coords:
        place, thing = place.sigmoid(), thing.sigmoid()
        classes = classes.softmax(-1) if by.softmax else classes.sigmoid()
    rows, columns = torch.meshgrid(torch.arange(height, device=found.device), torch.arange(width, device=found.device), indexing="ij")
    cells = torch.stack([columns, rows], -1)[:, :, None]
    grid = torch.tensor([width, height], device=found.device, dtype=torch.float32)
    middle = (cells + place * by.scale - (by.scale - 1) / 2) / grid
    unit = grid if by.kind == "region" else torch.tensor(image, device=found.device, dtype=torch.float32)
    sides = ((2 * sides) ** 2 if by.new_coords else sides.exp()) * anchors / unit
    boxes = torch.cat([middle, sides], -1)
    return boxes.reshape(batch, -1, 4), thing.reshape(batch, -1), classes.reshape(batch, -1, by.classes)
