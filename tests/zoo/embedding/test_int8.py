"""Vectors in int8: near float32's, certified, and another job where other images calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zoo.embedding import embed
from zoo.networks.model import Model

pytestmark = pytest.mark.nncf


def test_vectors_are_near_float32s_and_certified(network: Model, photos: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"device": "cpu", "batch_size": 8, "workers": 0, "progress": False}
    whole, small = tmp_path / "whole.npy", tmp_path / "small.npy"
    embed(network, photos, whole, dtype=torch.float32, **given)
    report = embed(network, photos, small, dtype="int8", calibration=photos, tolerance={"error": 0.3}, **given)
    right, ours = np.load(whole), np.load(small)
    off = np.linalg.norm(ours - right) / np.linalg.norm(right)
    assert 1e-4 < off < 0.3
    assert "int8 proven" in report.certificate[0]
    assert "60 images that calibrated nothing" in report.certificate[0]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no images": ({"dtype": "int8"}, "needs calibration="),
    "calibration alone": ({"calibration": "photos"}, 'calibration goes with dtype="int8"'),
    "auto": ({"dtype": "auto", "calibration": "photos"}, "depends on timing"),
    "fp8": ({"dtype": "fp8", "calibration": "photos"}, 'takes no dtype="fp8": 8 bits are "int8" on a CPU'),
    "without fast": ({"dtype": "int8", "calibration": "photos", "fast": False}, "fast=True"),
    "with Ray": ({"dtype": "int8", "calibration": "photos", "engine": "ray"}, 'engine="local"'),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_makes_no_sense_is_refused(network: Model, photos: Path, tmp_path: Path, case: str) -> None:
    given, said = WRONG[case]
    with pytest.raises(ValueError, match=said):
        embed(network, photos, tmp_path / "x.npy", **{"device": "cpu", "progress": False, **given})
    assert not list(tmp_path.iterdir()), "nothing half-written"
