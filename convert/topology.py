"""Who feeds whom: a network reduced to its modules with tensors, on both sides, and the choices that this leaves open."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from convert.graph import Graph
from convert.network import Layer

Domains = dict[str, set[str]]
"""Our module to those of theirs that it may be."""

MAX_NODES = 50_000
"""Of a graph that is reduced: who feeds whom takes time with the square of it."""


@dataclass(frozen=True)
class Web:
    """Modules and those that feed them without another module between; "" is the network's input.

    Attributes:
        inputs: of each module, in the order in which it sees them.
        ordered: modules whose inputs come from concatenations alone, so that their order means something.
    """

    inputs: Mapping[str, tuple[str, ...]]
    ordered: frozenset[str] = field(default_factory=frozenset[str])

    @cached_property
    def outputs(self) -> dict[str, tuple[str, ...]]:
        """The modules that each one feeds."""
        found: dict[str, list[str]] = {name: [] for name in self.inputs}
        for name, feeds in self.inputs.items():
            for fed in feeds:
                if fed in found:
                    found[fed].append(name)
        return {name: tuple(fed) for name, fed in found.items()}

    @cached_property
    def before(self) -> dict[str, frozenset[str]]:
        """The modules without which each one can't be computed, near and far."""
        found: dict[str, frozenset[str]] = {"": frozenset()}
        for name, feeds in self.inputs.items():
            found[name] = frozenset(feeds).union(*(found.get(fed, frozenset()) for fed in feeds)) - {""}
        return found


def of_layers(layers: Sequence[Layer]) -> Web:
    """Describe our network, whose layers know their inputs."""
    return Web({layer.name: layer.inputs for layer in layers})


def of_graph(graph: Graph, modules: Collection[str]) -> Web | None:
    """Reduce a file's graph to `modules`; None where one of them is no layer of it, or the graph is larger than any network's."""
    if len(graph.nodes) > MAX_NODES or not {node.name for node in graph.nodes}.issuperset(modules):
        return None
    made: dict[str, tuple[tuple[str, ...], bool]] = {}
    inputs: dict[str, tuple[str, ...]] = {}
    ordered: set[str] = set()
    for node in graph.nodes:
        fed = tuple(dict.fromkeys(name for source in node.inputs for name in made[source][0]))
        in_order = all(made[source][1] for source in node.inputs) and (len(node.inputs) == 1 or node.op == "concat")
        if node.name in modules:
            inputs[node.name] = fed
            if in_order:
                ordered.add(node.name)
            made[node.name] = ((node.name,), True)
        else:
            made[node.name] = (("",), True) if node.op == "input" else (fed, in_order)
    return Web(inputs, frozenset(ordered))


def refine(domains: Domains, ours: Web, theirs: Web, *, by_order: bool = False) -> None:
    """Strike out, in place, every choice whose neighbours can't be each other's; repeat until nothing changes.

    It is the refinement of Weisfeiler and Leman for two graphs at once, with candidates in the place of colours: a module stays
    a candidate as long as the modules before it can be paired with those before ours, and those behind it with those behind ours.

    Args:
        domains: changed in place; an emptied set says that there is no answer.
        ours, theirs: both networks.
        by_order: whether the inputs of a concatenation must agree place by place.
    """
    waiting = dict.fromkeys(domains)
    while waiting:
        name = next(iter(waiting))
        del waiting[name]
        kept = {other for other in domains[name] if _fits(name, other, domains, ours, theirs, by_order)}
        if kept != domains[name]:
            domains[name] = kept
            waiting |= dict.fromkeys(near for near in (*ours.inputs[name], *ours.outputs[name]) if near in domains)


def _fits(name: str, other: str, domains: Domains, ours: Web, theirs: Web, by_order: bool) -> bool:
    if by_order:
        readers = [
            (reader, ours.inputs[reader].index(name), len(ours.inputs[reader])) for reader in ours.outputs[name] if reader in domains
        ]
        return all(any(_at(there, place, count, theirs) in (other, None) for there in domains[reader]) for reader, place, count in readers)
    return _pairable(ours.inputs[name], theirs.inputs[other], domains) and _pairable(ours.outputs[name], theirs.outputs[other], domains)


def _at(reader: str, place: int, count: int, theirs: Web) -> str | None:
    """Tell who is at that place of what a module of theirs reads; None where their order means nothing."""
    fed = theirs.inputs[reader]
    return fed[place] if reader in theirs.ordered and len(fed) == count else None


def _pairable(ours: Sequence[str], theirs: Sequence[str], domains: Domains) -> bool:
    if len(ours) != len(theirs):
        return False
    there = set(theirs)
    return len(pair({name: domains.get(name, {name}) & there for name in ours})) == len(ours)


def pair(domains: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Pair as many of ours as can be, each with another one of its domain."""
    chosen: dict[str, str] = {}
    holder: dict[str, str] = {}
    for start in domains:
        came: dict[str, str] = {}  # theirs, by whom of ours it was reached
        queue, free = deque([start]), None
        while queue and free is None:
            name = queue.popleft()
            for other in domains[name]:
                if other in came:
                    continue
                came[other] = name
                if other not in holder:
                    free = other
                    break
                queue.append(holder[other])
        while free is not None:  # walk back, and let everyone on the way change over
            name = came[free]
            previous = chosen.get(name)
            chosen[name], holder[free] = free, name
            free = previous
    return chosen


def prune(domains: Domains) -> bool:
    """Strike out, in place, choices that occur in no complete pairing; False where there is none at all."""
    chosen = pair(domains)
    if len(chosen) < len(domains):
        return False
    holder = {other: name for name, other in chosen.items()}
    # a choice occurs in some complete pairing if it closes a circle of changes with the one that was found
    changes = {name: [holder[other] for other in options if other in holder] for name, options in domains.items()}
    circle = _circles(changes)
    for name, options in domains.items():
        domains[name] = {other for other in options if other not in holder or circle[holder[other]] == circle[name]}
    return True


def _circles(edges: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Number the strongly connected components: Kosaraju's two walks."""
    seen: set[str] = set()
    finished: list[str] = []
    for start in edges:
        stack: list[tuple[str, Iterator[str]]] = [] if start in seen else [(start, iter(edges[start]))]
        seen.add(start)
        while stack:
            name, rest = stack[-1]
            for other in rest:
                if other not in seen:
                    seen.add(other)
                    stack.append((other, iter(edges[other])))
                    break
            else:
                finished.append(name)
                stack.pop()
    back: dict[str, list[str]] = {name: [] for name in edges}
    for name, others in edges.items():
        for other in others:
            back[other].append(name)
    number: dict[str, int] = {}
    for place, start in enumerate(reversed(finished)):
        todo = [] if start in number else [start]
        while todo:
            name = todo.pop()
            if name not in number:
                number[name] = place
                todo.extend(other for other in back[name] if other not in number)
    return number


def groups(domains: Domains) -> list[tuple[list[str], list[str]]]:
    """List the open choices: ours that compete, in their order, and what they compete for, sorted."""
    open_ones = {name: set(options) for name, options in domains.items() if len(options) > 1}
    found: list[tuple[list[str], list[str]]] = []
    while open_ones:
        name, reach = next(iter(open_ones.items()))
        members = [name]
        del open_ones[name]
        while more := [other for other, options in open_ones.items() if options & reach]:
            for other in more:
                reach |= open_ones.pop(other)
            members += more
        order = {name: place for place, name in enumerate(domains)}
        found.append((sorted(members, key=order.__getitem__), sorted(reach)))
    return found
