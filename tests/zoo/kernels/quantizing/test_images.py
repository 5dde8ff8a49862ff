"""Calibration images: what is taken, and what is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from weights import Preprocessing
from zoo.images.batch import batch
from zoo.kernels.comparing.sample_images import natural_images
from zoo.kernels.quantizing.images import CALIBRATE, FEWEST, gather, made_up


def smooth(count: int = 64, side: int = 16, seed: int = 0) -> Tensor:
    parts = [natural_images((16, 3, side, side), torch.device("cpu"), 100 * seed + i) for i in range(-(-count // 16))]
    return torch.cat(parts)[:count]


class Record:
    preprocessing = Preprocessing(resize=16, crop=16, interpolation="bilinear", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


class Known(nn.Module):
    """A network whose checkpoint says how images are preprocessed."""

    in_channels, input_size, checkpoint = 3, 16, Record()

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)

    def batch_of(self, images: Any) -> Tensor:
        return batch(images, Record.preprocessing, 3)


@pytest.fixture
def plain() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3))


def test_half_of_the_images_are_set_aside_and_calibrate_nothing(plain: nn.Module) -> None:
    images = smooth(70)
    found = gather(plain, images, labels=range(70))
    assert len(found.calibration) == 35
    assert len(found.check) == 35
    assert not found.made_up
    rows = {tuple(image.flatten()[:5].tolist()): index for index, image in enumerate(images)}
    places = [[rows[tuple(image.flatten()[:5].tolist())] for image in part] for part in (found.calibration, found.check)]
    assert sorted(places[0] + places[1]) == list(range(70))
    assert found.labels is not None
    assert found.labels.tolist() == places[1]
    assert min(places[1]) < 30 < 40 < max(places[1]), "a folder is sorted by classes: a half must not be its end"


def test_of_many_images_at_most_300_calibrate(plain: nn.Module) -> None:
    found = gather(plain, smooth(700, 4))
    assert len(found.calibration) == CALIBRATE
    assert len(found.check) == 400


def test_images_to_compare_on_may_be_given(plain: nn.Module) -> None:
    found = gather(plain, list(smooth(32)), smooth(40, seed=1), labels=torch.arange(40))
    assert len(found.calibration) == 32
    assert len(found.check) == 40


def test_copies_to_compare_on_count_once(plain: nn.Module) -> None:
    distinct = smooth(32, seed=1)
    check = torch.cat([distinct[:1], distinct[:1], distinct[1:], distinct[:1].repeat(968, 1, 1, 1)])
    with pytest.warns(UserWarning, match="969 of the 1001 check images are copies of others: each counts once"):
        found = gather(plain, smooth(32), check, labels=torch.arange(1001))
    assert torch.equal(found.check, distinct)
    assert found.labels is not None
    assert found.labels.tolist() == [0, *range(2, 33)], "labels stay with their images"


def test_other_images_have_another_digest(plain: nn.Module) -> None:
    one, two = gather(plain, smooth(64)), gather(plain, smooth(64, seed=1))
    assert one.digest != two.digest
    assert one.check_digest != two.check_digest
    assert gather(plain, smooth(64)).digest == one.digest
    assert gather(plain, smooth(64), labels=[0] * 64).digest != one.digest


def test_a_folder_is_read_by_the_checkpoints_own_preprocessing(tmp_path: Path) -> None:
    pixels = ((smooth(64, 20) / 4 + 0.5).clamp(0, 1) * 255).byte().permute(0, 2, 3, 1).numpy()
    for index, picture in enumerate(pixels):
        Image.fromarray(picture).save(tmp_path / f"{index:02d}.png")
    found = gather(Known(), tmp_path)
    assert found.calibration.shape == (32, 3, 16, 16)
    assert found.calibration.min() < -0.5
    listed = gather(Known(), sorted(map(str, tmp_path.iterdir())))
    assert listed.digest == found.digest


def test_noise_is_taken_for_made_up(plain: nn.Module) -> None:
    assert "noise" in gather(plain, torch.randn(64, 3, 16, 16)).made_up
    assert "made up" in made_up((3, 16, 16)).made_up


def test_a_tenth_of_noise_among_pictures_is_noticed(plain: nn.Module) -> None:
    images = smooth(64)
    assert not gather(plain, images).made_up
    mixed = torch.cat([images[:56], torch.randn(8, 3, 16, 16) / 100])  # whose pixels hardly count beside those of pictures
    assert "look like noise" in gather(plain, mixed).made_up


def test_a_detector_is_calibrated_on_pixels_between_0_and_1() -> None:
    class Detecting(Known):
        def answer_by(self) -> None: ...

    fitting = smooth(64).sigmoid()
    assert len(gather(Detecting(), fitting).check) == 32
    for wrong in (255 * fitting, fitting - 0.5):
        with pytest.raises(ValueError, match="the calibration images of a detector hold pixels between 0 and 1"):
            gather(Detecting(), wrong)


def test_copies_count_once_before_images_are_divided(plain: nn.Module) -> None:
    images = torch.cat([smooth(64), smooth(3)])
    with pytest.warns(UserWarning, match="3 of the 67 calibration images are copies of others: each counts once"):
        found = gather(plain, images, labels=range(67))
    assert len(found.calibration) == len(found.check) == 32
    assert found.labels is not None
    assert found.labels.max() < 64


def test_noise_of_any_range_is_taken_for_made_up_by_a_network_with_a_checkpoint() -> None:
    assert "noise" in gather(Known(), 3 * torch.randn(64, 3, 16, 16)).made_up


def test_a_picture_that_cannot_be_read_is_told_with_its_folder(tmp_path: Path) -> None:
    for index, image in enumerate(smooth(70).sigmoid()):
        Image.fromarray((255 * image).byte().permute(1, 2, 0).numpy()).save(tmp_path / f"{index:02}.png")
    (tmp_path / "zz.jpg").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=rf"calibration, {tmp_path}: zz\.jpg"):
        gather(Known(), str(tmp_path))
    with pytest.raises(ValueError, match="calibration names no folder: the path is empty"):
        gather(Known(), "")


def alike() -> Tensor:
    return smooth(1).expand(64, -1, -1, -1) + 1e-6 * torch.arange(64.0).view(-1, 1, 1, 1)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "too few": (smooth(63), None, "calibration has 63 images, and 64 are the fewest"),
    "too few to calibrate": (smooth(31), smooth(40, seed=1), f"calibration has 31 images, and {FEWEST} are the fewest"),
    "too few to compare": (smooth(40), smooth(31, seed=1), f"check has 31 images, and {FEWEST} are the fewest"),
    "copies": (smooth(8).repeat(8, 1, 1, 1), smooth(40, seed=1), "only 8 of the 64 calibration images are different"),
    "one image": (smooth(1).repeat(99, 1, 1, 1), None, "only 1 of the 99 calibration images are different"),
    "too few that differ": (
        torch.cat([smooth(40), smooth(40)]),
        None,
        "only 40 of the 80 calibration images are different, and 64 are the fewest",
    ),
    "all alike": (alike(), smooth(40, seed=1), "the calibration images are all alike"),
    "of one colour": (torch.randn(64, 3, 1, 1).expand(-1, -1, 16, 16), smooth(40, seed=1), "are of one colour"),
    "the same twice": (smooth(64), smooth(40), "40 of the 40 images to compare on are calibration images too"),
    "channels last": (smooth(64).permute(0, 2, 3, 1), None, "are last; the network takes them first"),
    "other channels": (smooth(64)[:, :2], None, "takes 3 channels"),
    "no batch": (smooth(64)[0], None, r"a tensor of images \(N, C, H, W\)"),
    "several sizes": ([*smooth(40), *smooth(40, 12)], None, "of one shape"),
    "NaN": (smooth(64).index_fill(0, torch.tensor([3]), float("nan")), None, "NaN or infinite"),
    "an empty list": ([], None, "the list is empty"),
    "no images": (7, None, "a tensor .* a list of images or a folder"),
    "pictures without a checkpoint": ([torch.zeros(3, 16, 16, dtype=torch.uint8)], None, "no checkpoint that says how pictures"),
    "a folder without a checkpoint": ("photographs", None, "no checkpoint that says how pictures"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_images_that_say_nothing_are_refused(plain: nn.Module, case: str) -> None:
    calibration, check, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        gather(plain, calibration, check)


def test_another_range_or_size_than_the_checkpoints_is_refused() -> None:
    fitting = (smooth(64) / 4).clamp(-1, 1)
    assert len(gather(Known(), fitting).check) == 32
    with pytest.raises(ValueError, match=r"another range .* look like 0\.\.255"):
        gather(Known(), (fitting + 1) * 127.5)
    with pytest.raises(ValueError, match=r"another range .* not normalised"):
        gather(Known(), ((fitting + 1) * 127.5).round() / 255)
    with pytest.raises(ValueError, match=r"images of 3x16x16 .* are 3x12x12"):
        gather(Known(), (smooth(64, 12) / 4).clamp(-1, 1))
    any_size = Known()
    any_size.size_multiple = 4  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"images of 3x16x16 .* are 3x12x12"):
        gather(any_size, (smooth(64, 12) / 4).clamp(-1, 1))
    assert gather(any_size, (smooth(64, 12) / 4).clamp(-1, 1), size=(3, 12, 12)).check.shape[-1] == 12


@pytest.mark.parametrize(("labels", "said"), [
    ([1, 2], "2 labels for 64 images"), ([0.5] * 64, "whole numbers"), ("cats", "indices of classes"),
    (torch.zeros(64, 2).long(), "in one row"),
])  # fmt: skip
def test_labels_that_do_not_fit_are_refused(plain: nn.Module, labels: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gather(plain, smooth(64), labels=labels)
