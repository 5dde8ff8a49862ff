"""`segment` gives the class of every pixel at the photograph's own size, whatever the sizes are, and says what each takes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import zoo
from zoo.images.preprocess import BadImage
from zoo.segmentation import PixelConfusion, Segmenter, segment
from zoo.segmentation.drawing import palette


class Reddish(Segmenter):
    """Calls a pixel by its strongest channel: 1, 2 or 3, and 0 where none is strong."""

    paper = "none"
    input_size = 32
    classifiers = ("score",)

    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        self.num_classes, self.in_channels = num_classes, 3
        self.score = nn.Conv2d(3, num_classes, 1)
        with torch.no_grad():
            self.score.weight.zero_()
            self.score.bias.zero_()
            self.score.weight[1:4, :, 0, 0] = torch.eye(3)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        assert not self.training
        self.shapes.append(tuple(x.shape))
        return {"out": self.score(x)}


def halves(width: int, height: int) -> np.ndarray:
    """Draw red on the left, blue on the right."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2, 0] = 255
    pixels[:, width // 2 :, 2] = 255
    return pixels


def test_maps_have_the_photographs_own_sizes() -> None:
    model = Reddish().train()
    found = segment(model, [halves(64, 48), halves(200, 100), halves(64, 48)], batch_size=2)
    assert [one.size for one in found] == [(64, 48), (200, 100), (64, 48)]
    for one in found:
        width = one.size[0]
        assert one.labels[0, 0] == 1
        assert one.labels[-1, -1] == 3
        assert one.areas == pytest.approx({"class 1": 0.5, "class 3": 0.5}, abs=2 / width)
        assert sum(one.areas.values()) == pytest.approx(1)
    assert model.training
    assert model.shapes == [(1, 3, 32, 42), (1, 3, 32, 64), (1, 3, 32, 42)]


def test_neighbours_of_one_size_go_through_together() -> None:
    model = Reddish()
    segment(model, [halves(64, 48)] * 3, batch_size=2)
    assert [shape[0] for shape in model.shapes] == [2, 1]


def test_many_classes_on_a_large_photograph_are_resized_a_few_at_once() -> None:
    model = Reddish(300)
    found = segment(model, halves(90, 60))
    assert found.labels.dtype == torch.int16
    assert set(found.areas) == {"class 1", "class 3"}


def test_a_picture_has_the_colours_and_a_legend(tmp_path: Path) -> None:
    pixels = halves(120, 80)
    found = segment(Reddish(), pixels)
    path = found.save(pixels, tmp_path / "found.png")
    with Image.open(path) as picture:
        assert picture.width == 120
        assert picture.height > 80
        drawn = np.asarray(picture.convert("RGB"))
    expected = (0.4 * np.array([255, 0, 0]) + 0.6 * palette(4)[1]).astype(np.uint8)
    assert drawn[10, 10].tolist() == expected.tolist()
    with pytest.raises(ValueError, match="120x80"):
        found.picture(halves(10, 10))


def test_the_palette_is_pascals() -> None:
    assert palette(21)[[0, 1, 2, 15, 20]].tolist() == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [192, 128, 128], [0, 64, 128]]


def test_what_is_no_segmenter_and_no_photograph_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a segmenter, as trained"):
        segment(zoo.ResNet20(), halves(8, 8))
    with pytest.raises(TypeError, match=r"trained\('deeplab'\) builds a network"):
        segment("deeplab", halves(8, 8))
    with pytest.raises(BadImage, match="the list is empty"):
        segment(Reddish(), [])
    with pytest.raises(ValueError, match="batch_size is a whole number of at least 1"):
        segment(Reddish(), halves(8, 8), batch_size=0)


def test_intersection_over_union_is_that_of_a_loop() -> None:
    random = torch.Generator().manual_seed(0)
    counts = PixelConfusion(6)
    maps: list[Any] = []
    for _ in range(3):
        found, true = torch.randint(5, (7, 9), generator=random), torch.randint(5, (7, 9), generator=random)
        true[0, :3] = 255
        counts.add(found, true)
        maps.append((found[true != 255], true[true != 255]))
    found, true = (torch.cat([pair[i] for pair in maps]) for i in (0, 1))
    expected = [float(((found == k) & (true == k)).sum() / ((found == k) | (true == k)).sum()) for k in range(5)]
    measures = counts.measures()
    assert measures.iou[:5] == pytest.approx(expected)
    assert np.isnan(measures.iou[5])
    assert measures.miou == pytest.approx(np.mean(expected))
    assert measures.accuracy == pytest.approx(float((found == true).double().mean()))


def test_pixels_that_can_not_be_counted_are_refused() -> None:
    counts = PixelConfusion(3)
    with pytest.raises(ValueError, match="nothing to measure"):
        counts.measures()
    with pytest.raises(ValueError, match="one shape"):
        counts.add(torch.zeros(2, 2), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="has class 3, and there are 3"):
        counts.add(torch.full((2, 2), 3), torch.zeros(2, 2).long())
