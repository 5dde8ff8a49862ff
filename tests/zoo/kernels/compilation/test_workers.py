"""Kernels are compiled by processes without a GPU, in the order of their promise, for as long as there is time."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache as cached
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from preloaded import compiler

import zoo
from tests.zoo.kernels.compilation.processes import gone
from tests.zoo.kernels.works import SETTING, norm_of, tasks_of
from zoo.kernels.compilation import compiler_process, fingerprint, fork_server
from zoo.kernels.compilation import workers as compiling
from zoo.kernels.compilation.cache_notes import NAME, Compiled, expected_place
from zoo.kernels.compilation.workers import Compilers
from zoo.kernels.tuning.contest import _compiled
from zoo.kernels.tuning.steps import Candidate
from zoo.kernels.tuning.tasks import Task


@pytest.fixture(autouse=True)
def some_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MOST", 4)
    monkeypatch.setattr(sys, "executable", compiler())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Compilers, Path]]:
    """Processes that take seconds to start, and Triton's cache, which they know from then on."""
    folder = tmp_path_factory.mktemp("triton")
    with pytest.MonkeyPatch.context() as patch, closing(Compilers((9, 0))) as compilers:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        patch.setattr(sys, "executable", compiler())
        yield compilers, folder


def test_processes_leave_kernels_for_the_gpu_in_tritons_cache(shared: tuple[Compilers, Path]) -> None:
    compilers, cache = shared
    kinds = {task.candidate.op: task for task in tasks_of(zoo.SqueezeNet1_1, 64)}
    assert {"conv", "stem", "pool", "global_pool"} <= kinds.keys()
    tasks = [kinds[op] for op in ("conv", "stem", "pool", "global_pool")]
    tasks.append(replace(tasks[0], followed=False))
    before = set(cache.rglob("*.cubin"))
    assert compilers.compile(tasks) == set(range(len(tasks)))
    assert len(set(cache.rglob("*.cubin")) - before) >= len(tasks)  # the image is packed by a kernel too
    assert "sm_90" in next(cache.rglob("*.ptx")).read_text()


