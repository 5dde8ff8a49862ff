"""Pictures for proofs: found in folders, labelled by names, given by a reference, or computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import weights
from weights import Preprocessing
from zoo import ResNet20
from zoo.conversion.proof_images import MOST, Pictures, natural, prepared, steps, unprepared
from zoo.images.preprocess import BadImage
from zoo.networks.model import Model

BGR: dict[str, Any] = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.25, 1.0), "channel_order": "bgr"}


@pytest.fixture
def network() -> Model:
    return ResNet20().eval()


def wanted(**told: Any) -> Preprocessing:
    return replace(weights.adhoc("ResNet20", "file:///none").preprocessing, **{"resize": 32, "crop": 32, **told})


def draw(path: Path, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (40, 50, 3), np.uint8)).save(path)


def test_pictures_are_found_in_folders_below(tmp_path: Path) -> None:
    for place in ("b/2.JPG", "a/1.png", "3.webp"):
        draw(tmp_path / place)
    (tmp_path / "notes.txt").write_text("none")
    (tmp_path / "folder.png").mkdir()
    assert [path.name for path in Pictures.of(tmp_path).files] == ["3.webp", "1.png", "2.JPG"]


def test_a_folder_without_pictures_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no pictures"):
        Pictures.of(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Pictures.of(tmp_path / "nowhere")


def test_of_too_many_pictures_some_of_all_are_taken(tmp_path: Path) -> None:
    for i in range(MOST + MOST // 2):
        (tmp_path / f"{i:05}.png").touch()
    numbers = [int(path.stem) for path in Pictures.of(tmp_path).files]
    assert len(numbers) == len(set(numbers)) == MOST
    assert numbers[0] == 0
    assert numbers[-1] > 1.49 * MOST


def test_nothing_is_nothing() -> None:
    assert not Pictures()
    assert not Pictures.of(None)
    assert Pictures(reference=(np.zeros(1), np.zeros(1)))


def test_unprepared_undoes_prepared() -> None:
    unit = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    made = prepared(unit, wanted(**BGR))
    assert torch.allclose(unprepared(made, wanted(**BGR)), unit)
    assert torch.allclose(made[:, 0], (unit[:, 2] - 0.1) / 0.5)


def test_both_networks_are_given_the_same_picture_each_in_its_own_way(network: Model) -> None:
    theirs, ours = Pictures().inputs(network, wanted(**BGR), wanted(mean=(0.0,) * 3, std=(1.0,) * 3), False)
    assert theirs.dtype == np.float64
    assert ours.dtype == torch.float32
    assert np.allclose(unprepared(torch.from_numpy(theirs), wanted(**BGR)), ours, atol=1e-6)
    pixels, _ = Pictures().inputs(network, wanted(**BGR), wanted(), True)
    assert 200 < pixels.max() <= 255
    assert pixels.min() >= 0
    assert np.allclose(pixels / 255, ours, atol=1e-6)


def test_photographs_are_prepared_for_both(network: Model, tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    theirs, ours = Pictures.of(tmp_path).inputs(network, wanted(**BGR), wanted(mean=(0.0,) * 3, std=(1.0,) * 3), False)
    assert ours.shape == (1, 3, 32, 32)
    assert np.allclose(unprepared(torch.from_numpy(theirs), wanted(**BGR)), ours, atol=1e-6)


def test_the_inputs_of_a_reference_are_taken_as_they_are(network: Model) -> None:
    inputs = np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype(np.float32)
    theirs, ours = Pictures(reference=(inputs, np.zeros((2, 10)))).referenced(network, wanted(**BGR), wanted(**BGR), False)
    assert np.array_equal(theirs, inputs)
    assert np.array_equal(ours.numpy(), inputs)
    last = np.ascontiguousarray(inputs.transpose(0, 2, 3, 1))
    assert np.array_equal(Pictures(reference=(last, np.zeros((2, 10)))).referenced(network, wanted(), wanted(), False)[0], inputs)


def test_the_inputs_of_a_reference_are_changed_where_ours_wants_others(network: Model) -> None:
    pixels = np.random.default_rng(0).uniform(0, 255, (1, 3, 32, 32))
    theirs, ours = Pictures(reference=(pixels, np.zeros((1, 10)))).referenced(network, wanted(**BGR), wanted(**BGR), True)
    assert np.array_equal(theirs, pixels.astype(np.float32)) or np.allclose(theirs, pixels)
    assert torch.allclose(ours, prepared(torch.from_numpy(pixels) / 255, wanted(**BGR)).float(), atol=1e-5)
    with pytest.raises(ValueError, match="no reference"):
        Pictures().referenced(network, wanted(), wanted(), False)


@pytest.mark.parametrize("place", ["{}/{}.png", "{}_{}.png"])
def test_the_class_is_in_the_name_of_the_folder_or_of_the_file(network: Model, tmp_path: Path, place: str) -> None:
    classes = ["cat", "Truck", "ship", "airplane"]
    for i in range(12):
        draw(tmp_path / "photos" / place.format(classes[i % 4], i), i)
    found = Pictures.of(tmp_path / "photos").labelled(network, wanted())
    assert found is not None
    batch, labels = found
    assert batch.shape == (12, 3, 32, 32)
    assert set(labels.tolist()) == {3, 9, 8, 0}


def test_few_labelled_pictures_are_none(network: Model, tmp_path: Path) -> None:
    for i in range(9):
        draw(tmp_path / "cat" / f"{i}.png", i)
    assert Pictures.of(tmp_path).labelled(network, wanted()) is None
    for i in range(20):
        draw(tmp_path / "holiday" / f"{i}.png", i)
    draw(tmp_path / "cat" / "last.png")
    assert Pictures.of(tmp_path).labelled(network, wanted()) is None


def test_numbers_are_classes_where_no_list_has_as_many(tmp_path: Path) -> None:
    for i in range(12):
        draw(tmp_path / str(i % 3) / f"x{i}.png", i)
    found = Pictures.of(tmp_path).labelled(ResNet20(num_classes=3).eval(), wanted())
    assert found is not None
    assert sorted(found[1].tolist()) == [0] * 4 + [1] * 4 + [2] * 4


def test_the_strongest_evidence_is_given(network: Model, tmp_path: Path) -> None:
    for i in range(12):
        draw(tmp_path / "x" / "cat" / f"{i}.png", i)
        draw(tmp_path / "y" / f"photo{i}.png", i)
    reference = (np.zeros((2, 3, 32, 32), np.float32), np.zeros((2, 10)))
    assert set(Pictures.of(tmp_path / "x", reference).evidence(network, wanted(), False)) == {"reference"}
    assert set(Pictures.of(tmp_path / "x").evidence(network, wanted(), False)) == {"labelled"}
    assert set(Pictures.of(tmp_path / "y").evidence(network, wanted(), False)) == {"images"}


def test_damaged_pictures_are_left_out_unless_all_are(network: Model, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(BadImage, match="none of the pictures"):
        Pictures.of(tmp_path).inputs(network, wanted(), wanted(), False)
    draw(tmp_path / "b.png")
    assert len(Pictures.of(tmp_path).inputs(network, wanted(), wanted(), False)[1]) == 1


def test_what_is_known_goes_over_the_default_checkpoints(network: Model) -> None:
    default = weights.find("ResNet20").preprocessing
    assert steps(network, {}) == default
    made = steps(network, {"channel_order": "bgr", "mean": [0, 0, 1], "unknown": 3})
    assert (made.channel_order, made.mean, made.std) == ("bgr", (0, 0, 1), default.std)
    assert len(steps(ResNet20(in_channels=1), {}).mean) == 1


def test_a_small_networks_images_are_small() -> None:
    from zoo import ResNet110

    assert (steps(ResNet110(), {}).resize, steps(ResNet110(), {}).crop) == (32, 32)


def test_computed_pictures_are_the_same_every_time_and_never_symmetric() -> None:
    made = natural(2, 3, 32)
    assert torch.equal(made, natural(2, 3, 32))
    assert not torch.equal(made[0], made[1])
    assert made.min() >= 0
    assert made.max() <= 255
    assert torch.equal(made, made.round())
    for turned in (made.flip(1), made.flip(2), made.flip(3), made.transpose(2, 3)):
        assert (made - turned).abs().mean() > 5
    assert natural(1, 1, 8, seed=1).shape == (1, 1, 8, 8)
