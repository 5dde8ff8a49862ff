"""A plan against PyTorch's compiler, on the whole: who is right and faster is served, and it is remembered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.kernels.comparing.parity import Parity
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans import contest
from zoo.kernels.plans.rival import _fold, with_own_code
from zoo.kernels.reports.report import PlanReport, Row
from zoo.kernels.tuning.choices import Choices
from zoo.kernels.tuning.steps import Setting

CPU = torch.device("cpu")
RIGHT, WRONG = Parity(1e-3, 1e-3, 16), Parity(1.0, 1e-3, 16)


class Rival:
    """What the compiler made."""

    outputs = (torch.zeros(2, 5),)

    def __init__(self, *_: Any) -> None: ...


def decided(
    monkeypatch: pytest.MonkeyPatch,
    choices: Choices,
    *,
    tune: Any = "quick",
    plan_us: float = 100.0,
    rival_us: float = 90.0,
    replaced_us: float = 150.0,
    parity: Parity = RIGHT,
    fails: bool = False,
    before: bool = False,
    kernel: str = "conv",
) -> tuple[Any, PlanReport, list[str]]:
    asked: list[str] = []

    def make(*_: Any) -> Rival:
        asked.append("compiled")
        if fails:
            raise RuntimeError("no such operator\nand more")
        return Rival()

    monkeypatch.setattr(contest, "Compiled", make)
    monkeypatch.setattr(contest, "parity", lambda *_: parity)
    monkeypatch.setattr(contest, "race", lambda *_: (plan_us, rival_us))
    monkeypatch.setattr(contest, "event_time_us", lambda *_, **__: plan_us)
    report = PlanReport([(2, 3)], [Row("conv", kernel, (2, 5), plan_us, replaced_us)], RIGHT)
    options: Any = SimpleNamespace(device=CPU, dtype=torch.bfloat16, tf32=False, tune=tune)
    whole = contest.Whole(
        nn.Linear(3, 5),
        ((torch.zeros(2, 3),), {}),
        [torch.float32],
        [((torch.zeros(2, 3),), {})],
        None,  # pyright: ignore[reportArgumentType]
        options,
        choices,
        "whole",
    )
    if before:
        found = contest.remembered(whole)
        return (None, report, asked) if found is None else (*found, asked)
    served = contest.contested(lambda tensors: tensors, report, whole)  # pyright: ignore[reportArgumentType]
    return served, report, asked


@pytest.fixture
def choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Choices:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    return Choices(CPU)


def test_the_faster_one_is_served_and_named(monkeypatch: pytest.MonkeyPatch, choices: Choices) -> None:
    served, report, _ = decided(monkeypatch, choices)
    assert isinstance(served, Rival)
    assert [row.kernel for row in report.rows] == ["torch.compile"]
    assert "90.0" in str(report.us)
    assert "faster on the whole" in report.notes[0]
    assert Choices(CPU).get("whole") is not None  # for the next process


@pytest.mark.parametrize(("rival_us", "parity"), [(99.0, RIGHT), (120.0, RIGHT), (50.0, WRONG)])
def test_a_plan_stays_where_the_compiler_is_no_faster_or_wrong(
    monkeypatch: pytest.MonkeyPatch, choices: Choices, rival_us: float, parity: Parity
) -> None:
    served, report, _ = decided(monkeypatch, choices, rival_us=rival_us, parity=parity)
    assert served is None
    assert [row.kernel for row in report.rows] == ["conv"]
    again, _, asked = decided(monkeypatch, choices, rival_us=1.0)
    assert (again, asked) == (None, [])  # it is known
    _, _, asked = decided(monkeypatch, choices, tune="full")
    assert asked  # but full tuning asks once more


def test_no_compiler_is_asked_where_a_plan_is_far_ahead_or_nothing_is_tuned(monkeypatch: pytest.MonkeyPatch, choices: Choices) -> None:
    assert decided(monkeypatch, choices, replaced_us=500.0)[2] == []
    assert decided(monkeypatch, choices, tune="none")[2] == []
    assert decided(monkeypatch, choices, replaced_us=float("inf"))[2] == ["compiled"]  # nothing is known of a step


@pytest.mark.parametrize("kernel", ['pool {"block":128}', "pointwise", "layer_norm"])
def test_being_far_ahead_of_operators_that_a_compiler_fuses_says_nothing(
    monkeypatch: pytest.MonkeyPatch, choices: Choices, kernel: str
) -> None:
    assert decided(monkeypatch, choices, replaced_us=5_000.0, kernel=kernel)[2] == ["compiled"]


def test_a_compiler_that_fails_leaves_the_plan_and_is_told(monkeypatch: pytest.MonkeyPatch, choices: Choices) -> None:
    served, report, _ = decided(monkeypatch, choices, fails=True)
    assert served is None
    assert report.notes == ["PyTorch's compiler could not take the whole network: RuntimeError: no such operator"]


def test_what_won_is_known_without_tuning(monkeypatch: pytest.MonkeyPatch, choices: Choices) -> None:
    decided(monkeypatch, choices)
    served, _, asked = decided(monkeypatch, choices, tune="none")
    assert isinstance(served, Rival)
    assert asked
    found = choices.get("whole")
    assert found is not None
    assert found.level == "quick"


def network(act: nn.Module, channels: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), act).eval()


def test_a_key_tells_networks_shapes_and_dtypes_apart() -> None:
    def key(made: nn.Module, side: int = 8, dtype: torch.dtype = torch.bfloat16) -> str:
        return contest.key(understand(made, (torch.zeros(1, 3, side, side),), {}, CPU)[0], Setting(CPU, dtype))

    keys = [key(network(nn.ReLU())), key(network(nn.SiLU())), key(network(nn.ReLU(), 5)), key(network(nn.ReLU()), 9)]
    keys.append(key(network(nn.ReLU()), dtype=torch.float16))
    assert len(set(keys)) == len(keys)
    assert key(network(nn.ReLU())) == keys[0]


class Branching(nn.Module):
    """A convolution whose output is normalised and read beside that, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.twice, self.other = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.twice(self.twice(self.norm(self.one(x)))))


