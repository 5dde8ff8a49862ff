"""`zoo segment`: areas, JSON and a picture; what can't be used is told in the caller's words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from zoo import LRASPP_MobileNet_V3_Large
from zoo.commands.app import main


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of weights that torch wrote, and two photographs."""
    folder = tmp_path_factory.mktemp("segment")
    torch.manual_seed(0)
    torch.save(LRASPP_MobileNet_V3_Large().state_dict(), folder / "mine.pth")
    random = np.random.default_rng(0)
    (folder / "photos").mkdir()
    for name, size in (("a.png", (60, 80, 3)), ("b.png", (90, 50, 3))):
        Image.fromarray(random.integers(0, 255, size, np.uint8)).save(folder / "photos" / name)
    return folder


def asked(files: Path, *more: str) -> list[str]:
    return ["segment", str(files / "photos"), "-m", "lraspp_mobilenet_v3_large", "-w", str(files / "mine.pth"), "-q", *more]


def test_areas_and_a_picture(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(asked(files, "--picture", str(tmp_path / "classes.png"))) == 0
    told = capsys.readouterr().out
    assert "80 x 60 pixels" in told
    assert "50 x 90 pixels" in told
    assert "which knows 21 classes" in told
    assert "2 of 2 images segmented" in told
    with Image.open(tmp_path / "classes.png") as drawn:
        assert drawn.width == 80


def test_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(asked(files, "--json")) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["size"] for row in rows] == [[80, 60], [50, 90]]
    assert all(sum(one["share"] for one in row["classes"]) == pytest.approx(1) for row in rows)


def test_what_is_no_segmenter_and_no_photograph_is_told(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["segment", str(files / "photos"), "-m", "resnet50"]) == 2
    assert "ResNet50 is a network for classification" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "bad.png").write_bytes(b"no picture")
    command = asked(files)
    assert main([command[0], str(tmp_path / "bad.png"), *command[2:]]) == 1
    assert "bad.png" in capsys.readouterr().err
