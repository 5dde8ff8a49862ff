"""What answers calls of one shape: made by `plans.build` on a GPU, by `engines.build` on a CPU, kept by `network`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zoo.kernels.errors import Untraceable
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.reports.report import PlanReport


@dataclass(slots=True)
class Built:
    """A checked plan: `run` takes the tensors among the arguments and returns the flat outputs."""

    run: Callable[[list[Tensor]], list[Any]]
    spec: Any
    report: PlanReport
    single: bool = field(init=False)
    """Whether the network returns one tensor, and no structure around it."""
    replays: bool = field(init=False)
    """Whether a call is a replay, which depends on none of PyTorch's modes."""

    def __post_init__(self) -> None:
        """Ask once what every call would ask."""
        self.single = self.spec.is_leaf()
        self.replays = getattr(self.run, "captured", False)

    def overwrites(self, tensors: list[Tensor]) -> bool:
        """Tell whether a call may write over a tensor that it is given."""
        run: Any = self.run
        return self.replays and run.overwrites(tensors)

    def rooms(self) -> list[Tensor | None]:
        """Return for each tensor where a caller may write it so that it is not copied; None where that is nowhere."""
        run: Any = self.run
        return run.rooms() if self.replays else [None] * len(self.report.shapes)


def empty(graph: Graph, device: torch.device, network: nn.Module) -> Built:
    """A batch of no images has outputs without elements; where an output has some nevertheless, the network has to compute them."""
    if any(isinstance(leaf, Node) and torch.Size(leaf.shape).numel() for leaf in graph.outputs):
        raise Untraceable(f"{type(network).__name__} makes something of an empty tensor")
    made = [torch.empty(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, Node) else leaf for leaf in graph.outputs]
    return Built(
        lambda _: [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in made],
        graph.spec,
        PlanReport([tuple(node.shape) for node in graph.inputs], notes=["an empty batch"]),
    )
