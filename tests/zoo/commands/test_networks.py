"""`zoo list` and `zoo info`: patterns, orders, figures, and one screen."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import weights
from weights.adding import to_toml
from weights.record import PERMISSIVE
from zoo import CATALOGUE, ResNet20
from zoo.commands import networks, speeds
from zoo.commands.app import main
from zoo.commands.speeds import Speeds

MEASURED = Speeds("2 threads of a test", "2026-11-26", {"VGG19": 250.04, "ResNet50": 61.68, "MobileNetV2": 19.04})


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "speeds", lambda: MEASURED)


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["list", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("vgg1*_bn", ["VGG11_BN", "VGG13_BN", "VGG16_BN", "VGG19_BN"]),
        ("RESNET5", ["ResNet50", "SEResNet50", "ResNet56"]),
        ("densenet121", ["DenseNet121"]),
        ("resnet[25]0", ["ResNet50", "ResNet20"]),
    ],
)
def test_a_pattern_chooses_networks_in_any_case(pattern: str, found: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    names = [row["network"] for row in listed(capsys, pattern)]
    assert set(found) <= set(names)
    assert all(re.search(pattern.replace("*", ".*"), name, re.IGNORECASE) for name in names)


@pytest.mark.parametrize(
    ("pattern", "said"), [("resnot", "no network 'resnot'; did you mean ResNet"), ("*zzz*", "no network is called like '*zzz*'")]
)
def test_a_pattern_that_means_nothing_is_a_mistake(pattern: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", pattern]) == 3
    assert said in capsys.readouterr().err


def test_each_order_has_the_best_or_the_smallest_first_and_the_unknown_last(capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(capsys, "--sort", "accuracy")
    on_imagenet = [c["metrics"]["top1"] for row in rows if (c := row["checkpoint"]) and (c["metrics_data"] or "").startswith("ImageNet")]
    assert on_imagenet == sorted(on_imagenet, reverse=True)
    assert [row["checkpoint"]["metrics_data"][:5] for row in rows[len(on_imagenet) : len(on_imagenet) + 2]] == ["CIFAR", "CIFAR"]
    assert not any(row["checkpoint"] and row["checkpoint"]["metrics"].get("top1") for row in rows[len(on_imagenet) + 2 :])
    for order, figure in (("params", "params"), ("gmacs", "multiply_adds")):
        figures = [row[figure] for row in listed(capsys, "--sort", order)]
        assert figures == sorted(figures)
    rows = listed(capsys, "--sort", "speed")
    assert [row["network"] for row in rows[:3]] == ["MobileNetV2", "ResNet50", "VGG19"]
    assert all(row["cpu_ms"] is None for row in rows[3:])
    sizes = [row["checkpoint"]["size_bytes"] or 0 for row in listed(capsys, "vgg", "--sort", "size") if row["checkpoint"]]
    assert [size for size in sizes if size] == sorted(size for size in sizes if size)
    assert main(["list", "--sort", "beauty"]) == 2


def test_the_table_has_macs_megabytes_and_milliseconds_and_says_of_which_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "vgg19"]) == 0
    shown = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert rows[0] == "network params GMACs MB CPU ms top-1 top-5 on px weights licence"
    assert rows[1] == "VGG19 143.67M 19.63 575 250 72.38 90.88 ImageNet 224 imagenet1k_v1 unstated"
    assert rows[2].startswith("VGG19_BN 143.68M 19.63 575 74.22 ")  # nothing where nothing was measured
    assert "CPU ms: one image, plain float32, on 2 threads of a test, 2026-11-26; blank if not measured" in shown


def test_a_size_that_nobody_states_is_marked_as_reckoned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "densenet264"]) == 0
    assert "~133" in capsys.readouterr().out


def screen(*arguments: str, columns: int = 80) -> str:
    """Return what a terminal shows."""
    main_end, terminal = pty.openpty()
    settings = {**os.environ, "COLUMNS": str(columns), "TERM": "dumb"}
    with subprocess.Popen([sys.executable, "-m", "zoo", *arguments], stdout=terminal, stderr=terminal, env=settings):
        os.close(terminal)
        shown = b""
        while True:
            try:
                piece = os.read(main_end, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
    os.close(main_end)
    return shown.decode().replace("\r", "")


@pytest.mark.parametrize("network", ["ResNet50", pytest.param("EfficientNetB0", marks=pytest.mark.long)])
def test_info_is_one_screen_with_a_table_first(network: str) -> None:
    lines = screen("info", network).splitlines()
    assert len(lines) <= 24
    assert lines[0].split() == f"{network} weights top-1 top-5 on px MB licence here".split()
    assert "default" in lines[1]
    assert not any("…" in line for line in lines)


def test_info_shows_the_best_behind_the_default_and_all_with_full(capsys: pytest.CaptureFixture[str]) -> None:
    rows = weights.checkpoints("ResNet50")
    assert main(["info", "resnet50"]) == 0
    brief = capsys.readouterr().out
    assert f"and {len(rows) - 8} more: --full" in brief
    assert "61.7 ms: one image, plain float32, on 2 threads of a test, 2026-11-26" in brief
    assert "zoo predict PHOTO --model ResNet50" in brief
    assert "sha256" not in brief
    assert main(["info", "resnet50", "--full"]) == 0
    full = capsys.readouterr().out
    assert all(row.tag in full and row.sources[0] in full for row in rows)
    assert "learnt from" in full


def test_info_says_which_checkpoints_are_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torch.save(ResNet20().state_dict(), tmp_path / "mine.pth")
    assert main(["add", str(tmp_path / "mine.pth"), "ResNet20:mine"]) == 0
    capsys.readouterr()
    assert main(["info", "ResNet20"]) == 0
    here = {line.split()[0]: line.rstrip().endswith("yes") for line in capsys.readouterr().out.splitlines()[1:4]}
    assert here == {"cifar10": True, "mine": True, "akamaster": False}


def test_a_network_without_weights_has_no_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "DenseNet264"]) == 0
    shown = capsys.readouterr().out
    assert "top-1" not in shown
    assert "No pretrained weights are known" in shown


def test_the_shipped_milliseconds_are_of_networks_that_there_are() -> None:
    shipped = speeds.speeds()
    assert shipped.plain.keys() <= CATALOGUE.keys()
    assert all(cost > 0 for cost in shipped.plain.values())
    assert "threads" in shipped.machine


def test_the_most_accurate_free_network_of_few_operations_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(capsys, "--sort", "accuracy", "--max-gmacs", "5", "--licence", "permissive")
    assert all(row["multiply_adds"] <= 5e9 and row["checkpoint"]["license"] in PERMISSIVE for row in rows)
    top = [
        row["checkpoint"]["metrics"].get("top1", 0) for row in rows if (row["checkpoint"]["metrics_data"] or "ImageNet").startswith("Im")
    ]
    assert top == sorted(top, reverse=True)
    found = next(row["checkpoint"] for row in rows if row["network"] == "ResNet50")  # whose default's licence nobody states
    free = [row for row in weights.checkpoints("ResNet50") if row.license in PERMISSIVE]
    assert not found["default"]
    assert found["metrics"]["top1"] == max(row.metrics["top1"] for row in free if "top1" in row.metrics)
    assert not any(row["network"] == "VGG19" for row in rows)
    assert len(listed(capsys, "--licence", "permissive", "--checkpoints")) == sum(
        row.license in PERMISSIVE for row in weights.checkpoints()
    )


@pytest.mark.parametrize("command", [["list", "--sort", "accuracy", "--max-gmacs", "5", "--licence", "permissive"], ["info", "ResNet50"]])
def test_a_thousand_rows_are_listed_in_half_a_second_of_one_core(command: list[str]) -> None:
    """The least of three, since other programs take time of the same cores."""
    spent: list[float] = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-m", "zoo", *command], check=True, capture_output=True)
        after = os.times()
        spent.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(spent) < 1.0  # half of it on a machine of its own; without bound where it is shared


def test_one_checkpoint_is_shown_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "resnet20:CIFAR10"]) == 0
    shown = capsys.readouterr().out
    assert "akamaster" not in shown
    assert "22978711f85112b9811d0348c319b8d18b4ae4b994a3539975971ac9589fe952" in shown
    assert main(["info", "resnet20:nope"]) == 3


def test_a_file_to_add_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["add", str(tmp_path / "none.pth"), "ResNet20:mine"]) == 3
    assert "none.pth' is not there; name the file to add" in " ".join(capsys.readouterr().err.split())


def test_several_checkpoints_are_pulled_at_once_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "resnet20", "ResNet20:CIFAR10", "-q"]) == 0
    assert capsys.readouterr().out.count("ResNet20:cifar10:") == 1
    assert main(["pull", "resnet20", "ResNet99", "-q"]) == 3
    told = capsys.readouterr()
    assert "did you mean" in told.err
    assert not told.out  # names are looked at before anything is fetched


def test_words_of_a_record_and_of_labels_move_no_cursor(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attack = "MIT\x1b[2J\x1b]0;owned\x07[red]"
    row = weights.adhoc("ResNet20", "hf://acme/wheels/w.safetensors", tag="odd", num_classes=10)
    row = replace(row, license=attack, provenance=attack, metrics={"top1": 99.9}, metrics_data=attack, recipe=attack)
    folder = own_cache.parent / "registry"
    folder.mkdir()
    (folder / "ResNet20.odd.toml").write_text(to_toml(row))
    for words in (["list", "resnet20", "-c"], ["info", "ResNet20"], ["info", "ResNet20:odd"], ["list", "-c", "--licence", attack]):
        assert main(words) == 0
        out, err = capsys.readouterr()
        assert "MIT" in out
        assert not {"\x1b", "\x07"} & {*out, *err}

    import zoo.bench
    from zoo.prediction import predict
    from zoo.pretrained import offline, trained

    label = predict.Prediction("cat\x1b[2J[red]", "n0\x1b", 0.9, 0)
    monkeypatch.setattr(predict, "predict", lambda *_, **__: [[label, label]])
    monkeypatch.setattr(zoo.bench, "load", lambda *_, **__: [])
    monkeypatch.setattr(offline, "usual", lambda: (row, attack))
    monkeypatch.setattr(trained, "trained", lambda *_, **__: ResNet20())
    monkeypatch.setattr("zoo.commands.demo.pictures", lambda required: [])
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert main(["demo", str(tmp_path / "a.png"), "--picture", str(tmp_path / "demo.png")]) == 0
    out, err = capsys.readouterr()
    assert "cat\ufffd[2J[red]" in out
    assert not {"\x1b", "\x07"} & {*out, *err}


def test_info_shows_a_run_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from zoo.pretrained.run_folder import write_result

    told: dict[str, Any] = {"options": {}, "base": None, "metrics": {"top1": 61.5}, "metrics_data": "13 images"}
    state = ResNet20(num_classes=3).state_dict()
    write_result(tmp_path, state, model="ResNet20", classes=["a", "b", "c"], preprocessing=weights.find("ResNet20").preprocessing, **told)
    assert main(["info", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["network"], [row["num_classes"] for row in shown["checkpoints"]]) == ("ResNet20", [3])
    assert main(["info", str(tmp_path)]) == 0
    assert "61.5" in capsys.readouterr().out
