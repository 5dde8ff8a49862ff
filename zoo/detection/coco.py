"""Answers in COCO's form: what its own tools read as results, with the names that people read."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from zoo.detection.detections import Detections

CATEGORIES = tuple(sorted(set(range(1, 91)) - {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}))
"""COCO's category ids: 80 of 1 to 90, in the order of its classes."""
DIGITS = 5
"""Of scores, after the point; boxes have two, a hundredth of a pixel."""


def category(label: int, labels: str | None) -> int:
    """Return the category id of a class: COCO's own of its 80 classes, what the network says where it answers in ids, else from 1 on.

    Args:
        label: the class's index.
        labels: the name of the list of labels.
    """
    if labels == "coco":
        return CATEGORIES[label]
    return label if labels == "coco91" else label + 1


def image_id(name: str) -> int | str:
    """Return an image's id: the number that it is called by, as COCO's are, "000000000139.jpg", or else its name."""
    stem = PurePath(name).stem
    return int(stem) if stem.isascii() and stem.isdigit() else name


def results(found: Detections, name: str, labels: str | None) -> list[dict[str, Any]]:
    """Return what was found on an image as COCO's results: bbox is left, top, width and height in pixels.

    Args:
        found: the answer.
        name: of the image.
        labels: the name of the list of labels, as `Checkpoint.labels` has it.
    """
    rows: list[dict[str, Any]] = []
    boxes, scores = found.boxes.double().tolist(), found.scores.double().tolist()
    for place, (box, score, label) in enumerate(zip(boxes, scores, found.labels.tolist(), strict=True)):
        left, top, right, bottom = box
        row: dict[str, Any] = {
            "image_id": image_id(name),
            "category_id": category(label, labels),
            "bbox": [round(edge, 2) for edge in (left, top, right - left, bottom - top)],
            "score": round(score, DIGITS),
            "category_name": found.names[place],
            "file_name": name,
        }
        if found.keypoints is not None:
            row["keypoints"] = [round(value, 2) for point in found.keypoints[place].tolist() for value in point]
        if found.masks is not None:
            row["segmentation"] = run_lengths(found.masks[place].cpu().numpy())
        rows.append(row)
    return rows


def run_lengths(mask: Any) -> dict[str, Any]:
    """Return a mask as COCO's uncompressed run lengths: counts of 0 and 1 in turn, column by column, beginning with 0.

    Args:
        mask: bool (height, width).
    """
    import numpy as np

    flat = np.asarray(mask, bool).flatten(order="F")
    edges = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff(np.concatenate([[0], edges, [flat.size]])).tolist()
    if flat.size and flat[0]:
        counts = [0, *counts]
    return {"size": list(mask.shape), "counts": counts}
