"""The command: what it prints, and what it says when it can't."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from small import draw

from zoo.cli import main


@pytest.fixture
def ships(tmp_path: Path) -> Path:
    return draw(tmp_path / "ships", {"boat": 10, "raft": 10})


def test_a_folder_becomes_a_network_that_predicts(ships: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs" / "x"
    told = [
        "finetune",
        str(ships),
        "-m",
        "ResNet20",
        "--out",
        str(out),
        "--steps",
        "6",
        "--batch",
        "8",
        "--set",
        "warmup=0",
        "--lr",
        "0.02",
    ]
    assert main([*told, "--head-epochs", "0"]) == 0
    printed = capsys.readouterr().out
    assert "boat" in printed
    assert f"zoo predict PHOTO --model {out}" in printed
    assert main(["predict", str(ships / "raft" / "000.png"), "--model", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[0]["predictions"]
    assert {row["label"] for row in found} == {"boat", "raft"}
    assert main(["finetune", "--resume", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6
    assert main(told) == 1
    assert "holds a run" in capsys.readouterr().err


def test_the_finder_draws(ships: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["finetune", str(ships), "-m", "ResNet20", "--out", str(tmp_path / "x"), "--find-lr", "--batch", "8"]
    assert main(told) == 0
    assert "the loss falls fastest at --lr" in capsys.readouterr().out
    assert (tmp_path / "x" / "rates.png").is_file()
    assert not (tmp_path / "x" / "settings.json").exists()


def test_the_package_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["zoo", "finetune", "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("zoo", run_name="__main__")
    assert left.value.code == 0
    assert "torchrun" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("told", "code", "words"),
    [
        ([], 2, "which images?"),
        (["--resume", "x", "DATA"], 2, "leave the others out"),
        (["DATA", "--set", "warmup"], 2, "a setting looks like warmup=0.1"),
        (["DATA", "--set", "warm=1", "-m", "ResNet20"], 2, "did you mean warmup?"),
        (["--resume", "nowhere"], 3, "holds no run to go on with"),
        (["nowhere", "-m", "ResNet20"], 3, "nowhere is not there"),
    ],
)
def test_mistakes_are_one_message(told: list[str], code: int, words: str, ships: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", *(str(ships) if word == "DATA" else word for word in told)]) == code
    printed = capsys.readouterr().err
    assert words in " ".join(printed.replace("│", " ").split())
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "data=x"], "there is no setting 'data'"),
        (["--set", "warmupp=0.1"], "did you mean warmup?"),
        (["-o", "num_classes=7"], "leave num_classes out"),
    ],
)
def test_what_is_no_setting_is_misspelt(arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", str(tmp_path), "-m", "ResNet20", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_damaged_record_of_a_run_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "weights.toml").write_text("[ResNet20]\nx = 1\n")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert main(["predict", str(tmp_path / "a.jpg"), "--model", str(tmp_path)]) == 1
    assert "no record of one run" in capsys.readouterr().err
