"""Several processes in a captured step: DistributedDataParallel's work, in an order that is the same with and without a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Exchange:
    """Average the gradients of a DistributedDataParallel network over its processes, and spread its buffers, without its hooks.

    The nodes that its hooks hang on belong to the stream on which it was made, which no capture may wait for; so in a step stand-ins
    that share the parameters' memory take their places. All gradients are averaged in one call behind the backward: a process whose
    step is not captured, for its batch is smaller, say, exchanges the same in the same order as the others.

    Args:
        model: what is stepped.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.network: nn.Module = model.module
        self.group: Any = model.process_group
        self._size = dist.get_world_size(self.group)
        self._buffers = list(model.modules_buffers) if model.broadcast_buffers else []

    @staticmethod
    def refuses(model: DistributedDataParallel) -> str:
        """Say why its own hooks have to exchange the gradients; empty where they don't."""
        if getattr(model, "_comm_hooks", None):
            return "its gradients go through a hook of their own"
        if getattr(model, "_delay_all_reduce_params", None):
            return "it exchanges some gradients late"
        return ""

    @contextmanager
    def stand_ins(self) -> Iterator[dict[nn.Parameter, Tensor]]:
        """Put stand-ins into the network for a forward and a backward, and yield them by their parameters."""
        found: dict[nn.Parameter, Tensor] = {}
        places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        for module in self.network.modules():
            places += [(module._parameters, name, p) for name, p in module._parameters.items() if p is not None]
        try:
            for holder, name, parameter in places:
                if parameter not in found:
                    found[parameter] = parameter.detach().requires_grad_(parameter.requires_grad)
                holder[name] = found[parameter]
            yield found
        finally:
            for holder, name, parameter in places:
                holder[name] = parameter

    def spread(self) -> None:
        """Give all processes the first one's buffers, as DistributedDataParallel does before each forward."""
        with torch.no_grad():
            for same in _by_dtype(self._buffers):
                flat = torch.cat([buffer.reshape(-1) for buffer in same])
                dist.broadcast(flat, group=self.group, group_src=0)
                torch._foreach_copy_(same, _views(flat, same))  # pyright: ignore[reportPrivateImportUsage]

    def average(self, learnt: dict[nn.Parameter, Tensor]) -> None:
        """Set the parameters' gradients to the mean of all processes' stand-ins'."""
        known = {parameter: stand_in.grad for parameter, stand_in in learnt.items() if stand_in.grad is not None}
        for stand_in in learnt.values():
            stand_in.grad = None
        with torch.no_grad():
            for dtype in dict.fromkeys(g.dtype for g in known.values()):
                own = {parameter: g for parameter, g in known.items() if g.dtype == dtype}
                flat = torch.empty(sum(g.numel() for g in own.values()), dtype=dtype, device=next(iter(own.values())).device)
                views = _views(flat, list(own))
                torch._foreach_copy_(views, list(own.values()))  # pyright: ignore[reportPrivateImportUsage]
                dist.all_reduce(flat.div_(self._size), group=self.group)
                for parameter, view in zip(own, views, strict=True):
                    parameter.grad = view


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    return [[t for t in tensors if t.dtype == dtype] for dtype in dict.fromkeys(t.dtype for t in tensors)]


def _views(flat: Tensor, like: list[Any]) -> list[Tensor]:
    """Cut a flat tensor into pieces with the sizes and strides of tensors that have no gaps."""
    pieces, start = [], 0
    for tensor in like:
        pieces.append(flat[start : start + tensor.numel()].as_strided(tensor.size(), tensor.stride(), start))
        start += tensor.numel()
    return pieces
