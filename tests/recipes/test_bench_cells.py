"""Cells are taken once, measured while there is time, kept, and not measured again."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from zoo.bench.inference import DeviceLost
from zoo.bench.record import Record

RECIPE = Path(__file__).parents[2] / "recipes" / "bench_cells.py"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_cells", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_cells"] = module  # processes that compile import what they are given by its name
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def measured(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The cells that are measured, which takes no time."""
    found: list[tuple[str, int]] = []

    def run(plan: Any, *, path: Path, resume: bool) -> Record:
        assert resume
        [cls], [batch] = plan.models, plan.batches
        found.append((cls.__name__, batch))
        record = Record.read(path) if path.is_file() else Record(recipe.Plan([], [], [], torch.device("cpu"), torch.bfloat16).about())
        rows = {
            "fast": {"build_s": 3.0, "images_s": 100.0},
            "recipe": {"build_s": 1.0, "images_s": 50.0},
            "eager-cl": {"failed": "no room"},
        }
        record.put({"model": cls.__name__, "batch": batch, "ways": rows, "ratio": 2.0})
        record.write(path)
        return record

    monkeypatch.setattr(recipe, "run", run)
    return found


def listed(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cells.txt"
    path.write_text(text)
    return path


def words(tmp_path: Path, text: str, *more: str) -> list[str]:
    return ["--cells", str(listed(tmp_path, text)), "--save", str(tmp_path / "record.json"), "--peers", "eager-cl", *more]


def test_cells_are_measured_once_in_their_order_and_kept(
    recipe: ModuleType, measured: list[tuple[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = words(tmp_path, "# small ones\nResNet20 4\n\nSqueezeNet1_1 1\n")
    recipe.main(asked)
    assert measured == [("ResNet20", 4), ("SqueezeNet1_1", 1)]
    kept = Record.read(tmp_path / "record.json")
    for name, batch in measured:
        cell = kept.cell(name, batch)
        assert cell is not None
        assert {row.get("build_s", "none") for row in cell["ways"].values()} == {None, "none"}
    printed = capsys.readouterr().out
    assert "ResNet20 at 4: 2.00 times the fastest peer, 0 s; eager-cl: no room" in printed
    assert "2 of 2 cells are measured\n" in printed
    recipe.main(asked)
    for claim in (tmp_path / "record.json.claims").iterdir():
        claim.unlink()
    recipe.main(asked)  # by the record alone
    assert len(measured) == 2
    (tmp_path / "record.json").unlink()
    recipe.main([*asked, "--claims", str(tmp_path / "record.json.claims")])  # another process has measured them
    assert len(measured) == 2


def test_a_cell_that_lacks_a_peer_is_measured_again(recipe: ModuleType, measured: list[tuple[str, int]], tmp_path: Path) -> None:
    recipe.main(words(tmp_path, "ResNet20 4"))
    recipe.main([*words(tmp_path, "ResNet20 4")[:-1], "eager-fp32"])
    assert measured == [("ResNet20", 4)] * 2


HOLD = "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True); input()"


def test_processes_take_different_cells_and_those_of_one_that_was_killed(recipe: ModuleType, tmp_path: Path) -> None:
    claims, cell = recipe.Claims(tmp_path / "claims"), ("ResNet20", 1)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "claims" / "ResNet20-1.lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with claims.taken(cell) as mine:
            assert not mine
        with claims.taken(("ResNet20", 2)) as mine:
            assert mine
        other.kill()
    for _ in range(2):
        with claims.taken(cell) as mine:
            assert mine
    claims.done(cell)
    with claims.taken(cell) as mine:
        assert not mine


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (DeviceLost("gone"), "gone; start again to go on")])
def test_what_is_interrupted_is_left_to_the_next_start(
    recipe: ModuleType,
    measured: list[tuple[str, int]],
    error: BaseException,
    status: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = words(tmp_path, "ResNet20 4\nResNet20 8")
    with monkeypatch.context() as patched:
        patched.setattr(recipe, "run", Raising(error))
        with pytest.raises(SystemExit) as stopped:
            recipe.main(asked)
    assert stopped.value.code == status
    assert not measured
    recipe.main(asked)
    assert measured == [("ResNet20", 4), ("ResNet20", 8)]


class Raising:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *given: object, **named: object) -> None:
        raise self.error


def test_what_there_is_no_time_for_is_left_to_the_next_start(
    recipe: ModuleType, measured: list[tuple[str, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        recipe.main(words(tmp_path, "ResNet20 4", "--seconds", "20"))
    assert stopped.value.code == 3
    assert not measured
    assert "0 of 1 cells are measured; left: ResNet20 at 4" in capsys.readouterr().out
    recipe.main(words(tmp_path, "ResNet20 4", "--seconds", "60"))
    assert measured == [("ResNet20", 4)]


def test_a_cell_as_long_as_the_longest_is_not_begun_without_time_for_it(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, lasts, begun = [0.0], {("ResNet20", 1): 90.0, ("ResNet20", 4): 5.0}, []

    def measure_one(cell: tuple[str, int], *_: object) -> None:
        begun.append(cell)
        now[0] += lasts[cell]

    monkeypatch.setattr(recipe.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(recipe, "_measure", measure_one)
    claims = recipe.Claims(tmp_path / "claims")
    recipe.measure(list(lasts), None, tmp_path / "record.json", claims, until=170.0)
    assert begun == [("ResNet20", 1)]
    recipe.measure(list(lasts)[1:], None, tmp_path / "record.json", claims, until=170.0)
    assert begun == list(lasts)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ResNet20 4\nResNet20", "line 2: 'ResNet20' is no network"),
        ("ResNet21 4", "ResNet21"),
        ("ResNet20 0", "line 1"),
        ("ResNet20 x", "line 1"),
    ],
)
def test_a_line_that_is_no_cell_is_named(
    recipe: ModuleType, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        recipe.main(["--cells", str(listed(tmp_path, text)), "--save", str(tmp_path / "record.json")])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def compiling(cell: tuple[str, int]) -> None:
    """Stands for a compiler: leaves a file, and what it found best; one of them fails."""
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    (folder / f"{cell[0]}.{os.environ['OMP_NUM_THREADS']}").touch()
    (folder / f"{cell[0]}.best_config").touch()
    if cell[1] == 2:
        raise RuntimeError("no compiler")


def test_peers_are_compiled_beside_each_other_and_what_was_best_there_is_forgotten(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.syspath_prepend(RECIPE.parent)
    recipe.compile_peers([("a", 3), ("b", 2), ("c", 1)], 2, 300, compiling)
    assert {path.name for path in tmp_path.iterdir()} == {"a.1", "b.1", "c.1"}
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_records_that_cannot_be_gone_on_with_are_mistakes(recipe: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, other = tmp_path / "broken.json", tmp_path / "other.json"
    broken.write_text("[")
    Record({"type": "cpu", "device": "none", "dtype": "float32"}, []).write(other)
    for save, said in (
        (tmp_path / "none" / "r.json", "make it first"),
        (broken, "is no JSON that can be read"),
        (other, "device none, not"),
    ):
        with pytest.raises(SystemExit) as stopped:
            recipe.main(["--cells", str(listed(tmp_path, "ResNet20 1")), "--save", str(save), "--peers", "eager-fp32"])
        assert stopped.value.code == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert {path.name for path in tmp_path.iterdir()} == {"broken.json", "other.json", "cells.txt"}


def test_compilers_end_with_their_time(recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(RECIPE.parent)
    recipe.compile_peers([("a", 3)], 1, 0.1, compiling)
    assert not list(tmp_path.iterdir())
    assert not multiprocessing.active_children()
