"""Detectors and segmenters taught from the command line: interrupted, resumed, by two processes, from COCO's, VOC's and YOLO's data."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapes
import torch
from killing import Killed, killing
from preloaded import python

from weights.errors import MalformedFile
from zoo import DeepLabV3_ResNet50, MaskRCNN_ResNet50_FPN, SSDlite320_MobileNet_V3_Large, YOLOv3Tiny, detect, trained
from zoo.commands.app import main
from zoo.segmentation.measures import IGNORED
from zoo.training import LearningSettings, read_painted, teach
from zoo.training.run import task_of

DRIVER = Path(__file__).with_name("together.py")


class Small(SSDlite320_MobileNet_V3_Large, fixed=(64, 64), params=SSDlite320_MobileNet_V3_Large.params): ...


Small.catalogue.pop("Small")  # every test's process has read this file


@pytest.fixture(autouse=True)
def _entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Know the class of this file as a user's is known where it is defined, and in no other file."""
    monkeypatch.setitem(Small.catalogue, "Small", Small)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "data"
    shapes.make(folder, 12, 0)
    return folder


def test_a_run_that_is_killed_and_resumed_leaves_the_same_weights_and_is_a_source_of_trained(data: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"from_scratch": True, "epochs": 2, "batch_size": 4, "device": "cpu", "save_every": 2}
    expected = teach(Small, data / "annotations.json", tmp_path / "whole", **how)
    assert (expected.steps, expected.resumed, expected.photographs) == (6, 0, (11, 1))
    assert set(expected.measured) == {"map", "map50"}
    with pytest.raises(Killed):
        teach(Small, data / "annotations.json", tmp_path / "killed", progress=killing(3), **how)
    with pytest.raises(FileExistsError, match="resume=True goes on with it"):
        teach(Small, data / "annotations.json", tmp_path / "killed", **how)
    found = teach(Small, out=tmp_path / "killed", resume=True)
    assert (found.steps, found.resumed) == (6, 2)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert files[0] == files[1]
    again = trained(Small, tmp_path / "killed")
    assert again.num_classes == 4
    assert again.checkpoint is not None
    assert "map50" in again.checkpoint.metrics
    assert set(detect(again, data / "images" / "0000.jpg", threshold=0.05).names) <= {*shapes.NAMES}


def test_what_can_not_be_taught_is_refused_in_the_users_words(data: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="YOLOv3Tiny has no losses here"):
        teach(YOLOv3Tiny, data, tmp_path / "a")
    with pytest.raises(TypeError, match="learns masks too, which are not read"):
        teach(MaskRCNN_ResNet50_FPN, data, tmp_path / "b", from_scratch=True)
    with pytest.raises(ValueError, match="size is a segmenter's"):
        teach(Small, data, tmp_path / "c", size=64)
    with pytest.raises(ValueError, match="split is of a detector's VOC folder"):
        teach(DeepLabV3_ResNet50, data, tmp_path / "d", split="train")
    with pytest.raises(FileNotFoundError, match="holds no run to go on with"):
        teach(out=tmp_path / "e", resume=True)
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "settings.json").write_text('{"task": "detection", "model": 3}')
    with pytest.raises(ValueError, match="is damaged"):
        teach(out=tmp_path / "f", resume=True)
    assert task_of(tmp_path / "f") == "detection"
    assert task_of(tmp_path) == "classification"


def outlined(folder: Path, things: list[dict[str, Any]], size: tuple[int, int] = (128, 96)) -> Path:
    row = {"id": 0, "file_name": "0000.jpg", "width": size[0], "height": size[1]}
    rows = [{"id": number, "image_id": 0, "bbox": [0, 0, 9, 9], **thing} for number, thing in enumerate(things)]
    file = folder / "outlines.json"
    names = [{"id": 3, "name": "square"}, {"id": 7, "name": "disc"}]
    file.write_text(json.dumps({"images": [row], "annotations": rows, "categories": names}))
    return file


def test_cocos_outlines_and_runs_are_painted(data: Path) -> None:
    square = {"category_id": 3, "segmentation": [[10, 20, 29, 20, 29, 49, 10, 49]]}
    above = {"category_id": 7, "segmentation": [[20, 20, 29, 20, 29, 49, 20, 49]]}
    crowd = {"category_id": 7, "iscrowd": 1, "segmentation": {"size": [96, 128], "counts": [96 * 100 + 5, 10, 96 * 28 - 15]}}
    painted = read_painted(outlined(data, [square, above, crowd]), images=data / "images")
    assert painted.classes == ("background", "square", "disc")
    expected = np.zeros((96, 128), dtype=np.int64)
    expected[20:50, 10:30] = 1
    expected[20:50, 20:30] = 2
    expected[5:15, 100] = IGNORED
    assert np.array_equal(painted.true(0), expected)


