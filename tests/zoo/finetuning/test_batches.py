"""The images of a step are a function of the seed: of no worker, no process and no step before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from weights import Preprocessing
from zoo.finetuning.batches import Batch, Batches, TooManyUnreadable, Unreadable, in_memory
from zoo.finetuning.distributed import World
from zoo.finetuning.settings import Settings
from zoo.finetuning.splits import Split, classes_of, open_data, split
from zoo.images.preprocess import preprocess

STEPS = Preprocessing(16, 16, "bilinear", (0.4, 0.5, 0.6), (0.2, 0.3, 0.25))


def batches(folder: Path, settings: Settings, rank: int = 0, size: int = 1, steps: Preprocessing = STEPS) -> Batches:
    source, _ = open_data(folder, None, "classes")
    part, _ = split(source, None, classes_of(source, None), Settings(val_share=0.0))
    unreadable = Unreadable(len(part), settings.max_unreadable)
    kept: tuple[Split, Tensor | None] = in_memory(part, steps, settings, unreadable) or (part, None)
    weights = np.ones(len(kept[0]), dtype=np.float32)
    return Batches(kept[0], steps, settings, World(rank, size, torch.device("cpu")), weights, unreadable, kept[1])


def images(found: list[Batch]) -> Tensor:
    return torch.cat([batch.images for batch in found])


@pytest.mark.parametrize("told", [{}, {"randaugment": 9}, {"augment": "resized"}], ids=["memory", "randaugment", "resized"])
def test_a_later_start_other_workers_and_more_processes_see_the_same_images(photos: Path, told: dict[str, int]) -> None:
    all_at_once = list(batches(photos, Settings(**told, workers=0, mixup=0.3)).training(0, 8, 12))
    assert len(all_at_once) == 8
    late = list(batches(photos, Settings(**told, workers=1, mixup=0.3)).training(5, 8, 12))
    assert torch.equal(images(late), images(all_at_once[5:]))
    pair = [list(batches(photos, Settings(**told, workers=0, mixup=0.3), rank, 2).training(0, 8, 12)) for rank in (0, 1)]
    together = torch.cat([part.images for step in zip(*pair, strict=True) for part in step])
    assert torch.allclose(together, images(all_at_once), atol=1e-6)
    assert not torch.equal(all_at_once[0].images, all_at_once[4].images)  # another epoch, other shifts


def test_an_epoch_has_every_image_once(photos: Path) -> None:
    ready = batches(photos, Settings(augment="none", flip=False))
    epoch = images(list(ready.training(4, 8, 12))).flatten(1)
    straight = torch.cat([x for x, _ in ready.measuring(10)]).flatten(1)
    assert sorted(row.sum().item() for row in epoch) == sorted(row.sum().item() for row in straight)


@pytest.mark.parametrize("steps", [STEPS, Preprocessing(80, 72, "bicubic", (0.4,) * 3, (0.2,) * 3, "bgr")], ids=["memory", "decoded"])
def test_what_is_measured_is_preprocessed_bit_by_bit_as_the_record_says(photos: Path, steps: Preprocessing) -> None:
    ready = batches(photos, Settings(workers=0), steps=steps)
    x, places = next(iter(ready.measuring(5)))
    wanted = preprocess([photos / ready.part.key(int(place)) for place in places], steps)
    assert torch.equal(x, wanted)


def test_processes_share_the_measuring_and_get_as_many_batches_each(photos: Path) -> None:
    told = [[places for _, places in batches(photos, Settings(), rank, 5).measuring(4)] for rank in range(5)]
    assert len({len(chunks) for chunks in told}) == 1
    seen = torch.cat([places for chunks in told for places in chunks])
    assert sorted(p for p in seen.tolist() if p >= 0) == list(range(48))


@pytest.mark.parametrize("told", [{"mixup": 0.4}, {"cutmix": 1.0}], ids=str)
def test_mixed_images_are_what_their_shares_say(photos: Path, told: dict[str, float]) -> None:
    settings = Settings(**told, augment="none", flip=False)
    plain = next(batches(photos, Settings(augment="none", flip=False)).training(3, 4, 12))
    mixed = next(batches(photos, settings).training(3, 4, 12))
    partners, share = mixed.target.partners, mixed.target.share
    assert partners is not None
    assert share is not None
    assert partners.tolist() == [i ^ 1 for i in range(12)]
    other = plain.images[partners]
    if "mixup" in told:
        part = share.view(-1, 1, 1, 1)
        assert torch.allclose(mixed.images, plain.images * part + other * (1 - part), atol=1e-6)
    else:
        own = (mixed.images == plain.images).all(1).float().mean((1, 2))
        assert torch.allclose(own, share, atol=0.02)
        assert ((mixed.images == plain.images) | (mixed.images == other)).all()
    assert share.unique().numel() > 2  # each pair has its own


@pytest.mark.parametrize("told", [{}, {"randaugment": 5, "workers": 0}], ids=["memory", "decoded"])
def test_unreadable_images_are_listed_and_left_out_until_they_are_too_many(photos: Path, told: dict[str, int]) -> None:
    (photos / "cat" / "003.png").write_bytes(b"")
    (photos / "dog" / "004.png").write_bytes((photos / "dog" / "004.png").read_bytes()[:200])
    ready = batches(photos, Settings(**told))
    assert sum(len(batch.images) for batch in ready.training(0, 4, 11)) == 44
    measured = [int(p) for _, places in ready.measuring(48) for p in places]
    assert sum(p >= 0 for p in measured) == 46
    assert set(ready.unreadable.reasons) == {"cat/003.png", "dog/004.png"}
    assert "empty" in ready.unreadable.reasons["cat/003.png"]
    for number in range(5, 9):
        (photos / "eel" / f"{number:03d}.png").write_bytes(b"no image")
    with pytest.raises(TooManyUnreadable, match=r"4 of 48 images can't be read, more than max_unreadable allows \(3\)"):
        list(batches(photos, Settings(**told)).training(0, 8, 11))
