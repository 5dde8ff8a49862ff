from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.bench import clock, floor, inference, peers, subject
from zoo.bench.clock import Clock
from zoo.bench.inference import DeviceLost, Plan, measure_cell, run
from zoo.bench.peers import OURS, Way
from zoo.bench.record import Record
from zoo.bench.subject import Subject
from zoo.cli import main

CPU = torch.device("cpu")
TINY = zoo.CATALOGUE["ResNet20"]


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


@pytest.fixture(scope="module")
def small() -> Subject:
    return subject.subject(TINY, 2, CPU, torch.float32)


def test_figures_are_the_median_and_percentiles_of_the_samples() -> None:
    samples = [100.0, 300.0, 200.0, 400.0, 500.0, 1000.0, 600.0, 700.0, 800.0, 900.0, 0.0]
    row = measure_cell(plan(way(OURS)), TINY, 2, watch(fast=samples))["ways"][OURS]
    assert (row["us"], row["us_low"], row["us_high"]) == (500.0, 100.0, 900.0)
    assert row["images_s"] == pytest.approx(2 / 500e-6)
    assert row["latency_us"] == 500.0


def test_percentiles_lie_between_samples() -> None:
    assert clock.median_and_spread([1.0, 2.0]) == pytest.approx((1.5, 1.1, 1.9))
    assert clock.median_and_spread([7.0]) == (7.0, 7.0, 7.0)


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


def test_batchnorms_get_statistics_that_are_worth_folding(small: Subject) -> None:
    norms = [layer for layer in small.own.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(norms) == 19
    for norm in norms:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        assert norm.running_mean.abs().max() > 0.01
        assert norm.running_var.min() > 0
        assert not norm.training
        assert norm.momentum == 0.1
    assert 0.01 < float(small.reference.std()) < 100


def test_a_subject_is_the_same_every_time(small: Subject) -> None:
    again = subject.subject(TINY, 2, CPU, torch.float32)
    assert torch.equal(again.input(torch.float32), small.input(torch.float32))
    torch.testing.assert_close(again.reference, small.reference)


@pytest.mark.parametrize(("batch", "batches"), [(1, 16), (3, 6), (16, 1), (20, 1)])
def test_answers_are_compared_on_sixteen_images_or_more(batch: int, batches: int) -> None:
    s = subject.subject(TINY, batch, CPU, torch.float32)
    images = s.input(torch.float32)
    before, seen = images.clone(), list[Tensor]()

    def call() -> Tensor:
        seen.append(images.clone())
        with torch.no_grad():
            return s.peer(images)

    assert s.reference.shape == (batch * batches, 10)
    assert subject.relative_error(s.answers(call), s.reference) < 1e-5
    assert len(seen) == s.batches == batches
    assert len({one.sum().item() for one in seen}) == batches
    assert torch.equal(seen[0], before)
    assert torch.equal(images, before)


def test_answers_can_be_asked_for_after_the_reference() -> None:
    s = subject.subject(TINY, 2, CPU, torch.float32)
    assert s.reference.shape == (16, 10)
    with torch.no_grad():
        assert subject.relative_error(s.answers(lambda: s.peer(s.input(torch.float32))), s.reference) < 1e-5


def test_a_way_that_is_wrong_for_other_images_only_is_red() -> None:
    def build(s: Subject, tune: str) -> Callable[[], Tensor]:
        call, first = eager()(s, tune), s.input(torch.float32).clone()
        return lambda: call() if torch.equal(s.input(torch.float32), first) else -call()

    cell = measure_cell(plan(way("fast", build), way("eager")), TINY, 2, watch(fast=[50.0], eager=[60.0]))
    assert cell["ways"]["fast"]["failed"].startswith("red: ")
    assert "failed" not in cell["ways"]["eager"]


@pytest.mark.parametrize(("name", "twin"), [("SqueezeNet1_1", "torchvision"), ("GoogLeNet", "torchvision"), ("ResNet20", "zoo")])
def test_the_peer_has_our_weights(name: str, twin: str) -> None:
    own = zoo.CATALOGUE[name]().eval()
    peer, whose = subject._twin(own)
    assert whose == twin
    ours, theirs = own.state_dict(), peer.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (peer is own) == (twin == "zoo")


def test_folding_keeps_the_answer_and_loses_the_batchnorms(small: Subject) -> None:
    folded = peers.folded(small.own)
    assert not any(isinstance(layer, nn.BatchNorm2d) for _, layer in folded.named_modules() if layer is not small.own)
    with torch.no_grad():
        assert subject.relative_error(small.answers(lambda: folded(small.input(torch.float32))), small.reference) < 1e-5
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in small.own.modules())


def test_eager_peers_compute_the_network(small: Subject) -> None:
    with torch.no_grad():
        for name in ("eager-fp32", "eager-cl"):
            call = peers.WAYS[name].build(small, "none")
            assert subject.relative_error(small.answers(call), small.reference) < 1e-5


def test_the_floor_counts_multiply_adds_and_each_map_once() -> None:
    found = floor.work(zoo.CATALOGUE["ResNet50"], 4)
    assert sum(w.flop for w in found) / 8e9 == pytest.approx(4.089, abs=0.001)  # torchvision's published 4.09 GMAC
    assert found[0].elements == 4 * 3 * 224 * 224 + 64 * 3 * 7 * 7 + 4 * 64 * 112 * 112


