"""Small kernels of a DenseNet's block: a slice is written and its statistics taken, shares of sums are noted, and at last paid.

Statistics of a block's channels are rows of counts, means and sums of squared deviations, (3, C) for the whole block; what the
BatchNorms of many layers owe their channels' gradients is (2, C), a level and a tilt.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops._fold import SMS
from zoo.kernels.ops._layout import units
from zoo.kernels.ops._overlap import begin, followed_by_ours, overlap


@triton.jit
def append_kernel(
    new, out, partials, rows, channels, new_units, out_units,
    V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Copy a program's rows, and write (count, mean, sum of squared deviations) of them."""
    begin(OVERLAP)
    part = tl.program_id(1)
    col = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    lane = tl.arange(0, BR)[:, None]
    live = col < channels
    row = part * BR + lane
    # Sums are of differences from each lane's first value, so that a large mean cancels nothing.
    shift = tl.load(new + (row * (new_units * V) + col), mask=(row < rows) & live, other=0.0).to(tl.float32)
    count = tl.zeros([BR, BC], tl.float32)
    sums = tl.zeros([BR, BC], tl.float32)
    squares = tl.zeros([BR, BC], tl.float32)
    for first in range(part * BR, rows, tl.num_programs(1) * BR):
        row = first + lane
        there = (row < rows) & live
        value = tl.load(new + (row * (new_units * V) + col), mask=there, other=0.0)
        tl.store(out + (row * (out_units * V) + col), value, mask=there)
        off = tl.where(there, value.to(tl.float32) - shift, 0.0)
        sums += off
        squares += off * off
        count += there.to(tl.float32)
    means = shift + sums / tl.maximum(count, 1.0)
    squares -= sums * (sums / tl.maximum(count, 1.0))
    number = tl.sum(count, axis=0, keep_dims=True)
    mean = tl.sum(count * means, axis=0, keep_dims=True) / tl.maximum(number, 1.0)
    off = means - mean
    squares = tl.sum(squares + count * off * off, axis=0, keep_dims=True)
    to = partials + (part * 3 * channels + col)
    tl.store(to, number, mask=live)
    tl.store(to + channels, mean, mask=live)
    tl.store(to + 2 * channels, squares, mask=live)


