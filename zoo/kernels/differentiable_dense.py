"""A DenseNet's block as one differentiable op: one map that every layer reads the beginning of and writes the next channels of.

Nothing is concatenated. Statistics of a channel don't depend on who reads it, so they are taken once, when it is written. The way back
has one map of gradients, to which each layer adds. Kept are the block's map, what each 1x1 convolution gave, and statistics: memory
grows with the number of layers, not with its square, and what is computed again are activations, inside of the kernels that read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zoo.kernels.ops import batch_norm_act_grad, pointwise_stats, pointwise_stats_input_add, pointwise_stats_weight_grad
from zoo.kernels.ops._exchange import row_of
from zoo.kernels.ops._layout import empty_map, pixel_stride
from zoo.kernels.ops._norm import apply, join, partial_statistics
from zoo.kernels.ops._norm_grad import back
from zoo.kernels.ops._overlap import followed_by_ours
from zoo.kernels.ops.batch_norm_act import configs as norm_configs
from zoo.kernels.ops.batch_norm_act_grad import configs as back_configs
from zoo.kernels.ops.pointwise import DTYPES, kernels_run

Pair = tuple[int, int]
TENSORS = 10
"""Tensors a layer: weight, bias, running mean and variance of its first BatchNorm, its 1x1 kernel, the same of its second, its kernel."""


@dataclass(frozen=True)
class Norm:
    """What a BatchNorm with its activation computes with, beside its tensors."""

    momentum: float
    eps: float
    act: str


@dataclass(frozen=True)
class DenseLayer:
    """A layer of a block: BatchNorm, activation, 1x1 convolution, BatchNorm, activation, convolution; no convolution has a bias.

    Attributes:
        first: the BatchNorm of all that the block has so far.
        second: the BatchNorm behind the 1x1 convolution.
        padding: of the last convolution, which keeps the map's size.
        dilation: of the same.
    """

    first: Norm
    second: Norm
    padding: Pair = (1, 1)
    dilation: Pair = (1, 1)


def dense_layers(layers: Sequence[dict[str, Any]]) -> tuple[DenseLayer, ...]:
    """Return layers of plain numbers: dicts of the attributes of `DenseLayer`, the norms dicts of those of `Norm`."""
    return tuple(DenseLayer(Norm(**given["first"]), Norm(**given["second"]), given["padding"], given["dilation"]) for given in layers)


def refuses(x: Tensor, tensors: Sequence[Tensor | None], layers: Sequence[DenseLayer]) -> str:
    """Say why kernels would not take a block's arguments; "" where they do. The tensors may be without data."""
    if x.dim() != 4 or x.dtype not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    n, read, h, w = x.shape
    if not x.numel():
        return "no pixels"
    for index, layer in enumerate(layers):
        weight, bias, mean, var, kernel, weight2, bias2, mean2, var2, last = tensors[TENSORS * index : TENSORS * (index + 1)]
        assert kernel is not None
        assert last is not None
        seen, made = _like((n, read, h, w), x), _like((n, len(kernel), h, w), x)
        flat, stats = torch.empty(kernel.shape, dtype=x.dtype, device="meta"), torch.empty((3, read), device="meta")
        reason = pointwise_stats_input_add.supports(made, flat, seen, stats, seen, weight, bias, act=layer.first.act)
        reason = reason or _norm_refuses(made, weight2, bias2, layer.second.act)
        if any(p is not None and not p.is_contiguous() for p in (mean, var, mean2, var2)):
            reason = reason or "running statistics are not one for each channel"
        if reason:
            return reason
        read += len(last)
    return "" if n * read * h * w < 2**31 - 2**24 else "larger than 32-bit indices reach"


def _like(size: tuple[int, ...], x: Tensor) -> Tensor:
    return torch.empty(size, dtype=x.dtype, device="meta").contiguous(memory_format=torch.channels_last)


