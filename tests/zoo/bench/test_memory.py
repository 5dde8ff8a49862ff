"""What a way takes is what it holds and what a call needs, whoever has multiplied before it."""

from __future__ import annotations

import pytest
import torch

from zoo.bench.clock import Memory
from zoo.kernels.memory.workspaces import clear_workspaces

pytestmark = pytest.mark.gpu

MIB = 2**20


def product() -> None:
    matrix = torch.ones(64, 64, device="cuda")
    torch.mm(matrix, matrix)


def test_cublas_workspaces_are_nobodys() -> None:
    product()
    with torch.cuda.stream(torch.cuda.Stream()):
        product()
    cleared = Memory(torch.device("cuda", 0))
    clear_workspaces()
    assert abs(cleared.peak_mib(lambda: None) or 0) < 0.1
    clear_workspaces()
    made = Memory(torch.device("cuda", 0))
    with torch.cuda.stream(torch.cuda.Stream()):
        product()
    assert abs(made.peak_mib(product) or 0) < 0.1


def test_tensors_pools_and_peaks_count() -> None:
    memory = Memory(torch.device("cuda", 0))
    held = torch.zeros(8 * MIB, dtype=torch.uint8, device="cuda")
    assert memory.peak_mib(lambda: None) == pytest.approx(8, abs=0.1)
    assert memory.peak_mib(lambda: torch.zeros(24 * MIB, dtype=torch.uint8, device="cuda")) == pytest.approx(32, abs=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    assert memory.peak_mib(graph.replay) == pytest.approx(8 + 64, abs=0.1)
    del held
