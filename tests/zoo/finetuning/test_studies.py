"""MURA's case: several views a study, one decision, Cohen's kappa."""

from __future__ import annotations

import json
import pickle
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small import draw

from zoo.finetuning.settings import Settings
from zoo.finetuning.splits import class_weights, classes_of, open_data, split
from zoo.finetuning.studies import Studies, one_decision
from zoo.images import open_source

RECIPE = Path(__file__).parents[3] / "recipes" / "mura.py"


def radiographs(folder: Path, patients: int, seed: int) -> Path:
    """Draw studies of one to three views as MURA lays them out; an abnormal one has a bright bar in every view."""
    chance = np.random.default_rng(seed)
    for part, abnormal in (("XR_WRIST", 0.5), ("XR_HAND", 0.25)):
        for patient in range(patients):
            positive = patient % 4 < 4 * abnormal
            study = folder / part / f"patient{patient:05d}" / f"study1_{'positive' if positive else 'negative'}"
            study.mkdir(parents=True)
            for view in range(1 + patient % 3):
                pixels = chance.normal(90, 20, (40, 40))
                if positive:
                    pixels[14:26, 4:36] += 110
                Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(study / f"image{view + 1}.png")
    return folder


def test_a_study_is_one_decision_of_the_mean_of_its_views() -> None:
    probabilities = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7], [0.4, 0.6]])
    mean, targets, names = one_decision(probabilities, np.array([0, 0, 1, 0]), ["b", "b", "a", "b"])
    assert names == ["a", "b"]
    assert np.allclose(mean, [[0.3, 0.7], [0.5, 0.5]])
    assert targets.tolist() == [1, 0]
    with pytest.raises(ValueError, match="the images of b are of several classes"):
        one_decision(probabilities, np.array([0, 1, 1, 0]), ["b", "b", "a", "b"])


def test_weights_are_the_papers_within_each_kind_of_study(tmp_path: Path) -> None:
    train, _ = open_data(radiographs(tmp_path, 8, 0), None, "studies")
    assert classes_of(train, None) == ["abnormal", "normal"]
    part, _ = split(train, None, ["abnormal", "normal"], Settings(val_share=0.0))
    weights = class_weights(part)
    for kind in ("WRIST", "HAND"):
        inside = np.array([stratum == kind for stratum in part.strata or []])
        abnormal, normal = ((inside & (part.targets == target)) for target in (0, 1))
        ratio = weights[abnormal][0] / weights[normal][0]
        assert ratio == pytest.approx(normal.sum() / abnormal.sum())  # section 3.1: |N| to |A|
    assert weights.mean() == pytest.approx(1)


def test_views_of_a_study_are_set_aside_together(tmp_path: Path) -> None:
    train, _ = open_data(radiographs(tmp_path, 12, 0), None, "studies")
    kept, aside = split(train, None, ["abnormal", "normal"], Settings(val_share=0.25))
    assert aside is not None
    assert set(kept.groups or []) & set(aside.groups or []) == set()
    assert len(kept) + len(aside) == len(train)


def test_folders_that_are_not_muras_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not lie as MURA's images do"):
        Studies(open_source(draw(tmp_path, {"a": 1, "b": 1})))


def test_a_worker_gets_a_source_that_reads(tmp_path: Path) -> None:
    source = Studies(open_source(radiographs(tmp_path, 4, 0)))
    assert pickle.loads(pickle.dumps(source)).read(0) == source.read(0)


def test_the_recipe_tells_abnormal_from_normal_studies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "MURA"
    radiographs(data / "train", 16, 0)
    radiographs(data / "valid", 8, 1)
    told = [
        "--model",
        "ResNet20",
        "--weights",
        "cifar10",
        "--size",
        "32",
        "--steps",
        "20",
        "--batch",
        "16",
        "--lr",
        "0.003",
        "--workers",
        "0",
    ]
    monkeypatch.setattr(sys, "argv", ["mura.py", str(data), "--out", str(tmp_path / "x"), *told])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(RECIPE), run_name="__main__")
    assert left.value.code is None
    found = json.loads(capsys.readouterr().out)
    assert found["studies"] == 16
    assert found["kappa"] > 0.8
