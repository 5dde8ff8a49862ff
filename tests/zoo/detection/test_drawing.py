"""Boxes and names on photographs: names lie in the picture, and none hides another while there is room."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from zoo import Detections
from zoo.detection import drawing
from zoo.detection.drawing import COLOURS, drawn, save


def found(boxes: list[list[float]], names: tuple[str, ...], size: tuple[int, int], **more: torch.Tensor) -> Detections:
    labels = torch.tensor([COLOURS.index(COLOURS[i % len(COLOURS)]) for i in range(len(names))])
    return Detections(torch.tensor(boxes), torch.linspace(0.9, 0.5, len(names)), labels, names, size, **more)


def grounds(boxes: list[list[float]], names: tuple[str, ...], size: tuple[int, int]) -> list[tuple[float, float, float, float]]:
    taken: list[tuple[float, float, float, float]] = []
    draw = ImageDraw.Draw(Image.new("RGB", size))
    for box, name in zip(boxes, names, strict=True):
        drawing._name(draw, size, box, name, 14, COLOURS[0], taken)
    return taken


def test_names_lie_within_the_picture_and_hide_no_other() -> None:
    size = (300, 200)
    boxes = [[0.0, 0, 40, 40], [250, 0, 300, 30], [2, 0, 60, 60], [10, 190, 290, 200], [250, 150, 299, 199]]
    taken = grounds(boxes, ("bird", "traffic light 93%", "cat", "dog", "refrigerator 50%"), size)
    assert all(0 <= left < right <= size[0] and 0 <= top < bottom <= size[1] for left, top, right, bottom in taken)
    assert not any(drawing._meet(one, other) for i, one in enumerate(taken) for other in taken[i + 1 :])


def test_boxes_masks_and_points_are_drawn_in_the_photographs_own_size(tmp_path: Path) -> None:
    photograph = np.zeros((80, 120, 3), np.uint8)
    mask = torch.zeros(1, 80, 120, dtype=torch.bool)
    mask[:, 50:70, 60:100] = True
    answer = found([[10.0, 40, 110, 75]], ("dog",), (120, 80), masks=mask, keypoints=torch.tensor([[[30.0, 60, 1]]]))
    page = np.asarray(drawn(photograph, answer))
    ink = [int(COLOURS[0][at : at + 2], 16) for at in (1, 3, 5)]
    assert page.shape == (80, 120, 3)
    assert page[74, 60].tolist() == ink, "the lower edge"
    assert page[60, 30].tolist() == ink, "the point"
    assert page[60, 80].tolist() == pytest.approx([drawing.VEIL * value for value in ink], abs=1), "the mask"
    assert not page[5, 5].any()
    for name in ("found.png", "found.jpg"):
        with Image.open(save(drawn(photograph, answer), tmp_path / name)) as saved:
            assert saved.size == (120, 80)
    with pytest.raises(ValueError, match="a picture ends in"):
        save(drawn(photograph, answer), tmp_path / "found.svg")
    with pytest.raises(ValueError, match="120x80 pixels, and the answer is of one with 9x9"):
        drawn(photograph, Detections.none((9, 9)))
