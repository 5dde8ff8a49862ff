"""The recipe of the styles that ship: pictures that a seed paints, training without anything installed but PyTorch, and what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes import style_networks, style_paintings, style_speed
from zoo.catalogue import SqueezeNet1_0

NEEDLESS = [
    "safetensors",
    "blake3",
    "typer",
    "rich",
    "httpx2",
    "huggingface_hub",
    "filelock",
    "platformdirs",
    "ml_dtypes",
    "torchvision",
    "pyarrow",
    "skimage",
    "cv2",
]
TRAIN = ["--styles", "woodcut", "--steps", "1", "--batch", "2", "--size", "64", "--side", "64", "--log", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    draw = np.random.default_rng(0)
    names = (*style_networks.SHOWN, "scene0")
    np.savez(folder / "pictures.npz", **{name: draw.integers(0, 256, (40, 44, 3), dtype=np.uint8) for name in names})
    torch.save({"network": "SqueezeNet1_0", "state": SqueezeNet1_0().state_dict()}, folder / "loss_network.pt")
    return folder


@pytest.mark.parametrize("name", style_paintings.PAINTINGS)
def test_a_seed_paints_the_same_picture_each_time(name: str) -> None:
    paint = style_paintings.PAINTINGS[name]
    one, other = (np.asarray(paint(side=96)) for _ in range(2))
    assert (one == other).all()
    assert one.shape == (96, 96, 3)
    assert one.std() > 20
    assert (np.asarray(paint(seed=9, side=96)) != one).any()


def test_a_scene_is_painted_by_its_number_alone() -> None:
    one = np.asarray(style_networks.scene(3, 64))
    assert (np.asarray(style_networks.scene(3, 64)) == one).all()
    assert (np.asarray(style_networks.scene(4, 64)) != one).any()


def test_training_needs_pytorch_numpy_and_pillow_alone(prepared: Path, tmp_path: Path) -> None:
    """It runs on a machine that is lent, where nothing can be installed."""
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in NEEDLESS)
    told = ["train", str(prepared), "--out", str(tmp_path), *TRAIN]
    recipes = str(Path(style_networks.__file__).parent)
    code = f"import sys; {blocked}; sys.path.insert(0, {recipes!r}); import style_networks as recipe; recipe.main({told!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "woodcut 1/1: loss" in done.stdout
    facts = json.loads((tmp_path / "woodcut.json").read_text())
    assert (facts["steps"], facts["loss_network"], facts["channels"], len(facts["curve"])) == (1, "SqueezeNet1_0", 8, 1)
    assert sum(value.numel() for value in torch.load(tmp_path / "woodcut.pt").values()) == 108_771
    assert (tmp_path / "woodcut.png").is_file()


def test_every_style_that_ships_has_its_curve_beside_it() -> None:
    folder = style_networks.ROOT / "weights" / "embedded"
    for name in style_networks.STYLES:
        facts = json.loads((folder / f"style_{name}.json").read_text())
        assert facts["curve"][-1][0] == facts["steps"]
        assert facts["curve"][-1][2] < 0.5  # of the style that a photograph has


def test_speeds_are_measured_at_any_size(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = "--device cpu --sizes 32x32 --channels 2 --batch 1 --side 48 --rounds 1 --no-compile --no-fast --loss-network SqueezeNet1_0"
    style_speed.main([*told.split(), "--json", str(tmp_path / "speed.json")])
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert {row["way"] for row in rows} >= {"eager", "eager half", "train_style", "eager, as pytorch/examples"}
    assert all(row["ms"] > 0 for row in rows)
    assert "train 1x48, SqueezeNet1_0" in capsys.readouterr().out
