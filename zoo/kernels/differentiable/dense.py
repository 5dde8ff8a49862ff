"""A DenseNet's block as one differentiable op: one map that every layer reads the beginning of and writes the next channels of.

Nothing is concatenated. Statistics of a channel don't depend on who reads it, so they are taken once, when it is written. The way back
has one map of gradients, to which each layer adds. Kept are the block's map, what each 1x1 convolution gave, and statistics: memory
grows with the number of layers, not with its square, and what is computed again are activations, inside of the kernels that read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.differentiable.maps import of_affine, outline, rows
from zoo.kernels.differentiable.nodes import node
from zoo.kernels.differentiable.norms import batch_norm_act
from zoo.kernels.ops import batch_norm_act_grad, pointwise_stats, pointwise_stats_input_add, pointwise_stats_weight_grad
from zoo.kernels.ops._dense_block import append, known, owe, settle
from zoo.kernels.ops._exchange import row_of
from zoo.kernels.ops._layout import DTYPES, empty_map
from zoo.kernels.ops._norm import apply, join
from zoo.kernels.ops._overlap import followed_by_ours, kernels_run
from zoo.kernels.ops.batch_norm_act import configs as norm_configs

Pair = tuple[int, int]
Affine = tuple[Tensor | None, Tensor | None]
"""Weight and bias of a BatchNorm."""

TENSORS = 10
"""Tensors a layer: weight, bias, running mean and variance of its first BatchNorm, its 1x1 kernel, the same of its second, its kernel."""

KEPT = 9
"""Tensors a layer that the way back needs."""


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
        seen, made = outline((n, read, h, w), x.dtype), outline((n, len(kernel), h, w), x.dtype)
        flat, stats = torch.empty(kernel.shape, dtype=x.dtype, device="meta"), torch.empty((3, read), device="meta")
        reason = pointwise_stats_input_add.supports(made, flat, seen, stats, seen, weight, bias, act=layer.first.act)
        made_stats = torch.empty((3, len(kernel)), device="meta")
        reason = reason or batch_norm_act_grad.supports(made, made, weight2, bias2, made_stats, act=layer.second.act)
        if any(p is not None and not p.is_contiguous() for p in (mean, var, mean2, var2)):
            reason = reason or "running statistics are not one for each channel"
        if reason:
            return reason
        read += len(last)
    return "" if n * read * h * w < 2**31 - 2**24 else "larger than 32-bit indices reach"


Running = tuple[Tensor, Tensor] | None
"""Running mean and variance of a BatchNorm, where there are some."""


def _stats(partials: Tensor, row: Tensor, old: int, running: Running, norm: Norm) -> Tensor:
    """Add the channels behind `old` to the row; return means, 1 / deviations and 1 / pixels of all, whose running ones move."""
    stats = torch.empty((3, old + partials.shape[2]), dtype=torch.float32, device=row.device)
    with followed_by_ours(True):
        known(partials, row, old, stats, running, norm.eps, norm.momentum)
    return stats


def _product(x: Tensor, kernel: Tensor, stats: Tensor, affine: Affine, act: str, running: Running, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return the 1x1 convolution of the normalised and activated map, and the statistics of what it gives for the next BatchNorm."""
    y = empty_map(x.shape[0], len(kernel), *x.shape[2:], like=x)
    with followed_by_ours(True):
        partials = pointwise_stats.partial_product(x, kernel, stats, *affine, act=act, out=y)
        return y, join(partials, torch.empty((3, len(kernel)), device=x.device), running, running or (), norm.eps, norm.momentum)


def _applied(x: Tensor, stats: Tensor, affine: Affine, act: str) -> Tensor:
    """Return the normalised and activated map."""
    out = empty_map(*x.shape, like=x)
    apply(x, None, stats, *affine, act, out, norm_configs(x)[0])
    return out


def _settled(total: Tensor, x: Tensor, mean: Tensor, owed: Tensor) -> Tensor:
    """Return a part of the gradients less the levels and tilts that its channels owe."""
    return settle(total, x, mean, owed, empty_map(*x.shape, like=total))


