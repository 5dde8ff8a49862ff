"""The kernels of BatchNorm with its activation, in train mode: statistics, apply, and back.

Both ways sums over all pixels come first. Programs add what their rows give to partial sums in a fixed order, one more kernel adds
those, so results repeat bit for bit. What is summed forward are differences from each lane's own first value, joined by the formula
of Chan, Golub and LeVeque (1979), so a mean that is large beside the deviation cancels nothing. A program's tiles are spread over the
whole map: all programs advance together, and what was read last is still in the L2 cache when the next kernel begins there.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops._activation import activate
from zoo.kernels.ops._fold import cut, shares, tile_rows
from zoo.kernels.ops._overlap import begin, overlap

PASSES = "columns warps unroll programs apply_columns apply_warps apply_unroll"
"""Launch parameters of the pass that sums, then of the one that applies."""


@triton.jit
def inside(row, col, rows, total, width, RAGGED: tl.constexpr, FOLD: tl.constexpr):
    """Tell which elements of a tile are there."""
    if FOLD:
        return row * width + col < total
    elif RAGGED:  # noqa: RET505 (Triton compiles both branches unless one is dead)
        return (row < rows) & (col < width)
    else:
        return (row < rows) & (col >= 0)


@triton.jit
def whole_rows(x, row, col, step, width, RAGGED: tl.constexpr, STRIDE: tl.constexpr, U: tl.constexpr):
    """Load U tiles of whole rows, STRIDE rows apart, all before the first is used."""
    values = ()
    for u in tl.static_range(U):
        at = x + ((row + u * STRIDE) * step + col)
        values = values + (tl.load(at, mask=col < width, other=0.0) if RAGGED else tl.load(at),)  # noqa: RUF005
    return values


@triton.jit
def statistics_kernel(
    x, partials, full, rows, total, channels, pixels, width_units, step_units,
    V: tl.constexpr, RAGGED: tl.constexpr, FOLD: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write (count, mean, sum of squared deviations) of a program's rows, a row of 3 C floats for each pixel of a wide row."""
    begin(OVERLAP)
    width = width_units * V
    step = step_units * V
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    col = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    lane = tl.arange(0, BR)[:, None]
    first = ()
    for u in tl.static_range(U):
        row = part * (BR * U) + u * BR + lane
        first = first + (tl.load(x + (row * step + col), mask=inside(row, col, rows, total, width, RAGGED, FOLD), other=0.0),)  # noqa: RUF005
    shift = first[0].to(tl.float32)
    sums = tl.zeros([BR, BC], tl.float32)
    squares = tl.zeros([BR, BC], tl.float32)
    count = tl.zeros([BR, BC], tl.float32)
    for u in tl.static_range(U):
        there = inside(part * (BR * U) + u * BR + lane, col, rows, total, width, RAGGED, FOLD)
        off = tl.where(there, first[u].to(tl.float32) - shift, 0.0)
        sums += off
        squares += off * off
        count += there.to(tl.float32)
    for tile in range(part + parts, full, parts):
        values = whole_rows(x, tile * (BR * U) + lane, col, step, width, RAGGED, BR, U)
        for u in tl.static_range(U):
            off = values[u].to(tl.float32) - shift
            sums += off
            squares += off * off
    count += (tl.maximum(full - part - 1, 0) // parts * U).to(tl.float32)
    if (full % parts == part) & (full > part) & (full * (BR * U) < rows):
        for u in tl.static_range(U):
            row = full * (BR * U) + u * BR + lane
            there = inside(row, col, rows, total, width, RAGGED, FOLD)
            off = tl.where(there, tl.load(x + (row * step + col), mask=there, other=0.0).to(tl.float32) - shift, 0.0)
            sums += off
            squares += off * off
            count += there.to(tl.float32)
    means = shift + sums / tl.maximum(count, 1.0)
    squares -= sums * (sums / tl.maximum(count, 1.0))
    number = tl.sum(count, axis=0, keep_dims=True)
    mean = tl.sum(count * means, axis=0, keep_dims=True) / tl.maximum(number, 1.0)
    off = means - mean
    squares = tl.sum(squares + count * off * off, axis=0, keep_dims=True)
    to = partials + ((part * pixels + col // channels) * 3 * channels + col % channels)
    tl.store(to, number, mask=col < width)
    tl.store(to + channels, mean, mask=col < width)
    tl.store(to + 2 * channels, squares, mask=col < width)


@triton.jit
def join_kernel(
    partials, old_mean, old_var, out, mean_out, var_out, parts, channels, eps, momentum,
    RAW: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Join partial statistics to (mean, 1 / deviation, 1 / count), and move the running ones; RAW: to one partial row."""
    begin(OVERLAP)
    c = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    lane = tl.arange(0, BR)[:, None]
    live = c < channels
    number = tl.zeros([BR, BC], tl.float32)
    weighted = tl.zeros([BR, BC], tl.float32)
    for first in range(0, parts, BR):
        at = partials + ((first + lane) * 3 * channels + c)
        there = (first + lane < parts) & live
        count = tl.load(at, mask=there, other=0.0)
        number += count
        weighted += count * tl.load(at + channels, mask=there, other=0.0)
    number = tl.sum(number, axis=0, keep_dims=True)
    some = tl.maximum(number, 1.0)
    mean = tl.sum(weighted, axis=0, keep_dims=True) / some
    squares = tl.zeros([BR, BC], tl.float32)
    for first in range(0, parts, BR):
        at = partials + ((first + lane) * 3 * channels + c)
        there = (first + lane < parts) & live
        off = tl.load(at + channels, mask=there, other=0.0) - mean
        squares += tl.load(at + 2 * channels, mask=there, other=0.0) + tl.load(at, mask=there, other=0.0) * off * off
    squares = tl.sum(squares, axis=0, keep_dims=True)
    if RAW:
        tl.store(out + c, number, mask=live)
        tl.store(out + channels + c, mean, mask=live)
        tl.store(out + 2 * channels + c, squares, mask=live)
    else:
        tl.store(out + c, mean, mask=live)
        tl.store(out + channels + c, 1.0 / tl.sqrt_rn(squares / some + eps), mask=live)
        tl.store(out + 2 * channels + c, 1.0 / some, mask=live)
        if old_mean is not None:
            before = tl.load(old_mean + c, mask=live).to(tl.float32)
            tl.store(mean_out + c, (before + momentum * (mean - before)).to(mean_out.dtype.element_ty), mask=live)
            before = tl.load(old_var + c, mask=live).to(tl.float32)
            tl.store(
                var_out + c,
                (before + momentum * (squares / tl.maximum(number - 1.0, 1.0) - before)).to(var_out.dtype.element_ty),
                mask=live,
            )


@triton.jit
def channel_of(col, channels, W: tl.constexpr):
    """Return the channels of columns (1, n); W consecutive ones are of consecutive channels, which a remainder hides."""
    return tl.max_contiguous(tl.multiple_of(col % channels, (1, W)), (1, W))


@triton.jit
def factors(stats, weight, bias, col, channels, live, W: tl.constexpr):
    """Load a channel's mean, 1 / deviation, weight and bias; without an affine part 1 and 0."""
    c = channel_of(col, channels, W)
    mean = tl.load(stats + c, mask=live, other=0.0)
    inverse = tl.load(stats + channels + c, mask=live, other=0.0)
    factor = 1.0 if weight is None else tl.load(weight + c, mask=live, other=0.0).to(tl.float32)
    shift = 0.0 if bias is None else tl.load(bias + c, mask=live, other=0.0).to(tl.float32)
    return mean, inverse, factor, shift


@triton.jit
def apply_kernel(
    x, residual, stats, weight, bias, out, rows, total, channel_units, width_units, x_units, residual_units, out_units,
    ACT: tl.constexpr, V: tl.constexpr, W: tl.constexpr, RAGGED: tl.constexpr, FOLD: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    U: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalise, add the residual, activate: the last rows first, which the L2 cache still has."""
    begin(OVERLAP)
    channels = channel_units * W
    width = width_units * V
    blocks = tl.cdiv(width, BC)
    place = tl.num_programs(0) - 1 - tl.program_id(0)  # one axis: the others of a grid end at 65535
    col = ((place % blocks) * BC + tl.arange(0, BC))[None, :]
    first = (place // blocks) * (BR * U) + tl.arange(0, BR)[:, None]
    values = ()
    more = ()
    for u in tl.static_range(U):
        row = first + u * BR
        there = inside(row, col, rows, total, width, RAGGED, FOLD)
        values = values + (tl.load(x + (row * (x_units * V) + col), mask=there, other=0.0),)  # noqa: RUF005
        if residual is not None:
            more = more + (tl.load(residual + (row * (residual_units * V) + col), mask=there, other=0.0),)  # noqa: RUF005
    mean, inverse, factor, shift = factors(stats, weight, bias, col, channels, col < width, W)
    factor = inverse * factor
    for u in tl.static_range(U):
        row = first + u * BR
        y = (values[u].to(tl.float32) - mean) * factor + shift
        if residual is not None:
            y += more[u].to(tl.float32)
        there = inside(row, col, rows, total, width, RAGGED, FOLD)
        tl.store(out + (row * (out_units * V) + col), activate(y, ACT).to(out.dtype.element_ty), mask=there)


def partial_statistics(x: Tensor, config: dict[str, int]) -> Tensor:
    """Return float32 (R, 3, C): counts, means and sums of squared deviations, each row of other pixels."""
    c = cut(config["columns"], x)
    rows, unroll = tile_rows(c, config["warps"], x.element_size(), config["unroll"])
    parts = shares(c, rows * unroll, config["programs"])
    partials = torch.empty((parts * c.pixels, 3, x.shape[1]), dtype=torch.float32, device=x.device)
    statistics_kernel[(c.blocks, parts)](
        x, partials, c.whole // (rows * unroll), c.rows, c.total, x.shape[1], c.pixels, c.width // c.vector, c.steps[0],
        **c.constants(rows, unroll), num_warps=config["warps"], **overlap(x),
    )  # fmt: skip
    return partials


def join(partials: Tensor, out: Tensor, old: Any, new: Any, eps: float, momentum: float, *, raw: bool = False) -> Tensor:
    """Join partial statistics to those of all pixels: `reference`'s, or `raw` to one partial row."""
    parts, _, channels = partials.shape
    rows = min(triton.next_power_of_2(parts), 256)
    across = min(2048 // rows, 64, triton.next_power_of_2(channels))  # 8 floats a thread: of more, Triton 3.8's compiler can die
    join_kernel[(triton.cdiv(channels, across),)](
        partials, *(old or (None, None)), out, *(new or (None, None)), parts, channels, eps, momentum,
        RAW=raw, BR=rows, BC=across, num_warps=8 if rows * across > 1024 else 4, **overlap(partials),
    )  # fmt: skip
    return out


def apply(
    x: Tensor, residual: Tensor | None, stats: Tensor, weight: Tensor | None, bias: Tensor | None, act: str, out: Tensor, config: Any
) -> None:  # fmt: skip
    """Write what the statistics make of `x`."""
    c = cut(config["apply_columns"], x, x if residual is None else residual, out)
    rows, unroll = tile_rows(c, config["apply_warps"], x.element_size(), config["apply_unroll"])
    apply_kernel[(c.blocks * triton.cdiv(c.rows, rows * unroll),)](
        x, residual, stats, weight, bias, out, c.rows, c.total, x.shape[1] // c.run, c.width // c.vector, *c.steps, ACT=act,
        W=c.run, **c.constants(rows, unroll), num_warps=config["apply_warps"], **overlap(x),
    )  # fmt: skip
