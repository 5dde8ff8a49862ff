"""What `detect` asks of any detector, whatever its family, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from weights import BadRecord, Preprocessing, UnknownWeights
from zoo import Detections, ResNet20, detect, predict, trained
from zoo.detection import Detector
from zoo.images.preprocess import BadImage
from zoo.variants import variants


class Corners(Detector):
    """Finds the upper left quarter of every photograph that is not black, by its mean brightness."""

    paper = "none"
    classifiers = ("score",)

    def __init__(self, num_classes: int = 2, in_channels: int = 3) -> None:
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        self.body, self.score = nn.Dropout(), nn.Linear(1, num_classes)
        self.asked: list[Any] = []

    def answer(self, photographs: Sequence[Tensor], threshold: float, overlap: float) -> list[Detections]:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.asked.append((len(photographs), threshold, overlap))
        return [self.one(photograph, threshold) for photograph in photographs]

    def one(self, photograph: Tensor, threshold: float) -> Detections:
        assert photograph.dtype == torch.uint8
        height, width = photograph.shape[1:]
        score = photograph.float().mean() / 255
        if score <= threshold:
            return Detections.none((width, height))
        box = torch.tensor([[0, 0, width / 2, height / 2]])
        return Detections(box, score[None], torch.tensor([1]), self.names_of([1]), (width, height))


@pytest.fixture
def model() -> Corners:
    return Corners()


def grey(value: int, width: int, height: int) -> np.ndarray:
    return np.full((height, width, 3), value, np.uint8)


def test_photographs_of_different_sizes_have_boxes_in_their_own_pixels(model: Corners) -> None:
    found = detect(model, [grey(200, 64, 32), grey(0, 8, 8), grey(255, 30, 90)], threshold=0.5, overlap=0.1, batch_size=2)
    assert [one.size for one in found] == [(64, 32), (8, 8), (30, 90)]
    assert [len(one) for one in found] == [1, 0, 1]
    assert found[2].boxes.tolist() == [[0, 0, 15, 45]]
    assert found[0].names == ("class 1",)
    assert model.asked == [(2, 0.5, 0.1), (1, 0.5, 0.1)]


def test_one_photograph_gives_one_answer_by_the_networks_own_limits(model: Corners) -> None:
    model.body.eval()
    one = detect(model, grey(255, 8, 8))
    assert isinstance(one, Detections)
    assert model.asked == [(1, Detector.threshold, Detector.overlap)]
    assert (model.training, model.body.training, model.score.training) == (True, False, True)


@pytest.mark.parametrize("limits", [{"threshold": 1.5}, {"overlap": -1}, {"threshold": True}, {"batch_size": 0}])
def test_a_limit_out_of_range_is_refused(model: Corners, limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        detect(model, grey(255, 8, 8), **limits)


def test_what_is_no_detector_and_no_photograph_is_refused(model: Corners) -> None:
    with pytest.raises(TypeError, match=r"predict\(\) takes a classifier, and Corners is a network for detection; detect\(model, images\)"):
        predict(model, grey(1, 8, 8))
    with pytest.raises(TypeError, match="takes a detector"):
        detect(ResNet20(), grey(1, 8, 8))
    with pytest.raises(BadImage, match="the list is empty"):
        detect(model, [])


def test_an_answer_has_one_of_each_for_every_thing() -> None:
    box = torch.zeros(1, 4)
    with pytest.raises(ValueError, match="each thing has one of each"):
        Detections(box, torch.zeros(2), torch.zeros(1).long(), ("dog",), (4, 4))
    with pytest.raises(ValueError, match=r"masks are \(1, 3, 4\)"):
        Detections(box, torch.zeros(1), torch.zeros(1).long(), ("dog",), (4, 3), masks=torch.zeros(1, 4, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="keypoints"):
        Detections(box, torch.zeros(1), torch.zeros(1).long(), ("dog",), (4, 3), keypoints=torch.zeros(1, 17, 2))


def test_a_class_line_with_params_is_in_the_detectors_catalogue_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Detector, "catalogue", dict(Detector.catalogue))

    class MyCorners(Corners, params=4): ...

    known = variants("detection")["MyCorners"]
    assert (known.family, known.task, known.home) == ("Corners", "detection", __name__)
    assert "MyCorners" not in variants()
    with pytest.raises(TypeError, match="in_channels=1 is for classifiers"):
        trained(MyCorners, in_channels=1)
    with pytest.raises(UnknownWeights, match="which is your own"):  # a module of the user's, and no file
        trained(nn.Linear)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ({"resize": 416, "letterbox": True, "squash": True}, "three ways to resize"),
        ({"resize": 800, "longest": 1333, "crop": 224}, "no crop"),
        ({"letterbox": True}, "need resize"),
        ({"resize": 800, "longest": 0}, "longest is a number of pixels"),
    ],
)
def test_a_record_resizes_a_photograph_in_one_way(steps: dict[str, Any], said: str) -> None:
    usual: dict[str, Any] = {"resize": None, "crop": None, "interpolation": "bilinear", "mean": (0.0,) * 3, "std": (1.0,) * 3}
    with pytest.raises(BadRecord, match=said):
        Preprocessing(**(usual | steps))
    assert Preprocessing(**(usual | {"resize": 800, "longest": 1333})).longest == 1333
