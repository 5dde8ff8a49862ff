"""Time inference in cells of a network and a batch: every way built, proven, weighed, and then timed in turns with all others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zoo.bench.cell import DeviceLost as DeviceLost
from zoo.bench.cell import Plan as Plan
from zoo.bench.cell import attempt, compare, measured, rounds_of
from zoo.bench.clock import Clock, Memory, clock, median_and_spread
from zoo.bench.floor import floor_us
from zoo.bench.peers import HALF, OURS, QUARTER, WARMUPS, Call, Way, note_ops
from zoo.bench.record import Record
from zoo.bench.subject import OFF, Subject, relative_error, subject
from zoo.networks.model import Model

FIGURE = ("ResNet50", "ResNet101", "VGG19")
"""The networks of the figure: those that Torch.jl compared frameworks with."""
BATCHES = (1, 32, 256)
CPU_BATCHES = (1, 8)
OUR_SLACK, PEER_SLACK = 1.1, 2.0
"""Allowed error over plain eager's in the same dtype: ours promises the first; a peer promises nothing, and must compute this network."""
EXACT_LIMIT, TF32_LIMIT = 1e-4, 5e-2
"""Allowed relative error of float32, whose sums have another order, and of TF32, whose operands have ten bits."""
NARROWER = {"openvino-shipped": 0.2, HALF: 0.2, QUARTER: 2.0}
"""Allowed relative error of what computes in fewer bits than the measured dtype: it must be this network; the table shows the error."""
CELL_US = 20e6
"""Time that the rounds of a cell may take, about."""


def run(
    plan: Plan,
    *,
    path: Path | None = None,
    resume: bool = False,
    budget_s: float | None = None,
    say: Callable[[str], object] = lambda line: None,
    measure: Callable[[Plan, type[Model], int], dict[str, Any]] | None = None,
) -> Record:
    """Measure cell by cell; the record is written after each, so that an interruption loses only the cell it hits.

    Args:
        plan: what to measure.
        path: of the record; None keeps it in memory.
        resume: keep the cells of the record at `path` that have all of the plan's ways, and measure the others.
        budget_s: start no further cell after so many seconds.
        say: gets a line before each cell and at the end of the budget.
        measure: measures a cell; `measure_cell` if left out.

    Returns:
        The record.

    Raises:
        ValueError: the record to resume belongs to another device, dtype or version.
        DeviceLost: a way has broken the device; the record holds what was measured.
    """
    start = time.monotonic()
    record = Record(plan.about())
    if resume and path is not None and path.is_file():
        record = Record.resumed(path, plan.about())
    names = {way.name for way in plan.ways}
    wanted = [(cls, batch) for cls in plan.models for batch in plan.batches]
    todo = [(cls, batch) for cls, batch in wanted if not names <= set((record.cell(cls.__name__, batch) or {"ways": ()})["ways"])]
    if path is not None:
        record.write(path)
    for done, (cls, batch) in enumerate(todo):
        if budget_s is not None and time.monotonic() - start > budget_s:
            later = "left for --resume" if path is not None else "not measured; with --save FILE a later run could --resume"
            say(f"the budget of {budget_s:g} s is spent; {len(todo) - done} of {len(wanted)} cells are {later}")
            break
        say(f"{cls.__name__}, batch {batch} ({len(wanted) - len(todo) + done + 1} of {len(wanted)})")
        cell = (measure or measure_cell)(plan, cls, batch)
        lost = cell.pop("device_lost", False)
        record.put(cell)
        if path is not None:
            record.write(path)
        if lost:
            raise DeviceLost(f"{cls.__name__} at batch {batch} broke the device: {cell['failed']}; go on in a new process with --resume")
    return record


