"""Kernels are compiled by processes without a GPU, in the order of their promise, for as long as there is time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
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
from tests.zoo.kernels.launching import SHAPE, Gated
from zoo.kernels import compiling
from zoo.kernels.compiled import NAME, Compiled
from zoo.kernels.compiling import Compilers
from zoo.kernels.passes import understand
from zoo.kernels.passes.merge import apply, merges
from zoo.kernels.training import kernels
from zoo.kernels.training.compiling import ChainWork, _works
from zoo.kernels.training.record import record
from zoo.kernels.tuning.binding import blanks
from zoo.kernels.tuning.candidates import candidates
from zoo.kernels.tuning.contest import _compiled
from zoo.kernels.tuning.steps import COMPUTED, FOREIGN, Candidate, Setting, describe
from zoo.kernels.tuning.tasks import Blank, Task

SETTING = Setting(torch.device("cpu"), torch.bfloat16)


@pytest.fixture(autouse=True)
def some_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MOST", 4)


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


def send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes find these works' classes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    for work in (Deadly, Easy, Wrong, Full):
        monkeypatch.setattr(work, "__module__", "test_compiling")
    monkeypatch.setitem(sys.modules, "test_compiling", sys.modules[__name__])


def test_a_compiler_that_dies_takes_its_own_task_along_and_no_other(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch)
    works = [Easy(0), Easy(1), Easy(2), Deadly(3), Deadly(4), Easy(5), Easy(6)]
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile(works) == {0, 1, 2, 5, 6}
    assert not any(Compiled("90").knows(work.key) for work in works[3:5])  # it may be killed for another's memory


def test_what_can_never_be_compiled_is_tried_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch)
    works = [*(Wrong(number) for number in range(6)), *(Easy(number) for number in range(6)), *(Full(number) for number in range(4))]
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile(works) == set(range(6, 12))
    monkeypatch.setattr(compiling.subprocess, "Popen", None)
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile(works) == set(range(6, 16))  # what had no room is left to its first call
    monkeypatch.undo()


def test_what_has_one_key_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch)
    totals = set[int]()
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile([Easy(number % 5) for number in range(20)], progress=lambda done, total, name: totals.add(total)) == set(
            range(20)
        )
        assert totals == {5}
        monkeypatch.setattr(compiling.subprocess, "Popen", None)
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile([Easy(number % 6) for number in range(20)]) == set(range(20))  # one is missing, however often


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


def test_what_is_compiled_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works, totals = [norm_of(channels) for channels in (8, 16, 24, 32, 40)], set[int]()
    with closing(Compilers((9, 0))) as compilers:
        assert compilers.compile(works) == set(range(5))
        more = [norm_of(channels) for channels in (48, 56, 64, 72, 80)]
        assert compilers.compile([*more, *works], progress=lambda done, total, name: totals.add(total)) == set(range(10))
    assert totals == {5}
    monkeypatch.setattr(compiling.subprocess, "Popen", None)
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
    assert [compiled.has(key) for key in "abc"].count(True) == 1  # one went to the line that was cut off


KEYS = """
import torch, zoo
from test_compiling import chains_of, tasks_of
for work in (*tasks_of(zoo.SqueezeNet1_1, 64), *chains_of(zoo.ResNet20), *chains_of(zoo.MobileNetV2)):
    print(work.key)
"""


CHAINS = """
import torch
from zoo.kernels import compiling
compiling.stop_at_launch(90)
from zoo.kernels.training import kernels
kernels.on_kernels = lambda device: True
from zoo.kernels.training.compiling import _works
from zoo.kernels.training.record import record
conv, relu = torch.nn.Conv2d, torch.nn.ReLU
network = torch.nn.Sequential(conv(3, 8, 3), relu(), conv(8, 16, 3), relu(), conv(16, 8, 3)).train()
images = torch.randn(2, 3, 16, 16)
works = [work for _, work in _works(record(network, (images,), {}, images.device))]
for work in works:
    work.compile()
