"""All passes one after the other: a network becomes steps, and the places of what is concatenated."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo.kernels.passes.fold import fold
from zoo.kernels.passes.fuse import fuse
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.islands import gather
from zoo.kernels.passes.lower import lower
from zoo.kernels.passes.place import Place, place
from zoo.kernels.passes.response_norm import gate_responses
from zoo.kernels.passes.trace import trace
from zoo.kernels.passes.windows import windows


def understand(
    network: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device | None = None,
    islands: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Graph, dict[Node, Place]]:
    """Trace, lower, fold, fuse and place: everything that needs no device and no clock.

    Args: as of `trace`, and

        islands: gather what no kernel takes for PyTorch's compiler.
        dtype: what the plan will compute in; None may be any.

    Returns:
        The steps, and where the parts of its concatenations lie.

    Raises:
        Untraceable: see `trace`.
        ValueError: the network itself refuses such input.
    """
    graph = trace(network, args, kwargs, device)
    lower(graph)
    gate_responses(graph)
    fold(graph, dtype)
    windows(graph)
    fuse(graph)
    if islands:
        gather(graph)
    return graph, place(graph)