def _norm_refuses(made: Tensor, weight: Tensor | None, bias: Tensor | None, act: str) -> str:
    return batch_norm_act_grad.supports(made, made, weight, bias, torch.empty((3, made.shape[1]), device="meta"), act=act)


class _Maps:
    """The steps of a block, by kernels where they run, else by their references."""

    def __init__(self, runs: bool) -> None:
        self.runs = runs

    def row(self, x: Tensor) -> Tensor:
        """Return (3, C): count, means and sums of squared deviations."""
        if not self.runs:
            return row_of(x)[0]
        with followed_by_ours(True):
            partials = partial_statistics(x, norm_configs(x)[0])
        return join(partials, torch.empty(partials.shape[1:], device=x.device), None, None, 0.0, 0.0, raw=True)

    def stats(self, row: Tensor, running: tuple[Tensor | None, Tensor | None], norm: Norm) -> Tensor:
        """Return means, 1 / deviations and 1 / pixels of a row; the running statistics move."""
        old = None if running[0] is None or running[1] is None else (running[0], running[1])
        if self.runs:
            return join(row.contiguous()[None], torch.empty(row.shape, device=row.device), old, old or (), norm.eps, norm.momentum)
        count, mean, squares = row
        if old:
            old[0].lerp_(mean.to(old[0].dtype), norm.momentum)
            old[1].lerp_((squares / (count - 1)).to(old[1].dtype), norm.momentum)
        return torch.stack([mean, (squares / count + norm.eps).rsqrt(), 1 / count])

    def product(self, x: Tensor, kernel: Tensor, stats: Tensor, weight: Any, bias: Any, act: str) -> tuple[Tensor, Tensor]:
        """Return the 1x1 convolution of the normalised and activated map, and the row of what it gives."""
        if self.runs:
            return pointwise_stats.launch(x, kernel, stats, weight, bias, act=act)
        return pointwise_stats.reference(x, kernel, stats, weight, bias, act=act)

    def applied(self, x: Tensor, stats: Tensor, weight: Any, bias: Any, act: str) -> Tensor:
        """Return the normalised and activated map."""
        if self.runs:
            out = empty_map(*x.shape, like=x)
            apply(x, None, stats, weight, bias, act, out, norm_configs(x)[0])
            return out
        return pointwise_stats.normalised(x, stats, weight, bias, act).to(x.dtype)

    def norm_back(self, gradient: Tensor, x: Tensor, weight: Any, bias: Any, stats: Tensor, act: str, of_x: bool) -> tuple[Tensor, Tensor]:
        """Return the gradient of a normalised map's input, and the sums that are those of bias and weight."""
        of_map, sums = batch_norm_act_grad.gradients(_rows(gradient), x, weight, bias, stats, None, act=act, of_x=of_x)
        return of_map, sums

    def kernel_back(self, gradient: Tensor, x: Tensor, stats: Tensor, weight: Any, bias: Any, act: str, out: Tensor) -> Tensor:
        """Write the gradient of a 1x1 kernel."""
        flat = out.view(len(out), -1)
        if self.runs:
            pointwise_stats_weight_grad.launch(gradient, x, stats, weight, bias, act=act, out=flat)
        else:
            flat.copy_(pointwise_stats_weight_grad.reference(gradient, x, stats, weight, bias, act=act))
        return out

    def add_back(
        self, gradient: Tensor, kernel: Tensor, x: Tensor, stats: Tensor, total: Tensor, weight: Any, bias: Any, act: str, to: Tensor
    ) -> Tensor:
        """Write `total` plus what needs no sums of the gradient of x, and return the sums."""
        parts = (gradient, kernel, x, stats, total, weight, bias)
        if self.runs:
            sums = torch.empty((2, x.shape[1]), dtype=torch.float32, device=x.device)
            return pointwise_stats_input_add.launch(*parts, act=act, out=(to, sums))[1]
        added, sums = pointwise_stats_input_add.reference(*parts, act=act)
        to.copy_(added)
        return sums

    def settled(self, total: Tensor, x: Tensor, mean: Tensor, owed: Tensor) -> Tensor:
        """Return a part of the gradients less the levels and tilts that its channels owe."""
        if self.runs:
            out, one = empty_map(*x.shape, like=total), torch.ones_like(mean)
            stats = torch.stack([mean, one, one])
            back(total, x, None, None, stats, None, "none", owed.contiguous(), out, back_configs(total, x)[0])
            return out
        level, tilt = owed[:, :, None, None]
        return (total - (level + (x - mean[:, None, None]) * tilt)).to(total.dtype)


