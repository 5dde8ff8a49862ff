"""The proof of a plan: compared with the network before and behind its capture; a step that is worse than ATen's falls back."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.comparing.copies import tensors_of
from zoo.kernels.comparing.parity import Parity, Reference
from zoo.kernels.errors import Untraceable, first_line
from zoo.kernels.measuring.fresh_thread import Do, elsewhere
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.place import Place
from zoo.kernels.plans.plan import Plan
from zoo.kernels.plans.program import Program, StepFailed
from zoo.kernels.tuning.binding import Weights, bind
from zoo.kernels.tuning.choices import Choices
from zoo.kernels.tuning.choose import Decision
from zoo.kernels.tuning.expected import errors
from zoo.kernels.tuning.steps import ATEN, Candidate, Setting

REPLAYS = 3
"""Times that a graph's answers are compared before it is used: a race is not lost every time."""

WORSE = 1.1
"""Times ATen's error from which on a step is to blame."""

WAYS = ((True, True), (True, False), (False, True), (False, False))
"""How a plan is captured, the best first: whether kernels overlap, and whether maps lie over each other in one piece of memory."""


class Unlike(Untraceable):
    """A plan computes something else than the network, and no single step is to blame."""


def checked(
    graph: Graph,
    places: dict[Node, Place],
    decision: Decision,
    setting: Setting,
    weights: Weights,
    choices: Choices,
    batches: list[Any],
    reference: Reference,
) -> tuple[Plan, Parity, dict[Node, str]]:
    """Compare a plan with the network; while it fails, take ATen's operators for the layers whose own error is too large.

    Where each step is as right as ATen's and the whole isn't, as of a network that makes small errors large, the steps give way in the
    order of their errors, twice as many from round to round.

    Args:
        graph: fused, placed and merged.
        places: where parts of concatenations lie.
        decision: the kernels; those that fall back are changed in it.
        setting: device and dtype.
        weights: where packed weights are kept.
        choices: forgets what fell back.
        batches: arguments, those of `reference`.
        reference: the network's right outputs.

    Returns:
        The plan, not yet captured; how near it is; and why steps fell back.

    Raises:
        Unlike: the plan as a whole is wrong, and ATen's operators are no better for any step.
    """
    notes: dict[Node, str] = {}
    rest: list[tuple[Node, str]] | None = None
    count = 1
    while True:
        plan = Plan(Program(graph, places, decision.chosen, setting, weights, overlapping=True))  # the kernels that the graph will hold
        try:
            outputs = [_floats(plan.eager(tensors_of(batch))) for batch in batches]
        except StepFailed as failure:
            if decision.chosen[failure.node].op == ATEN:
                raise
            _fall_back(failure.node, first_line(failure), decision, choices, notes)
            choices.save()
            continue
        parity = reference.compare(outputs)
        if parity.passes():
            return plan, parity, notes
        culprits: list[tuple[Node, str]] = []
        if rest is None:
            culprits, others = _by_error(plan, decision, setting, batches[0])
            rest = None if culprits else others
        if rest is not None:
            rest = [one for one in rest if decision.chosen[one[0]].op != ATEN]  # a step may have failed meanwhile
            culprits, rest, count = rest[:count], rest[count:], 2 * count
        if not culprits:
            raise Unlike(f"its plan does not reproduce it: {parity}")
        for node, reason in culprits:
            _fall_back(node, reason, decision, choices, notes)
        choices.save()


def _fall_back(node: Node, reason: str, decision: Decision, choices: Choices, notes: dict[Node, str]) -> None:
    notes[node] = f"{decision.chosen[node].op} fell back: {reason}"
    decision.chosen[node] = Candidate(ATEN)
    if decision.found.pop(node, None) is not None:
        choices.forget(decision.keys[node])


def captured(
    plan: Plan, parity: Parity, decision: Decision, weights: Weights, batches: list[Any], reference: Reference
) -> tuple[Plan, Parity]:
    """Capture a plan, compare what its graph answers, call upon call as a user makes them; give up one thing after the other if it fails.

    In a graph kernels follow each other without the pauses that the first check had between them. The plan that comes back runs without a
    graph where none passes; its `note` says why.
    """
    graph, places, setting = plan.program.graph, plan.program.places, plan.setting
    given = [tensors_of(batch) for batch in batches]
    fault, shares = "", True
    for overlapping, arena in WAYS:
        if not arena and not shares:
            continue  # the same as the way before
        tried: Plan | None = Plan(Program(graph, places, decision.chosen, setting, weights, overlapping))
        try:
            tried.capture(arena)
        except Exception as error:  # a step that synchronises, or a library that allocates
            fault = f"{type(error).__name__}: {first_line(error)}"
            tried = None  # its buffers are made before the next one's otherwise
        if tried is None:
            if not arena:
                break
            shares = True
            continue
        shares = tried.shares
        found = max((reference.compare(_answers(tried, given)) for _ in range(REPLAYS)), key=lambda parity: parity.fast)
        if found.passes():
            apart = [*([] if overlapping else ["its kernels don't overlap"]), *([] if arena else ["its maps lie apart"])]
            tried.note = f"{', '.join(apart)}: else the graph had {fault}" if apart else ""
            return tried, found
        tried.close()
        fault = f"a relative error of {found.fast:.1e}"
    alone = Plan(Program(graph, places, decision.chosen, setting, weights))
    alone.note = f"runs without a CUDA graph: {fault}"
    return alone, parity


def _answers(plan: Plan, given: list[list[Tensor]]) -> list[list[Tensor]]:
    """Answer each batch right behind other images: a kernel that reads too early would find the same batch's values, and seem right."""
    found = []
    for tensors in given:
        plan([t.flip(0).neg() if t.is_floating_point() and t.dim() else t for t in tensors])
        found.append(_floats(plan(tensors)))
    return found


def _floats(outputs: list[Any]) -> list[Tensor]:
    return [leaf.clone() for leaf in outputs if isinstance(leaf, Tensor)]


def _by_error(plan: Plan, decision: Decision, setting: Setting, batch: Any) -> tuple[list[tuple[Node, str]], list[tuple[Node, str]]]:
    """Return the steps that are worse than ATen's on the values that reach them, and the others, with the errors, the worst first."""
    tensors = tensors_of(batch)
    images = dict(zip(plan.program.graph.inputs, tensors, strict=True))
    found: dict[Node, tuple[float, float, float]] = {}

    def probe(node: Node, inputs: list[Any], value: Any, do: Do[Any]) -> None:
        if decision.chosen[node].op == ATEN:
            return
        given = [
            images[s].to(setting.dtype).contiguous(memory_format=torch.channels_last) if s.op == "input" else x
            for s, x in zip(node.inputs, inputs, strict=True)
        ]
        mine, theirs = do(lambda: errors(node, given, setting, [value, bind(node, Candidate(ATEN), setting)(given, None)]))
        found[node] = (mine / max(theirs, 1e-9), mine, theirs)

    with elsewhere() as do:
        plan.eager(tensors, partial(probe, do=do))
    ratios = {node: ratio if ratio == ratio else math.inf for node, (ratio, _, _) in found.items()}  # where both overflow, nothing is known
    worst = sorted(ratios, key=ratios.__getitem__, reverse=True)
    said = [(node, f"error {found[node][1]:.1e}, ATen's {found[node][2]:.1e}") for node in worst]
    bad = sum(ratio > WORSE for ratio in ratios.values())
    return said[:bad], said[bad:]
