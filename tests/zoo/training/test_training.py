"""Detectors and segmenters learn from COCO's, VOC's and YOLO's data, in runs that end with the same numbers however they were killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapes
import torch
from killing import Killed, killing
from torch import Tensor, nn

from weights.errors import MalformedFile
from zoo import LRASPP_MobileNet_V3_Large, SSDlite320_MobileNet_V3_Large, detect, trained
from zoo.detection import read_truths
from zoo.finetuning.progress import Epoch
from zoo.segmentation import Segmenter
from zoo.training import Diverged, LearningSettings, measure_segmenter, read_yolo, train_detector, train_segmenter
from zoo.training.detectors import _example
from zoo.training.loop import batches, learn


class Small(SSDlite320_MobileNet_V3_Large, fixed=(64, 64)): ...


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "data"
    shapes.make(folder, 6, 0)
    return folder


def test_the_three_forms_say_the_same(data: Path) -> None:
    coco, voc, yolo = read_truths(data / "annotations.json"), read_truths(data), read_yolo(data)
    assert coco.classes == yolo.classes == shapes.NAMES
    for number in range(6):
        one, other, third = (_example(known, number, mirrored=False)[1] for known in (coco, voc, yolo))
        assert torch.equal(one["boxes"], other["boxes"])
        torch.testing.assert_close(third["boxes"], one["boxes"], rtol=0, atol=1e-3)
        names = [
            [known.classes[int(label) - 1] for label in found["labels"]] for known, found in ((coco, one), (voc, other), (yolo, third))
        ]
        assert names[0] == names[1] == names[2]


def test_a_mirrored_photograph_has_mirrored_boxes(data: Path) -> None:
    known = read_truths(data / "annotations.json")
    (plain, one), (mirrored, other) = (_example(known, 0, mirrored=flip) for flip in (False, True))
    assert torch.equal(plain.flip(2), mirrored)
    width = plain.shape[2]
    assert torch.equal(other["boxes"][:, 0], width - one["boxes"][:, 2])


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    def losses(self, numbers: Sequence[int], random: torch.Generator) -> dict[str, Tensor]:
        x = torch.tensor(numbers).float()[:, None] * torch.rand(3, generator=random)
        return {"square": (self.layer(x) - 1).square().mean()}


def run(toy: Toy, out: Path, **more: Any) -> Any:
    settings = LearningSettings(epochs=3, batch_size=4, lr=0.1, save_every=2)
    return learn(toy, 10, toy.losses, out, settings, {"network": "Toy"}, classes=["a"], **more)


@pytest.mark.parametrize("at", [1, 4, 8])
def test_a_killed_run_ends_with_the_same_numbers(at: int, tmp_path: Path) -> None:
    whole, killed = Toy(), Toy()
    expected = run(whole, tmp_path / "whole")
    with pytest.raises(Killed):
        run(killed, tmp_path / "killed", progress=killing(at))
    again, epochs = Toy(), list[Epoch]()
    found = run(again, tmp_path / "killed", progress=killing(0, epochs))
    assert [(end.step, end.epoch, end.epochs) for end in epochs] == [(3 * i, i, 3) for i in range(at // 2 * 2 // 3 + 1, 4)]
    assert (found.steps, found.resumed) == (9, at // 2 * 2)
    assert found.losses == expected.losses
    assert all(torch.equal(one, other) for one, other in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))
    assert run(Toy(), tmp_path / "killed").resumed == 9


def test_a_run_with_other_settings_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    run(Toy(), tmp_path)
    toy = Toy().eval()
    with pytest.raises(ValueError, match="has a run with another lr; restart=True throws it away"):
        learn(
            toy,
            10,
            toy.losses,
            tmp_path,
            LearningSettings(epochs=3, batch_size=4, lr=0.2, save_every=2),
            {"network": "Toy"},
            classes=["a"],
        )
    assert not toy.training  # as the caller had it
    (tmp_path / "state.safetensors").write_bytes(b"damaged")
    with pytest.raises(MalformedFile, match="restart=True begins anew"):
        run(Toy(), tmp_path)
    assert run(Toy(), tmp_path, restart=True).resumed == 0


@pytest.mark.parametrize(
    ("count", "size", "least", "sizes"), [(11, 4, 1, (4, 4, 3)), (11, 4, 4, (4, 7)), (9, 4, 2, (4, 5)), (3, 4, 4, (3,)), (8, 4, 4, (4, 4))]
)
def test_batches_of_an_epoch(count: int, size: int, least: int, sizes: tuple[int, ...]) -> None:
    each = batches(count, size, least)
    assert (*[size] * (each - 1), count - size * (each - 1)) == sizes


def test_a_batch_norm_that_gets_one_photograph_says_how_many_it_needs(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs two photographs at once, and 1 are too few: give a batch_size of 2 or more"):
        train_detector(Small(4), data / "annotations.json", tmp_path, batch_size=1, epochs=1)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    toy = Toy()
    with pytest.raises(Diverged, match=r"at step 1 of \d+: give a smaller lr"):
        learn(toy, 4, lambda numbers, random: {"a": toy.layer[0].weight.sum() * torch.nan}, tmp_path, LearningSettings(), {}, classes=["a"])


def test_a_detector_learns_and_its_file_is_loaded_with_its_classes(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Small(4)
    learnt = train_detector(model, data / "annotations.json", tmp_path / "run", epochs=4, batch_size=3, lr=0.02, warmup_steps=1)
    assert learnt.steps == 8
    assert np.mean(learnt.losses[-2:]) < np.mean(learnt.losses[:2])
    assert not model.training
    again = trained(Small, str(learnt.model))
    assert again.num_classes == 4
    photograph = data / "images" / "0000.jpg"
    one, other = detect(model, photograph, threshold=0.1), detect(again, photograph, threshold=0.1)
    assert torch.equal(one.boxes, other.boxes)
    assert set(one.names) <= {*shapes.NAMES}
    assert (tmp_path / "run" / "labels.tsv").read_text().split() == ["background", *shapes.NAMES]
    with pytest.raises(ValueError, match="the data have 3 classes, and with the background the network needs num_classes=4; it has 5"):
        train_detector(Small(5), data, tmp_path / "other")
    with pytest.raises(TypeError, match="takes a detector with losses"):
        train_detector(nn.Linear(1, 1), data, tmp_path / "other")  # pyright: ignore[reportArgumentType]


class Pixels(Segmenter):
    """A convolution of each pixel alone, which can tell colours."""

    input_size = 64
    classifiers = ("score.2",)
    paper = "none"

    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        self.num_classes, self.in_channels = num_classes, 3
        self.score = nn.Sequential(nn.Conv2d(3, 32, 1), nn.ReLU(), nn.Conv2d(32, num_classes, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.score(x)}


def test_a_segmenter_learns_the_colours_of_shapes(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Pixels()
    names = ("background", *shapes.NAMES)
    before = measure_segmenter(model, data).miou
    train_segmenter(model, data, tmp_path, classes=names, size=64, epochs=60, batch_size=3, lr=0.1, warmup_steps=5)
    assert measure_segmenter(model, data).miou > max(0.8, before)
    with pytest.raises(ValueError, match="3 classes are named, and the network has num_classes=4"):
        train_segmenter(model, data, tmp_path, classes=names[:3])
    with pytest.raises(ValueError, match="as VOC has them"):
        train_segmenter(model, tmp_path, tmp_path / "none", classes=names)


def test_a_segmenter_of_the_catalogue_makes_a_step(data: Path, tmp_path: Path) -> None:
    model = LRASPP_MobileNet_V3_Large(4)
    learnt = train_segmenter(model, data, tmp_path, classes=("background", *shapes.NAMES), size=64, epochs=1, batch_size=6)
    assert learnt.steps == 1
    assert trained(LRASPP_MobileNet_V3_Large, str(learnt.model)).num_classes == 4


def test_lines_of_yolo_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    shapes.make(tmp_path / "data", 1, 0)
    file = tmp_path / "data" / "labels" / "0000.txt"
    for line in ("0 0.5 0.5", "9 0.5 0.5 0.1 0.1", "0 7 0.5 0.1 0.1", "cat 0 0 0 0"):
        file.write_text(line)
        with pytest.raises(MalformedFile, match=r"0000[.]txt, line 1"):
            read_yolo(tmp_path / "data")
