"""Compile a network's kernels by processes, then launch all that timing and a plan launch, in a process whose launches only compile.

Prints as JSON what the launches had to compile themselves: a process of its own, because it can't launch anything any more.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.zoo.kernels.works import SETTING
from zoo.kernels.compilation.compiler_process import stop_at_launch
from zoo.kernels.compilation.workers import Compilers
from zoo.kernels.passes.graph import Node
from zoo.kernels.passes.merge import apply, merges
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.passes.place import Place
from zoo.kernels.plans.plan import Plan
from zoo.kernels.plans.program import Program, compiled_for
from zoo.kernels.tuning.binding import Weights, blanks
from zoo.kernels.tuning.candidates import candidates
from zoo.kernels.tuning.contest import _call, random_inputs
from zoo.kernels.tuning.steps import ATEN, COMPUTED, FOREIGN, Candidate
from zoo.kernels.tuning.tasks import Task

SHAPE = (2, 3, 32, 32)


class Gated(nn.Module):
    """What takes a gate in float32, an image to be packed, and logits in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.SiLU())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 8, 1), nn.ReLU(), nn.Conv2d(8, 32, 1))
        self.narrow, self.head = nn.Conv2d(32, 16, 1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.stem(x))
        return self.head(self.narrow(x * self.squeeze(x).sigmoid()).mean((2, 3)))


def compiled() -> set[str]:
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    return {str(path.relative_to(cache)) for path in cache.rglob("*.cubin")}


def names(paths: set[str]) -> list[str]:
    return sorted(Path(path).stem for path in paths)


def first_of(node: Node, places: dict[Node, Place]) -> Candidate:
    several = candidates(node, blanks(node, places, SETTING), SETTING, 1)
    return next((candidate for candidate in several if candidate.op not in FOREIGN), Candidate(ATEN))


def programs() -> list[tuple[Program, list[Task], list[Task]]]:
    """Return two programs, of which the second has a merged step, what is timed for each, and what it launches."""
    found = []
    for merged in (False, True):
        graph, places = understand(Gated().eval(), (torch.zeros(SHAPE),), {})
        possible = merges(graph, places)
        if merged:
            apply(graph, [merge for merge in possible if merge.node.op == "depthwise_squeeze"], places)
            assert any(node.op == "second" for node in graph.steps())
        steps = [node for node in graph.steps() if node.op in COMPUTED]
        first = {node: first_of(node, places) for node in [*steps, *([] if merged else [merge.node for merge in possible])]}
        timed = [Task(node, places, SETTING, candidate) for node, candidate in first.items() if candidate.op != ATEN]
        program = Program(graph, places, {node: first[node] for node in steps}, SETTING, Weights(), overlapping=True)
        launched = compiled_for(graph, places, first, SETTING)
        found.append((program, timed, [Task(node, places, SETTING, first[node], *how) for node, how in launched.items()]))
    return found


def main() -> None:
    found = programs()
    trials = [task for _, timed, _ in found for task in timed]
    with closing(Compilers((9, 0))) as compilers:
        tasks = [*trials, *(task for *_, launched in found for task in launched)]
        refused = sorted(tasks[index].name for index in set(range(len(tasks))) - compilers.compile(tasks))
    ahead = compiled()
    stop_at_launch(90)
    with torch.no_grad():
        for task in trials:
            _call(task.node, task.candidate, random_inputs(task.node, task.places, SETTING), task.places, SETTING)()
        timed = compiled()
        for program, *_ in found:
            plan = Plan(program)
            plan.eager([torch.randn(SHAPE)])
            plan._pack(0, torch.randn(SHAPE), plan._buffers[0])  # as large images are
    ops = sorted({task.candidate.op for task in trials})
    again = {"timed": names(timed - ahead), "planned": names(compiled() - timed)}
    sys.stdout.write(json.dumps({"ahead": len(ahead), "ops": ops, "refused": refused, **again}))


if __name__ == "__main__":
    main()
