from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from zoo.bench import inference, peers
from zoo.bench.clock import Clock
from zoo.bench.inference import DeviceLost, Plan, measure_cell, run
from zoo.bench.peers import OURS, Way
from zoo.bench.record import Record
from zoo.bench.subject import Subject
from zoo.commands.app import main

CPU = torch.device("cpu")
TINY = zoo.CATALOGUE["ResNet20"]
RECORDS = Path(__file__).parents[3] / "docs"


def eager(scale: float = 1.0) -> Callable[[Subject, str], Callable[[], Tensor]]:
    """A way whose logits are the reference's times `scale`."""

    def build(s: Subject, tune: str) -> Callable[[], Tensor]:
        network, images = s.placed(s.peer, torch.float32), s.input(torch.float32)
        return lambda: scale * network(images)

    return build


def broken(s: Subject, tune: str) -> Callable[[], Tensor]:
    raise RuntimeError("out of memory\nsecond line")


def way(name: str, build: Callable[[Subject, str], Callable[[], Tensor]] | None = None) -> Way:
    return Way(name, name, name, build or eager())


def plan(*ways: Way, models: tuple[str, ...] = ("ResNet20",), batches: tuple[int, ...] = (2,)) -> Plan:
    return Plan([zoo.CATALOGUE[m] for m in models], batches, ways, CPU, torch.float32, rounds=5)


def watch(**samples: list[float]) -> Clock:
    def timed(calls: Any, rounds: int) -> dict[str, list[float]]:
        return {name: samples[name] for name in calls}

    return Clock(timed, timed)


def cell_of(plan: Plan, cls: Any, batch: int) -> dict[str, Any]:
    """What `measure_cell` returns, without measuring."""
    row = {"images_s": 100.0, "us": 10.0, "us_low": 9.0, "us_high": 11.0}
    return {"model": cls.__name__, "batch": batch, "size": 32, "date": "2026-11-21", "ways": {w.name: dict(row) for w in plan.ways}}


def test_figures_are_the_median_and_percentiles_of_the_samples() -> None:
    samples = [100.0, 300.0, 200.0, 400.0, 500.0, 1000.0, 600.0, 700.0, 800.0, 900.0, 0.0]
    row = measure_cell(plan(way(OURS)), TINY, 2, watch(fast=samples))["ways"][OURS]
    assert (row["us"], row["us_low"], row["us_high"]) == (500.0, 100.0, 900.0)
    assert row["images_s"] == pytest.approx(2 / 500e-6)
    assert row["latency_us"] == 500.0


def test_the_ratio_is_to_the_fastest_peer() -> None:
    ways = way(OURS), way("slow"), way("quick"), way("middling")
    cell = measure_cell(plan(*ways), TINY, 2, watch(fast=[50.0], slow=[400.0], quick=[75.0], middling=[100.0]))
    assert cell["fastest_peer"] == "quick"
    assert cell["ratio"] == pytest.approx(1.5)


def test_a_red_way_has_no_figures_and_is_no_peer() -> None:
    cell = measure_cell(plan(way(OURS), way("wrong", eager(1.01)), way("right")), TINY, 2, watch(fast=[50.0], right=[100.0]))
    assert cell["ways"]["wrong"] == {"failed": "red: relative error 1.0e-02, allowed 1.0e-04"}
    assert cell["fastest_peer"] == "right"


@pytest.mark.parametrize("scale", [1.01, float("nan"), float("inf")])
def test_ours_has_no_ratio_when_it_is_red(scale: float) -> None:
    cell = measure_cell(plan(way(OURS, eager(scale)), way("right")), TINY, 2, watch(right=[100.0]))
    assert cell["ways"][OURS]["failed"].startswith("red")
    assert "ratio" not in cell


