"""Random networks through trace, lower, fold, fuse, place and merge give what they gave in eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from tests.zoo.kernels.networks import Op, Random, ops
from zoo.kernels.passes.merge import Merge, apply, merges
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.steps import Setting

HEADS = ["mean", "flat", "map"]
CPU = Setting(torch.device("cpu"), torch.float64)


drawings = given(
    drawn=ops(),
    channels=st.sampled_from([1, 3, 4]),
    size=st.integers(5, 12),
    head=st.sampled_from(HEADS),
    seed=st.integers(0, 99),
    merging=st.integers(0, 3),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@drawings
def test_random_networks_compute_the_same_after_the_passes(**drawn: Any) -> None:
    compare(**drawn)


@pytest.mark.long
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@drawings
def test_more_random_networks_compute_the_same(**drawn: Any) -> None:
    compare(**drawn)


def compare(drawn: list[Op], channels: int, size: int, head: str, seed: int, merging: int) -> None:
    network = Random(drawn, channels, size, head, seed).double()
    x = torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(seed)).double()
    with torch.no_grad():
        graph, places = understand(network, (x,), {})
        possible = merges(graph, places)
        apply(graph, _some(possible, merging, graph.nodes), places)
        outputs = Program(graph, places, {}, CPU, Weights()).run([[x.contiguous(memory_format=torch.channels_last)]])
        result, expected = pytree.tree_unflatten(outputs, graph.spec), network(x)
    assert pytree.tree_structure(result) == pytree.tree_structure(expected)
    for got, want in zip(pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # folded biases and BatchNorm prologues are kept in float32


def _some(possible: list[Merge], merging: int, nodes: list[object]) -> list[Merge]:
    """Choose merges that don't overlap, others for another `merging`; none for 0."""
    taken: set[object] = set()
    chosen = []
    for merge in (possible, possible, possible[::-1], possible[1::2])[merging] if merging else ():
        if not taken.intersection(merge.parts):
            taken.update(merge.parts)
            chosen.append(merge)
    return sorted(chosen, key=lambda merge: nodes.index(merge.value))