def test_batch_norms_are_folded_where_each_is_called_once() -> None:
    made, x = Branching().eval(), torch.randn(2, 3, 4, 4)
    for norm in (made.norm, made.other):
        norm.running_mean, norm.running_var = torch.randn(3), torch.rand(3) + 0.5
    expected = made(x)
    answered = _fold(made, lambda: made(x))
    torch.testing.assert_close(answered, expected)
    assert isinstance(made.norm, nn.Identity)
    assert isinstance(made.other, nn.BatchNorm2d)
    torch.testing.assert_close(made(x), expected)


def test_nothing_is_folded_through_what_was_written_in_place_or_has_no_statistics() -> None:
    in_place = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True), nn.BatchNorm2d(3)).eval()
    alone = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)).eval()
    x = torch.randn(2, 3, 4, 4)
    for made in (in_place, alone):
        expected = made(x)
        _fold(made, lambda made=made: made(x))
        torch.testing.assert_close(made(x), expected)


def test_each_network_is_compiled_as_if_it_were_the_first() -> None:
    def call(x: Tensor) -> Tensor:
        return x + 1

    codes = {id(with_own_code(call).__code__) for _ in range(3)}
    assert id(call.__code__) not in codes
    assert with_own_code(call)(torch.ones(())) == 2


def test_networks_that_differ_between_kernels_alone_have_keys_of_their_own() -> None:
    class Middle(nn.Module):
        def __init__(self, waves: bool) -> None:
            super().__init__()
            self.first, self.last, self.waves = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1), waves

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(torch.sin(x) * torch.exp(x) if self.waves else torch.cos(x) * torch.exp(x))

    graphs = [understand(Middle(waves).eval(), (torch.zeros(1, 3, 4, 4),), {}, CPU, islands=True)[0] for waves in (True, False)]
    assert len({contest.key(graph, Setting(CPU, torch.bfloat16)) for graph in graphs}) == 2


def test_what_won_before_is_built_without_a_plan(monkeypatch: pytest.MonkeyPatch, choices: Choices) -> None:
    assert decided(monkeypatch, choices, before=True)[::2] == (None, [])  # nothing is known
    decided(monkeypatch, choices)
    served, report, asked = decided(monkeypatch, choices, before=True, tune="none")
    assert isinstance(served, Rival)
    assert asked == ["compiled"]
    assert [(row.op, row.us, row.replaced_us) for row in report.rows] == [("torch.compile", 90.0, 100.0)]
    assert decided(monkeypatch, choices, before=True, tune="full")[::2] == (None, [])  # full tuning asks once more
    assert decided(monkeypatch, choices, before=True, fails=True)[0] is None
    assert decided(monkeypatch, choices, before=True, parity=WRONG)[0] is None