def test_another_shape_is_red() -> None:
    def build(s: Subject, tune: str) -> Callable[[], Tensor]:
        call = eager()(s, tune)
        return lambda: call()[:1]

    cell = measure_cell(plan(way(OURS), way("short", build)), TINY, 2, watch(fast=[50.0]))
    assert cell["ways"]["short"]["failed"].startswith("red: relative error nan")


def test_a_failure_is_recorded_by_its_first_line_and_the_rest_goes_on() -> None:
    cell = measure_cell(plan(way(OURS), way("broken", broken), way("right")), TINY, 2, watch(fast=[50.0], right=[100.0]))
    assert cell["ways"]["broken"] == {"failed": "RuntimeError: out of memory"}
    assert cell["ratio"] == pytest.approx(2.0)


def test_a_way_that_fails_later_leaves_the_others_their_figures() -> None:
    def build(s: Subject, tune: str) -> Callable[[], Tensor]:
        call, left = eager()(s, tune), iter(range(inference.WARMUPS + 1))

        def worn() -> Tensor:
            if next(left, None) is None:
                raise MemoryError("no room beside the others")
            return call()

        return worn

    cell = measure_cell(plan(way(OURS), way("worn", build)), TINY, 2, watch(fast=[50.0]))
    assert cell["ways"]["worn"] == {"failed": "MemoryError: no room beside the others"}
    assert cell["ways"][OURS]["images_s"] > 0


def test_a_cell_without_a_reference_fails_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "subject", lambda *_: broken(None, ""))  # pyright: ignore[reportArgumentType]
    cell = measure_cell(plan(way(OURS)), TINY, 2, watch())
    assert cell["failed"] == "RuntimeError: out of memory"
    assert "failed" in cell["ways"][OURS]


def test_flags_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []

    def build(s: Subject, tune: str) -> Callable[[], Tensor]:
        seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark))
        return eager()(s, tune)

    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32
    measure_cell(plan(way(OURS, build)), TINY, 2, watch(fast=[50.0]))
    assert seen == [(False, True)]
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32) == before


def test_ours_is_allowed_a_tenth_over_plain_eager_and_a_peer_twice(small: Subject) -> None:
    half = dataclasses.replace(small, dtype=torch.bfloat16)
    assert 1e-4 < half.plain_error < 0.1
    assert inference.allowed(peers.WAYS[OURS], half) == pytest.approx(1.1 * half.plain_error)
    assert inference.allowed(peers.WAYS["eager-cl"], half) == pytest.approx(2 * half.plain_error)
    assert inference.allowed(peers.WAYS["eager-fp32"], half) == 1e-4
    assert inference.allowed(peers.WAYS[OURS], small) == 1e-4


def test_resuming_keeps_cells_and_measures_what_is_missing(tmp_path: Path) -> None:
    path, measured = tmp_path / "record.json", []

    def measure(plan: Plan, cls: Any, batch: int) -> dict[str, Any]:
        measured.append((cls.__name__, batch))
        return cell_of(plan, cls, batch)

    run(plan(way(OURS), way("peer")), path=path, measure=measure)
    wider = plan(way(OURS), way("peer"), models=("ResNet20", "ResNet32"), batches=(2, 4))
    record = run(wider, path=path, resume=True, measure=measure)
    assert measured == [("ResNet20", 2), ("ResNet20", 4), ("ResNet32", 2), ("ResNet32", 4)]
    assert len(record.cells) == len(Record.read(path).cells) == 4
    run(plan(way(OURS), way("another")), path=path, resume=True, measure=measure)
    assert measured[4:] == [("ResNet20", 2)]
    assert len(Record.read(path).cells) == 4


def test_without_resume_a_record_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    run(plan(way(OURS)), path=path, measure=cell_of)
    assert run(plan(way(OURS), models=("ResNet32",)), path=path, measure=cell_of).models == ["ResNet32"]


