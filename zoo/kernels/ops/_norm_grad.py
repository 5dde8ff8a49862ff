"""The kernels of the way back through BatchNorm with its activation in train mode: sums, then apply."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops._activation import BY_OUTPUT, slope
from zoo.kernels.ops._fold import cut, shares, tile_rows
from zoo.kernels.ops._norm import channel_of, factors, inside, whole_rows
from zoo.kernels.ops._overlap import begin, followed_by_ours, overlap


@triton.jit
def through(gradient, x, kept, mean, inverse, factor, shift, ACT: tl.constexpr, KEPT: tl.constexpr):
    """Return the gradient before the activation: of a kept output, or of what x and a kept residual add up to."""
    g = gradient.to(tl.float32)
    if ACT != "none":
        if KEPT == "output":
            g = slope(kept.to(tl.float32), g, ACT)
        else:
            z = (x.to(tl.float32) - mean) * (inverse * factor) + shift
            if KEPT == "residual":
                z += kept.to(tl.float32)
            g = slope(z, g, ACT)
    return g


@triton.jit
def reduce_kernel(
    gradient, x, kept, stats, weight, bias, partials, through_out, full, rows, total, channel_units, pixels, width_units,
    gradient_units, x_units, kept_units, out_units,
    ACT: tl.constexpr, KEPT: tl.constexpr, V: tl.constexpr, W: tl.constexpr, RAGGED: tl.constexpr, FOLD: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, U: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write a program's (sum of the gradient, of its product with the normalised x); the residual's gradient on the way."""
    begin(OVERLAP)
    channels = channel_units * W
    width = width_units * V
    part = tl.program_id(1)
    col = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    lane = tl.arange(0, BR)[:, None]
    mean, inverse, factor, shift = factors(stats, weight, bias, col, channels, col < width, W)
    sums = tl.zeros([BR, BC], tl.float32)
    products = tl.zeros([BR, BC], tl.float32)
    for tile in range(part, full, tl.num_programs(1)):
        row = tile * (BR * U) + lane
        gs = whole_rows(gradient, row, col, gradient_units * V, width, RAGGED, BR, U)
        xs = whole_rows(x, row, col, x_units * V, width, RAGGED, BR, U)
        ks = whole_rows(kept, row, col, kept_units * V, width, RAGGED, BR, U) if KEPT != "" else xs
        for u in tl.static_range(U):
            g = through(gs[u], xs[u], ks[u], mean, inverse, factor, shift, ACT, KEPT)
            sums += g
            products += g * (xs[u].to(tl.float32) - mean)
            if through_out is not None:
                at = through_out + ((row + u * BR) * (out_units * V) + col)
                if RAGGED:
                    tl.store(at, g.to(through_out.dtype.element_ty), mask=col < width)
                else:
                    tl.store(at, g.to(through_out.dtype.element_ty))
    if (full % tl.num_programs(1) == part) & (full * (BR * U) < rows):
        for u in tl.static_range(U):
            row = full * (BR * U) + u * BR + lane
            there = inside(row, col, rows, total, width, RAGGED, FOLD)
            g = tl.load(gradient + (row * (gradient_units * V) + col), mask=there, other=0.0)
            value = tl.load(x + (row * (x_units * V) + col), mask=there, other=0.0)
            k = tl.load(kept + (row * (kept_units * V) + col), mask=there, other=0.0) if KEPT != "" else value
            g = through(g, value, k, mean, inverse, factor, shift, ACT, KEPT)
            sums += g
            products += tl.where(there, g * (value.to(tl.float32) - mean), 0.0)
            if through_out is not None:
                tl.store(through_out + (row * (out_units * V) + col), g.to(through_out.dtype.element_ty), mask=there)
    to = partials + ((part * pixels + col // channels) * 2 * channels + col % channels)
    tl.store(to, tl.sum(sums, axis=0, keep_dims=True), mask=col < width)
    tl.store(to + channels, tl.sum(products, axis=0, keep_dims=True) * inverse, mask=col < width)


@triton.jit
def add_kernel(partials, out, parts, channels, TURNED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, OVERLAP: tl.constexpr):
    """Add rows of `channels` floats; where they are TURNED rows in one, write the columns of those as rows."""
    begin(OVERLAP)
    c = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    lane = tl.arange(0, BR)[:, None]
    sums = tl.zeros([BR, BC], tl.float32)
    for first in range(0, parts, BR):
        there = (first + lane < parts) & (c < channels)
        sums += tl.load(partials + ((first + lane) * channels + c), mask=there, other=0.0)
    to = out + ((c % (channels // TURNED)) * TURNED + c // (channels // TURNED))
    tl.store(to, tl.sum(sums, axis=0, keep_dims=True).to(out.dtype.element_ty), mask=c < channels)


@triton.jit
def back_kernel(
    gradient, x, kept, stats, weight, bias, sums, out, rows, total, channel_units, width_units,
    gradient_units, x_units, kept_units, out_units,
    ACT: tl.constexpr, KEPT: tl.constexpr, V: tl.constexpr, W: tl.constexpr, RAGGED: tl.constexpr, FOLD: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x, the last rows first."""
    begin(OVERLAP)
    channels = channel_units * W
    width = width_units * V
    blocks = tl.cdiv(width, BC)
    place = tl.num_programs(0) - 1 - tl.program_id(0)  # one axis: the others of a grid end at 65535
    col = ((place % blocks) * BC + tl.arange(0, BC))[None, :]
    first = (place // blocks) * (BR * U) + tl.arange(0, BR)[:, None]
    gs = ()
    xs = ()
    ks = ()
    for u in tl.static_range(U):
        row = first + u * BR
        there = inside(row, col, rows, total, width, RAGGED, FOLD)
        gs = gs + (tl.load(gradient + (row * (gradient_units * V) + col), mask=there, other=0.0),)  # noqa: RUF005
        xs = xs + (tl.load(x + (row * (x_units * V) + col), mask=there, other=0.0),)  # noqa: RUF005
        if KEPT != "":
            ks = ks + (tl.load(kept + (row * (kept_units * V) + col), mask=there, other=0.0),)  # noqa: RUF005
    live = col < width
    mean, inverse, factor, shift = factors(stats, weight, bias, col, channels, live, W)
    c = channel_of(col, channels, W)
    share = tl.load(stats + 2 * channels + c, mask=live, other=0.0)
    level = tl.load(sums + c, mask=live, other=0.0) * share
    tilt = tl.load(sums + channels + c, mask=live, other=0.0) * share * inverse
    for u in tl.static_range(U):
        row = first + u * BR
        g = through(gs[u], xs[u], ks[u] if KEPT != "" else xs[u], mean, inverse, factor, shift, ACT, KEPT)
        g = (g - level - (xs[u].to(tl.float32) - mean) * tilt) * (inverse * factor)
        there = inside(row, col, rows, total, width, RAGGED, FOLD)
        tl.store(out + (row * (out_units * V) + col), g.to(out.dtype.element_ty), mask=there)


def _source(kept: Tensor | None, act: str) -> str:
    return "" if kept is None else "output" if act in BY_OUTPUT else "residual"


def reduce(
    gradient: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, kept: Tensor | None, act: str, sums: Tensor,
    through: Tensor | None, config: dict[str, int],
) -> None:  # fmt: skip
    """Write the sums and the residual's gradient."""
    maps = [m if m is not None else x for m in (gradient, x, kept, through)]
    c = cut(config["columns"], *maps)
    rows, unroll = tile_rows(c, config["warps"], x.element_size(), config["unroll"])
    parts = shares(c, rows * unroll, config["programs"])
    partials = torch.empty((parts * c.pixels, 2, x.shape[1]), dtype=torch.float32, device=x.device)
    with followed_by_ours(True):
        reduce_kernel[(c.blocks, parts)](
            gradient, x, kept, stats, weight, bias, partials, through, c.whole // (rows * unroll), c.rows, c.total, x.shape[1] // c.run,
            c.pixels, c.width // c.vector, *c.steps, ACT=act, KEPT=_source(kept, act), W=c.run, **c.constants(rows, unroll),
            num_warps=config["warps"], **overlap(x),
        )  # fmt: skip
        add(partials, sums)


def add(partials: Tensor, out: Tensor, *, turned: int = 1) -> Tensor:
    """Write the sum of partial sums over their first axis, always in the same order.

    Args:
        partials: float32, one row of sums a program.
        out: as many elements as a row has, contiguous.
        turned: `out` is the transpose of so many rows that each row of `partials` is made of.

    Returns:
        `out`.
    """
    parts, channels = partials.shape[0], out.numel()
    rows = min(triton.next_power_of_2(parts), 512)
    across = min(4096 // rows, 128, triton.next_power_of_2(channels))
    add_kernel[(triton.cdiv(channels, across),)](
        partials, out, parts, channels, TURNED=turned, BR=rows, BC=across, num_warps=8 if rows * across > 1024 else 4, **overlap(partials)
    )  # fmt: skip
    return out


def back(
    gradient: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, kept: Tensor | None, act: str, sums: Tensor,
    out: Tensor, config: dict[str, int],
) -> None:  # fmt: skip
    """Write the gradient of x."""
    c = cut(config["apply_columns"], gradient, x, x if kept is None else kept, out)
    rows, unroll = tile_rows(c, config["apply_warps"], x.element_size(), config["apply_unroll"])
    back_kernel[(c.blocks * triton.cdiv(c.rows, rows * unroll),)](
        gradient, x, kept, stats, weight, bias, sums, out, c.rows, c.total, x.shape[1] // c.run, c.width // c.vector, *c.steps,
        ACT=act, KEPT=_source(kept, act), W=c.run, **c.constants(rows, unroll), num_warps=config["apply_warps"], **overlap(x),
    )  # fmt: skip
