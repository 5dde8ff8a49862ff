"""A whole plan against the whole network by PyTorch's compiler: the faster one is served, so that no plan is slower than that."""

from __future__ import annotations

import hashlib
import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.kernels.comparing.copies import tensors_of
from zoo.kernels.comparing.parity import Parity, Reference
from zoo.kernels.errors import first_line
from zoo.kernels.measuring.timing import event_time_us
from zoo.kernels.passes.graph import Graph
from zoo.kernels.plans.plan import Plan
from zoo.kernels.plans.proving import REPLAYS
from zoo.kernels.plans.rival import FASTER, Compiled, parity, race
from zoo.kernels.reports.report import PlanReport, Row
from zoo.kernels.tuning.choices import Choice, Choices
from zoo.kernels.tuning.request import Options
from zoo.kernels.tuning.steps import Setting

COMPILER, PLAN = "torch.compile", "plan"
"""Who won the whole network."""
SURE = 2.0
"""How many times a plan is faster than PyTorch's operators, step by step, where no race is needed: the compiler's best was 1.9 times."""
FUSED = ("pointwise", "pool", "global_pool", "layer_norm", "response_gate")
"""Ops of which the compiler's kernels are as fast: what PyTorch's operators take for these says nothing of it."""
_log = logging.getLogger("zoo.kernels")


def key(graph: Graph, setting: Setting) -> str:
    """Name a network at its shapes, under which it is kept who won."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    digest = hashlib.sha256()
    for node in graph.nodes:
        attrs: dict[str, Any] = {name: tuple(v.shape) if isinstance(v, Tensor) else str(v) for name, v in node.attrs.items()}
        attrs = {name: value for name, value in attrs.items() if name not in ("source", "body", "results", "given", "name", "tensor")}
        attrs["body"] = [(step.said(), step.shape) for step in node.attrs.get("body", [])]
        digest.update(repr((node.op, sorted(attrs.items(), key=str), node.shape, [number[source] for source in node.inputs])).encode())
    return f"whole {str(setting.dtype).removeprefix('torch.')}{'/tf32' if setting.tf32 else ''} {digest.hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Whole:
    """A network at its shapes, and what tells whether another way to run it is right and was faster.

    Attributes:
        network: as the caller has it.
        typed: arguments (args, kwargs) in its own dtype.
        dtypes: of its flat outputs, see `Compiled`.
        batches: arguments of `reference`.
        reference: the right outputs.
        options: of the fast network.
        choices: what was found before.
        name: of `key`.
    """

    network: nn.Module
    typed: Any
    dtypes: list[torch.dtype | None]
    batches: list[Any]
    reference: Reference
    options: Options
    choices: Choices
    name: str

    def compiled(self) -> tuple[Compiled, Parity]:
        """Let PyTorch's compiler have the network, and compare it; raises whatever that stumbles over."""
        setting = Setting(self.options.device, self.options.dtype, self.options.tf32)
        rival = Compiled(self.network, self.typed[0], self.typed[1], setting, self.dtypes)
        return rival, parity(rival, self.batches, self.reference, REPLAYS)


def contested(plan: Plan, report: PlanReport, whole: Whole) -> Compiled | None:
    """Race a captured plan against the compiler's, where it is known or likely that this one could win.

    Args:
        plan: captured and checked.
        report: of the plan; says afterwards what is served, and both times.
        whole: the network; with `tune="none"` only what was found before counts.

    Returns:
        The compiler's network where it is as right, and faster; else None.
    """
    tune, choices = whole.options.tune, whole.choices
    known, tensors = choices.get(whole.name), tensors_of(whole.batches[0])
    if known is not None and known.op == PLAN and (known.level == "full" or tune != "full"):
        return None
    if known is None and (tune == "none" or (tune == "quick" and _sure(plan, report, tensors))):
        return None
    try:
        rival, found = whole.compiled()
        mine, theirs = race(plan, rival, tensors)
    except Exception as error:  # whatever the compiler stumbles over: the plan is right, and there
        report.notes.append(f"PyTorch's compiler could not take the whole network: {_failed(error)[:160]}")
        return None
    won = found.passes() and theirs < FASTER * mine
    level = tune if known is None or tune == "full" else known.level
    choices.put(whole.name, Choice(COMPILER, {}, theirs, mine, 2, level) if won else Choice(PLAN, {}, mine, theirs, 2, level))
    choices.save()
    if not found.passes():
        report.notes.append(f"PyTorch's compiler computes something else: {found}")
    elif won:
        layers = f"the whole network, for {mine:.0f} us of a plan of {len(report.rows)} kernels"
        report.rows = [Row(layers, COMPILER, _shape(rival), theirs, mine)]
        report.notes, report.parity = ["PyTorch's compiler, in a CUDA graph, was faster on the whole"], found
    else:
        report.notes.append(f"on the whole this takes {mine:.0f} us, PyTorch's compiler {theirs:.0f}")
    return rival if won else None


def remembered(whole: Whole) -> tuple[Compiled, PlanReport] | None:
    """Build the compiler's network where it won before, without a plan and a race; None where that isn't known, or it fails now."""
    known = whole.choices.get(whole.name)
    if known is None or known.op != COMPILER or whole.options.tune == "full":
        return None
    try:
        rival, found = whole.compiled()
    except Exception as error:  # as in `contested`: a plan is made
        _failed(error)
        return None
    if not found.passes():
        return None
    row = Row(f"the whole network, for {known.aten_us:.0f} us of a plan", COMPILER, _shape(rival), known.us, known.aten_us)
    return rival, PlanReport([], [row], found, ["PyTorch's compiler, in a CUDA graph, was faster on the whole when it was raced"])


def _failed(error: Exception) -> str:
    """Give back what the compiler took, and say why it failed."""
    torch.cuda.empty_cache()
    said = f"{type(error).__name__}: {first_line(error)}"
    _log.debug("PyTorch's compiler failed: %s", said)
    return said


def _sure(plan: Plan, report: PlanReport, tensors: list[Tensor]) -> bool:
    """Tell whether a plan is so much faster than PyTorch's operators that no compiler comes near."""
    theirs = sum((row.us if row.op in FUSED else row.replaced_us) or 0.0 for row in report.rows)
    return math.isfinite(theirs) and theirs >= SURE * event_time_us(lambda: plan(tensors), target_ms=20.0)


def _shape(rival: Compiled) -> tuple[int, ...]:
    return next((tuple(leaf.shape) for leaf in rival.outputs if isinstance(leaf, Tensor)), ())
