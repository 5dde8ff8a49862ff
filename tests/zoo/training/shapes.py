"""Photographs with drawn shapes, whose places and pixels are known, as COCO, VOC and YOLO keep them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from zoo.segmentation.drawing import palette

NAMES = ("disc", "square", "triangle")
COLOURS = ((230, 40, 40), (40, 200, 60), (50, 90, 240))


def background(random: np.random.Generator, width: int, height: int, photographs: Sequence[Path]) -> Image.Image:
    """Cut a piece out of a photograph; where there is none, draw a soft picture."""
    if photographs:
        with Image.open(photographs[int(random.integers(len(photographs)))]) as opened:
            picture = opened.convert("RGB")
        picture = picture.resize((max(width, picture.width // 2), max(height, picture.height // 2)))
        left, top = int(random.integers(picture.width - width + 1)), int(random.integers(picture.height - height + 1))
        return picture.crop((left, top, left + width, top + height))
    few = random.integers(60, 190, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(few).resize((width, height), Image.Resampling.BICUBIC)


def draw(random: np.random.Generator, picture: Image.Image, most: int = 2) -> tuple[list[tuple[int, list[int]]], Image.Image]:
    """Draw one to `most` shapes that don't overlap; return their classes and boxes, and the map of classes."""
    width, height = picture.size
    mask = Image.new("L", picture.size, 0)
    pen, marker = ImageDraw.Draw(picture), ImageDraw.Draw(mask)
    things: list[tuple[int, list[int]]] = []
    wanted = int(random.integers(1, most + 1))
    for _ in range(20):
        side = int(random.integers(min(width, height) // 4, min(width, height) // 2))
        x, y = int(random.integers(1, width - side)), int(random.integers(1, height - side))
        box = [x, y, x + side, y + side]
        if any(box[0] < b[2] + 4 and b[0] < box[2] + 4 and box[1] < b[3] + 4 and b[1] < box[3] + 4 for _, b in things):
            continue
        kind = int(random.integers(3))
        corner = (x, y, x + side - 1, y + side - 1)
        for tool, ink in ((pen, COLOURS[kind]), (marker, kind + 1)):
            if kind == 0:
                tool.ellipse(corner, fill=ink)
            elif kind == 1:
                tool.rectangle(corner, fill=ink)
            else:
                tool.polygon([(x + side // 2, y), (x + side - 1, y + side - 1), (x, y + side - 1)], fill=ink)
        things.append((kind, box))
        if len(things) == wanted:
            break
    return things, mask


SIZES = ((128, 96), (96, 128))


def make(folder: Path, count: int, seed: int, photographs: Sequence[Path] = ()) -> Path:
    """Write a data set in all three forms into a folder; return COCO's file."""
    random = np.random.default_rng(seed)
    for name in ("images", "labels", "JPEGImages", "SegmentationClass", "Annotations"):
        (folder / name).mkdir(parents=True)
    (folder / "classes.txt").write_text("\n".join(NAMES) + "\n")
    images: list[Any] = []
    annotations: list[Any] = []
    colours = [int(value) for colour in palette(256) for value in colour]
    for number in range(count):
        width, height = SIZES[number % len(SIZES)]
        picture = background(random, width, height, photographs)
        things, mask = draw(random, picture)
        name = f"{number:04d}"
        picture.save(folder / "images" / f"{name}.jpg", quality=95)
        picture.save(folder / "JPEGImages" / f"{name}.jpg", quality=95)
        mask.putpalette(colours)
        mask.save(folder / "SegmentationClass" / f"{name}.png")
        images.append({"id": number, "file_name": f"{name}.jpg", "width": width, "height": height})
        lines, xml = [], []
        for kind, (x1, y1, x2, y2) in things:
            box = [x1, y1, x2 - x1, y2 - y1]
            row = {"id": len(annotations) + 1, "image_id": number, "category_id": kind + 1}
            annotations.append(row | {"bbox": box, "area": box[2] * box[3], "iscrowd": 0})
            lines.append(f"{kind} {(x1 + x2) / 2 / width} {(y1 + y2) / 2 / height} {(x2 - x1) / width} {(y2 - y1) / height}")
            edges = f"<xmin>{x1 + 1}</xmin><ymin>{y1 + 1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax>"
            xml.append(f"<object><name>{NAMES[kind]}</name><bndbox>{edges}</bndbox></object>")
        (folder / "labels" / f"{name}.txt").write_text("\n".join(lines))
        (folder / "Annotations" / f"{name}.xml").write_text(f"<annotation><filename>{name}.jpg</filename>{''.join(xml)}</annotation>")
    categories = [{"id": index + 1, "name": name} for index, name in enumerate(NAMES)]
    (folder / "annotations.json").write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
    return folder / "annotations.json"
