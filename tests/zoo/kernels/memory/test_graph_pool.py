"""While a graph is captured the allocator's segments grow; what the user told it stays."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from zoo.kernels.memory import graph_pool as module
from zoo.kernels.memory.graph_pool import growing


class Allocator:
    """Keeps what it is told, as PyTorch's does."""

    def __init__(self, settings: str) -> None:
        self.told = [settings]

    def tell(self, settings: str) -> None:
        self.told.append(settings)

    def ask(self) -> str:
        return self.told[-1]


def allocator(monkeypatch: pytest.MonkeyPatch, settings: str, backend: str = "native") -> Allocator:
    made = Allocator(settings)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", made.ask, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.tell)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(module.sys, "platform", "linux")
    return made


@pytest.mark.parametrize("settings", ["", "max_split_size_mb:64"])
def test_segments_grow_in_the_body_alone(monkeypatch: pytest.MonkeyPatch, settings: str) -> None:
    made = allocator(monkeypatch, settings)
    with growing():
        assert set(made.ask().split(",")) == {"expandable_segments:True", *filter(None, [settings])}
        with growing():  # a capture within another one's
            pass
        assert "expandable_segments:True" in made.ask()
    assert "expandable_segments:False" in made.told[-2]
    assert made.ask() == settings


def test_settings_that_end_with_a_comma_are_told_without_and_put_back_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = allocator(monkeypatch, "max_split_size_mb:64,")
    with growing():
        assert made.ask() == "max_split_size_mb:64,expandable_segments:True"
    assert made.ask() == "max_split_size_mb:64,"


def test_an_allocator_that_refuses_costs_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    made = allocator(monkeypatch, "")

    def refuses(settings: str) -> None:
        if settings.endswith("True"):
            raise ValueError(settings)
        made.tell(settings)

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuses)
    with growing():
        pass
    assert made.ask() == ""


def test_nothing_is_told_where_segments_are_to_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made = allocator(monkeypatch, "")
    with growing(False):
        assert made.told == [""]
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(module._turn.acquire, False).result()  # nor by anybody else meanwhile
    assert made.told == [""]


def test_an_error_puts_the_settings_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made = allocator(monkeypatch, "")
    with pytest.raises(RuntimeError), growing():
        raise RuntimeError
    assert made.ask() == ""


@pytest.mark.parametrize(
    ("settings", "backend"),
    [("expandable_segments:False", "native"), ("expandable_segments:True", "native"), ("", "cudaMallocAsync")],
)
def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch, settings: str, backend: str) -> None:
    made = allocator(monkeypatch, settings, backend)
    with growing():
        assert made.told == [settings]


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this PyTorch tells its settings in a snapshot alone"
)
def test_pytorch_itself_takes_the_settings() -> None:
    ask, tell = torch._C._accelerator_getAllocatorSettings, torch._C._accelerator_setAllocatorSettings
    before = ask()
    tell(module._joined(before, "True"))
    assert ask().endswith("expandable_segments:True")
    tell(module._joined(before, "False"))
    tell(before)
    assert ask() == before


def test_an_older_pytorch_is_asked_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    made = allocator(monkeypatch, "max_split_size_mb:64")
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": made.ask()}})
    with growing():
        assert made.ask() == "max_split_size_mb:64,expandable_segments:True"
    assert made.ask() == "max_split_size_mb:64"


@pytest.mark.gpu
def test_a_captured_step_keeps_little_more_than_what_lives_at_once() -> None:
    """Maps of many sizes: segments of one size each would stay beside each other."""

    def work(scale: int) -> torch.Tensor:
        kept = []
        for i in range(12):
            big = torch.ones(scale * (12 - i), 1 << 20, device="cuda")
            kept.append(big.mean(1))
            del big
        return torch.cat(kept)

    def pool() -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))

    def captured() -> int:
        graph, before = torch.cuda.CUDAGraph(), pool()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for scale in (1, 2, 4):
                work(scale)
        held = pool() - before
        graph.reset()
        return held

    work(1)
    plain = captured()
    with growing():
        tight = captured()
    largest = 48 << 22  # the largest map, 48 x 2^20 float32
    assert tight <= 1.3 * largest
    assert tight < plain  # by how much is the allocator's luck
