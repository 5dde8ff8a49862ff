"""Networks that are not the zoo's are measured as the zoo's are: proven first, in turns, into a record that grows."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

RECIPE = Path(__file__).parents[2] / "recipes" / "bench_modules.py"
CELL = "torchvision:squeezenet1_1@1"
QUICK = ("--side", "32", "--dtype", "float32", "--tune", "none", "--rounds", "1")


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_modules", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ways(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, and PyTorch's compiler, which takes long, is eager."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(recipe, "WAYS", {**recipe.WAYS, "compile": recipe.WAYS["eager"]})


@pytest.mark.usefixtures("ways")
def test_a_network_is_measured_beside_its_peers_and_kept(recipe: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "modules.json"
    recipe.main([CELL, "--save", str(file), *QUICK])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("| torchvision:squeezenet1_1 | 1 | ")
    kept = json.loads(file.read_text())
    (cell,) = kept["cells"]
    assert kept["device"]
    assert kept["date"]
    assert (cell["model"], cell["batch"], cell["size"]) == ("torchvision:squeezenet1_1", 1, 32)
    rates = {name: row["images_s"] for name, row in cell["ways"].items()}
    assert set(rates) == {"fast", "eager-cl", "eager"} or set(rates) == {"fast", "eager-cl", "compile"}
    assert cell["ratio"] == pytest.approx(rates["fast"] / max(rate for name, rate in rates.items() if name != "fast"))
    assert cell["ways"]["fast"]["error"] < 1e-5
    recipe.main(["torchvision:squeezenet1_0@2", "--save", str(file), *QUICK])
    assert [(one["model"], one["batch"]) for one in json.loads(file.read_text())["cells"]] == [
        ("torchvision:squeezenet1_1", 1),
        ("torchvision:squeezenet1_0", 2),
    ]
    recipe.main([CELL, "--save", str(file), *QUICK])
    assert len(json.loads(file.read_text())["cells"]) == 2


@pytest.mark.usefixtures("ways")
def test_another_network_than_asked_for_gets_no_figure(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(s: Any, tune: str) -> Any:
        images, network = s.input(torch.float32), s.placed(s.peer, torch.float32)
        return lambda: network(images) * 1.01

    way = recipe.WAYS["fast"]
    monkeypatch.setitem(recipe.WAYS, "fast", type(way)(way.name, way.label, way.says, wrong))
    recipe.main([CELL, "--save", str(tmp_path / "modules.json"), *QUICK])
    (cell,) = json.loads((tmp_path / "modules.json").read_text())["cells"]
    assert cell["ways"]["fast"]["failed"].startswith("red: ")
    assert "ratio" not in cell


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("swin_t@1", "LIBRARY:NAME@BATCH"),
        ("torchvision:swin_t", "LIBRARY:NAME@BATCH"),
        ("torchvision:swin_t@0", "LIBRARY:NAME@BATCH"),
        ("torchvision:nonsense@1", "torchvision:nonsense"),
        ("timm:nonsense@1", "timm:nonsense"),
        ("keras:vgg19@1", "timm:NAME"),
    ],
)
def test_what_is_no_network_is_refused_before_anything_is_measured(
    recipe: ModuleType, cell: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as exited:
        recipe.main([CELL, cell, "--save", str(tmp_path / "modules.json"), *QUICK])
    assert exited.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "modules.json").exists()


@pytest.mark.usefixtures("ways")
@pytest.mark.parametrize(("more", "said"), [(("--save", "nowhere/x.json"), "no folder"), (("--side", "0"), "1 pixel")])
def test_what_can_not_be_done_is_said_before_anything_is_measured(
    recipe: ModuleType, more: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        recipe.main([CELL, *QUICK, *more])
    assert exited.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("ways")
def test_a_network_that_takes_no_such_images_is_a_line(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.main(["torchvision:vit_b_16@1", *QUICK, "--side", "50"])
    told = capsys.readouterr()
    assert "| torchvision:vit_b_16 | 1 | - | - | - | - | - (-) |" in told.out
    assert "Wrong image" in told.err


@pytest.mark.usefixtures("ways")
def test_a_record_of_something_else_is_not_added_to(recipe: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "modules.json"
    for text, said in ((json.dumps({"device": "abacus", "cells": []}), "another device"), ("no JSON", "no record")):
        file.write_text(text)
        with pytest.raises(SystemExit) as exited:
            recipe.main([CELL, "--save", str(file), *QUICK])
        assert exited.value.code == 2
        assert said in capsys.readouterr().err
        assert file.read_text() == text


def test_heads_of_zeros_answer_something(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    def made(name: str, weights: None) -> nn.Module:
        del name, weights
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 5)).apply(
            lambda layer: nn.init.zeros_(layer.weight) if isinstance(layer, nn.Linear) else None
        )

    monkeypatch.setattr(torchvision.models, "get_model", made)
    module = recipe.module_of("torchvision:any")
    assert float(module(torch.randn(2, 3, 2, 2)).detach().std()) > 0
