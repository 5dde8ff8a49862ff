"""Time steps of training in cells of a network and a batch: every way built, proven by its first step, weighed, then timed in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.bench.cell import Plan, attempt, compare, forget, measured, rounds_of
from zoo.bench.clock import Clock, Memory, clock, median_and_spread
from zoo.bench.learner import Learner, learner_of
from zoo.bench.peers import MODULE, OURS, SMALL, Call, Way, eager_step, note_ops
from zoo.bench.subject import Subject, subject
from zoo.networks.model import Model

FIGURE = ("ResNet50", "VGG19", "DenseNet121", "MobileNetV2")
BATCHES = (32, 256)
CPU_BATCHES = (8,)
WARMUPS = 6
"""Calls of a new way before it is proven and measured; `fast_step` captures the fourth."""
LIMIT, EXACT_LIMIT = 1.5, 2e-2
"""Allowed error of a step over plain autocast's, and of float32 steps, whose sums have another order."""
CELL_US = 30e6


def measure_cell(plan: Plan, cls: type[Model], batch: int, watch: Clock | None = None) -> dict[str, Any]:
    """Measure the training of one network at one batch.

    Args:
        plan: what to measure it by.
        cls: the network.
        batch: images in a step.
        watch: times the steps; the device's clock if left out.

    Returns:
        JSON-able: `model`, `batch`, `size`, `twin`, `date`, `seconds`, `rounds`, `plain_error`, `fastest_peer`, `ratio` (our images a
        second over the fastest peer's), `memory_ratio` (our memory over `compile`'s) and `ways`: by name `build_s`, `error`, `limit`,
        `memory_mib`, `images_s`, `us`, `us_low`, `us_high` (10th and 90th percentile); of ours also `ops`, as of inference; or `failed`,
        and no figures.
    """

    def act(cell: dict[str, Any]) -> None:
        with torch.enable_grad():
            _measure(cell, plan, cls, batch, watch or clock(plan.device))

    return measured(plan, cls.__name__, cls.input_size, batch, act)


def _measure(cell: dict[str, Any], plan: Plan, cls: type[Model], batch: int, watch: Clock) -> None:
    s = subject(cls, batch, plan.device, plan.dtype)
    half = None if plan.dtype == torch.float32 else plan.dtype
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):  # to try all would take VGG19 at 256 minutes
        right = _update(learner_of(s, s.peer, None))
    plain = _apart(_update(learner_of(s, s.peer, half)), right)
    forget(plan.device)
    limit = EXACT_LIMIT if half is None else LIMIT * plain
    cell |= {"twin": s.twin, "plain_error": plain}
    steps: dict[str, Call] = {}
    for way in plan.ways:
        row = cell["ways"][way.name] = {}
        step = attempt(row, plan.device, partial(_build, way, s, half, plan.tune, row, right, limit))
        if step is not None:
            steps[way.name] = step
    if not (rounds := rounds_of(cell, plan, steps, CELL_US)):
        return
    for name, samples in watch.throughput(steps, rounds).items():
        row = cell["ways"][name]
        row["us"], row["us_low"], row["us_high"] = median_and_spread(samples)
        row["images_s"] = 1e6 * batch / row["us"]
    compare(cell, (MODULE, SMALL))
    ours, theirs = (cell["ways"].get(name, {}).get("memory_mib") for name in (OURS, "compile"))
    if ours and theirs:
        cell["memory_ratio"] = ours / theirs


def _build(way: Way, s: Subject, half: torch.dtype | None, tune: str, row: dict[str, Any], right: Tensor, limit: float) -> Call:
    """Build a way, prove a step of it, weigh it; raises ValueError where it learns something else."""
    memory = Memory(s.device)
    start = time.monotonic()
    learner = learner_of(s, s.own if way.name in (OURS, MODULE, SMALL) else s.peer, half)
    begun = _state(learner)
    step = way.build(learner, tune)
    for _ in range(WARMUPS):
        step()
    if s.device.type == "cuda":
        torch.cuda.synchronize(s.device)
    row["build_s"] = round(time.monotonic() - start, 2)
    _restore(learner, begun)
    step()
    error = _apart(_moved(learner, begun), right)
    del begun
    if not error <= limit:
        raise ValueError(f"red: relative error {error:.1e} of a step, allowed {limit:.1e}")
    note_ops(row, step)
    row |= {"error": error, "limit": limit, "memory_mib": memory.peak_mib(step)}
    return step


def _update(learner: Learner) -> Tensor:
    """Return what a first step changes of all parameters, flat."""
    begun = _state(learner)
    eager_step(learner)()
    return _moved(learner, begun)


def _state(learner: Learner) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (*learner.network.parameters(), *learner.network.buffers())]


def _restore(learner: Learner, begun: Sequence[Tensor]) -> None:
    """Put everything back in place, and the optimiser's momentum to zero, with which its step is a first one again."""
    with torch.no_grad():
        for tensor, before in zip((*learner.network.parameters(), *learner.network.buffers()), begun, strict=True):
            tensor.copy_(before)
        for state in learner.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()


def _moved(learner: Learner, begun: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.cat([(p - before).flatten() for p, before in zip(learner.network.parameters(), begun, strict=False)])


def _apart(moved: Tensor, right: Tensor) -> float:
    return float(torch.linalg.vector_norm(moved.double() - right.double()) / torch.linalg.vector_norm(right.double()))