def test_an_interruption_leaves_a_whole_record_of_what_was_measured(tmp_path: Path) -> None:
    def measure(plan: Plan, cls: Any, batch: int) -> dict[str, Any]:
        if cls.__name__ == "ResNet32":
            raise KeyboardInterrupt
        return cell_of(plan, cls, batch)

    with pytest.raises(KeyboardInterrupt):
        run(plan(way(OURS), models=("ResNet20", "ResNet32")), path=tmp_path / "record.json", measure=measure)
    assert Record.read(tmp_path / "record.json").models == ["ResNet20"]
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_a_spent_budget_begins_no_cell(tmp_path: Path) -> None:
    lines: list[str] = []
    record = run(plan(way(OURS)), path=tmp_path / "record.json", budget_s=0, measure=cell_of, say=lines.append)
    assert record.cells == []
    assert "1 of 1 cells are left" in lines[-1]
    assert Record.read(tmp_path / "record.json").cells == []


def test_a_record_of_another_device_is_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = run(plan(way(OURS)), path=path, measure=cell_of)
    record.about["device"] = "NVIDIA H200"
    record.write(path)
    with pytest.raises(ValueError, match="device NVIDIA H200"):
        run(plan(way(OURS)), path=path, resume=True, measure=cell_of)


def test_a_lost_device_ends_the_run_after_the_record_is_written(tmp_path: Path) -> None:
    def measure(plan: Plan, cls: Any, batch: int) -> dict[str, Any]:
        return {**cell_of(plan, cls, batch), "failed": "AcceleratorError: illegal access", "device_lost": True}

    with pytest.raises(DeviceLost, match="illegal access"):
        run(plan(way(OURS), models=("ResNet20", "ResNet32")), path=tmp_path / "record.json", measure=measure)
    assert Record.read(tmp_path / "record.json").models == ["ResNet20"]
    assert "device_lost" not in (tmp_path / "record.json").read_text()


def test_ours_says_which_op_won_which_steps() -> None:
    cell = measure_cell(dataclasses.replace(plan(peers.WAYS[OURS], way("peer")), tune="none"), TINY, 2, watch(fast=[50.0], peer=[60.0]))
    (engine,) = cell["ways"][OURS]["ops"].values()
    assert engine["steps"] == 1
    assert "ops" not in cell["ways"]["peer"]


@pytest.mark.gpu
def test_ours_says_which_op_won_which_steps_and_what_each_saves_on_a_gpu() -> None:
    ways = peers.WAYS[OURS], peers.WAYS["eager-cl"]
    cell = measure_cell(Plan([TINY], [8], ways, torch.device("cuda"), torch.bfloat16, rounds=3), TINY, 8)
    ops = cell["ways"][OURS]["ops"]
    assert sum(one["steps"] for one in ops.values()) > 9
    timed = [one for one in ops.values() if one["us"] is not None]
    assert timed
    assert sum(one["us"] for one in timed) < sum(one["pytorch_us"] for one in timed)
    assert json.loads(json.dumps(ops)) == ops


