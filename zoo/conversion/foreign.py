"""A file of any framework with the network that its tensors were given to: what is known of it, and the network loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from convert import names
from convert.adopted import Adopted
from convert.core import COUNTER
from convert.network import Layer
from convert.source import Convention, Source, Spatial
from weights import Checkpoint
from weights.errors import LimitExceeded
from zoo.conversion.beside import Beside, suited
from zoo.conversion.notes import notes
from zoo.networks.assignment import assign
from zoo.networks.model import Model

MOST_PIXELS = 2048
"""Side of the images that a file may ask to be proven on."""


@dataclass(slots=True)
class Foreign:
    """A file, and the network that its tensors were given to.

    Attributes:
        source: what the reader found.
        model: the class.
        network: built on the meta device with `options`.
        layers: of the network.
        adopted: the tensors by our names.
        options: constructor keywords without which these weights compute something else.
        known: the registry's record of these very bytes, if there is one.
        convention, spatial: what was said or decided, where the file doesn't say; None where the file is believed.
        renamed: whether the file's classifier has another name than in its naming.
        beside: what files beside it say.
    """

    source: Source
    model: type[Model]
    network: Model
    layers: list[Layer]
    adopted: Adopted
    options: dict[str, Any] = field(default_factory=dict)
    convention: Convention | None = None
    spatial: Spatial | None = None
    known: Checkpoint | None = None
    renamed: bool = False
    beside: Beside | None = None

    @property
    def customs(self) -> str:
        """The naming whose habits the file has, see `convert.names.customs`."""
        return names.customs(self.adopted.naming, self.source.format)

    @property
    def preprocessing(self) -> dict[str, Any]:
        """How images are prepared, fields of `weights.Preprocessing`: what the file says, over what its naming is known to want."""
        if noted := notes(self.source.facts, self.model):
            return dict(noted["preprocessing"])
        if self.known is not None and self.known.model == self.model.variant().__name__:
            return asdict(self.known.preprocessing)
        known = names.fact(self.customs, "preprocessing", self.model) if self.customs else {}
        both = {**known, **self.source.preprocessing}
        if self.beside is not None:
            both |= suited(self.beside.preprocessing, self.model, self.options)
        side = self.image_size
        if side not in (None, self.network.input_size) and not {"resize", "crop"} & both.keys():
            both |= {"resize": side, "crop": side}
        return {name: both[name] for name in ("resize", "crop", "interpolation", "mean", "std", "channel_order", "squash") if name in both}

    @property
    def image_size(self) -> int | None:
        """Side in pixels of the images that the file's network takes, where its graph says it."""
        for node in self.source.graph.nodes if self.source.graph is not None else ():
            shape = [side for side in node.attrs.get("shape") or () if isinstance(side, int)] if node.op == "input" else []
            if len(shape) == 3:
                if max(shape) > MOST_PIXELS:
                    raise LimitExceeded(
                        f"{self.source.path} asks for images of {max(shape)} pixels a side; at most {MOST_PIXELS} are tried"
                    )
                sides = shape[1:] if node.attrs.get("layout", "nchw") == "nchw" else shape[:2]
                if sides[0] == sides[1] and sides[0] >= self.network.min_size:
                    return sides[0]
        return None

    @property
    def labels(self) -> str | None:
        """The name of its list of labels: noted by `zoo convert`, or ImageNet's where its naming is of networks with these classes."""
        if noted := notes(self.source.facts, self.model):
            return noted.get("labels")
        if self.known is not None and self.known.model == self.model.variant().__name__:
            return self.known.labels
        if self.beside is not None and self.beside.labels and not self.beside.labels.endswith(".tsv"):  # a table of this machine's cache
            return self.beside.labels
        if not self.network.classifiers:
            return None
        head = self.adopted.tensors.get(f"{self.network.classifiers[0]}.weight")
        return "imagenet1k" if head is not None and head.shape[0] == 1000 and self.adopted.naming in names.NAMINGS else None

    def settled(self) -> Source:
        """Return the source with what was decided about it, for the execution of its graph."""
        source = self.source
        if self.spatial is not None:
            source = replace(source, spatial=self.spatial)
        if self.convention is None or source.graph is None:
            return source
        nodes = [
            replace(node, attrs={**node.attrs, "convention": self.convention}) if "convention" in node.attrs else node
            for node in source.graph.nodes
        ]
        return replace(source, graph=replace(source.graph, nodes=tuple(nodes)))

    @property
    def takes_pixels(self) -> bool:
        """Whether the source network takes pixels, 0..255, and prepares them itself."""
        graph = self.source.graph
        if graph is not None:
            first = next((node for node in graph.nodes if node.op != "input"), None)
            return first is not None and first.op == "affine"
        known = names.fact(self.customs, "preprocessing", self.model) if self.customs else {}
        return bool(known.get("built_in", False))


def load(foreign: Foreign, network: Model | None = None) -> Model:
    """Build the network with the tensors of the file, in eval mode, in torch's default dtype, on the CPU."""
    from convert.formats._torch import as_tensor

    target = network if network is not None else foreign.network
    found = foreign.adopted.tensors
    return filled(target, {name: as_tensor(found[name].array()).contiguous() for name in target.state_dict() if name in found})


def filled(network: Model, tensors: Mapping[str, Tensor]) -> Model:
    """Give a network tensors by its own names, in its dtypes, in eval mode; step counters that are missing are 0."""
    counters = {name: torch.zeros((), dtype=torch.int64) for name in network.state_dict() if name.endswith(COUNTER)}
    return assign(network, {**counters, **tensors}).eval()
