"""Kernels for a GPU are compiled where there is none, are what a plan asks for there, and are compiled once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from preloaded import compiler
from torch import nn

from tests.zoo.kernels.works import SETTING
from zoo import SqueezeNet1_1
from zoo.kernels.api.compile_ahead import compile_ahead
from zoo.kernels.compilation import workers
from zoo.kernels.compilation.cache_notes import NAME, Compiled, _settings
from zoo.kernels.compilation.workers import Compilers
from zoo.kernels.errors import Untraceable
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.tuning.choices import Choices
from zoo.kernels.tuning.choose import kernels

IMAGES = torch.empty(2, 3, 64, 64, device="meta")
NETWORK = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many compile is another test's, and what a process imports too."""
    monkeypatch.setattr(workers, "MOST", 1)
    monkeypatch.setattr(sys, "executable", compiler())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, int]]:
    """The kernels of `NETWORK`, compiled once for all, and how many of how many they are."""
    folder = tmp_path_factory.mktemp("made") / "triton"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "MOST", 1)
        patch.setattr(sys, "executable", compiler())
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        return folder, compile_ahead(NETWORK, IMAGES, progress=False)


@pytest.fixture
def own(made: tuple[Path, tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of them, which the next plan finds."""
    shutil.copytree(made[0], tmp_path / "made")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "made"))
    return tmp_path / "made"


def test_what_is_compiled_ahead_is_what_a_plan_would_compile(made: tuple[Path, tuple[int, int]], own: Path) -> None:
    there, asked = made[1]
    assert there == asked > 0
    graph, places = understand(NETWORK, (IMAGES,), {}, torch.device("cpu"))
    wanted = kernels(graph, places, SETTING, "quick", Choices(torch.device("cpu")))
    noted = Compiled("90")
    assert all(noted.has(task.key) for task in wanted)
    assert len(list(own.rglob("*.cubin"))) > 0
    assert not any(Compiled("80").has(task.key) for task in wanted)


def test_kernels_that_a_librarys_follows_are_compiled_where_they_are_asked_for(made: tuple[Path, tuple[int, int]], own: Path) -> None:
    assert own.is_dir()
    there, asked = compile_ahead(NETWORK, IMAGES, libraries=True, progress=False)
    assert there == asked == 2 * made[1][1]
    graph, places = understand(NETWORK, (IMAGES,), {}, torch.device("cpu"))
    noted = Compiled("90")
    for task in kernels(graph, places, SETTING, "quick", Choices(torch.device("cpu"))):
        assert noted.has(replace(task, followed=False).key)


def test_notes_hold_on_another_machine() -> None:
    settings = _settings("90")
    assert "12." in settings or "13." in settings  # the assembler's version
    assert sys.prefix not in settings


def test_notes_of_another_build_of_triton_are_not_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    Compiled("90").add(["a"])
    assert Compiled("90").has("a")
    monkeypatch.setattr("triton.runtime.cache.triton_key", lambda: "the same version, built for another Python")
    assert not Compiled("90").has("a")


def test_kernels_are_found_in_a_folder_that_was_moved(
    made: tuple[Path, tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(made[0], tmp_path / "a place of its own")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "a place of its own"))
    groups = list((tmp_path / "a place of its own").rglob("__grp__*.json"))
    for number, damaged in enumerate(("[1", "{}", "[]", '{"child_paths": 3}')):
        groups[0].with_name(f"__grp__damaged{number}.json").write_text(damaged)
    assert len(groups) > 0
    assert compile_ahead(NETWORK, IMAGES, progress=False) == made[1]
    for group in groups:
        paths = json.loads(group.read_text())["child_paths"].values()
        assert len(paths) > 1
        assert all(Path(path).is_file() for path in paths)
    notes = tmp_path / "a place of its own" / NAME
    before, written = notes.read_text(), groups[0].stat().st_mtime_ns
    assert before.count("@") == 2
    Compiled("90")
    assert (notes.read_text(), groups[0].stat().st_mtime_ns) == (before, written)


@pytest.mark.parametrize("noted", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_folder_named_from_the_one_that_one_is_in_is_found_from_others(
    noted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", "kernels")
    compile_ahead(NETWORK, IMAGES, progress=False)
    if not noted:  # whoever compiled did not come to that
        (tmp_path / "kernels").rename(tmp_path / "moved")
        (tmp_path / "moved" / NAME).unlink()
        monkeypatch.setenv("TRITON_CACHE_DIR", "moved")
        Compiled("90").add(["a"])
    groups = list(tmp_path.rglob("__grp__*.json"))
    monkeypatch.chdir("/")
    for group in groups:
        assert all(Path(path).is_file() for path in json.loads(group.read_text())["child_paths"].values())
    assert len(groups) > 0
    assert not list(Path("/").glob("kernels"))


def test_a_folder_whose_compiler_noted_nothing_is_found_from_others(
    made: tuple[Path, tuple[int, int]], own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a compiler that did not come to its notes leaves it: named from the folder that it worked in."""
    (own / NAME).unlink()
    groups = list(own.rglob("__grp__*.json"))
    for group in groups:
        children = {name: os.path.relpath(path, made[0].parent) for name, path in json.loads(group.read_text())["child_paths"].items()}
        group.write_text(json.dumps({"child_paths": children}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", "made")
    Compiled("90").add(["a"])
    monkeypatch.chdir("/")
    paths = [path for group in groups for path in json.loads(group.read_text())["child_paths"].values()]
    assert paths
    assert all(Path(path).is_file() and Path(path).is_relative_to(own) for path in paths)


def test_what_fast_takes_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    monkeypatch.setattr(Compilers, "compile", lambda *given: set())
    asked = compile_ahead(network, IMAGES, progress=False)
    assert compile_ahead(network, IMAGES.bfloat16(), progress=False) == asked
    assert compile_ahead(network.bfloat16(), IMAGES, progress=False) == asked
    assert asked[1] > 0
    assert compile_ahead(network, IMAGES[:0], progress=False) == (0, 0)


def test_a_second_time_no_process_is_started(made: tuple[Path, tuple[int, int]], own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own.is_dir()

    def no_process(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    assert compile_ahead(NETWORK, IMAGES, progress=False) == made[1]


def test_what_can_not_be_planned_says_why() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(Untraceable):
        compile_ahead(Branching(), IMAGES)
    with pytest.raises(ValueError, match='tune=\'none\' is neither "quick" nor "full"'):
        compile_ahead(Branching(), IMAGES, tune="none")
    with pytest.raises(ValueError, match="images"):
        compile_ahead(SqueezeNet1_1().eval(), torch.empty(1, 3, 2, 2))