def measure_cell(plan: Plan, cls: type[Model], batch: int, watch: Clock | None = None) -> dict[str, Any]:
    """Measure one network at one batch.

    Args:
        plan: what to measure it by.
        cls: the network.
        batch: images in a call.
        watch: times the calls; the device's clock if left out.

    Returns:
        JSON-able: `model`, `batch`, `size`, `twin`, `means_off` (deviations, see `subject.settle`), `date`, `seconds`, `rounds`,
        `floor_us`, `plain_error`, `fastest_peer`, `ratio` (our images a second over the fastest peer's) and `ways`: by name `build_s`,
        `error`, `limit`, `memory_mib`, `images_s`, `us` and `latency_us` with `_low` and `_high` (10th and 90th percentile), `roofline`
        (share of it); of `fast` also `ops` (by op: `steps`, `us`, `pytorch_us`, see `OurCall.ops`); or `failed`, and no figures.
        `failed` of the cell itself where there is no reference.
    """
    return measured(plan, cls.__name__, cls.input_size, batch, lambda cell: _measure(cell, plan, cls, batch, watch or clock(plan.device)))


def _measure(cell: dict[str, Any], plan: Plan, cls: type[Model], batch: int, watch: Clock) -> None:
    s = subject(cls, batch, plan.device, plan.dtype)
    cell |= {"means_off": OFF, "floor_us": floor_us(cls, batch, plan.device, plan.dtype)}
    compete(cell, plan, s, watch)


def compete(cell: dict[str, Any], plan: Plan, s: Subject, watch: Clock) -> None:
    """Build all ways to run a subject, prove them, and time them in turns, into a cell; `floor_us`, if it is there, gives the rooflines."""
    s.prepare()
    cell |= {"twin": s.twin, "plain_error": s.plain_error if math.isfinite(s.plain_error) else None}
    calls: dict[str, Call] = {}
    for way in plan.ways:
        row = cell["ways"][way.name] = {}
        call = attempt(row, plan.device, partial(_build, way, s, plan.tune, row))
        if call is not None:
            calls[way.name] = call
    with torch.inference_mode():
        if not (rounds := rounds_of(cell, plan, calls, CELL_US)):
            return
        throughput, latency = watch.throughput(calls, rounds), watch.latency(calls, rounds)
    for name in calls:
        _note(cell["ways"][name], s.batch, throughput[name], latency[name], cell.get("floor_us"))
    compare(cell, beside=(HALF, QUARTER, "openvino-shipped"))


def _build(way: Way, s: Subject, tune: str, row: dict[str, Any]) -> Call:
    """Build a way, prove it and weigh it; raises ValueError where it computes another network."""
    memory = Memory(s.device)
    start = time.monotonic()
    with torch.no_grad():
        call = way.build(s, tune)
    with torch.inference_mode():
        for _ in range(1 + WARMUPS):
            call()
        if s.device.type == "cuda":
            torch.cuda.synchronize(s.device)
        row["build_s"] = round(time.monotonic() - start, 2)
        error, limit = relative_error(s.answers(call), s.reference), allowed(way, s)
        if not error <= limit:
            raise ValueError(f"red: relative error {error:.1e}, allowed {limit:.1e}")
        weights = sum(parameter.numel() for parameter in s.own.parameters())
        note_ops(row, call)
        row |= {"error": error, "limit": limit, "memory_mib": plausible(memory.peak_mib(call), weights, s.dtype)}
    return call


def plausible(mib: float | None, weights: int, dtype: torch.dtype) -> float | None:
    """Return a measured memory, None where it is less than so many weights take in this dtype."""
    return mib if mib is not None and mib >= weights * dtype.itemsize / 2**20 else None


def allowed(way: Way, s: Subject) -> float:
    """Return the relative error against float32 eager up to which a way's figures count."""
    if way.uses_tf32:
        return TF32_LIMIT
    if way.name in NARROWER:
        return NARROWER[way.name]
    if way.exact or s.dtype == torch.float32:
        return EXACT_LIMIT
    return (OUR_SLACK if way.name == OURS else PEER_SLACK) * s.plain_error


def _note(row: dict[str, Any], batch: int, throughput: list[float], latency: list[float], floor: float | None) -> None:
    for key, samples in (("us", throughput), ("latency_us", latency)):
        row[key], row[f"{key}_low"], row[f"{key}_high"] = median_and_spread(samples)
    row["images_s"] = 1e6 * batch / row["us"]
    row["roofline"] = None if floor is None else floor / row["us"]
