"""The recipe names what is wrong, and says of each network and batch how many kernels are there."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from zoo.kernels.api import compile_ahead as ahead

RECIPE = Path(__file__).parents[2] / "recipes" / "compile_ahead.py"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--models", "VGG20"], "there is no network VGG20; `zoo list` names them"),
        (["--models", "VGG19", "--batches", "one"], "a capability is like 9.0, batches are like 1,32,256"),
        (["--models", "VGG19", "--batches", "8,0"], "batches are 1 or more"),
        (["--models", "VGG19", "--batches=-1"], "batches are 1 or more"),
        (["--models", "VGG19", "--capability", "1.0"], "capabilities 7.5 to 12.9"),
        (["--models", "VGG19", "--capability", "hopper"], "a capability is like 9.0"),
        ([], "--models"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(RECIPE))["main"](words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("libraries", [[], ["--libraries"]])
def test_every_network_and_batch_is_compiled_for_the_gpu_that_was_named(
    libraries: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def compiled(network: Any, images: Any, **how: Any) -> tuple[int, int]:
        asked.append((type(network).__name__, tuple(images.shape), how["capability"], how["tune"], how["libraries"]))
        return 3, 4

    monkeypatch.setattr(ahead, "compile_ahead", compiled)
    runpy.run_path(str(RECIPE))["main"](["--models", "ResNet20,SqueezeNet1_1", "--batches", "1,2", "--capability", "8.0", *libraries])
    sizes = (("ResNet20", 32), ("SqueezeNet1_1", 224))
    assert asked == [(name, (batch, 3, size, size), (8, 0), "quick", bool(libraries)) for name, size in sizes for batch in (1, 2)]
    assert "ResNet20 at 2: 3 of 4 kernels" in capsys.readouterr().out


def test_where_nothing_can_be_compiled_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "compile_ahead", lambda network, images, **how: (0, 4))
    with pytest.raises(SystemExit, match="none of 4 kernels could be compiled"):
        runpy.run_path(str(RECIPE))["main"](["--models", "ResNet20"])
