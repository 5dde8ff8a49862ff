"""What may compete for a step."""

from __future__ import annotations

import pytest
import torch

from zoo.kernels.passes.graph import Node
from zoo.kernels.tuning import contest
from zoo.kernels.tuning.contest import _unseen
from zoo.kernels.tuning.steps import Candidate, Setting


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_error_that_doesnt_matter_is_smaller_than_what_rounding_one_output_makes(dtype: torch.dtype) -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    rounding = float((x.to(dtype).float() - x).norm() / x.norm())
    assert 0 < _unseen(dtype) < rounding / 2


def test_nothing_is_late_without_a_limit_and_each_share_of_the_steps_has_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(contest.time, "monotonic", lambda: now)
    free, bound = contest._Schedule(10, None), contest._Schedule(10, 40.0)
    now = 120.0  # compiled
    for schedule in (free, bound):
        schedule.begin()
    for late, done, allowed in (
        (121.9, 0, True),
        (122.1, 0, False),
        (129.0, 4, True),
        (133.0, 5, False),
        (139.9, 10, True),
        (141.0, 10, False),
    ):
        now = late
        assert bound.is_late(done) != allowed
        assert not free.is_late(done)


def test_of_a_late_step_the_best_guess_of_each_op_is_timed() -> None:
    several = [Candidate("conv", {"a": 1}), Candidate("conv", {"a": 2}), Candidate("cudnn_graph", {"plan": 0}), Candidate("cudnn_conv")]
    assert [one.config for one in contest._first_of_each(several)] == [{"a": 1}, {"plan": 0}, {}]


def test_of_a_late_step_nothing_is_tried_that_a_library_compiles_where_there_is_anything_else() -> None:
    plans = [Candidate("cudnn_graph", {"plan": plan}, plan < 2) for plan in range(4)]
    assert [(one.op, one.config) for one in contest._quickest([*plans, Candidate("conv", {"a": 1}), Candidate("conv", {"a": 2})])] == [
        ("cudnn_graph", {"plan": 2}),
        ("conv", {"a": 1}),
    ]
    assert [one.config for one in contest._quickest(plans[:2])] == [{"plan": 0}]


def test_memory_beside_the_arena_decides_between_equals() -> None:
    setting = Setting(torch.device("cpu"), torch.bfloat16)
    small, middle, large = (Node("conv", [], {}, (n, 64, 56, 56), torch.float32) for n in (1, 256, 512))
    assert contest._beside("conv", small, setting) == contest._beside("cudnn_graph", large, setting) == 1.0
    assert 1.0 < contest._beside("cudnn_conv", middle, setting) < 1.05 < contest._beside("cudnn_conv", small, setting) < 1.1
    assert contest._beside("cudnn_conv", large, setting) == contest._beside("cublaslt", large, setting)
    assert (
        contest._beside("cublaslt", large, setting)
        < contest._beside("cublaslt", middle, setting)
        < 1.2
        < contest._beside("cublaslt", small, setting)
    )
