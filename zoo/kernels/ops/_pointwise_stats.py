"""The kernels of a 1x1 convolution between two BatchNorms: what is element by element around it happens on the way in and out.

Forward, the map that comes in is normalised and activated while it is read, and the statistics of the map that goes out are taken
while it is written. Back, the slope of that activation and the sums of that BatchNorm are taken while the gradient is written, and
the weight's gradient normalises its map again. So the activated map is never in memory. Programs keep a column of tiles and walk down
the rows, so sums are few, and are joined in a fixed order.
"""

# Kernels are Python by syntax only: constants are passed as plain values, and constant branches decide what is bound.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zoo.kernels.ops._activation import activate, slope
from zoo.kernels.ops._dense import nearest, product
from zoo.kernels.ops._norm import factors
from zoo.kernels.ops._overlap import begin


@triton.jit
def forward_kernel(
    x, weight, stats, factor, shift, out, partials, rows, cin_units, cout_units, x_units, out_units,
    ACT: tl.constexpr, V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write tiles of the product of `act(norm(x))` and the weight, and (count, mean, sum of squared deviations) of a program's rows."""
    begin(OVERLAP)
    cin = cin_units * V
    cout = cout_units * VO
    rn = (tl.program_id(0) * BN + tl.arange(0, BN))[None, :]
    rk = tl.arange(0, BK)
    part = tl.program_id(1)
    number = 0.0
    mean = tl.zeros([1, BN], tl.float32)
    squares = tl.zeros([1, BN], tl.float32)
    for tile in range(part, tl.cdiv(rows, BM), tl.num_programs(1)):
        rm = tile * BM + tl.arange(0, BM)[:, None]
        here = tl.minimum(rm, rows - 1) * (x_units * V)
        acc = tl.zeros([BM, BN], tl.float32)
        for first in range(0, cin, BK):
            k = first + rk
            a = tl.load(x + (here + k[None, :]), mask=k[None, :] < cin, other=0.0)
            # Columns behind the last channel become anything, and meet zeros.
            b = tl.load(weight + (rn * cin + k[:, None]), mask=(k[:, None] < cin) & (rn < cout), other=0.0)
            if stats is not None:
                level, inverse, scale, offset = factors(stats, factor, shift, k[None, :], cin, k[None, :] < cin, V)
                a = nearest(activate((a.to(tl.float32) - level) * (inverse * scale) + offset, ACT), x.dtype.element_ty)
            acc = product(a, b, acc, "ieee")
        y = nearest(acc, out.dtype.element_ty)
        live = rm < rows
        tl.store(out + (rm * (out_units * VO) + rn), y, mask=live & (rn < cout))
        count = tl.minimum(rows - tile * BM, BM).to(tl.float32)
        # Statistics are of what is stored.
        v = tl.where(live, y.to(tl.float32), 0.0)
        mine = tl.sum(v, axis=0, keep_dims=True) / count
        off = tl.where(live, v - mine, 0.0)
        total = number + count
        gap = mine - mean
        squares += tl.sum(off * off, axis=0, keep_dims=True) + gap * gap * (number * (count / total))
        mean += gap * (count / total)
        number = total
    to = partials + (part * 3 * cout + rn)
    tl.store(to, tl.zeros([1, BN], tl.float32) + number, mask=rn < cout)
    tl.store(to + cout, mean, mask=rn < cout)
    tl.store(to + 2 * cout, squares, mask=rn < cout)


@triton.jit
def input_kernel(
    gradient, weight, x, stats, factor, shift, out, partials, rows, cin_units, cout_units, g_units, x_units, out_units,
    ACT: tl.constexpr, V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write tiles of the gradient before the activation, and its sum and that of its product with the normalised x, a program's rows."""
    begin(OVERLAP)
    cin = cin_units * V
    cout = cout_units * VO
    rn = (tl.program_id(0) * BN + tl.arange(0, BN))[None, :]
    rk = tl.arange(0, BK)
    part = tl.program_id(1)
    level, inverse, scale, offset = factors(stats, factor, shift, rn, cin, rn < cin, V)
    sums = tl.zeros([1, BN], tl.float32)
    products = tl.zeros([1, BN], tl.float32)
    for tile in range(part, tl.cdiv(rows, BM), tl.num_programs(1)):
        rm = tile * BM + tl.arange(0, BM)[:, None]
        safe = tl.minimum(rm, rows - 1)
        acc = tl.zeros([BM, BN], tl.float32)
        for first in range(0, cout, BK):
            k = first + rk
            a = tl.load(gradient + (safe * (g_units * VO) + k[None, :]), mask=k[None, :] < cout, other=0.0)
            b = tl.load(weight + (k[:, None] * cin + rn), mask=(k[:, None] < cout) & (rn < cin), other=0.0)
            acc = product(a, b, acc, "ieee")
        there = (rm < rows) & (rn < cin)
        off = tl.load(x + (safe * (x_units * V) + rn), mask=there, other=0.0).to(tl.float32) - level
        g = nearest(slope(off * (inverse * scale) + offset, acc, ACT), out.dtype.element_ty)
        tl.store(out + (rm * (out_units * V) + rn), g, mask=there)
        g = tl.where(there, g.to(tl.float32), 0.0)
        sums += tl.sum(g, axis=0, keep_dims=True)
        products += tl.sum(tl.where(there, g * off, 0.0), axis=0, keep_dims=True)
    to = partials + (part * 2 * cin + rn)
    tl.store(to, sums, mask=rn < cin)
    tl.store(to + cin, products * inverse, mask=rn < cin)


@triton.jit
def add_kernel(
    gradient, weight, x, stats, factor, shift, total, out, partials, rows, cin_units, cout_units, g_units, x_units, total_units, out_units,
    ACT: tl.constexpr, V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write tiles of `total`, which may be `out`, plus the part of the gradient of x that needs no sums; and those sums, as above."""
    begin(OVERLAP)
    cin = cin_units * V
    cout = cout_units * VO
    rn = (tl.program_id(0) * BN + tl.arange(0, BN))[None, :]
    rk = tl.arange(0, BK)
    part = tl.program_id(1)
    sums = tl.zeros([1, BN], tl.float32)
    products = tl.zeros([1, BN], tl.float32)
    for tile in range(part, tl.cdiv(rows, BM), tl.num_programs(1)):
        rm = tile * BM + tl.arange(0, BM)[:, None]
        safe = tl.minimum(rm, rows - 1)
        # On their way while the product is computed.
        ahead = tl.load(x + (safe * (x_units * V) + rn), mask=rn < cin, other=0.0)
        before = tl.load(total + (safe * (total_units * V) + rn), mask=rn < cin, other=0.0)
        acc = tl.zeros([BM, BN], tl.float32)
        for first in range(0, cout, BK):
            k = first + rk
            a = tl.load(gradient + (safe * (g_units * VO) + k[None, :]), mask=k[None, :] < cout, other=0.0)
            b = tl.load(weight + (k[:, None] * cin + rn), mask=(k[:, None] < cout) & (rn < cin), other=0.0)
            acc = product(a, b, acc, "ieee")
        # Loaded for each tile, for registers are what limits how many programs hide each other's waiting.
        level, inverse, scale, offset = factors(stats, factor, shift, rn, cin, rn < cin, V)
        off = ahead.to(tl.float32) - level
        g = tl.where(rm < rows, slope(off * (inverse * scale) + offset, acc, ACT), 0.0)
        there = (rm < rows) & (rn < cin)
        both = nearest(before.to(tl.float32) + g * (inverse * scale), out.dtype.element_ty)
        tl.store(out + (rm * (out_units * V) + rn), both, mask=there)
        sums += tl.sum(g, axis=0, keep_dims=True)
        products += tl.sum(g * off, axis=0, keep_dims=True)
    to = partials + (part * 2 * cin + rn)
    tl.store(to, sums, mask=rn < cin)
    tl.store(to + cin, products * tl.load(stats + (cin + rn), mask=rn < cin, other=0.0), mask=rn < cin)


@triton.jit
def weight_kernel(
    gradient, x, stats, factor, shift, partials, rows, cin_units, cout_units, g_units, x_units,
    ACT: tl.constexpr, V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write a program's part of the weight's gradient, BM output by BN input channels, from rows that are BK * programs apart."""
    begin(OVERLAP)
    cin = cin_units * V
    cout = cout_units * VO
    columns = tl.cdiv(cin, BN)
    rm = (tl.program_id(0) // columns) * BM + tl.arange(0, BM)
    rn = ((tl.program_id(0) % columns) * BN + tl.arange(0, BN))[None, :]
    part = tl.program_id(1)
    if stats is not None:
        level, inverse, scale, offset = factors(stats, factor, shift, rn, cin, rn < cin, V)
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(part * BK, rows, tl.num_programs(1) * BK):
        row = first + tl.arange(0, BK)[:, None]
        there = row < rows
        g = tl.load(gradient + (row * (g_units * VO) + rm[None, :]), mask=there & (rm[None, :] < cout), other=0.0)
        z = tl.load(x + (row * (x_units * V) + rn), mask=there & (rn < cin), other=0.0)
        if stats is not None:
            z = nearest(activate((z.to(tl.float32) - level) * (inverse * scale) + offset, ACT), x.dtype.element_ty)
        acc = product(tl.trans(g), z, acc, "ieee")
    to = partials + ((part * cout + rm[:, None]) * cin + rn)
    tl.store(to, acc, mask=(rm[:, None] < cout) & (rn < cin))
