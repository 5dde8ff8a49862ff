import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zoo.commands import app as cli
from zoo.recommendation.latency import Latency


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 pictures in two folders: stripes across, and upright ones."""
    root = tmp_path_factory.mktemp("photos")
    for seed in range(20):
        pixels = np.random.default_rng(seed).normal(100, 20, (32, 32, 3)) + 80 * (np.arange(32) % 8 < 4)[:, None, None]
        path = root / ("across", "upright")[seed % 2] / f"{seed:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray((pixels if seed % 2 else pixels.transpose(1, 0, 2)).clip(0, 255).astype(np.uint8)).save(path)
    return root


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.recommendation.run.measured", lambda *_: Latency(8.0, 7.0, 9.5, "told"))


@pytest.fixture
def command(photos: Path, kept: Path) -> list[str]:
    return ["recommend", str(photos), "-m", "ResNet20", "--folds", "2", "--folder", str(kept)]


def test_the_table_the_reasons_and_the_line_to_use(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "choice.png"
    assert cli.main([*command, "--picture", str(picture)]) == 0
    shown = capsys.readouterr()
    assert "->     1  ResNet20:cifar10" in shown.out
    assert "8.00 (7.00 to 9.50)" in shown.out
    assert "Start from ResNet20:cifar10" in shown.out
    assert "There are 20 images and 2 classes have fewer than 20" in shown.out
    assert 'trained(ResNet20, "cifar10")' in shown.out
    assert "next: zoo finetune PHOTOS --model ResNet20:cifar10" in shown.out
    assert "1 of 1: ResNet20:cifar10: timing fast() with one image" in shown.err
    with Image.open(picture) as drawn:
        assert drawn.size == (1800, 1120)
    assert cli.main(command) == 0
    again = capsys.readouterr()
    assert "20 images embedded by an earlier call" in again.err
    assert "3 results of an earlier run reused: --restart computes anew" in again.out


def test_json_has_all_of_it_and_a_budget_that_nobody_meets_is_exit_1(
    command: list[str], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--json", "--quiet"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["best"], told["images"], told["classes"]) == ("ResNet20:cifar10", 20, {"across": 10, "upright": 10})
    assert told["ranking"][0]["ms"] == 8.0
    assert cli.main([*command, "--max-ms", "5", "--quiet"]) == 1
    assert "nearest comes ResNet20:cifar10 (8.0 ms, 5 allowed)" in capsys.readouterr().out
    assert cli.main([*command, "--no-labels", "--quiet"]) == 1
    assert "20 images without labels say nothing, for neighbours are compared; give 21 at least" in capsys.readouterr().err
    more = shutil.copytree(photos, tmp_path / "more")
    with Image.open(more / "across" / "00.png") as image:
        image.transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(more / "across" / "another.png")
    assert cli.main([command[0], str(more), *command[2:], "--no-labels", "--quiet"]) == 0
    assert "which is weaker" in capsys.readouterr().out


def test_mistakes_are_one_message_in_the_shells_words(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text("".join(f"across/{seed:02d}.png,same\n" for seed in range(0, 20, 2)))
    for arguments, code, message in (
        (["recommend", str(tmp_path / "none")], 3, "is not there"),
        ([*command, "--max-ms", "0"], 2, "a positive number, not 0"),
        ([*command, "--folds", "1"], 2, "1 is not in the range"),
        ([*command[:4], "--folds", "11", "--quiet"], 1, "has 10 images, and 1 other class has fewer than 11 too"),
        ([*command[:4], "--folds", "11", "--quiet"], 1, "Take --folds 10"),
        ([*command, "--labels", str(labels)], 1, "all images are of one class, 'same'"),
        ([*command, "--labels", str(labels)], 1, "--no-labels (labels=False) compares without labels"),
        ([*command, "--labels", str(labels), "--no-labels"], 2, "leave one out"),
        ([*command, "--picture", "a.svg"], 2, "name it 'a.png'"),
        ([*command, "--device", "tpu"], 2, "a device is cpu, cuda or cuda:1"),
        (["recommend", command[1], "-m", "ResNet21"], 3, "did you mean"),
        (["recommend", command[1], "-m", "ResNet50", "--offline"], 1, "it is not on this machine, and nothing may be fetched"),
    ):
        assert cli.main(arguments) == code, arguments
        shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert message in shown, shown
        assert "Traceback" not in shown
