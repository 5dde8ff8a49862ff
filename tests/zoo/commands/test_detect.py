"""`zoo detect`, and the detectors of `zoo list` and `zoo info`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from darknet_file import CFG
from PIL import Image

from zoo.commands.app import main


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A network of one convolution that sees a moth wherever a pixel is bright: 16 cells a side, boxes of 8 pixels of 16."""
    (tmp_path / "bright.cfg").write_text(CFG)
    bias, weight = np.array([0, 0, 0, 0, -30, 9, -9], "<f4"), np.zeros((7, 3), "<f4")
    weight[4] = 20
    header = np.array([0, 2, 5, 0, 0], "<i4").tobytes()
    (tmp_path / "bright.weights").write_bytes(header + bias.tobytes() + weight.tobytes())
    (tmp_path / "bright.names").write_text("moth\nbee\n")
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, (width, height) in enumerate(((64, 64), (96, 48), (40, 80))):
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[height // 4 : height // 4 + 16, width // 4 : width // 4 + 16] = 255
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")
    return tmp_path


def network(files: Path) -> list[str]:
    return ["--cfg", str(files / "bright.cfg"), "-w", str(files / "bright.weights"), "--names", str(files / "bright.names")]


def test_a_table_a_picture_and_cocos_form(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = [str(files / "photos" / f"{number:03d}.png") for number in range(3)]
    assert main(["detect", *photos, *network(files), "--picture", str(files / "found.png")]) == 0
    told = capsys.readouterr().out
    assert told.count("moth") >= 3
    assert "which knows 2 classes" in told
    assert "found.png', the first photograph" in told
    assert "3 of 3 images looked at" in told
    with Image.open(files / "found.png") as saved, Image.open(photos[0]) as before:
        drawn, plain = np.asarray(saved.convert("RGB")), np.asarray(before.convert("RGB"))
    assert drawn.shape == (64, 64, 3)
    assert (drawn != plain).any()
    assert main(["detect", *photos, *network(files), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["image_id"] for row in rows} == {0, 1, 2}
    assert {(row["category_id"], row["category_name"]) for row in rows} == {(1, "moth")}
    left, top, width, height = rows[0]["bbox"]
    assert (left, top, width, height) == pytest.approx((8, 8, 32, 32), abs=8)


def test_what_cannot_be_used_is_told_and_spoils_no_other(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "bad.png").write_bytes(b"no picture")
    assert main(["detect", str(files / "bad.png"), str(files / "photos" / "000.png"), *network(files)]) == 1
    captured = capsys.readouterr()
    assert "bad.png" in captured.err
    assert "1 of 2 images looked at" in captured.out
    assert main(["detect", str(files / "none.png"), *network(files)]) == 3


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["-m", "ResNet50"], "ResNet50 is a network for classification", 2),
        (["-m", "yolov3tinyy"], "did you mean YOLOv3Tiny", 3),
        (["-m", "YOLOv7Tiny"], "no pretrained weights of YOLOv7Tiny are known", 3),
        (["--names", "x.names"], "--names are of a network that --cfg describes", 2),
        (["--cfg", "x.cfg"], "--weights names its file", 2),
        ([], "name a detector, or describe one of your own", 2),
        (["--cfg", "none.cfg", "-w", "none.weights"], "none.cfg", 3),
        (["--picture", "found.svg"], "a picture ends in", 2),
        (["--threshold", "2"], "--threshold", 2),
    ],
)
def test_mistakes_are_told_in_the_commands_words(
    words: list[str], said: str, code: int, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["detect", str(files / "photos" / "000.png"), *words]) == code
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_folder_is_written_whole_and_goes_on(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = files / "found"
    assert main(["detect", str(files / "photos"), *network(files), "-o", str(out)]) == 0
    assert "on 3 photographs" in capsys.readouterr().out
    assert sorted(one.name for one in out.iterdir()) == ["detections.json", "images.json"]
    assert main(["detect", str(files / "photos"), *network(files), "-o", str(out)]) == 1
    assert "--restart" in capsys.readouterr().err
    before = (out / "detections.json").read_bytes()
    assert main(["detect", str(files / "photos"), *network(files), "-o", str(out), "--restart", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["photographs"] == 3
    assert (out / "detections.json").read_bytes() == before
    assert main(["detect", str(files / "photos"), str(files), *network(files), "-o", str(out)]) == 2


def test_detectors_have_their_own_section_of_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    told = capsys.readouterr().out
    assert told.index("ResNet50") < told.index("for detection") < told.index("YOLOv3Tiny")
    assert main(["list", "--task", "detection"]) == 0
    told = capsys.readouterr().out
    assert "YOLOv4Tiny" in told
    assert "ResNet50 " not in told
    assert main(["list", "yolov4", "--json"]) == 0
    assert [row["network"] for row in json.loads(capsys.readouterr().out)] == ["YOLOv4", "YOLOv4Tiny"]
    assert main(["list", "--family", "VGG"]) == 0
    assert "for detection" not in capsys.readouterr().out
    assert main(["list", "--task", "cooking"]) == 2
    assert main(["list", "--task", "detection", "--sort", "params"]) == 2


def test_info_tells_what_a_detector_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "yolov7-tiny"]) == 0
    told = capsys.readouterr().out
    assert "6,227,101" in told
    assert "detection, 80 classes, images of 416 px" in told
    assert "--weights FILE" in told


@pytest.mark.nncf
def test_int8_finds_the_same(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "calibration").mkdir()
    for number in range(64):
        pixels = np.zeros((64, 64, 3), np.uint8)
        left, top = 3 * (number % 8), 5 * (number // 8)
        pixels[top : top + 20, left : left + 16] = 100 + 2 * number
        Image.fromarray(pixels).save(files / "calibration" / f"{number:03d}.png")
    photo = str(files / "photos" / "000.png")
    asked = ["detect", photo, *network(files), "--json"]
    assert main(asked) == 0
    plain = json.loads(capsys.readouterr().out)
    int8 = ["--dtype", "int8", "--calibration", str(files / "calibration"), "--tolerance", "0.5", "--device", "cpu"]
    assert main([*asked, *int8]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert "int8 proven" in told.err
    assert [row["category_name"] for row in found] == [row["category_name"] for row in plain]
    for ours, theirs in zip(found, plain, strict=True):
        assert ours["bbox"] == pytest.approx(theirs["bbox"], abs=2)
    assert main([*asked, *int8, "--out", str(files / "results")]) == 2
    assert "int8 goes without --out" in capsys.readouterr().err
