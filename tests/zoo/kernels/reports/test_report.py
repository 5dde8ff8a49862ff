"""A plan's report says what each op wins, and what it saves over PyTorch's own operators."""

from __future__ import annotations

import torch

from zoo import ResNet20, fast, why
from zoo.kernels.comparing.parity import Parity
from zoo.kernels.reports.report import PlanReport, Report, Row

SHAPE = (1, 8, 4, 4)


def test_rows_are_summed_up_by_op_and_the_one_that_saves_most_comes_first() -> None:
    rows = [
        Row("a", 'conv {"block_m":64}', SHAPE, 10.0, 12.0),
        Row("b", "aten", SHAPE, 7.0, 7.0),
        Row("c", "join", SHAPE, 5.0, 20.0),
        Row("d", 'conv {"block_m":128}', SHAPE, 1.0, 2.0),
    ]
    report = PlanReport([SHAPE], rows)
    found = report.by_op()
    assert list(found) == ["join", "conv", "aten"]
    assert found["conv"] == {"steps": 2, "us": 11.0, "pytorch_us": 14.0}
    assert found["aten"] == {"steps": 1, "us": 7.0, "pytorch_us": 7.0}
    assert sum(one["us"] for one in found.values()) == report.us
    assert sum(one["pytorch_us"] for one in found.values()) == report.replaced_us


def test_what_was_not_timed_counts_as_a_step_and_takes_no_time() -> None:
    rows = [Row("a", "conv", SHAPE), Row("b", "conv", SHAPE, 3.0, 4.0), Row("c", "pool", SHAPE), Row("d", "pool", SHAPE, 3.0)]
    assert PlanReport([SHAPE], rows).by_op() == {
        "conv": {"steps": 2, "us": 3.0, "pytorch_us": 4.0},
        "pool": {"steps": 2, "us": None, "pytorch_us": None},
    }
    assert PlanReport([SHAPE]).by_op() == {}


def test_on_a_cpu_the_engine_wins_the_whole_network() -> None:
    model = fast(ResNet20().eval(), "cpu", example=torch.zeros(1, 3, 32, 32), tune="none", progress=False)
    (plan,) = why(model).plans
    assert plan.by_op() == {plan.rows[0].kernel: {"steps": 1, "us": plan.rows[0].us, "pytorch_us": plan.rows[0].replaced_us}}


def test_an_error_that_a_note_tells_is_told_once() -> None:
    worst, other = Parity(0.02, 0.01, 2), Parity(0.001, 0.01, 2)
    for notes, times in ((["outputs: " + str(other), "gradients: " + str(worst)], 1), ([], 1), (["a note"], 1)):
        said = str(Report([PlanReport([SHAPE], [], worst, notes)], "", "cpu", "float32"))
        assert " ".join(said.split()).count("2.00e-02") == times
