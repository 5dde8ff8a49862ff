"""Which part of a picture a network sees: the size by the header, and the box that preprocessing leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from weights import Preprocessing
from zoo.images.preprocess import open_image, picture_size, preprocess, seen_box

MEAN, STD = (0.0,) * 3, (1.0,) * 3


@pytest.mark.parametrize(
    "source", [np.zeros((20, 30), np.uint8), np.zeros((20, 30, 3), np.uint8), torch.zeros(3, 20, 30, dtype=torch.uint8)]
)
def test_an_arrays_size_is_that_of_its_picture(source: Any) -> None:
    assert picture_size(source) == open_image(source).size == (30, 20)


@pytest.mark.parametrize("turn", [1, 3, 6, 8])
def test_a_files_size_is_that_of_the_upright_picture(turn: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    Image.new("RGB", (30, 20)).save(tmp_path / "a.jpg", exif=exif)
    assert picture_size(tmp_path / "a.jpg") == open_image(tmp_path / "a.jpg").size
    with Image.open(tmp_path / "a.jpg") as opened:
        assert picture_size(opened) == open_image(opened).size


@pytest.mark.parametrize(
    ("record", "box"),
    [
        (Preprocessing(32, 32, "nearest", MEAN, STD), (20, 0, 84, 64)),
        (Preprocessing(64, 32, "nearest", MEAN, STD), (36, 16, 68, 48)),
        (Preprocessing(32, 32, "nearest", MEAN, STD, squash=True), (0, 0, 104, 64)),
        (Preprocessing(None, None, "nearest", MEAN, STD), (0, 0, 104, 64)),
        (Preprocessing(None, 128, "nearest", MEAN, STD), (-12, -32, 116, 96)),
    ],
)
def test_the_box_holds_the_pixels_that_the_network_gets(record: Preprocessing, box: tuple[int, ...]) -> None:
    assert seen_box((104, 64), record) == pytest.approx(box)
    pixels = np.zeros((64, 104, 3), np.uint8)
    left, top, right, bottom = (max(0, v) for v in box)
    pixels[top : min(bottom, 64), left : min(right, 104)] = 255
    seen = preprocess(pixels, record)
    share = (min(right, 104) - left) * (min(bottom, 64) - top) / ((box[2] - box[0]) * (box[3] - box[1]))
    assert float(seen.mean()) == pytest.approx(share, abs=1e-3)