class _DenseBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: tuple[DenseLayer, ...], *tensors: Tensor | None) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        maps = _Maps(kernels_run(x) and not refuses(x, tensors, layers))
        ends = _ends(x.shape[1], tensors)
        n, _, h, w = x.shape
        whole = empty_map(n, ends[-1], h, w, x)
        row = torch.empty((3, ends[-1]), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        whole[:, : ends[0]], row[:, : ends[0]] = x, maps.row(_rows(x))
        kept: list[Tensor] = []
        moved: list[Tensor] = []
        for index, layer in enumerate(layers):
            weight, bias, mean, var, kernel, weight2, bias2, mean2, var2, last = _of(tensors, index)
            read, first, second = whole[:, : ends[index]], layer.first, layer.second
            stats = maps.stats(row[:, : ends[index]], (mean, var), first)
            y, of_y = maps.product(read, _flat(kernel, x), stats, weight, bias, first.act)
            stats2 = maps.stats(of_y, (mean2, var2), second)
            z = maps.applied(y, stats2, weight2, bias2, second.act)
            new = torch.ops.aten.convolution(z, last.to(x.dtype), None, [1, 1], layer.padding, layer.dilation, False, [0, 0], 1)
            part = slice(ends[index], ends[index + 1])
            whole[:, part], row[:, part] = new, maps.row(_rows(new))
            kept += [stats, _rows(y), stats2]
            moved += [t for t in (mean, var, mean2, var2) if t is not None]
        torch.autograd.graph.increment_version(moved)
        ctx.save_for_backward(whole, row, *kept, *(t for index in range(len(layers)) for t in _learnt(tensors, index)))
        ctx.layers, ctx.ends, ctx.runs = layers, ends, maps.runs
        ctx.mark_non_differentiable(row)
        return whole, row

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        whole, row, *rest = ctx.saved_tensors
        layers, ends, maps, count = ctx.layers, ctx.ends, _Maps(ctx.runs), len(ctx.layers)
        kept, learnt = rest[: 3 * count], rest[3 * count :]
        of_x_needed, _, *needed = ctx.needs_input_grad
        wanted = [_of(needed, index) for index in range(count)]
        found: list[Any] = [None] * (TENSORS * count)
        n, _, h, w = whole.shape
        total = _rows(gradient)
        owed = torch.zeros((2, ends[-1]), dtype=row.dtype, device=whole.device)
        for index in reversed(range(count)):
            deep = of_x_needed or any(any(names) for names in wanted[:index])
            weight_needed, bias_needed, _, _, kernel_needed, *second_needed, last_needed = wanted[index]
            first_needed = weight_needed or bias_needed or deep
            if not (deep or any(wanted[index])):
                break
            (stats, y, stats2), layer = kept[3 * index : 3 * index + 3], layers[index]
            weight, bias, kernel, weight2, bias2, last = learnt[6 * index : 6 * index + 6]
            part = slice(ends[index], ends[index + 1])
            results: list[Any] = [None] * TENSORS
            of_new = maps.settled(total[:, part], whole[:, part], row[1, part], owed[:, part])
            inner = first_needed or kernel_needed or any(second_needed)
            z = maps.applied(y, stats2, weight2, bias2, layer.second.act) if last_needed else y
            of_z, of_last, _ = torch.ops.aten.convolution_backward(
                of_new, z, last.to(z.dtype), None, [1, 1], layer.padding, layer.dilation, False, [0, 0], 1, [inner, last_needed, False]
            )  # fmt: skip
            del z, of_new
            results[9] = of_last.to(last.dtype) if last_needed else None
            if inner:
                of_y, sums = maps.norm_back(of_z, y, weight2, bias2, stats2, layer.second.act, first_needed or kernel_needed)
                results[5], results[6] = _of_affine(sums, weight2, bias2, second_needed)
                del of_z
                read, flat = whole[:, : ends[index]], _flat(kernel, whole)
                if kernel_needed:
                    of_kernel = torch.empty(kernel.shape, dtype=kernel.dtype, device=kernel.device)
                    results[4] = maps.kernel_back(of_y, read, stats, weight, bias, layer.first.act, of_kernel)
                if first_needed:
                    there = total[:, : ends[index]]
                    to = there if index < count - 1 else empty_map(n, ends[index], h, w, whole)  # nobody's gradient is written into
                    sums = maps.add_back(of_y, flat, read, stats, there, weight, bias, layer.first.act, to)
                    results[0], results[1] = _of_affine(sums, weight, bias, (weight_needed, bias_needed))
                    slant = stats[1] if weight is None else stats[1] * weight
                    share = sums * (slant * stats[2])
                    owed[0, : ends[index]] += share[0]
                    owed[1, : ends[index]] += share[1] * stats[1]
                    total = to
                del of_y
            found[TENSORS * index : TENSORS * (index + 1)] = results
        first = slice(0, ends[0])
        of_x = maps.settled(total[:, first], whole[:, first], row[1, first], owed[:, first]) if of_x_needed else None
        return of_x, None, *found


def _of(tensors: Sequence[Any], index: int) -> Sequence[Any]:
    return tensors[TENSORS * index : TENSORS * (index + 1)]


def _learnt(tensors: Sequence[Any], index: int) -> list[Any]:
    weight, bias, _, _, kernel, weight2, bias2, _, _, last = _of(tensors, index)
    return [weight, bias, kernel, weight2, bias2, last]


def _ends(channels: int, tensors: Sequence[Any]) -> list[int]:
    """Return where each layer's input ends, and the last one's output."""
    return list(accumulate((len(last) for last in tensors[TENSORS - 1 :: TENSORS]), initial=channels))


def _of_affine(sums: Tensor, weight: Tensor | None, bias: Tensor | None, needed: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
    of_weight = sums[1].to(weight.dtype) if weight is not None and needed[0] else None
    return of_weight, sums[0].to(bias.dtype) if bias is not None and needed[1] else None


def _flat(kernel: Tensor, x: Tensor) -> Tensor:
    return kernel.flatten(1).to(x.dtype).contiguous()


def _rows(x: Tensor) -> Tensor:
    """Return a map whose pixels lie in rows, as kernels read it."""
    return x if pixel_stride(x) else x.contiguous(memory_format=torch.channels_last)


def dense_block(x: Tensor, *tensors: Tensor | None, layers: Sequence[DenseLayer]) -> tuple[Tensor, Tensor]:
    """Append to a map what each layer makes of all that is there, differentiably; running statistics move in place, as PyTorch's do.

    Args:
        x: map (N, C, H, W), on any device and in any memory format.
        tensors: `TENSORS` a layer. Weights, biases and running statistics are one for each channel, or None; the 1x1 kernel is (K, C + what
            the layers before have appended, 1, 1), the other (G, K, KH, KW); both are rounded to the dtype of `x`, and their gradients come
            back in their own.
        layers: in train mode.

    Returns:
        The map (N, C + all G, H, W) in channels_last memory, in the dtype of `x`; float32 (3, C + all G), its row for the BatchNorm behind
        it: count, means and sums of squared deviations. Kept for the way back are that map and what the 1x1 convolutions gave.

    Raises:
        ValueError: there is one value a channel, which has no variance, as PyTorch says.
    """
    if x.shape[0] * x.shape[2] * x.shape[3] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    return _DenseBlock.apply(x, tuple(layers), *tensors)  # pyright: ignore[reportReturnType]