def test_a_way_that_is_wrong_for_other_images_only_is_red() -> None:
    def build(s: Subject, tune: str) -> Callable[[], Tensor]:
        call, first = eager()(s, tune), s.input(torch.float32).clone()
        return lambda: call() if torch.equal(s.input(torch.float32), first) else -call()

    cell = measure_cell(plan(way("fast", build), way("eager")), TINY, 2, watch(fast=[50.0], eager=[60.0]))
    assert cell["ways"]["fast"]["failed"].startswith("red: ")
    assert "failed" not in cell["ways"]["eager"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--models", "ResNet51"], 3, "did you mean"),
        (["--peers", "jax"], 2, "There are eager-fp32"),
        (["--device", "abacus"], 2, "a device is cpu, cuda or cuda:1, not 'abacus'"),
        (["--dtype", "int8"], 2, "bfloat16, float16, float32"),
        (["--batches", "1,x"], 2, "1,32,256"),
        (["--batches", "0"], 2, "above 0"),
        (["--tune", "slow"], 2, "quick"),
        (["--resume"], 2, "--save"),
        (["--what", "dream"], 2, "infer, train and load"),
        (["--from-json", "missing.json"], 3, "missing.json"),
        (["--what", "load", "--from-json", "missing.json"], 2, "measured anew"),
        (["--what", "load", "--peers", "foo"], 2, "of a load there are"),
        (["--replace"], 2, "it goes with --save FILE, and without --resume"),
        (["--replace", "--resume", "--save", "new.json"], 2, "it goes with --save FILE, and without --resume"),
        (["--models", "ResNet20", "--batches", "1", "--save", __file__], 2, "--resume goes on with it, --replace measures all anew"),
    ],
)
def test_a_mistake_of_the_command_gets_a_message(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    defaults = [] if "--device" in arguments else ["--device", "cpu"]
    assert main(["bench", *defaults, *arguments]) == code
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_command_measures_saves_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(peers.WAYS, OURS, dataclasses.replace(peers.WAYS[OURS], build=eager()))
    save, picture = tmp_path / "r.json", tmp_path / "p.png"
    words = ["bench", "-m", "ResNet20", "--batches", "1", "--device", "cpu", "--rounds", "2", "--peers", "eager-fp32", "--save", str(save)]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "ResNet20, batch 1" in shown.err
    assert "eager fp32" in shown.out
    record = Record.read(save)
    row = record.cells[0]["ways"][OURS]
    assert row["images_s"] > 0
    assert row["error"] < 1e-6
    monkeypatch.setattr(inference, "measure_cell", broken)
    assert main([*words, "--resume", "--json", "--picture", str(picture)]) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == record.cells
    assert picture.is_file()
    assert (tmp_path / "p-zoo.png").is_file()
    assert main(words) == 2
    assert Record.read(save).cells == record.cells
    monkeypatch.undo()
    monkeypatch.setitem(peers.WAYS, OURS, dataclasses.replace(peers.WAYS[OURS], build=eager()))
    assert main([*words, "--replace"]) == 0
    assert Record.read(save).cells != record.cells


def test_a_peer_that_is_not_there_is_named_beside_the_ratio(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    selected = peers.select
    monkeypatch.setattr(peers, "left_out", lambda *_: {"onnxruntime": ["onnxscript"]})
    monkeypatch.setattr(peers, "select", lambda names, *rest: selected(["eager-fp32"] if names is None else names, *rest))
    assert main(["bench", "-m", "ResNet20", "--batches", "1", "--device", "cpu", "--rounds", "2", "--tune", "none", "--budget-s", "0"]) == 0
    shown = capsys.readouterr()
    assert "ratio: over the fastest peer there is without onnxruntime, not installed" in " ".join(shown.out.split())
    assert "1 of 1 cells are not measured; with --save FILE a later run could --resume" in " ".join(shown.err.split())


def test_memory_below_that_of_the_weights_is_no_measurement() -> None:
    count = zoo.ResNet20.params
    assert inference.plausible(1.01 * 4 * count / 2**20, count, torch.float32) == 1.01 * 4 * count / 2**20
    assert inference.plausible(0.99 * 4 * count / 2**20, count, torch.float32) is None
    assert inference.plausible(None, count, torch.float32) is None


MEASURED = sorted(set(RECORDS.glob("benchmarks-*.json")) - {RECORDS / "benchmarks-load.json"})
"""Records of calls and steps; one of loading has no memory."""


@pytest.mark.parametrize("record", MEASURED, ids=lambda path: path.stem)
def test_no_memory_in_the_records_is_below_that_of_the_weights(record: Path) -> None:
    found = [(cell, row) for cell in Record.read(record).cells for row in cell["ways"].values() if row.get("memory_mib") is not None]
    assert found or record.stem == "benchmarks-cpu"
    for cell, row in found:
        assert inference.plausible(row["memory_mib"], zoo.CATALOGUE[cell["model"]].params, torch.bfloat16) is not None, cell["model"]
