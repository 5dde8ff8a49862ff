"""Which images are learnt from, and what is said when they can't be."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from small import draw

from zoo.finetuning.settings import Settings
from zoo.finetuning.splits import Split, class_weights, classes_of, open_data, split


def names(part: Split | None) -> set[str]:
    assert part is not None
    return {part.key(i) for i in range(len(part))}


def divided(folder: Path, **settings: float) -> tuple[Split, Split | None]:
    train, val = open_data(folder, None, "classes")
    return split(train, val, classes_of(train, val), Settings(**settings))


def test_a_share_of_each_class_is_set_aside_by_name_and_seed(photos: Path) -> None:
    train, val = divided(photos, val_share=0.25)
    assert val is not None
    assert np.bincount(val.targets).tolist() == [4, 4, 4]
    assert names(train) | names(val) == {f"{c}/{i:03d}.png" for c in ("cat", "dog", "eel") for i in range(16)}
    assert names(train) & names(val) == set()
    assert names(divided(photos, val_share=0.25)[1]) == names(val)
    assert names(divided(photos, val_share=0.25, seed=1)[1]) != names(val)
    assert divided(photos, val_share=0.0)[1] is None


def test_train_and_val_folders_are_found(tmp_path: Path) -> None:
    draw(tmp_path / "train", {"a": 3, "b": 3})
    draw(tmp_path / "test", {"a": 2, "b": 1})
    train, val = divided(tmp_path)
    assert val is not None
    assert (len(train), len(val)) == (6, 3)
    draw(tmp_path / "val", {"a": 1, "b": 1})
    assert len(names(divided(tmp_path)[1])) == 2  # val goes before test


@pytest.mark.parametrize(("train", "val"), [("training", "validation"), ("Train", "Val"), ("train", "valid"), ("TRAINING", "dev")])
def test_folders_of_usual_names_are_no_classes(tmp_path: Path, train: str, val: str) -> None:
    draw(tmp_path / train, {"a": 3, "b": 3})
    draw(tmp_path / val, {"a": 2, "b": 1})
    draw(tmp_path / "test", {"a": 1, "b": 1})
    learnt, measured = divided(tmp_path)
    assert (len(learnt), len(names(measured))) == (6, 3)


def test_a_test_folder_that_decides_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draw(tmp_path / "train", {"a": 3, "b": 3})
    draw(tmp_path / "Test", {"a": 2, "b": 1})
    assert len(names(divided(tmp_path)[1])) == 3
    assert "Test decides which state is kept" in caplog.text
    caplog.clear()
    draw(tmp_path / "val", {"a": 1, "b": 1})
    assert len(names(divided(tmp_path)[1])) == 2
    assert not caplog.text


def test_folders_to_measure_on_alone_are_refused_and_trains_may_be_a_class(tmp_path: Path) -> None:
    draw(tmp_path / "x" / "val", {"a": 3, "b": 3})
    draw(tmp_path / "x" / "test", {"a": 3, "b": 3})
    with pytest.raises(ValueError, match=r"holds test and val, which are names for what is measured on, and no folder train"):
        divided(tmp_path / "x")
    learnt, _ = divided(draw(tmp_path / "traffic", {"car": 5, "train": 5}))
    assert set(np.unique(learnt.targets)) == {0, 1}


def test_empty_single_missing_and_strange_classes_are_explained(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (photos / "fox").mkdir()
    with pytest.raises(ValueError, match="1 folder is empty, fox; put images there or delete it"):
        divided(photos)
    (photos / "fox/a.heic").write_bytes(b"-")
    with monkeypatch.context() as patch:
        patch.setattr("zoo.images.folder.unreadable", lambda name: "HEIC is read with …" if name.endswith(".heic") else "")
        with pytest.raises(ValueError, match=r"no image of fox can be read: fox/a\.heic: HEIC is read with …"):
            divided(photos)
    shutil.rmtree(photos / "fox")
    one = tmp_path / "one"
    shutil.copytree(photos / "cat", one / "cat")
    with pytest.raises(ValueError, match="all images are of one class, cat"):
        divided(one)
    shutil.copy(photos / "cat" / "000.png", photos / "loose.png")
    with pytest.raises(ValueError, match=r"1 of 49 images have no class \(loose.png\)"):
        divided(photos)
    (photos / "loose.png").unlink()
    other = draw(tmp_path / "other", {"cat": 1, "wolf": 1})
    train, val = open_data(photos, other, "classes")
    with pytest.raises(ValueError, match=r"has classes that .* has not: wolf"):
        classes_of(train, val)
    (tmp_path / "two" / "cat").mkdir(parents=True)
    shutil.copytree(photos / "dog", tmp_path / "two" / "dog")
    shutil.copy(photos / "cat" / "000.png", tmp_path / "two" / "cat" / "000.png")
    with pytest.raises(ValueError, match="cat has 1 image, too few to set 20% aside"):
        divided(tmp_path / "two")


def test_a_class_that_is_not_measured_is_told(photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, val = open_data(photos, draw(tmp_path / "few", {"cat": 1, "dog": 1}), "classes")
    assert classes_of(train, val) == ["cat", "dog", "eel"]
    assert "has no image of eel" in caplog.text


def test_weights_make_all_classes_count_the_same(tmp_path: Path) -> None:
    train, _ = divided(draw(tmp_path / "x", {"a": 2, "b": 6}), val_share=0.0)
    weights = class_weights(train)
    assert weights.mean() == pytest.approx(1)
    assert weights[train.targets == 0].sum() == pytest.approx(weights[train.targets == 1].sum())
