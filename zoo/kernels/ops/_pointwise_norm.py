"""The kernels of a 1x1 convolution with BatchNorm behind it, in train mode, where what is in between is never in memory.

Of a product c = a W' the mean and the variance follow from those of a: W m and the diagonal of W C W', with the means m of a's channels
and their covariances C. So BatchNorm's scale and level are known before c is computed, and c is finished where it is computed. On the
way back the sums over pixels of g c, with the gradient g, are the diagonal of W M', with M = g' a, which the weight's gradient needs
anyway; and the part of a's gradient that BatchNorm's own sums give is a small matrix times a. So c is not needed there either.

Programs that sum over pixels take rows that are far apart, and their sums are added in a fixed order, so results repeat bit for bit.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zoo.kernels.ops._activation import activate, slope
from zoo.kernels.ops._dense import nearest, product
from zoo.kernels.ops._overlap import begin


@triton.jit
def moments_kernel(
    x, partials, rows, cin_units, x_units,
    SAME: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write a program's part of the sums of products of channels, BM by BN, and of the BN channels' own sums behind all of those."""
    begin(OVERLAP)
    cin = cin_units * V
    columns = tl.cdiv(cin, BN)
    rm = (tl.program_id(0) // columns) * BM + tl.arange(0, BM)[None, :]
    rn = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)[None, :]
    part = tl.program_id(1)
    acc = tl.zeros([BM, BN], tl.float32)
    sums = tl.zeros([BK, BN], tl.float32)
    for first in range(part * BK, rows, tl.num_programs(1) * BK):
        row = first + tl.arange(0, BK)[:, None]
        there = row < rows
        z = tl.load(x + (row * (x_units * V) + rn), mask=there & (rn < cin), other=0.0)
        # Through registers: a tile that is multiplied where it was loaded, and added up too, came out wrong of Triton 3.6 with four warps.
        z = tl.where(there & (rn < cin), z, 0.0)
        other = z
        if not SAME:
            other = tl.load(x + (row * (x_units * V) + rm), mask=there & (rm < cin), other=0.0)
        acc = product(tl.trans(other), z, acc, "ieee")
        sums += z.to(tl.float32)
    to = partials + part * (cin * cin + cin)
    down = tl.trans(rm)
    tl.store(to + (down * cin + rn), acc, mask=(down < cin) & (rn < cin))
    if tl.program_id(0) < columns:
        tl.store(to + (cin * cin + rn), tl.sum(sums, axis=0, keep_dims=True), mask=rn < cin)


@triton.jit
def exactly(a, b, acc):
    """Return ``acc + a @ b`` for float32 b, all of whose digits count."""
    if a.dtype == tl.bfloat16:  # of which three hold b's
        first = nearest(b, tl.bfloat16)
        b -= first.to(tl.float32)
        second = nearest(b, tl.bfloat16)
        b -= second.to(tl.float32)
        acc = product(a, nearest(b, tl.bfloat16), acc, "ieee")
        acc = product(a, second, acc, "ieee")
        return product(a, first, acc, "ieee")
    else:  # noqa: RET505 (Triton compiles both branches unless one is dead)
        return tl.dot(a.to(tl.float32), b, acc, input_precision="ieee")


