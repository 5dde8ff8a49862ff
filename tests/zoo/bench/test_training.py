"""`zoo bench --what train`: a way counts when its first step is right, ours is put over the fastest peer, and the page says how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import zoo
from zoo.bench import inference, page, training
from zoo.bench.cell import Plan
from zoo.bench.clock import Clock
from zoo.bench.learner import Learner
from zoo.bench.peers import MODULE, OURS, TRAINING, Way, select
from zoo.bench.record import Record, trains
from zoo.bench.training import measure_cell
from zoo.commands.app import main

CPU = torch.device("cpu")
TINY = zoo.CATALOGUE["ResNet20"]


def watch(**samples: list[float]) -> Clock:
    def timed(calls: Any, rounds: int) -> dict[str, list[float]]:
        return {name: samples[name] for name in calls}

    return Clock(timed, timed)


def plan(*ways: Way, dtype: torch.dtype = torch.float32) -> Plan:
    return Plan([TINY], [2], ways, CPU, dtype, rounds=3, what="train")


def way(name: str, build: Callable[[Learner, str], Callable[[], Tensor]] | None = None) -> Way:
    return TRAINING[name] if build is None else Way(name, name, name, cast(Any, build))


def lazy(learner: Learner, tune: str) -> Callable[[], Tensor]:
    """Learns at half the rate."""
    learner.optimizer.param_groups[0]["lr"] /= 2
    return lambda: learner.step(learner.network)


@pytest.fixture(scope="module")
def cell() -> dict[str, Any]:
    ways = (way(OURS), way(MODULE), way("eager-cl"), way("lazy", lazy))
    times = watch(**{OURS: [40.0, 50.0, 60.0], MODULE: [60.0], "eager-cl": [100.0]})
    return measure_cell(plan(*ways), TINY, 2, times)


def test_figures_are_ours_over_the_fastest_peer_and_our_own_other_way_is_none(cell: dict[str, Any]) -> None:
    assert cell["ways"][OURS]["images_s"] == pytest.approx(2 / 50e-6)
    assert (cell["ways"][OURS]["us_low"], cell["ways"][OURS]["us_high"]) == (42.0, 58.0)
    assert cell["fastest_peer"] == "eager-cl"
    assert cell["ratio"] == pytest.approx(2.0)
    assert all(cell["ways"][name]["error"] <= training.EXACT_LIMIT for name in (OURS, MODULE, "eager-cl"))


def test_ours_says_which_op_wins_which_steps(cell: dict[str, Any]) -> None:
    for name in (OURS, MODULE):
        ops = cell["ways"][name]["ops"]
        assert sum(one["steps"] for one in ops.values()) >= 19
        assert {key for one in ops.values() for key in one} == {"steps", "us", "pytorch_us"}
    assert "ops" not in cell["ways"]["eager-cl"]


def test_a_way_that_learns_something_else_has_no_figures(cell: dict[str, Any]) -> None:
    assert cell["ways"]["lazy"] == {"failed": "red: relative error 5.0e-01 of a step, allowed 2.0e-02"}


def test_half_precision_is_measured_by_plain_autocasts_error() -> None:
    found = measure_cell(plan(way(OURS), dtype=torch.bfloat16), TINY, 2, watch(**{OURS: [50.0]}))
    assert found["ways"][OURS]["limit"] == pytest.approx(training.LIMIT * found["plain_error"])
    assert "ratio" not in found


def test_the_page_of_training_stands_beside_that_of_inference(cell: dict[str, Any], tmp_path: Path) -> None:
    record = Record(plan(way(OURS)).about(), [cell])
    assert trains(record)
    document = tmp_path / "page.md"
    document.write_text("# Measurements\n", encoding="utf-8")
    page.write(record, document, ["ResNet20"])
    first = document.read_text(encoding="utf-8")
    page.write(record, document, ["ResNet20"])
    assert document.read_text(encoding="utf-8") == first
    assert "zoo bench --what train --models ResNet20 --batches 2" in first
    assert "| ResNet20 | *20,000* | 33,333 | 40,000 |" in first.replace(" - |", "")
    assert "red: relative error" in first
    assert page.marks(record) != page.marks(Record({**record.about, "what": "infer"}, []))
    assert {file.name for file in tmp_path.glob("*.png")} == {"page-training-cpu-float32.png", "page-training-cpu-float32-zoo.png"}


def test_the_command_knows_its_networks_batches_and_peers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Plan] = []

    def run(plan: Plan, **_: Any) -> Record:
        asked.append(plan)
        return Record(plan.about())

    monkeypatch.setattr(inference, "run", run)
    assert main(["bench", "--what", "train", "--device", "cpu", "--json"]) == 0
    (known,) = asked
    assert [cls.__name__ for cls in known.models] == list(training.FIGURE)
    assert list(known.batches) == list(training.CPU_BATCHES)
    assert [w.name for w in known.ways] == [OURS, "eager-cl", "compile"]
    assert known.about()["what"] == "train"
    assert main(["bench", "--what", "train", "--device", "cpu", "--peers", "onnxruntime"]) == 2
    assert "no peer 'onnxruntime'" in capsys.readouterr().err
    assert [w.name for w in select(["max-autotune"], torch.device("cuda"), torch.bfloat16, TRAINING)] == [OURS, "max-autotune"]