print(sum(work.name.startswith("conv") for work in works))
"""


def chains_of(cls: type[torch.nn.Module]) -> list[ChainWork]:
    images = torch.randn(2, 3, 32, 32)
    return [work for _, work in _works(record(cls().train(), (images,), {}, images.device))]


def test_keys_are_the_same_in_every_process() -> None:
    known = []
    for seed in ("1", "2"):
        there = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]), "PYTHONHASHSEED": seed}
        ran = subprocess.run([sys.executable, "-c", KEYS], env=os.environ | there, capture_output=True, text=True, check=True)
        known.append(ran.stdout.splitlines())
    assert known[0] == known[1]
    assert len(set(known[0])) > 30
    assert not any(" at 0x" in key for key in known[0])


GLOBALS = """
import importlib, pathlib
from triton.runtime.jit import JITFunction
from zoo.kernels import ops
files = sorted(pathlib.Path(ops.__path__[0]).glob("[!_]*.py")) + sorted(pathlib.Path(ops.__path__[0]).glob("_[!_]*.py"))
modules = [importlib.import_module(f"zoo.kernels.ops.{file.stem}") for file in files]
kernels = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}
for kernel in kernels.values():
    kernel.cache_key
print(len(kernels), sorted({name for kernel in kernels.values() for name, _ in kernel.used_global_vals}))
"""


def test_no_kernel_reads_a_global_which_its_hash_would_hold_or_not() -> None:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", GLOBALS], env=kept, capture_output=True, text=True, check=True)
    count, found = ran.stdout.split(" ", 1)
    assert int(count) > 50
    assert found.strip() == "[]"


def test_what_processes_compile_is_what_is_launched(cache: Path) -> None:
    there = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).parent / "launching.py")]
    found = json.loads(subprocess.run(command, env=kept | there, capture_output=True, text=True, check=True).stdout)
    assert found["ahead"] > 8
    assert {"stem", "depthwise", "squeeze_excite", "depthwise_squeeze", "conv"} <= set(found["ops"])
    assert found["refused"] == []
    assert found["timed"] == []
    assert found["planned"] == []


@pytest.mark.parametrize("merged", [False, True])
def test_a_gate_is_compiled_in_the_type_that_kernels_give_it(merged: bool) -> None:
    graph, places = understand(Gated().eval(), (torch.zeros(SHAPE),), {})
    if merged:
        apply(graph, [merge for merge in merges(graph, places) if merge.node.op == "depthwise_squeeze"], places)
    node = next(node for node in graph.steps() if "gate" in node.roles)
    assert node.inputs[1].op == ("second" if merged else "squeeze_excite")
    light = Task(node, places, SETTING, Candidate("conv")).portable()
    assert [blank.dtype for blank in blanks(light.node, light.places, light.setting)] == [torch.bfloat16, torch.float32]


def test_a_key_says_where_a_map_begins() -> None:
    graph, places = understand(zoo.DenseNet_BC_100_12().eval(), (torch.zeros(1, 3, 32, 32),), {})
    keys: dict[str, set[str]] = {}
    begins: dict[str, set[int]] = {}
    for node in graph.steps():
        if node in places:  # parts of twelve channels
            text = describe(node, places, SETTING)
            keys.setdefault(text, set()).add(Task(node, places, SETTING, Candidate("conv")).key)
            begins.setdefault(text, set()).add(2 * places[node].offset % 16)
    assert max(len(several) for several in begins.values()) == 2
    assert all(len(keys[text]) >= len(begins[text]) for text in keys)


def test_what_trains_convolutions_with_a_bias_can_be_compiled(shared: tuple[Compilers, Path]) -> None:
    command = [sys.executable, "-c", CHAINS]
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    there = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]), "TRITON_CACHE_DIR": str(shared[1])}
    ran = subprocess.run(command, env=kept | there, capture_output=True, text=True, check=True)
    assert int(ran.stdout) > 0


def test_a_key_says_what_follows_and_which_parameters() -> None:
    first = tasks_of(zoo.SqueezeNet1_1, 64)[0]
    others = [replace(first, followed=False), replace(first, candidate=replace(first.candidate, config={"BM": 1}))]
    assert len({first.key, *(other.key for other in others), tasks_of(zoo.SqueezeNet1_1, 96)[0].key}) == 4
    assert replace(first).key == first.key


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
