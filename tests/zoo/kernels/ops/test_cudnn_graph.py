"""cuDNN's graphs: one handle for all threads, and few of those plans whose kernels cuDNN compiles itself; by a front end that is none."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from zoo.kernels.ops import _cudnn, cudnn_graph
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.tuning import candidates
from zoo.kernels.tuning.binding import blanks
from zoo.kernels.tuning.steps import Setting

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class NotSupported(Exception):
    """The front end's own."""


class Value:
    """A tensor of a graph."""

    def _same(self, _: Any) -> Value:
        return self

    set_output = set_data_type = set_dim = set_stride = _same


class Front:
    """What is asked of the front end, answered without a GPU: plans 0 to 5, of which the odd ones are compiled late."""

    cudnnGraphNotSupportedError = NotSupported  # noqa: N815 (its name there)
    data_type = SimpleNamespace(BFLOAT16=1, FLOAT=2)
    heur_mode = SimpleNamespace(A=1, B=2, FALLBACK=3)
    behavior_note = SimpleNamespace(RUNTIME_COMPILATION="compiled late")

    def __init__(self) -> None:
        self.handles, self.told, self.asked, self.done = 0, list[tuple[int, int]](), 0, list[tuple[int, int, bool]]()
        self.refuses, self.refuses_streams = False, False

    def create_handle(self) -> int:
        self.handles += 1
        return self.handles

    def set_stream(self, handle: int, stream: int) -> None:
        if self.refuses_streams:
            raise ValueError("no such stream")
        self.told.append((handle, stream))

    def pygraph(self, handle: int, **_: Any) -> Any:
        front = self
        self.asked += 1

        def check_support() -> None:
            if front.refuses:
                raise NotSupported("no engine")

        def execute(pack: Any, workspace: Tensor, index: int, handle: int) -> None:
            front.done.append((index, handle, _cudnn.USING._is_owned()))  # pyright: ignore[reportAttributeAccessIssue]

        return SimpleNamespace(
            tensor=lambda **_: Value(),
            conv_fprop=lambda **_: Value(),
            swish=lambda **_: Value(),
            validate=lambda: None,
            build_operation_graph=lambda: None,
            create_execution_plans=lambda _: None,
            check_support=check_support,
            get_execution_plan_count=lambda: 6,
            get_plan_name_at_index=lambda index: f"engine {index}",
            get_behavior_notes_for_plan_at_index=lambda index: ["compiled late"] * (index % 2),
            build_plan_at_index=lambda index: None,
            get_workspace_size_plan_at_index=lambda index: 0,
            execute_plan_at_index=execute,
        )


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Front:
    """Pretend that cuDNN is there."""
    made = Front()
    monkeypatch.setitem(sys.modules, "cudnn", made)
    monkeypatch.setattr(_cudnn, "HANDLES", {})
    monkeypatch.setattr(_cudnn, "GRAPHS", {})
    monkeypatch.setattr(_cudnn, "installed", lambda: True)
    monkeypatch.setattr(_cudnn, "aligned", lambda _: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=threading.get_ident()))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return made


@pytest.fixture
def maps() -> Iterator[tuple[Tensor, Tensor]]:
    """A map and a weight on a GPU that is not there."""
    with FakeTensorMode():
        x, weight = (torch.empty(size, dtype=torch.bfloat16, device=FIRST) for size in ((2, 8, 4, 4), (8, 8, 1, 1)))
        yield x.contiguous(memory_format=torch.channels_last), weight.contiguous(memory_format=torch.channels_last)


def test_threads_share_a_devices_handle_one_at_a_time_on_their_own_streams(front: Front) -> None:
    inside, most = 0, 0

    def use(number: int) -> Any:
        nonlocal inside, most
        with _cudnn.handle(FIRST) as handle:
            assert front.told[-1] == (handle, threading.get_ident())
            inside += 1
            most = max(most, inside)
            time.sleep(0.002)
            inside -= 1
        return handle

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(use, range(32))) == {1}
    assert most == 1
    with _cudnn.handle(SECOND) as other, _cudnn.handle(FIRST) as one:
        assert other != one


@pytest.mark.parametrize("before", [False, True])
def test_a_handle_is_free_again_when_its_thread_fails(front: Front, before: bool) -> None:
    def fail() -> None:
        front.refuses_streams = before
        with contextlib.suppress(ValueError), _cudnn.handle(FIRST):
            raise ValueError
        front.refuses_streams = False

    failing = threading.Thread(target=fail)
    failing.start()
    failing.join()
    acquired = threading.Event()

    def use() -> None:
        with _cudnn.handle(FIRST):
            acquired.set()

    threading.Thread(target=use, daemon=True).start()
    assert acquired.wait(10)


