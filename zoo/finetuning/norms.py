"""BatchNorm whose statistics are those of all processes.

A step's images are divided evenly (`plan.plan_of` refuses anything else), so no process has to ask how many the others have.
`torch.nn.SyncBatchNorm` does ask, and waits for the answer in every layer, which leaves the GPU without work; and it has no CPU kernel.
The statistics travel in a process group of their own: in the gradients' they would wait behind whole buckets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from zoo.kernels.ops._exchange import gathered


def share_norms(model: nn.Module) -> None:
    """Let every BatchNorm take its statistics over all processes, in place; names and tensors stay as they are."""
    group = dist.new_group()
    for layer in model.modules():
        if type(layer) is nn.BatchNorm2d:
            layer.__class__ = SharedBatchNorm2d
            layer.__dict__["group"] = group


class SharedBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm over the images of all processes, as many in each."""

    group: Any = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (B, C, H, W); in eval mode with the running statistics."""
        if not self.training:
            return super().forward(input)
        factor = 0.0
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        return (self._on_gpu if input.is_cuda else self._on_cpu)(input, factor)

    def _on_gpu(self, input: Tensor, factor: float) -> Tensor:
        known = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        result = _Normal.apply(input, self.weight, self.bias, *known, factor, self.eps, self.group)
        assert isinstance(result, Tensor)
        return result

    def _on_cpu(self, input: Tensor, factor: float) -> Tensor:
        kind, input = input.dtype, input.float()
        number = input.numel() / input.shape[1] * dist.get_world_size(self.group)
        mean = _total(input.sum((0, 2, 3)), self.group) / number
        centred = input - mean[:, None, None]
        variance = _total(centred.square().sum((0, 2, 3)), self.group) / number
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                self.running_mean.lerp_(mean.detach(), factor)
                self.running_var.lerp_(variance.detach() * number / (number - 1), factor)
        normal = centred * torch.rsqrt(variance + self.eps)[:, None, None]
        if self.weight is not None:
            normal = normal * self.weight[:, None, None] + self.bias[:, None, None]
        return normal.to(kind)


class _Sum(torch.autograd.Function):
    """A sum over all processes whose gradient is the sum over all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _total(x: Tensor, group: Any) -> Tensor:
    result = _Sum.apply(x, group)
    assert isinstance(result, Tensor)
    return result


class _Normal(torch.autograd.Function):
    """ATen's kernels for BatchNorm over processes: one pass for the statistics, one to normalise, and so back."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        factor: float,
        eps: float,
        group: Any,
    ) -> Tensor:
        x, size = _dense(x), dist.get_world_size(group)
        mean, inverse = torch.batch_norm_stats(x, eps)
        means, inverses = gathered(torch.cat((mean, inverse))[None], group).split(len(mean), 1)
        counts = torch.full((size,), x.numel() // x.shape[1], dtype=mean.dtype, device=mean.device)
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            x, means.contiguous(), inverses.contiguous(), running_mean, running_var, factor, eps, counts
        )
        ctx.save_for_backward(x, weight, mean, inverse, counts.int())
        ctx.group = group
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, mean, inverse, counts = ctx.saved_tensors
        gradient = _dense(gradient)
        sums = torch.batch_norm_backward_reduce(gradient, x, mean, inverse, weight, *ctx.needs_input_grad[:3])
        of_x = None
        if ctx.needs_input_grad[0]:
            both = torch.cat(sums[:2])
            dist.all_reduce(both, group=ctx.group)
            of_gradient, of_product = both.split(len(mean))
            of_x = torch.batch_norm_backward_elemt(gradient, x, mean, inverse, weight, of_gradient, of_product, counts)
        return of_x, sums[2] if ctx.needs_input_grad[1] else None, sums[3] if ctx.needs_input_grad[2] else None, *[None] * 5


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()