def test_a_shortcut_is_read_once_more() -> None:
    found = floor.work(TINY, 1)
    second = found[2]  # the second convolution of the first block
    assert second.elements == 2 * 16 * 32 * 32 + 16 * 16 * 3 * 3 + 16 * 32 * 32


def test_pools_of_a_graph_count_as_held() -> None:
    segments = [
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 10},
        {"device": 0, "segment_pool_id": (0, 1), "total_size": 100, "allocated_size": 30},
        {"device": 1, "segment_pool_id": (0, 1), "total_size": 100, "allocated_size": 30},
    ]
    assert clock.pooled(segments, 0) == 70


def test_the_hosts_clock_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "SETTLE", 1e-6)
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    times = clock.clock(CPU).latency(calls, 40)
    assert [len(t) for t in times.values()] == [40, 40]
    rounds = ["".join(order[i : i + 4]) for i in range(0, 160, 4)]
    assert set(rounds) == {"aabb", "bbaa"}  # each once a round, and neither always behind the other


def test_calls_that_pay_for_other_engines_threads_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def call(name: str) -> None:
        nonlocal now, spins
        now += 1.0 if name == "heavy" else 0.01 + 0.02 * (now < spins)
        spins = now + 0.05 if name == "heavy" else spins

    spins = 0.0

    def rest(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now)
    monkeypatch.setattr(clock.time, "sleep", rest)
    calls = {name: lambda name=name: call(name) for name in ("heavy", "light")}
    for times in (clock.clock(CPU).latency(calls, 10), clock.clock(CPU).throughput(calls, 10)):
        assert times["light"] == pytest.approx([1e4] * 10)
        assert times["heavy"] == pytest.approx([1e6] * 10)


def test_peers_are_chosen_by_device_and_dtype() -> None:
    gpu = torch.device("cuda")
    named = {w.name for w in peers.select(None, gpu, torch.bfloat16)}
    assert {"eager-fp32", "eager-tf32", "eager", "eager-cl", "compile", "max-autotune", "recipe", OURS} == named
    assert "eager" not in {w.name for w in peers.select(None, gpu, torch.float32)}
    assert [w.name for w in peers.select(["compile", " eager-cl"], gpu, torch.bfloat16)] == [OURS, "eager-cl", "compile"]
    assert "recipe" not in {w.name for w in peers.select(None, CPU, torch.float32)}
    assert "onnxruntime" not in {w.name for w in peers.select(None, CPU, torch.bfloat16)}


def test_an_unknown_peer_names_the_nearest_and_all() -> None:
    with pytest.raises(ValueError, match=r"no peer 'compiled' on cpu in float32; did you mean compile\? There are eager-fp32, eager-cl"):
        peers.select(["compiled"], CPU, torch.float32)


def test_a_peer_without_its_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package openvino, which is not installed: pip install openvino"):
        peers.select(["openvino"], CPU, torch.float32)
    assert "openvino" not in {w.name for w in peers.select(None, CPU, torch.float32)}


def test_a_peer_that_needs_two_packages_says_which_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ValueError, match="needs the package onnxscript, which is not installed: pip install onnxscript"):
        peers.select(["onnxruntime"], CPU, torch.float32)
    assert "onnxruntime" not in {w.name for w in peers.select(None, CPU, torch.float32)}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--models", "ResNet51"], 3, "did you mean"),
        (["--peers", "jax"], 2, "There are eager-fp32"),
        (["--device", "abacus"], 2, "cuda or cpu"),
        (["--dtype", "int8"], 2, "bfloat16, float16, float32"),
        (["--batches", "1,x"], 2, "1,32,256"),
        (["--batches", "0"], 2, "above 0"),
        (["--tune", "slow"], 2, "quick"),
        (["--resume"], 2, "--save"),
        (["--what", "dream"], 2, "infer, train and load"),
        (["--from-json", "missing.json"], 3, "missing.json"),
        (["--what", "load", "--from-json", "missing.json"], 2, "measured anew"),
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


def test_memory_below_that_of_the_weights_is_no_measurement() -> None:
    weights = 4 * sum(p.numel() for p in zoo.ResNet20().parameters()) / 2**20
    assert inference.plausible(1.01 * weights, zoo.ResNet20, torch.float32) == 1.01 * weights
    assert inference.plausible(0.99 * weights, zoo.ResNet20, torch.float32) is None
    assert inference.plausible(None, zoo.ResNet20, torch.float32) is None


@pytest.mark.parametrize("name", ["benchmarks-h200.json", "benchmarks-h100.json", "benchmarks-train-h200.json"])
def test_no_memory_in_the_records_is_below_that_of_the_weights(name: str) -> None:
    record = Record.read(Path(__file__).parents[2] / "docs" / name)
    found = [(cell, row) for cell in record.cells for row in cell["ways"].values() if row.get("memory_mib") is not None]
    assert len(found) > 20
    for cell, row in found:
        assert inference.plausible(row["memory_mib"], zoo.CATALOGUE[cell["model"]], torch.bfloat16) is not None, cell["model"]