def test_a_plan_is_executed_by_who_holds_the_handle(front: Front, maps: tuple[Tensor, Tensor]) -> None:
    cudnn_graph.launch(*maps, act="silu", config={"plan": 3})
    assert front.done == [(3, 1, True)]


def test_what_cudnn_compiles_late_is_read_off_its_notes(front: Front, maps: tuple[Tensor, Tensor]) -> None:
    plans = cudnn_graph.configs(*maps, act="silu")
    assert [plan["plan"] for plan in plans] == [0, 1, 2, 3, 4, 5]
    assert cudnn_graph.compiled_late(plans, *maps, act="silu") == [{"plan": 1}, {"plan": 3}, {"plan": 5}]
    assert front.asked == 1


def test_a_graph_that_cudnn_refuses_is_a_guess_that_fails_and_is_asked_for_once(front: Front, maps: tuple[Tensor, Tensor]) -> None:
    front.refuses = True
    assert cudnn_graph.configs(*maps, act="silu") == [{"plan": 0}]
    assert cudnn_graph.compiled_late([{"plan": 0}], *maps, act="silu") == []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cuDNN has no plan for this graph: no engine"):
            cudnn_graph.launch(*maps, act="silu")
    assert front.asked == 1
    (kept,) = _cudnn.GRAPHS.values()
    assert isinstance(kept, RuntimeError)
    assert kept.__traceback__ is None  # whose frames hold maps


@pytest.mark.parametrize(
    ("compiled", "limit", "tried"),
    [
        ((), 4, [0, 1, 2, 3]),
        ((0, 1, 2, 3, 4, 5), 4, [0, 1]),
        ((1, 2, 4), 4, [0, 1, 2, 3]),
        ((0, 1, 2, 3), 4, [0, 1, 4, 5]),
        ((0, 1, 2, 3), None, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_quick_tries_few_plans_that_a_library_compiles(
    compiled: tuple[int, ...], limit: int | None, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_graph, "supports", lambda *args, **options: "")
    monkeypatch.setattr(cudnn_graph, "configs", lambda *args, **options: [{"plan": plan} for plan in range(6)])
    monkeypatch.setattr(cudnn_graph, "compiled_late", lambda tried, *args, **options: [one for one in tried if one["plan"] in compiled])
    graph, places = understand(nn.Sequential(nn.Conv2d(8, 8, 3), nn.SiLU()).eval(), (torch.empty(1, 8, 6, 6),), {}, torch.device("cpu"))
    node, setting = next(graph.steps()), Setting(torch.device("cpu"), torch.bfloat16)
    found = [one for one in candidates.candidates(node, blanks(node, places, setting), setting, limit) if one.op == "cudnn_graph"]
    assert [one.config["plan"] for one in found] == tried
    assert [one.compiles for one in found] == [limit is not None and plan in compiled for plan in tried]


def test_off_the_gpu_nothing_is_said_to_be_compiled() -> None:
    x, weight = torch.empty(1, 8, 4, 4), torch.empty(8, 8, 1, 1)
    assert cudnn_graph.configs(x, weight, act="silu") == [{"plan": 0}]
    assert cudnn_graph.compiled_late([{"plan": 0}], x, weight, act="silu") == []


@pytest.mark.gpu
@pytest.mark.cudnn
def test_cudnn_compiles_for_silu_and_not_for_relu() -> None:
    x = torch.empty(8, 64, 28, 28, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight = torch.empty(64, 64, 1, 1, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    bias = torch.empty(64, device="cuda", dtype=torch.bfloat16)

    def share(act: str) -> float:
        plans = cudnn_graph.configs(x, weight, bias, act=act)
        return len(cudnn_graph.compiled_late(plans, x, weight, bias, act=act)) / len(plans)

    assert share("silu") == 1
    assert share("relu") < 1


@pytest.mark.gpu
@pytest.mark.cudnn
def test_many_threads_compute_by_one_handle_on_streams_of_their_own() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    draw = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    maps = [torch.randn(4, 64, 14, 14, **draw).contiguous(memory_format=torch.channels_last) for _ in range(16)]
    weight = torch.randn(64, 64, 3, 3, **draw).contiguous(memory_format=torch.channels_last)
    torch.cuda.synchronize()

    def compute(x: Tensor) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            y = cudnn_graph.launch(x, weight, padding=(1, 1, 1, 1), act="relu")
            torch.cuda.current_stream().synchronize()
        return y

    with ThreadPoolExecutor(8) as pool:
        for x, y in zip(maps, pool.map(compute, maps), strict=True):
            expected = cudnn_graph.reference(x, weight, padding=(1, 1, 1, 1), act="relu")
            torch.testing.assert_close(y.float(), expected.float(), rtol=2e-2, atol=0.3)
