"""Choose a kernel for every step: what was found before, else what a contest finds; and apply the merges that pay."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from zoo.kernels.compilation.workers import Compilers
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.merge import Merge, apply, merges
from zoo.kernels.passes.place import Place
from zoo.kernels.tuning.binding import blanks
from zoo.kernels.tuning.candidates import candidates
from zoo.kernels.tuning.choices import Choice, Choices
from zoo.kernels.tuning.contest import Progress, contenders, ranked, tune
from zoo.kernels.tuning.steps import ATEN, COMPUTED, Candidate, Setting, describe, op_names
from zoo.kernels.tuning.tasks import Task


@dataclass(slots=True)
class Decision:
    """What was decided for one graph."""

    chosen: dict[Node, Candidate] = field(default_factory=dict)
    found: dict[Node, Choice] = field(default_factory=dict)
    keys: dict[Node, str] = field(default_factory=dict)


def choose(
    graph: Graph,
    places: dict[Node, Place],
    setting: Setting,
    level: str,
    choices: Choices,
    compilers: Compilers,
    progress: Progress | None = None,
) -> Decision:
    """Choose a kernel for every step of `graph`, and merge what is faster merged; the graph is changed accordingly.

    Args:
        graph: fused and placed.
        places: where parts of concatenations lie; follows the merges.
        setting: device, dtype.
        level: "none" takes what was found before, else a guess; "quick" and "full" time what was not found before.
        choices: what was found before; new findings are put there and saved.
        compilers: compile what is to be timed.
        progress: called with (done, total, step) while tuning.

    Returns:
        The decisions for the steps that the graph then has.
    """
    possible, keys = _considered(graph, places, setting)
    decision = Decision()
    if level != "none":
        levels = _levels(keys, possible, level)
        missing = _missing(keys, levels, choices)
        try:
            for key, choice in tune(missing, places, setting, levels, compilers, progress):
                choices.put(key, choice)
        finally:
            if missing:
                choices.save()
    _merge(graph, places, possible, keys, choices)
    for node in graph.steps():
        if node.op not in COMPUTED:
            continue
        key = keys.get(node) or describe(node, places, setting)
        decision.keys[node] = key
        choice = choices.get(key)
        if choice is None or not _known(node, choice):
            decision.chosen[node] = guess(node, places, setting)
        else:
            decision.chosen[node], decision.found[node] = Candidate(choice.op, choice.config), choice
    return decision


def kernels(graph: Graph, places: dict[Node, Place], setting: Setting, level: str, choices: Choices) -> list[Task]:
    """Return the kernels that `choose` would compile before it times them, the most promising first.

    Args: as of `choose`.
    """
    if level == "none":
        return []
    possible, keys = _considered(graph, places, setting)
    levels = _levels(keys, possible, level)
    missing = _missing(keys, levels, choices)
    found = contenders(missing, places, setting, levels, foreign=False)
    return [task for _, task in ranked(missing, found, places, setting)]


def _considered(graph: Graph, places: dict[Node, Place], setting: Setting) -> tuple[list[Merge], dict[Node, str]]:
    """Return the merges that are possible, and the keys of all steps that could be timed, those merged ones included."""
    possible = merges(graph, places)
    nodes = [node for node in graph.steps() if node.op in COMPUTED] + [merge.node for merge in possible]
    return possible, {node: describe(node, places, setting) for node in nodes}


def _levels(keys: dict[Node, str], possible: list[Merge], level: str) -> dict[str, str]:
    """Return how much to try of each step, by its key: few of one that squeeze-and-excite can be merged with wherever it is."""
    parts = {part for merge in possible if merge.node.op == "depthwise_squeeze" for part in merge.parts}
    elsewhere = {key for node, key in keys.items() if node not in parts}
    return {key: "part" if level == "quick" and key not in elsewhere else level for key in keys.values()}


def _missing(keys: dict[Node, str], levels: dict[str, str], choices: Choices) -> dict[str, Node]:
    """Return the steps that are worth timing and of which less than their level has been tried, by their keys.

    Those come first that a call spends most time in: whatever is late is tried less, and should cost little.
    """
    worth = {key: node for node, key in keys.items() if choices.get(key, levels[key]) is None}
    often = Counter(keys.values())
    return dict(sorted(worth.items(), key=lambda entry: -often[entry[0]] * (LAUNCH + _size(entry[1]))))


LAUNCH = 4 << 20
"""Elements that are read or written while a small kernel runs, as long as which any takes."""
PRODUCTS = 200
"""Products that are added up while an element is read or written."""


def _size(node: Node) -> float:
    """Return about how much a step has to do, in elements that are read and written."""
    weights = [value for value in node.attrs.values() if isinstance(value, Tensor)]
    elements = sum(prod(one.shape) for one in (node, *node.inputs)) + sum(weight.numel() for weight in weights)
    pixels = prod(node.shape) // node.shape[1] if len(node.shape) > 1 and node.shape[1] else 0
    return max(elements, pixels * sum(weight.numel() for weight in weights if weight.dim() == 4) / PRODUCTS)


def _known(node: Node, choice: Choice) -> bool:
    """Tell whether a kept choice is one that this version could have made: the file may be older, or edited."""
    return choice.op == ATEN or choice.op in op_names(node)


def _merge(graph: Graph, places: dict[Node, Place], possible: list[Merge], keys: dict[Node, str], choices: Choices) -> None:
    """Apply the merges that gain time, the largest gain first; overlapping ones exclude each other."""
    gains: list[tuple[float, int, Merge]] = []
    for number, merge in enumerate(possible):
        merged, parts = choices.get(keys[merge.node]), [choices.get(keys[part]) for part in merge.parts]
        if merged is None or merged.op == ATEN or any(part is None for part in parts):
            continue
        gain = sum(part.us for part in parts if part is not None) - merged.us
        if gain > 0:
            gains.append((gain, number, merge))
    taken: set[Node] = set()
    chosen: list[Merge] = []
    for _, _, merge in sorted(gains, key=lambda item: item[0], reverse=True):
        if not taken.intersection(merge.parts):
            taken.update(merge.parts)
            chosen.append(merge)
    order = {node: index for index, node in enumerate(graph.nodes)}
    apply(graph, sorted(chosen, key=lambda merge: order[merge.value]), places)


def guess(node: Node, places: dict[Node, Place], setting: Setting) -> Candidate:
    """Return what would probably be fast, without timing anything: the first op that takes these inputs, with its best guess."""
    return next(iter(candidates(node, blanks(node, places, setting), setting, 1)), Candidate(ATEN))
