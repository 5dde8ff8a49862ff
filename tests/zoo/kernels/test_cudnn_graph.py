"""cuDNN's graphs: one handle for all threads, and few of those plans whose kernels cuDNN compiles itself; by a front end that is none."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zoo.kernels.ops import cudnn_graph
from zoo.kernels.tuning import candidates


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Pretend that cuDNN is there; returns of which handles which streams were set."""
    made, told = iter(range(100)), list[tuple[int, int]]()
    front = SimpleNamespace(create_handle=lambda: next(made), set_stream=lambda handle, stream: told.append((handle, stream)))
    monkeypatch.setitem(sys.modules, "cudnn", front)
    monkeypatch.setattr(cudnn_graph, "_HANDLES", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=threading.get_ident()))
    return told


def test_threads_share_a_devices_handle_one_at_a_time_on_their_own_streams(handles: list[tuple[int, int]]) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    inside, most = 0, 0

    def use(number: int) -> Any:
        nonlocal inside, most
        with cudnn_graph._handle(first) as handle:
            assert handles[-1] == (handle, threading.get_ident())
            inside += 1
            most = max(most, inside)
            time.sleep(0.002)
            inside -= 1
        return handle

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(use, range(32)))) == 1
    assert most == 1
    with cudnn_graph._handle(second) as other, cudnn_graph._handle(first) as one:
        assert other != one


def test_a_handle_is_free_again_when_its_thread_fails(handles: list[tuple[int, int]]) -> None:
    device = torch.device("cuda", 0)

    def fail() -> None:
        with contextlib.suppress(RuntimeError), cudnn_graph._handle(device):
            raise RuntimeError

    threading.Thread(target=fail).start()
    acquired = threading.Event()

    def use() -> None:
        with cudnn_graph._handle(device):
            acquired.set()

    threading.Thread(target=use, daemon=True).start()
    assert acquired.wait(10)


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
def test_quick_tries_few_plans_that_a_library_compiles(compiled: tuple[int, ...], limit: int | None, tried: list[int]) -> None:
    module = SimpleNamespace(compiles=lambda config, x: config["plan"] in compiled)
    found = candidates._affordable(module, [{"plan": plan} for plan in range(6)], {"x": None}, limit)
    assert [config["plan"] for config in found] == tried


def test_off_the_gpu_nothing_is_said_to_be_compiled() -> None:
    x, weight = torch.empty(1, 8, 4, 4), torch.empty(8, 8, 1, 1)
    assert cudnn_graph.configs(x, weight, act="silu") == [{"plan": 0}]
    assert not cudnn_graph.compiles({"plan": 0}, x, weight, act="silu")


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("cudnn") is None, reason="nvidia-cudnn-frontend is not installed")
def test_cudnn_compiles_for_silu_and_not_for_relu() -> None:
    x = torch.empty(8, 64, 28, 28, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight = torch.empty(64, 64, 1, 1, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    bias = torch.empty(64, device="cuda", dtype=torch.bfloat16)

    def share(act: str) -> float:
        plans = cudnn_graph.configs(x, weight, bias, act=act)
        return sum(cudnn_graph.compiles(plan, x, weight, bias, act=act) for plan in plans) / len(plans)

    assert share("silu") == 1
    assert share("relu") < 1
    assert len(cudnn_graph._HANDLES) == 1
