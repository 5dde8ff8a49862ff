"""The kernels of a 1x1 convolution between two BatchNorms: what is element by element around it happens on the way in and out.

Forward, the map that comes in is normalised and activated while it is read, and the statistics of the map that goes out are taken
while it is written. Back, the slope of that activation and the sums of that BatchNorm are taken while the gradient is written, and
the weight's gradient normalises its map again. So the activated map is never in memory. Programs keep a column of tiles and walk down
the rows, so sums are few, and are joined in a fixed order.

What costs time beside the memory's is to add up over pixels what many threads have of a channel, tile for tile, so no tile does. Forward,
the product is turned, channels down and pixels across: tensor cores then leave a thread many pixels of few channels. Back, each thread
adds what it has to sums of its own, and those are joined once, at the end. Tiles further down are on their way meanwhile.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false

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
    ACT: tl.constexpr, V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write tiles of the product of `act(norm(x))` and the weight, and (count, mean, sum of squared deviations) of a program's rows.

    WHOLE says that no tile reaches beyond the last row. One loop runs over all steps of all tiles, so that what the next tile begins
    with is loaded while this one ends.
    """
    begin(OVERLAP)
    cin = cin_units * V
    cout = cout_units * VO
    rn = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None]
    rk = tl.arange(0, BK)[None, :]
    lane = tl.arange(0, BM)
    tile = tl.program_id(1)
    apart = tl.num_programs(1)
    mine = tl.cdiv(tl.cdiv(rows, BM) - tile, apart)
    number = 0.0
    mean = tl.zeros([BN, 1], tl.float32)
    squares = tl.zeros([BN, 1], tl.float32)
    acc = tl.zeros([BN, BM], tl.float32)
    first = 0
    for _ in range(mine * tl.cdiv(cin, BK)):
        k = first + rk
        down = tile * BM + lane[:, None]
        down = down if WHOLE else tl.minimum(down, rows - 1)
        a = tl.load(x + (down * (x_units * V) + k), mask=k < cin, other=0.0)
        # Columns behind the last channel become anything, and meet zeros.
        b = tl.load(weight + (rn * cin + k), mask=(k < cin) & (rn < cout), other=0.0)
        if stats is not None:
            level, inverse, scale, offset = factors(stats, factor, shift, k, cin, k < cin, V)
            a = nearest(activate((a.to(tl.float32) - level) * (inverse * scale) + offset, ACT), x.dtype.element_ty)
        acc = product(b, tl.trans(a), acc, "ieee")
        last = first + BK >= cin
        if last:
            across = tile * BM + lane[None, :]
            y = nearest(acc, out.dtype.element_ty)
            v = y.to(tl.float32)  # statistics are of what is stored
            to = out + (across * (out_units * VO) + rn)
            if WHOLE:
                count = 0.0 + BM
                tl.store(to, y, mask=rn < cout)
                middle = tl.sum(v, axis=1, keep_dims=True) / count
                off = v - middle
            else:
                live = across < rows
                count = tl.minimum(rows - tile * BM, BM).to(tl.float32)
                tl.store(to, y, mask=live & (rn < cout))
                middle = tl.sum(tl.where(live, v, 0.0), axis=1, keep_dims=True) / count
                off = tl.where(live, v - middle, 0.0)
            total = number + count
            gap = middle - mean
            squares += tl.sum(off * off, axis=1, keep_dims=True) + gap * gap * (number * (count / total))
            mean += gap * (count / total)
            number = total
            acc = tl.zeros([BN, BM], tl.float32)
        tile = tl.where(last, tile + apart, tile)
        first = tl.where(last, 0, first + BK)
    to = partials + (tl.program_id(1) * 3 * cout + rn)
    tl.store(to, tl.zeros([BN, 1], tl.float32) + number, mask=rn < cout)
    tl.store(to + cout, mean, mask=rn < cout)
    tl.store(to + 2 * cout, squares, mask=rn < cout)


@triton.jit
def input_kernel(
    gradient, weight, x, stats, factor, shift, total, out, partials, rows, cin_units, cout_units, g_units, x_units, total_units, out_units,
    ACT: tl.constexpr, V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write tiles of the gradient before the activation, and its sum and that of its product with the normalised x, a program's rows.

    With `total`, which may be `out`, that plus the part of the gradient of x that needs no sums is written. ONCE says that one step of
    BK reads all of the gradient's channels, so that a program's weights are read once.
    """
    begin(OVERLAP)
    cin = cin_units * V
    cout = cout_units * VO
    rn = (tl.program_id(0) * BN + tl.arange(0, BN))[None, :]
    rk = tl.arange(0, BK)
    part = tl.program_id(1)
    level, inverse, scale, offset = factors(stats, factor, shift, rn, cin, rn < cin, V)
    slant = inverse * scale
    sums = tl.zeros([BM, BN], tl.float32)
    products = tl.zeros([BM, BN], tl.float32)
    if ONCE:
        b = tl.load(weight + (rk[:, None] * cin + rn), mask=(rk[:, None] < cout) & (rn < cin), other=0.0)
    for tile in range(part, tl.cdiv(rows, BM), tl.num_programs(1)):
        rm = tile * BM + tl.arange(0, BM)[:, None]
        there = (rm < rows) & (rn < cin)
        # On their way while the product is computed.
        ahead = tl.load(x + (rm * (x_units * V) + rn), mask=there, other=0.0)
        if total is not None:
            before = tl.load(total + (rm * (total_units * V) + rn), mask=there, other=0.0)
        acc = tl.zeros([BM, BN], tl.float32)
        if ONCE:
            a = tl.load(gradient + (rm * (g_units * VO) + rk[None, :]), mask=(rm < rows) & (rk[None, :] < cout), other=0.0)
            acc = product(a, b, acc, "ieee")
        else:
            for first in range(0, cout, BK):
                k = first + rk
                a = tl.load(gradient + (rm * (g_units * VO) + k[None, :]), mask=(rm < rows) & (k[None, :] < cout), other=0.0)
                b = tl.load(weight + (k[:, None] * cin + rn), mask=(k[:, None] < cout) & (rn < cin), other=0.0)
                acc = product(a, b, acc, "ieee")
        off = ahead.to(tl.float32) - level
        g = slope(off * slant + offset, acc, ACT)  # zero in rows behind the last: so is the product, of finite weights
        if total is not None:
            y = nearest(before.to(tl.float32) + g * slant, out.dtype.element_ty)
        else:
            y = nearest(g, out.dtype.element_ty)
            g = y.to(tl.float32)
        tl.store(out + (rm * (out_units * V) + rn), y, mask=there)
        sums += g
        products += g * off
    to = partials + (part * 2 * cin + rn)
    tl.store(to, tl.sum(sums, axis=0, keep_dims=True), mask=rn < cin)
    # Read again: registers are what limits how many programs hide each other's waiting.
    inverse = tl.load(stats + (cin + rn), mask=rn < cin, other=0.0)
    tl.store(to + cin, tl.sum(products, axis=0, keep_dims=True) * inverse, mask=rn < cin)


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