@pytest.mark.parametrize(
    ("outline", "said"),
    [
        ([[1, 2, 3]], "have an outline that is none"),
        ({"size": [96, 128], "counts": "abc"}, "compressed to text"),
        ({"size": [96, 128], "counts": [4, 5]}, "runs of 9 pixels in a photograph of 12288"),
    ],
)
def test_damaged_outlines_are_named(outline: Any, said: str, data: Path) -> None:
    painted = read_painted(outlined(data, [{"category_id": 3, "segmentation": outline}]), images=data / "images")
    with pytest.raises(MalformedFile, match=said):
        painted.true(0)


def test_a_file_of_boxes_alone_has_no_pixels(data: Path) -> None:
    with pytest.raises(ValueError, match="has no outlines"):
        read_painted(data / "annotations.json")


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    """A last batch of one photograph leaves the second process nothing to add."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    launch = [*python(), str(DRIVER), str(tmp_path / "both")]
    both = [subprocess.Popen(launch, env={**shared, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    errors = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(errors)
    import together

    losses = together.learnt(tmp_path / "one")
    found = json.loads((tmp_path / "both" / "losses.json").read_text())
    np.testing.assert_allclose(found, losses, rtol=1e-5, atol=1e-6)  # a loss is a square, which may be near 0
    one, other = (torch.load(tmp_path / name / "weights.pt") for name in ("one", "both"))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)


def both(told: list[str], killed_at: int = 0) -> list[tuple[int, str]]:
    """Run the command in two processes, with the variables that torchrun sets; return how each ended, and what it said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    launch = [*python(), str(DRIVER.with_name("killed_at.py")), str(killed_at), *told]
    pair = [
        subprocess.Popen(launch, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=600)[1] for process in pair]
    return [(process.returncode, words) for process, words in zip(pair, said, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("model", ["SSDlite320_MobileNet_V3_Large", "LRASPP_MobileNet_V3_Large"])
def test_two_processes_that_are_killed_go_on_and_leave_the_same_weights(
    model: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = ["--size", "64"] if model.startswith("LRASPP") else []
    told = ["finetune", str(data), "-m", model, "--from-scratch", "--epochs", "2", "--batch-size", "4", "--set", "save_every=2", *task]
    told += ["--device", "cpu", "--quiet"]
    assert [code for code, _ in both([*told, "-o", str(tmp_path / "whole")])] == [0, 0]
    assert all(code != 0 for code, _ in both([*told, "-o", str(tmp_path / "killed")], killed_at=3))
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    ended = both(["finetune", "--resume", str(tmp_path / "killed"), "--device", "cpu", "--quiet"])
    assert [code for code, _ in ended] == [0, 0], ended
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert files[0] == files[1]
    alone = ["finetune", "--resume", str(tmp_path / "killed"), "--device", "cpu", "--quiet"]
    assert main(alone) == 1
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["annotations.json", ""])
def test_the_command_teaches_a_detector(form: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    told = ["finetune", str(data / form), "-m", "ssdlite320_mobilenet_v3_large", "--from-scratch", "-o", str(out)]
    assert main([*told, "--epochs", "1", "--batch-size", "6", "--lr", "0.001", "--set", "warmup_steps=1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["steps"], shown["classes"]) == (2, ["background", *shapes.NAMES])
    assert LearningSettings(**json.loads((out / "settings.json").read_text())["settings"]).lr == 0.001
    if not form:
        return
    assert main(["finetune", "--resume", str(out), "--quiet"]) == 0
    assert f"zoo detect PHOTO --model {out}" in " ".join(capsys.readouterr().out.split())
    assert main(["detect", str(data / "images" / "0000.jpg"), "--model", str(out), "--threshold", "0", "--json"]) == 0
    assert main(told) == 1
    assert "--resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["-m", "SSDlite320_MobileNet_V3_Large", "--mixup", "0.2"], "is a classifier's"),
        (["-m", "SSDlite320_MobileNet_V3_Large", "--set", "ema=0.9"], "there is no setting 'ema'"),
        (["-m", "ResNet20", "--split", "train"], "detector's or segmenter's"),
        (["-m", "SSDlite320_MobileNet_V3_Large", "--option", "num_classes=3"], "leave num_classes out"),
    ],
)
def test_options_of_another_task_are_refused(more: list[str], said: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", str(data), *more]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_command_teaches_a_segmenter(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    told = ["finetune", str(data), "-m", "LRASPP_MobileNet_V3_Large", "--from-scratch", "-o", str(out), "--size", "64"]
    assert main([*told, "--epochs", "1", "--batch-size", "6", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown["metrics"]) == {"miou", "pixels"}
    assert main(["segment", str(data / "images" / "0000.jpg"), "--model", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "background" in json.dumps(found) or any(name in json.dumps(found) for name in shapes.NAMES)