def test_what_no_time_is_left_for_is_no_candidate(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = tasks_of(zoo.SqueezeNet1_1, 64)
    nodes = {str(i): task.node for i, task in enumerate(tasks)}
    found = {str(i): [task.candidate, Candidate("cudnn_conv")] for i, task in enumerate(tasks)}
    with closing(Compilers((9, 0))) as compilers:
        left = _compiled(nodes, found, tasks[0].places, SETTING, 0.0, compilers, None)
    assert all(several[-1] == Candidate("cudnn_conv") for several in left.values())
    assert any(len(several) == 1 for several in left.values())


def test_the_first_of_every_step_comes_before_the_second_of_any() -> None:
    asked: list[str] = []

    class Listening:
        def compile(self, tasks: list[Task], seconds: float | None, progress: Any) -> set[int]:
            asked.extend(task.candidate.op for task in tasks)
            return set(range(len(tasks)))

    node = tasks_of(zoo.SqueezeNet1_1, 64)[0].node
    found = {"a": [Candidate("first"), Candidate("cudnn_conv"), Candidate("second")], "b": [Candidate("first"), Candidate("second")]}
    compilers: Any = Listening()
    assert _compiled({"a": node, "b": node}, found, {}, SETTING, None, compilers, None) == found
    assert asked == ["first", "first", "second", "second"]


def test_norms_of_any_number_of_channels_are_compiled_there_and_back(shared: tuple[Compilers, Path]) -> None:
    compilers, cache = shared
    works, before = [norm_of(channels) for channels in (7, 16, 24, 100, 256)], set(cache.rglob("*.cubin"))
    assert compilers.compile(works) == set(range(5))
    kernels_made = {path.stem for path in set(cache.rglob("*.cubin")) - before}
    assert kernels_made == {"statistics_kernel", "join_kernel", "apply_kernel", "reduce_kernel", "add_kernel", "back_kernel"}


@dataclass(frozen=True)
class Deadly:
    number: int
    name = "deadly"

    @property
    def key(self) -> str:
        return f"{self.name} {self.number}"

    def portable(self) -> Deadly:
        return self

    def compile(self) -> None:
        os._exit(1)


@dataclass(frozen=True)
class Easy(Deadly):
    name = "easy"

    def compile(self) -> None:
        pass


@dataclass(frozen=True)
class Wrong(Deadly):
    name = "wrong"

    def compile(self) -> None:
        raise ValueError("no such instruction")


@dataclass(frozen=True)
class Full(Deadly):
    name = "full"

    def compile(self) -> None:
        raise OSError("no space left")


@dataclass(frozen=True)
class Slow(Deadly):
    name = "slow"

    def compile(self) -> None:
        Path(os.environ["TRITON_CACHE_DIR"], f"{os.getpid()} sleeps").touch()
        time.sleep(600)


def asleep(cache: Path) -> list[int]:
    """The processes that have begun a slow work."""
    return [int(path.name.split()[0]) for path in cache.glob("* sleeps")]


def within(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes find these works' classes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for work in (Deadly, Easy, Wrong, Full, Slow):
        monkeypatch.setattr(work, "__module__", "test_workers")
    monkeypatch.setitem(sys.modules, "test_workers", sys.modules[__name__])


def test_a_compiler_that_dies_takes_its_own_task_along_and_no_other(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch)
    works = [Easy(0), Easy(1), Easy(2), Deadly(3), Deadly(4), Easy(5), Easy(6)]
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile(works) == {0, 1, 2, 5, 6}
    assert not any(Compiled("90").knows(work.key) for work in works[3:5])  # it may be killed for another's memory


def test_processes_that_were_started_before_are_those_that_compile(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch)
    works = [Easy(number) for number in range(6)]
    with closing(Compilers((9, 0))) as compilers:
        compilers.prepare(works[: compiling.WORTH - 1])
        assert not compilers._idle
        compilers.prepare(works)
        dead, *_ = compilers._idle
        dead.stdin.write(pickle.dumps(Deadly(0)))
        dead.stdin.flush()
        assert within(lambda: dead.has_ended())
        compilers.prepare(works)
        began = list(compilers._idle)
        assert began
        assert dead not in began
        with monkeypatch.context() as none_starts:
            none_starts.setattr(Compilers, "_start", None)
            assert compilers.compile(works) == set(range(6))
        assert compilers._idle == began
        server = compilers._server
        compilers.rest()
        assert server is not None
        assert server.has_ended()
        compilers.prepare(works)
        assert not compilers._idle  # all of them are compiled
        compilers.prepare([Easy(number) for number in range(6, 12)])
        assert compilers._idle
        server = compilers._server
    assert server is not None
    assert server.has_ended()


def test_what_was_begun_is_waited_for_and_ends_with_the_rest(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch)
    works = [Easy(number) for number in range(6)]
    with closing(Compilers((9, 0))) as compilers:
        compilers.begin(works)
        with monkeypatch.context() as nothing_more:
            assert compilers.compile(works[:2]) == {0, 1}  # when all are done
            nothing_more.setattr(Compilers, "_start", None)
            assert compilers.compile(works) == set(range(6))
    with closing(Compilers((9, 0))) as compilers:
        compilers.begin([Slow(number) for number in range(6)])
        assert within(lambda: len(asleep(cache)) > 1)
        thread = compilers._begun
    assert thread is not None
    assert not thread.is_alive()
    assert all(gone(number) for number in asleep(cache))


def test_processes_start_early_where_nothing_was_ever_compiled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch)
    with closing(Compilers((9, 0))) as compilers:
        compilers.expect(compiling.WORTH - 1)
        assert not compilers._idle
        compilers.expect(compiling.WORTH)
        assert compilers._idle
    with closing(Compilers((9, 0))) as compilers:
        compilers.expect(100)
        assert not compilers._idle  # for this cache it was tried
        monkeypatch.setattr(compiling, "_expected", set())
        compilers.compile([Easy(number) for number in range(6)])
        compilers.rest()
        compilers.expect(100)
        assert not compilers._idle  # there is something in it


@pytest.mark.parametrize("variables", [{}, {"TRITON_HOME": "/home"}, {"TRITON_HOME": "/home", "TRITON_CACHE_DIR": "/kernels"}])
def test_where_notes_lie_is_known_without_triton(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    for name, folder in variables.items():
        monkeypatch.setenv(name, folder)
    assert expected_place() == Path(knobs.cache.dir, NAME)


def test_processes_are_told_a_folder_that_holds_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", "kernels")
    assert compiling._environment()["TRITON_CACHE_DIR"] == str(tmp_path / "kernels")
    assert expected_place() == Compiled("90")._file
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert "TRITON_CACHE_DIR" not in compiling._environment()


def test_the_fingerprint_is_made_once_beside_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import cache as tritons

    made: list[str] = []

    def slowly() -> str:
        made.append("")
        time.sleep(0.2)
        return "fingerprint"

    monkeypatch.setattr(tritons, "triton_key", cached(slowly))
    monkeypatch.setattr(fingerprint, "_thread", None)
    fingerprint.begin()
    fingerprint.begin()
    assert "triton fingerprint" in Compiled("90")._about
    assert len(made) == 1


def test_a_triton_that_makes_launchers_makes_them_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver

    made: list[Any] = []
    kernel = SimpleNamespace(src="source", metadata="metadata")
    monkeypatch.setattr(driver, "CudaLauncher", lambda *of: made.append(of) or 1 / 0)
    monkeypatch.delattr(driver, "make_launcher", raising=False)
    compiler_process._build_launcher(kernel)
    assert not made
    monkeypatch.setattr(driver, "make_launcher", None, raising=False)
    compiler_process._build_launcher(kernel)  # and what goes wrong is left to the first launch
    assert made == [("source", "metadata")]


def test_what_can_never_be_compiled_is_tried_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch)
    works = [*(Wrong(number) for number in range(6)), *(Easy(number) for number in range(6)), *(Full(number) for number in range(4))]
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile(works) == set(range(6, 12))
    monkeypatch.setattr(fork_server.subprocess, "Popen", None)
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile(works) == set(range(6, 16))  # what had no room is left to its first call


def test_what_has_one_key_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch)
    totals = set[int]()
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile([Easy(number % 5) for number in range(20)], progress=lambda done, total, name: totals.add(total)) == set(
            range(20)
        )
        assert totals == {5}
        monkeypatch.setattr(fork_server.subprocess, "Popen", None)
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile([Easy(number % 6) for number in range(20)]) == set(range(20))  # one is missing, however often


