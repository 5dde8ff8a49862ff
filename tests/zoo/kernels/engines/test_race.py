"""The fastest engine wins: who is disturbed is not dropped for it, and who can't win is not timed again."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.zoo.kernels.engine_networks import NAMES, images
from zoo.kernels.engines import onnxruntime, openvino, race
from zoo.kernels.engines.choose import choose
from zoo.kernels.engines.engine import Plain


@pytest.mark.parametrize(("winner", "kind"), [("openvino", openvino._Requests), ("onnxruntime", onnxruntime._Session), ("eager", Plain)])
def test_the_fastest_engine_wins_even_if_more_than_half_of_its_calls_were_disturbed(
    small: nn.Module, monkeypatch: pytest.MonkeyPatch, winner: str, kind: type
) -> None:
    monkeypatch.setattr(race, "turn", lambda call, example: [0.1, 9.0, 0.1, 9.0, 9.0] if isinstance(call, kind) else [0.15])
    chosen = choose(small, (images(),))
    assert (chosen.name, chosen.copies_weights, bool(chosen.notes)) == (winner, winner != "eager", winner != "eager")
    assert isinstance(chosen.call, kind)
    assert chosen.seconds == {name: 0.1 if name == winner else 0.15 for name in NAMES}


def test_an_engine_that_can_not_win_is_timed_once(small: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(race, "turn", lambda call, example: [0.1 if isinstance(call, onnxruntime._Session | Plain) else 0.21])
    choose(small, (images(),), progress=said.append)
    timed = [text.split(":")[0] for text in said if text.startswith("timing")]
    assert timed == [f"timing {', '.join(NAMES)}"] + ["timing onnxruntime, eager"] * (race.ROUNDS - 1)


class Clock:
    """Calls that take the seconds that they are told to, behind a disturbance that ends at some time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.disturbed = 0.0
        monkeypatch.setattr(race.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(race.time, "sleep", self.rest)

    def rest(self, seconds: float) -> None:
        self.now += seconds

    def call(self, seconds: float, spins: float = 0.0) -> Any:
        def run() -> None:
            self.now += seconds + min(seconds, max(0.0, self.disturbed - self.now))
            self.disturbed = self.now + spins if spins else self.disturbed

        return run


@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.07, 0.5])
def test_calls_that_pay_for_the_engine_before_do_not_count(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    clock = Clock(monkeypatch)
    clock.call(0.1, spins=0.05)()
    times = race.turn(clock.call(seconds), ())
    assert times == pytest.approx([seconds] * len(times))
    assert sum(times) >= race.TURN


def test_a_long_call_counts_at_once_and_of_short_ones_the_first_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert race.turn(clock.call(2.0), ()) == [2.0]
    assert clock.now == 2.0 + race.SETTLE
    clock.disturbed = clock.now + race.SETTLE + 0.01  # what a first call finds
    assert race.turn(clock.call(0.04), ()) == pytest.approx([0.04])


def raced(monkeypatch: pytest.MonkeyPatch, turns: dict[str, list[float]]) -> tuple[dict[str, int], str]:
    """Hold a race between engines whose turns take so long, the last one again and again; return how many turns each had, and who won."""
    clock, had = Clock(monkeypatch), dict.fromkeys(turns, 0)

    def turn(name: str, example: Any) -> list[float]:
        took = turns[name][min(had[name], len(turns[name]) - 1)]
        had[name] += 1
        clock.now += took
        return [took]

    monkeypatch.setattr(race, "turn", turn)
    trial = race.Trial(lambda call, dtype: (0.0, 1.0), lambda text: None)
    trial.calls = {name: name for name in turns}  # type: ignore[assignment]  # `turn` knows them by name
    return had, race.fastest(trial, (), 10.0)[1]


def test_one_disturbed_turn_of_a_long_call_costs_no_engine_the_race(monkeypatch: pytest.MonkeyPatch) -> None:
    had, won = raced(monkeypatch, {"a": [1.3, 1.02], "b": [1.05], "c": [1.1], "d": [1.25], "e": [1.4]})
    assert won == "a"
    assert had["a"] == had["b"] >= race.FEWEST_ROUNDS
    assert (had["d"], had["e"]) == (2, 1)  # half of the time was over


def test_one_that_was_dropped_does_not_win_because_others_slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    had, won = raced(monkeypatch, {"a": [0.1, 0.4], "b": [0.21, 0.1], "c": [0.11, 0.44]})
    assert (had["b"], won) == (1, "a")


def test_where_all_that_were_left_fail_the_network_itself_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    had = {"a": 0, "b": 0, "eager": 0}

    def turn(name: str, example: Any) -> list[float]:
        had[name] += 1
        if name != "eager" and had[name] == 2:
            raise MemoryError("no memory left")
        return [0.9 if name == "eager" else 0.1]

    monkeypatch.setattr(race, "turn", turn)
    trial = race.Trial(lambda call, dtype: (0.0, 1.0), lambda text: None)
    trial.calls = {name: name for name in had}  # type: ignore[assignment]  # `turn` knows them by name
    seconds, won = race.fastest(trial, (), 10.0)
    assert (won, set(seconds)) == ("eager", {"eager"})
    assert trial.refused == dict.fromkeys("ab", "no memory left")
