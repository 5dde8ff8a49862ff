"""BatchNorms that take their statistics over several processes: recorded as one call, and alone while a network is checked."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from zoo.kernels.errors import Untraceable

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_here = threading.local()


def shared_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    group: Any,
) -> Tensor:
    """Normalise a map by the statistics of a group's pixels; by its own while `alone`."""
    if torch.overrides.has_torch_function((x,)):
        parts = (x, running_mean, running_var, weight, bias, training, momentum, eps, group)
        return torch.overrides.handle_torch_function(shared_batch_norm, (x,), *parts)
    if is_alone():
        return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(x, FakeTensor):  # a recording has nobody to talk to
        return torch.empty_like(x)
    from zoo.kernels import differentiable as ops

    return ops.batch_norm_act(x, weight, bias, running_mean, running_var, momentum=momentum, eps=eps, group=group)


def agreed(calls: Sequence[Any], found: tuple[dict[Any, str], ...] | Untraceable) -> tuple[dict[Any, str], ...]:
    """Unite what the processes of a group have found: they must all do the same, for some calls wait for the others.

    Args:
        calls: of a recording; without one that exchanges statistics nothing has to be agreed on.
        found: reasons by chain, or the error that ends the planning here.

    Returns:
        the reasons of all.

    Raises:
        Untraceable: the error, here or in another process.
    """
    group = next((call.args[-1] for call in calls if call.func is shared_batch_norm), None)
    if group is not None and not is_alone():
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, str(found) if isinstance(found, Untraceable) else found, group=group)
        if not isinstance(found, Untraceable):
            if failed := next((other for other in every if isinstance(other, str)), None):
                raise Untraceable(f"another process could not: {failed}")
            return tuple({makes: why for other in same for makes, why in other.items()} for same in zip(*every, strict=True))
    if isinstance(found, Untraceable):
        raise found
    return found


def _sharing(network: nn.Module) -> Iterator[tuple[nn.modules.batchnorm._BatchNorm, Any]]:
    """Yield the BatchNorms that may exchange statistics now, with their group, None where they don't say.

    A class of its own, as timm's with an activation, exchanges nothing where no processes are connected.
    """
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and type(module) not in _PLAIN and module.training:
            group = getattr(module, "process_group", None) or getattr(module, "group", None)
            if group is None and isinstance(module, nn.SyncBatchNorm) and dist.is_initialized():
                group = dist.group.WORLD
            if group is not None or (dist.is_available() and dist.is_initialized()):
                yield module, group


def stand_in(twin: nn.Module) -> None:
    """Let a copy that is recorded call `shared_batch_norm` where it would exchange statistics.

    Raises:
        Untraceable: a BatchNorm of its own kind doesn't say with whom.
    """
    for module, group in _sharing(twin):
        if group is None:
            raise Untraceable(f"a {type(module).__name__} may exchange statistics, and has no group of processes")
        module.__dict__["zoo_group"] = group
        module.forward = MethodType(_forward, module)


def _forward(self: Any, x: Tensor) -> Tensor:
    if x.dim() != 4 or self.momentum is None:
        raise Untraceable(f"a {type(self).__name__} of {x.dim()} axes, or without momentum")
    if self.track_running_stats and self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
    known = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
    return shared_batch_norm(x, *known, self.weight, self.bias, True, self.momentum, self.eps, self.zoo_group)


def lonely(twin: nn.Module) -> nn.Module:
    """Let a copy's BatchNorms take their own statistics, for a check that no other process takes part in."""
    for module, _ in _sharing(twin):
        module.forward = MethodType(nn.BatchNorm2d.forward, module)
    return twin


@contextmanager
def alone() -> Iterator[None]:
    """Exchange nothing on this thread for a while."""
    before = is_alone()
    _here.alone = True
    try:
        yield
    finally:
        _here.alone = before


def is_alone() -> bool:
    """Tell whether this thread exchanges nothing now."""
    return getattr(_here, "alone", False)