@triton.jit
def known_kernel(
    partials, row, stats, mean_out, var_out, parts, old, channels, whole, eps, momentum,
    BR: tl.constexpr, BC: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Put what the partial statistics of the channels from `old` on give into the row; with `stats` normalise by all, move running ones."""
    begin(OVERLAP)
    block = tl.program_id(0) * BC
    c = (block + tl.arange(0, BC))[None, :]
    lane = tl.arange(0, BR)[:, None]
    live = c < channels
    fresh = live & (c >= old)
    width = channels - old
    here = tl.where(block + BC > old, parts, 0)  # blocks of channels that are all known have nothing to join
    counts = tl.zeros([BR, BC], tl.float32)
    weighted = tl.zeros([BR, BC], tl.float32)
    for first in range(0, here, BR):
        at = partials + ((first + lane) * 3 * width + (c - old))
        there = (first + lane < parts) & fresh
        count = tl.load(at, mask=there, other=0.0)
        counts += count
        weighted += count * tl.load(at + width, mask=there, other=0.0)
    number = tl.sum(counts, axis=0, keep_dims=True)
    mean = tl.sum(weighted, axis=0, keep_dims=True) / tl.maximum(number, 1.0)
    gathered = tl.zeros([BR, BC], tl.float32)
    for first in range(0, here, BR):
        at = partials + ((first + lane) * 3 * width + (c - old))
        there = (first + lane < parts) & fresh
        off = tl.load(at + width, mask=there, other=0.0) - mean
        gathered += tl.load(at + 2 * width, mask=there, other=0.0) + tl.load(at, mask=there, other=0.0) * off * off
    squares = tl.sum(gathered, axis=0, keep_dims=True)
    tl.store(row + c, number, mask=fresh)
    tl.store(row + whole + c, mean, mask=fresh)
    tl.store(row + 2 * whole + c, squares, mask=fresh)
    if stats is not None:
        known = live & (c < old)
        number = tl.where(known, tl.load(row + c, mask=known, other=0.0), number)
        mean = tl.where(known, tl.load(row + whole + c, mask=known, other=0.0), mean)
        squares = tl.where(known, tl.load(row + 2 * whole + c, mask=known, other=0.0), squares)
        some = tl.maximum(number, 1.0)
        tl.store(stats + c, mean, mask=live)
        tl.store(stats + channels + c, 1.0 / tl.sqrt_rn(squares / some + eps), mask=live)
        tl.store(stats + 2 * channels + c, 1.0 / some, mask=live)
        if mean_out is not None:
            before = tl.load(mean_out + c, mask=live).to(tl.float32)
            tl.store(mean_out + c, (before + momentum * (mean - before)).to(mean_out.dtype.element_ty), mask=live)
            before = tl.load(var_out + c, mask=live).to(tl.float32)
            spread = squares / tl.maximum(number - 1.0, 1.0)
            tl.store(var_out + c, (before + momentum * (spread - before)).to(var_out.dtype.element_ty), mask=live)


@triton.jit
def owe_kernel(
    partials, sums, owed, stats, weight, parts, channels, whole,
    BR: tl.constexpr, BC: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add partial sums of a BatchNorm's gradients, and what of level and tilt its input's gradient owes to what is owed already."""
    begin(OVERLAP)
    c = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    lane = tl.arange(0, BR)[:, None]
    live = c < channels
    levels = tl.zeros([BR, BC], tl.float32)
    tilts = tl.zeros([BR, BC], tl.float32)
    for first in range(0, parts, BR):
        there = (first + lane < parts) & live
        levels += tl.load(partials + ((first + lane) * 2 * channels + c), mask=there, other=0.0)
        tilts += tl.load(partials + ((first + lane) * 2 * channels + channels + c), mask=there, other=0.0)
    level = tl.sum(levels, axis=0, keep_dims=True)
    tilt = tl.sum(tilts, axis=0, keep_dims=True)
    tl.store(sums + c, level, mask=live)
    tl.store(sums + channels + c, tilt, mask=live)
    inverse = tl.load(stats + channels + c, mask=live, other=0.0)
    share = inverse * tl.load(stats + 2 * channels + c, mask=live, other=0.0)
    if weight is not None:
        share *= tl.load(weight + c, mask=live, other=0.0).to(tl.float32)
    tl.store(owed + c, tl.load(owed + c, mask=live, other=0.0) + level * share, mask=live)
    tl.store(owed + whole + c, tl.load(owed + whole + c, mask=live, other=0.0) + tilt * share * inverse, mask=live)


@triton.jit
def settle_kernel(
    total, x, mean, owed, out, rows, channels, whole, total_units, x_units, out_units,
    V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write gradients less the levels and tilts that their channels owe."""
    begin(OVERLAP)
    blocks = tl.cdiv(channels, BC)
    place = tl.program_id(0)  # one axis: the others of a grid end at 65535
    col = ((place % blocks) * BC + tl.arange(0, BC))[None, :]
    first = (place // blocks) * (BR * U) + tl.arange(0, BR)[:, None]
    live = col < channels
    level = tl.load(mean + col, mask=live, other=0.0)
    flat = tl.load(owed + col, mask=live, other=0.0)
    tilt = tl.load(owed + whole + col, mask=live, other=0.0)
    for u in tl.static_range(U):
        row = first + u * BR
        there = (row < rows) & live
        g = tl.load(total + (row * (total_units * V) + col), mask=there, other=0.0).to(tl.float32)
        off = tl.load(x + (row * (x_units * V) + col), mask=there, other=0.0).to(tl.float32) - level
        tl.store(out + (row * (out_units * V) + col), (g - flat - off * tilt).to(out.dtype.element_ty), mask=there)


def append(new: Tensor, out: Tensor) -> Tensor:
    """Copy a map into a channel slice of another.

    Returns:
        float32 (R, 3, C), statistics of parts of its pixels.
    """
    rows, channels = new.numel() // new.shape[1], new.shape[1]
    vector, _, *steps = units(16 // new.element_size(), new, out)
    columns = min(64, triton.next_power_of_2(channels))
    height = max(1, min(2048 // columns, triton.next_power_of_2(rows)))
    across = triton.cdiv(channels, columns)
    parts = max(1, min(triton.cdiv(rows, height), 2 * SMS // across))
    partials = torch.empty((parts, 3, channels), dtype=torch.float32, device=new.device)
    with followed_by_ours(True):
        append_kernel[(across, parts)](
            new, out, partials, rows, channels, *steps, V=vector, BR=height, BC=columns, num_warps=8 if height * columns >= 2048 else 4,
            **overlap(new),
        )  # fmt: skip
    return partials


def known(partials: Tensor, row: Tensor, old: int, stats: Tensor | None, running: Any, eps: float, momentum: float) -> None:
    """Put partial statistics of the channels from `old` on into a row.

    Args:
        partials: float32 (R, 3, C - old).
        row: float32 (3, all), contiguous.
        old: channels whose statistics are there.
        stats: float32 (3, C) for means, 1 / deviations and 1 / pixels of the first C channels, or None.
        running: their running mean and variance, which move, or None.
        eps: added to the variance.
        momentum: the new statistics' share of the running ones.
    """
    parts, _, width = partials.shape
    rows = min(triton.next_power_of_2(parts), 64)
    known_kernel[(triton.cdiv(old + width, 32),)](
        partials, row, stats, *(running or (None, None)), parts, old, old + width, row.shape[1], eps, momentum, BR=rows, BC=32,
        num_warps=8 if rows > 32 else 4, **overlap(row),
    )  # fmt: skip


def owe(partials: Tensor, owed: Tensor, stats: Tensor, weight: Tensor | None) -> Tensor:
    """Note what a layer owes.

    Args:
        partials: float32 (R, 2, C), of the sums.
        owed: float32 (2, all), contiguous; the first C columns grow.
        stats: float32 (3, C), the BatchNorm's.
        weight: the BatchNorm's, or None.

    Returns:
        float32 (2, C), the sums.
    """
    parts, _, channels = partials.shape
    sums = torch.empty((2, channels), dtype=torch.float32, device=owed.device)
    rows = min(triton.next_power_of_2(parts), 128)
    owe_kernel[(triton.cdiv(channels, 32),)](
        partials, sums, owed, stats, weight, parts, channels, owed.shape[1], BR=rows, BC=32, num_warps=8 if rows > 32 else 4,
        **overlap(owed),
    )  # fmt: skip
    return sums


def settle(total: Tensor, x: Tensor, mean: Tensor, owed: Tensor, out: Tensor) -> Tensor:
    """Write gradients less what their channels owe.

    Args:
        total: map (N, C, H, W), maybe a channel slice.
        x: the map that it is the gradient of, maybe a channel slice.
        mean: float32 (C,) of x.
        owed: float32 (2, C), a slice of what all channels owe.
        out: map of that shape.

    Returns:
        `out`.
    """
    rows, channels = total.numel() // total.shape[1], total.shape[1]
    vector, _, *steps = units(16 // total.element_size(), total, x, out)
    columns = min(64, triton.next_power_of_2(channels))
    height, unroll = max(1, min(2048 // columns, triton.next_power_of_2(rows))), 2
    settle_kernel[(triton.cdiv(channels, columns) * triton.cdiv(rows, height * unroll),)](
        total, x, mean, owed, out, rows, channels, owed.stride(0), *steps, V=vector, BR=height, BC=columns, U=unroll,
        num_warps=8 if height * columns >= 2048 else 4, **overlap(total),
    )  # fmt: skip
    return out