@triton.jit
def spread_kernel(
    weight, moments, packed, spread, level, sums, pixels, cin, cout,
    BJ: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write BJ by BK of the weights, rounded, and of their products with the covariances; and these inputs' part of mean and variance."""
    begin(OVERLAP)
    columns = tl.cdiv(cin, BK)
    group = tl.program_id(0) % columns
    rj = (tl.program_id(0) // columns) * BJ + tl.arange(0, BJ)[:, None]
    live = rj < cout
    share = 1.0 / pixels
    k = group * BK + tl.arange(0, BK)[None, :]
    mk = tl.load(moments + (cin * cin + k), mask=k < cin, other=0.0) * share
    acc = tl.zeros([BJ, BK], tl.float32)
    for first in range(0, cin, BL):
        across = first + tl.arange(0, BL)[None, :]
        down = first + tl.arange(0, BL)[:, None]
        w = tl.load(weight + (rj * cin + across), mask=live & (across < cin), other=0.0).to(tl.float32)
        ml = tl.load(moments + (cin * cin + down), mask=down < cin, other=0.0) * share
        both = tl.load(moments + (down * cin + k), mask=(down < cin) & (k < cin), other=0.0) * share - ml * mk
        acc = exactly(nearest(w, packed.dtype.element_ty), both, acc)
    there = live & (k < cin)
    w = nearest(tl.load(weight + (rj * cin + k), mask=there, other=0.0).to(tl.float32), packed.dtype.element_ty)
    tl.store(packed + (rj * cin + k), w, mask=there)
    tl.store(spread + (rj * cin + k), acc, mask=there)
    w = w.to(tl.float32)
    to = sums + (2 * group * cout + rj)
    tl.store(to, tl.sum(w * mk, axis=1, keep_dims=True), mask=live)
    tl.store(to + cout, tl.sum(w * acc, axis=1, keep_dims=True), mask=live)
    if tl.program_id(0) < columns:
        tl.store(level + k, mk, mask=k < cin)


@triton.jit
def finish_kernel(
    x, packed, sums, factor, shift, residual, out, stats, old_mean, old_var, mean_out, var_out, rows, groups, pixels, eps, momentum,
    cin_units, cout_units, x_units, residual_units, out_units,
    ACT: tl.constexpr, V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write a tile of the product, normalised, with the residual added, activated; of each channel once the statistics."""
    begin(OVERLAP)
    cin = cin_units * V
    cout = cout_units * VO
    across = tl.cdiv(cout, BN)
    rm = (tl.program_id(0) // across) * BM + tl.arange(0, BM)[:, None]
    rn = (tl.program_id(0) % across) * BN + tl.arange(0, BN)[None, :]
    rk = tl.arange(0, BK)
    safe = tl.minimum(rm, rows - 1)
    live = rn < cout
    more = 0.0
    if residual is not None:  # on its way while the product is computed
        more = tl.load(residual + (safe * (residual_units * VO) + rn), mask=live, other=0.0)
    mean = tl.zeros([1, BN], tl.float32)
    var = tl.zeros([1, BN], tl.float32)
    for group in range(groups):
        at = sums + (2 * group * cout + rn)
        mean += tl.load(at, mask=live, other=0.0)
        var += tl.load(at + cout, mask=live, other=0.0)
    var = tl.maximum(var, 0.0, propagate_nan=tl.PropagateNan.ALL)
    inverse = 1.0 / tl.sqrt_rn(var + eps)
    scale = inverse * tl.load(factor + rn, mask=live, other=0.0).to(tl.float32)
    offset = tl.load(shift + rn, mask=live, other=0.0).to(tl.float32) - mean * scale
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, cin, BK):
        k = first + rk
        a = tl.load(x + (safe * (x_units * V) + k[None, :]), mask=k[None, :] < cin, other=0.0)
        b = tl.load(packed + (rn * cin + k[:, None]), mask=(k[:, None] < cin) & live, other=0.0)
        acc = product(a, b, acc, "ieee")
    y = acc * scale + offset
    if residual is not None:
        y += more.to(tl.float32)
    tl.store(out + (rm * (out_units * VO) + rn), nearest(activate(y, ACT), out.dtype.element_ty), mask=(rm < rows) & live)
    if tl.program_id(0) < across:
        tl.store(stats + rn, mean, mask=live)
        tl.store(stats + (cout + rn), inverse, mask=live)
        tl.store(stats + (2 * cout + rn), tl.zeros([1, BN], tl.float32) + 1.0 / pixels, mask=live)
        if mean_out is not None:
            before = tl.load(old_mean + rn, mask=live, other=0.0).to(tl.float32)
            tl.store(mean_out + rn, (before + momentum * (mean - before)).to(mean_out.dtype.element_ty), mask=live)
            before = tl.load(old_var + rn, mask=live, other=0.0).to(tl.float32)
            var *= pixels / tl.maximum(pixels - 1.0, 1.0)
            tl.store(var_out + rn, (before + momentum * (var - before)).to(var_out.dtype.element_ty), mask=live)


@triton.jit
def products_kernel(
    gradient, kept, x, partials, through, rows, cin_units, cout_units, g_units, kept_units, x_units, through_units,
    ACT: tl.constexpr, TURNED: tl.constexpr, V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the gradient before an activation, and a program's part of its sums: of products with BN inputs, then of itself."""
    begin(OVERLAP)
    cin = cin_units * V
    cout = cout_units * VO
    columns = tl.cdiv(cin, BN)
    rm = (tl.program_id(0) // columns) * BM + tl.arange(0, BM)[None, :]
    rn = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)[None, :]
    part = tl.program_id(1)
    column = tl.program_id(0) % columns
    acc = tl.zeros([BN, BM], tl.float32) if TURNED else tl.zeros([BM, BN], tl.float32)
    sums = tl.zeros([BK, BM], tl.float32)
    for first in range(part * BK, rows, tl.num_programs(1) * BK):
        row = first + tl.arange(0, BK)[:, None]
        there = (row < rows) & (rm < cout)
        g = tl.load(gradient + (row * (g_units * VO) + rm), mask=there, other=0.0)
        z = tl.load(x + (row * (x_units * V) + rn), mask=(row < rows) & (rn < cin), other=0.0)
        y = tl.load(kept + (row * (kept_units * VO) + rm), mask=there, other=0.0)
        g = nearest(slope(y.to(tl.float32), g.to(tl.float32), ACT), gradient.dtype.element_ty)
        # Of programs side by side one writes.
        tl.store(through + (row * (through_units * VO) + rm), g, mask=there & (column + 0 * rm == 0))
        sums += g.to(tl.float32)
        acc = product(tl.trans(z), g, acc, "ieee") if TURNED else product(tl.trans(g), z, acc, "ieee")
    to = partials + part * (cout * cin + cout)
    down = tl.trans(rm)
    tl.store(to + (down * cin + rn), tl.trans(acc) if TURNED else acc, mask=(down < cout) & (rn < cin))
    if column == 0:
        tl.store(to + (cout * cin + rm), tl.sum(sums, axis=0, keep_dims=True), mask=rm < cout)


@triton.jit
def settle_kernel(
    products, weight, factor, stats, spread, level, of_weight, slanted, sums, tilt, cin, cout,
    BJ: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write, of BJ outputs, the weights' gradient, BatchNorm's two sums, the weights times its scale, and what c is to be taken times."""
    begin(OVERLAP)
    rj = tl.program_id(0) * BJ + tl.arange(0, BJ)[:, None]
    live = rj < cout
    total = tl.load(products + (cout * cin + rj), mask=live, other=0.0)
    inverse = tl.load(stats + (cout + rj), mask=live, other=0.0)
    share = tl.load(stats + (2 * cout + rj), mask=live, other=0.0)
    scale = inverse * tl.load(factor + rj, mask=live, other=0.0).to(tl.float32)
    normal = tl.zeros([BJ, BK], tl.float32)
    for first in range(0, cin, BK):
        k = first + tl.arange(0, BK)[None, :]
        there = live & (k < cin)
        off = tl.load(products + (rj * cin + k), mask=there, other=0.0) - total * tl.load(level + k, mask=k < cin, other=0.0)
        w = tl.load(weight + (rj * cin + k), mask=there, other=0.0).to(tl.float32)
        tl.store(slanted + (rj * cin + k), nearest(scale * w, slanted.dtype.element_ty), mask=there)  # rounded once
        normal += off * nearest(w, slanted.dtype.element_ty).to(tl.float32)
    both = inverse * tl.sum(normal, axis=1, keep_dims=True)
    for first in range(0, cin, BK):
        k = first + tl.arange(0, BK)[None, :]
        there = live & (k < cin)
        off = tl.load(products + (rj * cin + k), mask=there, other=0.0) - total * tl.load(level + k, mask=k < cin, other=0.0)
        off = scale * (off - inverse * both * tl.load(spread + (rj * cin + k), mask=there, other=0.0))
        tl.store(of_weight + (rj * cin + k), off.to(of_weight.dtype.element_ty), mask=there)
    tl.store(sums + rj, total, mask=live)
    tl.store(sums + (cout + rj), both, mask=live)
    tl.store(tilt + rj, scale * inverse * both * share, mask=live)


@triton.jit
def bend_kernel(
    weight, slanted, tilt, sums, stats, level, bent, levels, cin, cout,
    BL: tl.constexpr, BK: tl.constexpr, BJ: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write BL by BK of the matrix that a is multiplied by, and these rows' part of what every pixel's gradient is lessened by.

    That part is taken with the matrix as it is rounded, so that gradients still add up to nothing over the pixels.
    """
    begin(OVERLAP)
    columns = tl.cdiv(cin, BK)
    group = tl.program_id(0) // columns
    low = group * BL + tl.arange(0, BL)[None, :]
    k = (tl.program_id(0) % columns) * BK + tl.arange(0, BK)[None, :]
    acc = tl.zeros([BL, BK], tl.float32)
    lessened = tl.zeros([BJ, BK], tl.float32)
    for first in range(0, cout, BJ):
        j = first + tl.arange(0, BJ)[:, None]
        live = j < cout
        w = tl.load(weight + (j * cin + low), mask=live & (low < cin), other=0.0).to(tl.float32)
        w = nearest(w * tl.load(tilt + j, mask=live, other=0.0), bent.dtype.element_ty)
        other = tl.load(weight + (j * cin + k), mask=live & (k < cin), other=0.0).to(tl.float32)
        acc = product(tl.trans(w), nearest(other, bent.dtype.element_ty), acc, "ieee")
        if group == 0:
            share = tl.load(sums + j, mask=live, other=0.0) * tl.load(stats + (2 * cout + j), mask=live, other=0.0)
            lessened += share * tl.load(slanted + (j * cin + k), mask=live & (k < cin), other=0.0).to(tl.float32)
    first_digits = nearest(-acc, bent.dtype.element_ty)
    more_digits = nearest(-acc - first_digits.to(tl.float32), bent.dtype.element_ty)
    down = tl.trans(low)
    tl.store(bent + (down * cin + k), first_digits, mask=(down < cin) & (k < cin))
    tl.store(bent + ((cin + down) * cin + k), more_digits, mask=(down < cin) & (k < cin))
    part = tl.sum(
        (first_digits.to(tl.float32) + more_digits.to(tl.float32)) * tl.load(level + down, mask=down < cin, other=0.0),
        axis=0,
        keep_dims=True,
    )
    tl.store(levels + (group * cin + k), part + tl.sum(lessened, axis=0, keep_dims=True), mask=k < cin)


@triton.jit
def source_kernel(
    gradient, x, slanted, bent, levels, out, rows, groups, cin_units, cout_units, g_units, x_units, out_units,
    V: tl.constexpr, VO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write a tile of the gradient of a."""
    begin(OVERLAP)
    cin = cin_units * V
    cout = cout_units * VO
    across = tl.cdiv(cin, BN)
    rm = (tl.program_id(0) // across) * BM + tl.arange(0, BM)[:, None]
    rn = (tl.program_id(0) % across) * BN + tl.arange(0, BN)[None, :]
    rk = tl.arange(0, BK)
    safe = tl.minimum(rm, rows - 1)
    acc = tl.zeros([BM, BN], tl.float32)
    for first in range(0, cout, BK):
        j = first + rk
        a = tl.load(gradient + (safe * (g_units * VO) + j[None, :]), mask=j[None, :] < cout, other=0.0)
        b = tl.load(slanted + (j[:, None] * cin + rn), mask=(j[:, None] < cout) & (rn < cin), other=0.0)
        acc = product(a, b, acc, "ieee")
    for first in range(0, cin, BK):
        k = first + rk
        a = tl.load(x + (safe * (x_units * V) + k[None, :]), mask=k[None, :] < cin, other=0.0)
        b = tl.load(bent + (k[:, None] * cin + rn), mask=(k[:, None] < cin) & (rn < cin), other=0.0)
        acc = product(a, b, acc, "ieee")
        b = tl.load(bent + ((cin + k[:, None]) * cin + rn), mask=(k[:, None] < cin) & (rn < cin), other=0.0)
        acc = product(a, b, acc, "ieee")
    for group in range(groups):
        acc -= tl.load(levels + (group * cin + rn), mask=rn < cin, other=0.0)
    tl.store(out + (rm * (out_units * V) + rn), nearest(acc, out.dtype.element_ty), mask=(rm < rows) & (rn < cin))
