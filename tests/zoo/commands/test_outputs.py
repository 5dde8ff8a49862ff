"""Outputs of all commands: a folder that isn't there is not made, and what can't be written is said before anything is computed for it."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from zoo.commands.app import main

OUTPUTS = {
    "x.png": [
        ["predict", "IN.png", "--picture"],
        ["demo", "--picture"],
        ["search", "IN.png", "IN.png", "--picture"],
        ["bench", "--picture"],
        ["dream", "IN.png", "-m", "ResNet20", "-o"],
    ],
    "x.npy": [["embed", ".", "-m", "ResNet20", "-o"]],
    "x.npz": [["convert", "IN.png", "-m", "ResNet20"]],
    "x.html": [["convert", "IN.png", "y.npz", "-m", "ResNet20", "--report"]],
    "x.json": [["sbom", "-o"], ["bench", "--save"], ["sign", "IN.png", "--key", "IN.png", "-o"]],
    "x.tar": [["bundle", "ResNet20", "-o"]],
    "x.lock": [["lock", "ResNet20", "--file"]],
}
COMMANDS = [(words, name) for name, commands in OUTPUTS.items() for words in commands]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    Image.new("RGB", (40, 40)).save(tmp_path / "IN.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("words", "name"), COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS])
@pytest.mark.parametrize(("place", "why"), [("new/deep", "there is no folder"), ("IN.png", "there is no folder"), (".", "it is a folder")])
def test_an_output_that_has_no_place_is_refused_by_one_rule(
    words: list[str], name: str, place: str, why: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if place == ".":
        (work / name).mkdir()
    before = sorted(work.rglob("*"))
    assert main([*words, f"{place}/{name}"]) == 1
    said = capsys.readouterr().err
    assert f"{name}' can't be written: {why}" in said
    assert "make it first: mkdir -p" in said or "name a file in it" in said
    assert sorted(work.rglob("*")) == before


@pytest.mark.parametrize(("words", "name"), COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS])
def test_a_folder_that_takes_no_file_is_named_with_the_reason(
    words: list[str], name: str, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = tempfile.TemporaryFile

    def refuses(*arguments: Any, **keywords: Any) -> Any:
        if keywords.get("dir") == work:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), "some.name")
        return real(*arguments, **keywords)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuses)
    assert main([*words, name]) == 1
    assert (
        f"{name}' can't be written: the folder '{work}' takes no file (Read-only file system); name another place"
        in capsys.readouterr().err
    )


def test_a_folder_that_a_run_can_not_make_is_named(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", ".", "-m", "ResNet20", "--out", "IN.png/run"]) == 1
    assert "IN.png/run' can't be made: '" in capsys.readouterr().err
    assert main(["mirror", "IN.png/mirror", "ResNet20"]) == 1
    assert "IN.png/mirror' can't be made: '" in capsys.readouterr().err


def test_a_fault_of_the_system_is_a_sentence_with_the_path_and_what_to_do(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work / "x.png"))

    monkeypatch.setattr("zoo.prediction.contact_sheet.contact_sheet", full)
    assert main(["predict", "IN.png", "--picture", "x.png"]) == 1
    said = capsys.readouterr().err
    assert f"'{work / 'x.png'}': no space left on device; free some room on that disk" in said
    assert "Errno" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["predict", "x.jpg", "--model", "~nosuch/x"],
        ["embed", "~nosuch/photos", "-m", "ResNet20", "-o", "o.npy"],
        ["embed", "photos", "-m", "~nosuch/x", "-o", "o.npy"],
        ["unbundle", "~nosuch/b.tar"],
        ["mirror", "~nosuch/m"],
        ["add", "~nosuch/x.pth", "ResNet20:mine"],
        ["predict", "IN.png", "-m", "ResNet20", "--weights", "~nosuch/w.pth"],
    ],
    ids=" ".join,
)
def test_the_home_of_nobody_is_a_place_that_is_not_there(arguments: list[str], work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(work.iterdir())
    assert main(arguments) in (1, 3)
    said = capsys.readouterr().err
    assert "~nosuch" in said
    assert "Traceback" not in said
    assert sorted(work.iterdir()) == before


def test_a_server_says_at_its_start_which_files_nobody_asks_it_for(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "m").mkdir()
    files = []
    for number, name in enumerate(("ResNet50:imagenet1k_v2", "ResNet20:akamaster")):
        (work / "m" / f"{number}.pth").write_bytes(b"x")
        files.append(
            {"name": f"{number}.pth", "size_bytes": 1, "sha256": f"{number}" * 64, "format": "pytorch", "license": "MIT", "weights": [name]}
        )
    (work / "m" / "index.json").write_text(json.dumps({"kernelzoo_mirror": 2, "files": files}))

    def ends(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weights.serving.Server.serve_forever", ends)
    assert main(["mirror", "m", "--serve", "--host", "0.0.0.0", "--port", "0"]) == 0
    said = capsys.readouterr().err
    assert "nobody asks for ResNet50:imagenet1k_v2, of which no full SHA-256 is published" in said
    assert "akamaster" not in said
    assert "zoo lock" in said
    assert "https://" in said
    assert main(["mirror", "m", "--serve", "--port", "0"]) == 0
    assert "nobody asks" not in capsys.readouterr().err


READING = [
    ["predict", "IN.png", "-m", "ResNet20", "--picture"],
    ["explain", "IN.png", "-m", "ResNet20", "--picture"],
    ["explain", ".", "-m", "ResNet20", "--picture"],
    ["detect", "IN.png", "-m", "YOLOv3Tiny", "--picture"],
    ["segment", "IN.png", "-m", "LRASPP_MobileNet_V3_Large", "--picture"],
    ["search", "e.npy", "IN.png", "--picture"],
    ["dream", "IN.png", "-m", "ResNet20", "-o"],
]


@pytest.mark.parametrize("words", READING, ids=lambda words: " ".join(words))
@pytest.mark.parametrize("place", ["IN.png", "same.png"])
def test_a_picture_that_is_read_is_not_written(words: list[str], place: str, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "same.png").symlink_to("IN.png")
    before = (work / "IN.png").read_bytes()
    assert main([*words, place]) == 1
    assert f"'{place}' is read here, and would be lost; write into another file" in capsys.readouterr().err
    assert (work / "IN.png").read_bytes() == before


def test_dreams_of_a_folders_pictures_do_not_go_over_them(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (40, 40)).save(work / "more.png")
    before = {path: path.read_bytes() for path in work.iterdir()}
    assert main(["dream", "IN.png", "more.png", "-m", "ResNet20", "-o", "."]) == 1
    assert "is read here, and would be lost" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in work.iterdir()} == before


MISSING = [
    "predict none.jpg no.jpg -m ResNet50",
    "explain none.jpg no.jpg -m ResNet50",
    "segment none.jpg no.jpg -m LRASPP_MobileNet_V3_Large",
    "detect none.jpg no.jpg -m YOLOv3Tiny",
    "dream none.jpg -m ResNet50 --out dream.png",
    "dream none.jpg -m ResNet50 --video dream.gif",
    "dream IN.png --guide none.jpg -m ResNet50 --out dream.png",
    "stylize none.jpg --style candy --out styled.png",
    "train-style folder none.jpg --out style",
    "embed none.jpg --out e.npy",
    "embed folder --out e.npy --dtype int8 --calibration none.jpg",
    "finetune none.jpg -m ResNet50 --out run",
    "recommend none.jpg",
    "evaluate none.jpg -m FasterRCNN_ResNet50_FPN",
]


@pytest.mark.parametrize("line", MISSING)
def test_a_picture_that_is_not_there_is_told_before_a_network_is_fetched(line: str, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "folder").mkdir()
    Image.new("RGB", (40, 40)).save(work / "folder" / "a.png")
    assert main(line.split()) == 3
    said = capsys.readouterr().err
    assert "none.jpg" in said
    assert "there is no such file" in said or "is not there" in said or "no such file or directory" in said
    assert "no source delivered" not in said