def test_an_interrupt_leaves_no_compiler_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch)

    def interrupt(*_: Any) -> None:
        if len(asleep(cache)) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), closing(Compilers((9, 0))) as compilers:
        compilers.compile([Slow(number) for number in range(8)], progress=interrupt)
    time.sleep(0.5)  # for whoever would begin another one
    assert all(gone(number) for number in asleep(cache))


def test_what_is_compiled_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works, totals = [norm_of(channels) for channels in (8, 16, 24, 32, 40)], set[int]()
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile(works) == set(range(5))
        more = [norm_of(channels) for channels in (48, 56, 64, 72, 80)]
        assert compilers.compile([*more, *works], progress=lambda done, total, name: totals.add(total)) == set(range(10))
    assert totals == {5}
    monkeypatch.setattr(fork_server.subprocess, "Popen", None)
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile([*works, *more]) == set(range(10))  # by none
    assert not any(Compiled("80").has(work.key) for work in works)  # another GPU
    shutil.rmtree(cache)
    assert not any(Compiled("90").has(work.key) for work in works)  # the notes go with the kernels


def test_an_interrupt_keeps_what_was_compiled(cache: Path) -> None:
    works = [norm_of(8 * channels) for channels in range(1, 9)]

    def interrupt(done: int, total: int, name: str) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), closing(Compilers((9, 0))) as compilers:
        compilers.compile(works, progress=interrupt)
    compiled = Compiled("90")
    assert any(compiled.has(work.key) for work in works)


def test_notes_that_cannot_be_read_or_written_are_none(cache: Path) -> None:
    (cache / NAME).mkdir()
    compiled = Compiled("90")
    compiled.add(["a"])
    assert compiled.has("a")
    assert not Compiled("90").has("a")
    (cache / NAME).rmdir()
    (cache / NAME).write_bytes(b"\xff\xfe half a li")
    Compiled("90").add(["a", "b"])
    compiled = Compiled("90")
    assert [compiled.has(key) for key in "abc"] == [True, True, False]  # where they lie went to the line that was cut off


def test_few_kernels_are_left_to_their_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server.subprocess, "Popen", None)
    tasks = tasks_of(zoo.SqueezeNet1_1, 64)[:3]
    assert Compilers((9, 0)).compile(tasks) == {0, 1, 2}


def test_where_no_process_can_compile_the_caller_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.sys, "executable", "/bin/false")
    tasks = tasks_of(zoo.SqueezeNet1_1, 64)
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile(tasks) == set(range(len(tasks)))


def test_what_is_begun_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[Any]()
    monkeypatch.setattr(Compilers, "_compiled", lambda self, *given: told.append(given) or set())
    with closing(Compilers((9, 0))) as compilers:
        compilers.begin(["work"], 7.0)  # pyright: ignore[reportArgumentType]
        compilers.compile(())
    assert told == [(["work"], 7.0, None), ((), None, None)]
