"""Which steps give way where a plan is not right enough."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zoo.kernels.plans import proving
from zoo.kernels.tuning.steps import ATEN, Candidate


class Steps:
    """A plan of steps by name, with its error on the whole and that of each step; what probing it cost is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, needed: int, bad: tuple[str, ...] = ()) -> None:
        self.names: list[Any] = [f"step {i}" for i in range(count)]
        self.needed, self.bad = needed, bad
        self.decision: Any = SimpleNamespace(chosen={name: Candidate("conv") for name in self.names}, found={}, keys={})
        self.rounds = self.probes = 0
        monkeypatch.setattr(proving, "Program", lambda *args, **options: None)
        monkeypatch.setattr(proving, "Plan", lambda program: SimpleNamespace(eager=lambda tensors: []))
        monkeypatch.setattr(proving, "_by_error", self.by_error)

    @property
    def left(self) -> list[str]:
        return [name for name in self.names if self.decision.chosen[name].op != ATEN]

    def by_error(self, *_: Any) -> tuple[list[tuple[Any, str]], list[tuple[Any, str]]]:
        self.probes += 1
        bad = [name for name in self.left if name in self.bad]
        return [(name, "wrong") for name in bad], [(name, "as ATen's") for name in self.left if name not in bad]

    def compare(self, _: Any) -> Any:
        self.rounds += 1
        right = len(self.names) - len(self.left) >= self.needed and not set(self.left) & set(self.bad)
        return SimpleNamespace(passes=lambda: right)

    def checked(self) -> dict[Any, str]:
        given: Any = SimpleNamespace(save=lambda: None)
        reference: Any = SimpleNamespace(compare=self.compare)
        return proving.checked(None, {}, self.decision, None, None, given, [((), {})], reference)[2]  # pyright: ignore[reportArgumentType]


def test_steps_as_right_as_pytorchs_give_way_twice_as_many_each_round_and_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, count=100, needed=60)
    notes = steps.checked()
    assert (steps.rounds, steps.probes, len(notes)) == (7, 1, 63)
    assert steps.left == steps.names[63:]


def test_wrong_steps_give_way_first_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, count=10, needed=0, bad=("step 3", "step 7"))
    assert set(steps.checked()) == {"step 3", "step 7"}
    assert (steps.rounds, steps.probes) == (2, 1)


def test_a_plan_that_no_step_makes_right_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, count=5, needed=6)
    with pytest.raises(proving.Unlike, match="does not reproduce it"):
        steps.checked()
    assert not steps.left
