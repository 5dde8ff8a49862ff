"""Several processes in a captured step: DistributedDataParallel's work, in an order that is the same with and without a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
        self._size, self._spreads = dist.get_world_size(self.group), model.broadcast_buffers

    @staticmethod
    def refuses(model: DistributedDataParallel) -> str:
        """Say why it has to exchange the gradients itself; empty where it hasn't."""
        if getattr(model, "_delay_all_reduce_params", None) or getattr(model, "mixed_precision", None) is not None:
            return "it exchanges gradients late, or in another dtype"
        if model.find_unused_parameters or model.parameters_to_ignore:
            return "not all parameters learn in all processes"
        if any(getattr(module, "sparse", False) for module in model.modules()) or not all(
            map(torch.ops.aten.is_non_overlapping_and_dense, model.parameters())
        ):
            return "gradients are sparse, or parameters have gaps"
        return Exchange.hooked(model)

    @staticmethod
    def hooked(model: DistributedDataParallel) -> str:
        """Say which hooks only its own way calls; they may come from one step to the next."""
        if getattr(model, "_comm_hooks", None) or getattr(model, "buffer_hook", None):
            return "its gradients or buffers go through a hook of their own"
        if any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters()):
            return "a parameter has hooks"
        if model._forward_hooks or model._forward_pre_hooks or model._backward_hooks or model._backward_pre_hooks:
            return "it has hooks itself"
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
                if parameter.requires_grad:
                    parameter.grad = None
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
            for same in _by_dtype(list(self.network.buffers()) if self._spreads else []):
                flat = torch.cat([buffer.reshape(-1) for buffer in same])
                dist.broadcast(flat, group=self.group, group_src=0)
                pieces = flat.split([buffer.numel() for buffer in same])
                views = [piece.view(buffer.shape) for piece, buffer in zip(pieces, same, strict=True)]
                torch._foreach_copy_(same, views)  # pyright: ignore[reportPrivateImportUsage]

    def average(self, learnt: dict[nn.Parameter, Tensor]) -> None:
        """Set the parameters' gradients to the mean of all processes', of what went to the stand-ins and to the parameters themselves."""
        known: dict[nn.Parameter, Tensor] = {}
        for parameter, stand_in in learnt.items():  # a penalty in the loss knows the parameter
            both = [g for g in (stand_in.grad, parameter.grad) if g is not None]
            if both:
                known[parameter] = both[0] if len(both) == 1 else both[0] + both[1]
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


def quiet(model: nn.Module, on: bool) -> Any:
    """Return a context in which a backward keeps its gradients to its process, if `on`: more parts of the step follow."""
    model = getattr(model, "_orig_mod", model)  # what torch.compile has put around it doesn't know
    if isinstance(model, DistributedDataParallel):
        return model.no_sync() if on else nullcontext()
    if callable(setter := getattr(model, "set_requires_gradient_sync", None)):  # FSDP's
        setter(not on)
    return nullcontext()


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    return [[t for t in tensors if t.dtype == dtype] for dtype in dict.fromkeys(t.dtype for t in tensors)]


def _views(flat: Tensor, like: list[Any]) -> list[Tensor]:
    """Cut a flat tensor into pieces with the sizes and strides of tensors that have no gaps."""
    pieces, start = [], 0
    for tensor in like:
        pieces.append(flat[start : start + tensor.numel()].as_strided(tensor.size(), tensor.stride(), start))
        start += tensor.numel()
    return pieces
