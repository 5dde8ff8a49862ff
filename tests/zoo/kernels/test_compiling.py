"""Kernels are compiled by processes without a GPU, in the order of their promise, for as long as there is time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from zoo.kernels import compiling
from zoo.kernels.compiling import Compilers
from zoo.kernels.passes import understand
from zoo.kernels.training import kernels
from zoo.kernels.training.compiling import ChainWork
from zoo.kernels.tuning.binding import blanks
from zoo.kernels.tuning.candidates import candidates
from zoo.kernels.tuning.contest import _compiled
from zoo.kernels.tuning.steps import COMPUTED, FOREIGN, Candidate, Setting
from zoo.kernels.tuning.tasks import Blank, Task

SETTING = Setting(torch.device("cpu"), torch.bfloat16)


def tasks_of(cls: type[torch.nn.Module], size: int) -> list[Task]:
    graph, places = understand(cls().eval(), (torch.zeros(1, 3, size, size),), {})
    made = []
    for node in graph.steps():
        if node.op in COMPUTED:
            ours = (c for c in candidates(node, blanks(node, places, SETTING), SETTING, 1) if c.op not in FOREIGN)
            made += [Task(node, places, SETTING, candidate) for candidate in ours]
    return made


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
        start = time.monotonic()
        left = _compiled(nodes, found, tasks[0].places, SETTING, 0.0, compilers, None)
        assert time.monotonic() - start < 20
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


def norm_of(channels: int) -> ChainWork:
    maps, ones = ((32, channels, 56, 56), torch.bfloat16, True), ((channels,), torch.float32, True)
    run = partial(kernels.batch_norm_act, momentum=0.1, eps=1e-5, act="relu")
    return ChainWork("batch_norm", run, (maps, ones, ones, (*ones[:2], False), (*ones[:2], False)), maps, True)


def test_norms_of_any_number_of_channels_are_compiled_there_and_back(shared: tuple[Compilers, Path]) -> None:
    compilers, cache = shared
    works, before = [norm_of(channels) for channels in (7, 16, 24, 100, 256)], set(cache.rglob("*.cubin"))
    assert compilers.compile(works) == set(range(5))
    kernels_made = {path.stem for path in set(cache.rglob("*.cubin")) - before}
    assert kernels_made == {"statistics_kernel", "join_kernel", "apply_kernel", "reduce_kernel", "add_kernel", "back_kernel"}


@dataclass(frozen=True)
class Deadly:
    name = "deadly"

    def portable(self) -> Deadly:
        return self

    def compile(self) -> None:
        os._exit(1)


@dataclass(frozen=True)
class Easy(Deadly):
    name = "easy"

    def compile(self) -> None:
        pass


def test_a_compiler_that_dies_takes_its_own_task_along_and_no_other(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for work in (Deadly, Easy):
        monkeypatch.setattr(work, "__module__", "test_compiling")
    monkeypatch.setitem(sys.modules, "test_compiling", sys.modules[__name__])
    works = [Easy(), Easy(), Easy(), Deadly(), Deadly(), Easy(), Easy()]
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile(works) == {0, 1, 2, 5, 6}


def test_an_interrupt_leaves_no_compiler_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    start = Compilers._start
    monkeypatch.setattr(Compilers, "_start", lambda self: (begun.append(start(self)), begun[-1])[1])

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), closing(Compilers((9, 0))) as compilers:
        compilers.compile([norm_of(16 * channels) for channels in range(1, 9)], progress=interrupt)
    time.sleep(0.5)  # for whoever would begin another one
    assert begun
    assert all(process.poll() is not None for process in begun)


def test_few_kernels_are_left_to_their_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.subprocess, "Popen", None)
    tasks = tasks_of(zoo.SqueezeNet1_1, 64)[:3]
    assert Compilers((9, 0)).compile(tasks) == {0, 1, 2}


def test_where_no_process_can_compile_the_caller_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.sys, "executable", "/bin/false")
    tasks = tasks_of(zoo.SqueezeNet1_1, 64)
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile(tasks) == set(range(len(tasks)))


def test_a_portable_task_carries_no_weights_and_no_other_step() -> None:
    task = max(tasks_of(zoo.SqueezeNet1_1, 64), key=lambda task: task.node.attrs["weight"].numel() if "weight" in task.node.attrs else 0)
    light = task.portable()
    assert isinstance(light.node.attrs["weight"], Blank)
    assert light.node.attrs["weight"].shape == tuple(task.node.attrs["weight"].shape)
    assert all(not source.inputs and not source.attrs for source in light.node.inputs)
    assert isinstance(task.node.attrs["weight"], torch.Tensor)
