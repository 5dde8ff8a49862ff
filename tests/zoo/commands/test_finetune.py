"""The command: what it prints, and what it says when it can't."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from small import draw

from zoo.commands.app import main
from zoo.finetuning.rates import Rates


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
        "--batch-size",
        "8",
        "--set",
        "warmup=0",
        "--lr",
        "0.02",
    ]
    assert main([*told, "--head-epochs", "0", "--no-fast"]) == 0
    assert json.loads((out / "settings.json").read_text())["settings"]["fast"] is False
    printed = capsys.readouterr().out
    assert "boat" in printed
    assert f"zoo predict PHOTO --model {out}" in printed
    assert main(["predict", str(ships / "raft" / "000.png"), "--model", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[0]["predictions"]
    assert {row["label"] for row in found} == {"boat", "raft"}
    assert main(["predict", str(ships / "raft" / "000.png"), "--model", str(out), "--weights", "akamaster"]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "is a run, which has weights of its own: leave out akamaster, or name the network, ResNet20" in said
    assert main(["add", str(out), "ResNet20:mine"]) == 1
    assert f"is a run of zoo finetune, which needs no adding: --model {out}" in " ".join(capsys.readouterr().err.split())
    assert main(["finetune", "--resume", str(out), "--fast", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6
    assert main(told) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"'{out}' holds a run: zoo finetune --resume {out} goes on with it, --restart throws it away" in said


def test_the_finder_draws(ships: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["finetune", str(ships), "-m", "ResNet20", "--out", str(tmp_path / "x"), "--find-lr", "--batch-size", "8"]
    assert main(told) == 0
    assert "the loss falls fastest at --lr" in capsys.readouterr().out
    assert (tmp_path / "x" / "rates.png").is_file()
    assert not (tmp_path / "x" / "settings.json").exists()


def test_the_finder_tells_machines_too(
    ships: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Rates([0.001, 0.01, 0.1], [2.0, 1.5, 3.0], 0.01)
    monkeypatch.setattr("zoo.finetuning.find_rate", lambda **told: found)
    assert main(["finetune", str(ships), "-m", "ResNet20", "--out", str(tmp_path / "x"), "--find-lr", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"lr": 0.01, "rates": found.rates, "losses": found.losses, "picture": str(tmp_path / "x" / "rates.png")}
    assert Path(told["picture"]).is_file()


def test_a_mobilenet_for_small_images_is_trained_and_used_by_the_command_alone(
    ships: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x"
    small = ["--from-scratch", "--size", "32", "--option", "stem_stride=1", "--option", "early_stride=1"]
    assert main(["finetune", str(ships), "-m", "MobileNetV2_035", *small, "--out", str(out), "--steps", "1", "--batch-size", "8"]) == 0
    capsys.readouterr()
    assert main(["predict", str(ships / "raft" / "000.png"), "--model", str(out), "--json"]) == 0
    assert {row["label"] for row in json.loads(capsys.readouterr().out)[0]["predictions"]} == {"boat", "raft"}
    (out / "weights.toml").unlink()
    assert main(["predict", str(ships / "raft" / "000.png"), "--model", str(out)]) == 3
    assert "is a run that is not finished" in " ".join(capsys.readouterr().err.split())


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
        (["--resume", "x", "DATA"], 2, "leave DATA out"),
        (["--resume", "x", "-m", "ResNet20", "--out", "y"], 2, "leave --model and --out out"),
        (["--resume", "x", "--val", "v", "--option", "dropout=0.1"], 2, "leave --val and --option out"),
        (["DATA", "--set", "warmup"], 2, "a setting looks like warmup=0.1"),
        (["DATA", "--set", "warm=1", "-m", "ResNet20"], 2, "did you mean warmup?"),
        (["--resume", "nowhere"], 3, "holds no run to go on with"),
        (["nowhere", "-m", "ResNet20"], 3, "nowhere' is not there"),
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
        (["--option", "num_classes=7"], "leave num_classes out"),
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


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            "the GPU's memory is full: take a smaller --batch-size, or parts of a step by --accumulate, or smaller images; other programs",
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "the GPU failed: CUDA error: an illegal memory access"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "the memory is full"),
        (MemoryError(), "the memory is full (no more is given)"),
    ],
)
def test_memory_that_is_full_and_gpus_that_fail_are_one_message(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("zoo.finetuning.finetune", fail)
    assert main(["finetune", "x", "-m", "ResNet20"]) == 1
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_full_memory_is_told_to_a_command_by_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr("zoo.pretrained.trained.trained", fail)
    (tmp_path / "x.jpg").touch()
    assert main(["predict", str(tmp_path / "x.jpg")]) == 1
    assert capsys.readouterr().err == "error: the memory is full (no more is given): take a smaller --batch-size, or smaller images\n"


def test_a_mistake_of_ours_stays_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("zoo.finetuning.finetune", fail)
    with pytest.raises(RuntimeError, match="mat1"):
        main(["finetune", "x", "-m", "ResNet20"])