def _dense_block_back(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    whole, row, *kept = ctx.saved_tensors
    whole = rows(whole)  # hooks may lay out anew what was saved
    ends, count = ctx.ends, len(ctx.layers)
    of_x_needed, _, *needed = ctx.needs_input_grad
    found: list[Any] = [None] * (TENSORS * count)
    n, _, h, w = whole.shape
    total, owed = rows(gradient), torch.zeros((2, ends[-1]), dtype=row.dtype, device=whole.device)
    for index in reversed(range(count)):
        weight_needed, bias_needed, _, _, kernel_needed, *second_needed, _, _, last_needed = _of(needed, index)
        deep = of_x_needed or any(needed[: TENSORS * index])
        if not (deep or any(_of(needed, index))):
            break
        first_needed = weight_needed or bias_needed or deep
        inner = first_needed or kernel_needed or any(second_needed)
        stats, y, stats2, flat, packed, *affine = kept[KEPT * index : KEPT * (index + 1)]
        y = rows(y)
        layer, affine, affine2 = ctx.layers[index], (affine[0], affine[1]), (affine[2], affine[3])
        read, part = slice(ends[index]), slice(ends[index], ends[index + 1])
        results: list[Any] = [None] * TENSORS
        of_new = _settled(total[:, part], whole[:, part], row[1, part], owed[:, part])
        z = _applied(y, stats2, affine2, layer.second.act) if last_needed else y
        of_z, of_last, _ = torch.ops.aten.convolution_backward(
            of_new, z, packed, None, [1, 1], layer.padding, layer.dilation, False, [0, 0], 1, [inner, last_needed, False]
        )
        del z, of_new
        results[9] = of_last.to(ctx.kinds[index][1]) if last_needed else None
        if inner:
            of_y, sums = batch_norm_act_grad.gradients(
                rows(of_z), y, *affine2, stats2, None, act=layer.second.act, of_x=first_needed or kernel_needed
            )
            results[5], results[6] = of_affine(sums, affine2, second_needed)
            del of_z
            if kernel_needed:
                results[4] = torch.empty((len(flat), ends[index], 1, 1), dtype=ctx.kinds[index][0], device=y.device)
                to = results[4].view(flat.shape)
                pointwise_stats_weight_grad.launch(of_y, whole[:, read], stats, *affine, act=layer.first.act, out=to)
            if first_needed:
                there = total[:, read]
                to = there if index < count - 1 else empty_map(n, ends[index], h, w, whole)  # nobody's gradient is written into
                parts = (of_y, flat, whole[:, read], stats, there, *affine)
                partials = pointwise_stats_input_add.partial_add(*parts, act=layer.first.act, out=to)
                results[0], results[1] = of_affine(owe(partials, owed, stats, affine[0]), affine, (weight_needed, bias_needed))
                total = to
            del of_y
        found[TENSORS * index : TENSORS * (index + 1)] = results
    first = slice(ends[0])
    of_x = _settled(total[:, first], whole[:, first], row[1, first], owed[:, first]) if of_x_needed else None
    return of_x, None, *found


@node(_dense_block_back)
def _dense_block(ctx: Any, x: Tensor, layers: tuple[DenseLayer, ...], *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    ends = _ends(x.shape[1], tensors)
    n, _, h, w = x.shape
    whole = empty_map(n, ends[-1], h, w, x)
    row = torch.empty((3, ends[-1]), dtype=torch.float32, device=x.device)
    # Rounded before the first kernel of ours: each of those is launched early, right behind another one.
    rounded = [
        (kernel.flatten(1).to(x.dtype).contiguous(), last.to(x.dtype, memory_format=torch.channels_last))
        for kernel, last in zip(*_kernels(tensors), strict=True)
    ]
    partials, old = append(rows(x), whole[:, : ends[0]]), 0
    kept: list[Tensor | None] = []
    moved: list[Tensor] = []
    for index, layer in enumerate(layers):
        weight, bias, mean, var, _, weight2, bias2, mean2, var2, _ = _of(tensors, index)
        (flat, packed), read = rounded[index], whole[:, : ends[index]]
        running, running2 = (None if m is None or v is None else (m, v) for m, v in ((mean, var), (mean2, var2)))
        stats = _stats(partials, row, old, running, layer.first)
        y, stats2 = _product(read, flat, stats, (weight, bias), layer.first.act, running2, layer.second)
        z = _applied(y, stats2, (weight2, bias2), layer.second.act)
        new = torch.ops.aten.convolution(z, packed, None, [1, 1], layer.padding, layer.dilation, False, [0, 0], 1)
        partials, old = append(rows(new), whole[:, ends[index] : ends[index + 1]]), ends[index]
        del z, new
        kept += [stats, y, stats2, flat, packed, weight, bias, weight2, bias2]
        moved += [t for t in (mean, var, mean2, var2) if t is not None]
    known(partials, row, old, None, None, 0.0, 0.0)  # of the last channels, whom nobody of the block reads
    torch.autograd.graph.increment_version(moved)
    ctx.save_for_backward(whole, row, *kept)
    ctx.layers, ctx.ends = layers, ends
    ctx.kinds = [(kernel.dtype, last.dtype) for kernel, last in zip(*_kernels(tensors), strict=True)]
    ctx.mark_non_differentiable(row)
    return whole, row


def _layer_by_layer(x: Tensor, layers: Sequence[DenseLayer], tensors: Sequence[Any]) -> Tensor:
    for index, layer in enumerate(layers):
        weight, bias, mean, var, kernel, weight2, bias2, mean2, var2, last = _of(tensors, index)
        y = F.conv2d(batch_norm_act(x, weight, bias, mean, var, **asdict(layer.first)), kernel.to(x.dtype))
        y = batch_norm_act(y, weight2, bias2, mean2, var2, **asdict(layer.second))
        x = torch.cat([x, F.conv2d(y, last.to(x.dtype), None, 1, layer.padding, layer.dilation)], 1)
    return x


def _of(tensors: Sequence[Any], index: int) -> Sequence[Any]:
    return tensors[TENSORS * index : TENSORS * (index + 1)]


def _kernels(tensors: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the 1x1 kernels and the others."""
    return tensors[4::TENSORS], tensors[9::TENSORS]


def _ends(channels: int, tensors: Sequence[Any]) -> list[int]:
    """Return where each layer's input ends, and the last one's output."""
    return list(accumulate((len(last) for last in _kernels(tensors)[1]), initial=channels))


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
        it: count, means and sums of squared deviations. By kernels only that map is kept for
        the way back, and what the 1x1 convolutions gave.

    Raises:
        ValueError: there is one value a channel, which has no variance, as PyTorch says.
    """
    if x.shape[0] * x.shape[2] * x.shape[3] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    if kernels_run(x) and not refuses(x, tensors, layers):
        return _dense_block(x, tuple(layers), *tensors)
    whole = rows(_layer_by_layer(x, layers, tensors))
    return whole, row_of(whole.detach())[0]
