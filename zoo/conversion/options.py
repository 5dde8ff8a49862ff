"""Constructor keywords that a file of another framework asks for: what its notes, its graph, its naming and its record say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from convert import names
from convert.source import Convention, Source, Spatial
from weights import Checkpoint
from zoo.conversion.beside import Beside
from zoo.conversion.notes import accepted, notes
from zoo.networks.model import Model

ACTIVATIONS = {"leaky_relu": "leaky_relu_0.1"}
"""Operations of a graph whose name here is another one."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the caller says of a file.

    Attributes:
        match: derive the mapping from topology, shapes and names instead of a table.
        convention: of the kernels, where the file doesn't say or says it wrongly.
        spatial: "hw" or "wh", likewise.
        headless: whether the file may lack the classifier: the network then ends in what its classifier reads.
        known: the registry's record of these very bytes, if there is one.
        options: constructor keywords; they win over the file's and the naming's.
        beside: what files beside it say.
    """

    match: bool = False
    convention: Convention | None = None
    spatial: Spatial | None = None
    headless: bool = False
    known: Checkpoint | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    beside: Beside | None = None


def options_of(source: Source, model: type[Model], naming: str, asked: Asked) -> dict[str, Any]:
    """Return the constructor keywords that a file needs, those that the network's class takes."""
    noted, known = notes(source.facts, model), asked.known
    habits = names.customs(naming, source.format)
    usual = names.fact(habits, "options", model) if habits else {}
    recorded = known.options if known is not None and known.model == model.variant().__name__ else {}
    beside = asked.beside.options if asked.beside is not None else {}
    suggested = noted["options"] if noted else {**usual, **_of_graph(source), **beside, **recorded}
    taken = accepted(model)
    return {k: v for k, v in suggested.items() if k in taken} | dict(asked.options)


def _of_graph(source: Source) -> dict[str, Any]:
    """Say which constructor keywords the file's own graph asks for."""
    if source.graph is None:
        return {}
    eps = {node.attrs["eps"] for node in source.graph.nodes if node.op == "norm" and "eps" in node.attrs}
    same = {
        node.attrs.get("pads") == "same_upper"
        for node in source.graph.nodes
        if node.op in ("conv", "depthwise") and tuple(node.attrs.get("stride", (1, 1))) != (1, 1)
    }
    found: dict[str, Any] = {}
    if len(eps) == 1:
        found["norm_eps"] = float(f"{eps.pop():.6g}")  # a graph keeps it in float32, 9.99999974e-06
    if same == {True}:
        found["padding"] = "same"
    used = {
        ACTIVATIONS.get(node.op, node.op) for node in source.graph.nodes if node.op in (*ACTIVATIONS, "relu", "relu6", "hardswish", "silu")
    }
    if len(used) == 1:
        found["activation"] = used.pop()
    last = next((node for node in reversed(source.graph.nodes) if node.op == "conv"), None)
    weight = None if last is None else source.tensors.get(f"{last.name}.weight")
    if last and weight and weight.shape[2:] == (1, 1) and tuple(last.attrs.get("pads", ())) == (1, 1, 1, 1):
        found["classifier_padding"] = 1
    return found
