"""From a network to a graph of steps that kernels can compute: nothing here needs a device or a clock.

graph      what the passes hand to each other: nodes in the order of their execution
trace      the network's ATen operators at one input shape; `state`: signs that the next call may compute something else;
           `attention`: what stays one operator
lower      what they mean: convolution, BatchNorm, pool …
           `aten`: what a node says of its operator, and how that is run; `pixels`: maps seen with their channels last;
           `constants`: what no input goes into
fold       BatchNorm into weights, padding into convolutions
fuse       what one kernel does: convolution + bias + residual + activation …
place      parts of concatenations, computed where they belong
apart      whether images are answered one by one: so that a CPU's engine may take a batch in parts
merge      steps that may become one kernel, where the clock decides: `tuning.choose` applies those that pay
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo.kernels.passes.fold import fold
from zoo.kernels.passes.fuse import fuse
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.lower import lower
from zoo.kernels.passes.place import Place, place
from zoo.kernels.passes.trace import trace


def understand(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None = None
) -> tuple[Graph, dict[Node, Place]]:
    """Trace, lower, fold, fuse and place: everything that needs no device and no clock.

    Args:
        network: any module; it is neither run nor changed.
        args: positional arguments; of tensors only shape and dtype matter.
        kwargs: keyword arguments, likewise.
        device: where the graph's constants are put; the network's own device if None.

    Returns:
        The steps, and where the parts of its concatenations lie.

    Raises:
        Untraceable: see `trace`.
        ValueError: the network itself refuses such input.
    """
    graph = trace(network, args, kwargs, device)
    lower(graph)
    fold(graph)
    fuse(graph)
    return graph, place(graph)
