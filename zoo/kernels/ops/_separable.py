"""The kernel of the depthwise convolution followed by a 1x1 convolution."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from zoo.kernels.ops._activation import activate
from zoo.kernels.ops._dense import product
from zoo.kernels.ops._overlap import begin


@triton.jit
def separable_kernel(
    x, dw_weight, dw_bias, weight, bias, residual, out, groups, blocks, height, width, out_height, out_width, top, left,
    x_units, ldx_units, out_units, ldo_units, ldr_units, X_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr,
    BG: tl.constexpr, COLS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    DW_ACT: tl.constexpr, ACT: tl.constexpr, PRE_ACT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile; sizes of channels come in units, so that the compiler knows what divides them and moves 16 bytes at once."""
    TIN: tl.constexpr = (COLS - 1) * SW + KW
    begin(OVERLAP)
    channels = x_units * X_UNIT
    ldx = ldx_units * X_UNIT
    cout = out_units * OUT_UNIT
    n_tiles = tl.cdiv(cout, BN)
    pid = tl.program_id(0)
    g = (pid // n_tiles) * BG + tl.arange(0, BG)
    rn = (pid % n_tiles) * BN + tl.arange(0, BN)
    real = g < groups
    safe = tl.minimum(g, groups - 1)
    block = safe % blocks
    line = safe // blocks
    image = line // out_height
    out_col = block * COLS
    row = (line % out_height) * SH - top
    col = out_col * SW - left
    origin = ((image * height + row) * width + col) * ldx
    rk = tl.arange(0, BK)
    spread = tl.zeros((BG, 1), tl.int32)
    sums = ()
    for _ in tl.static_range(COLS):
        zero = tl.zeros((BG, BN), tl.float32)
        sums = sums + (zero,)  # noqa: RUF005 (Triton knows no unpacking)
    for first in range(0, channels, BK):
        k = first + rk
        # A vector of channels for every place: each thread loads what it multiplies, and nothing is exchanged.
        lanes = spread + k[None, :]
        filled = lanes < channels
        start = tl.zeros((BG, BK), tl.float32)
        if dw_bias is not None:
            start += tl.load(dw_bias + lanes) if EVEN_K else tl.load(dw_bias + lanes, mask=filled, other=0.0)
        middle = ()
        for _ in tl.static_range(COLS):
            middle = middle + (start,)  # noqa: RUF005
        for kh in tl.static_range(KH):
            below = (row + kh * DH >= 0) & (row + kh * DH < height)
            taps = ()
            for kw in tl.static_range(KW):
                where = dw_weight + ((kh * KW + kw) * channels + lanes)
                tap = tl.load(where) if EVEN_K else tl.load(where, mask=filled, other=0.0)
                taps = taps + (tap.to(tl.float32),)  # noqa: RUF005
            for j in tl.static_range(TIN):
                inside = (below & (col + j * DW >= 0) & (col + j * DW < width))[:, None]
                where = x + ((origin + (kh * DH * width + j * DW) * ldx)[:, None] + k[None, :])
                value = tl.load(where, mask=inside if EVEN_K else inside & filled, other=0.0).to(tl.float32)
                if PRE_ACT != "none":
                    value = activate(value, PRE_ACT)
                    if PRE_ACT == "sigmoid" or PRE_ACT == "hardsigmoid":
                        value = tl.where(inside, value, 0.0)
                updated = ()
                for c in tl.static_range(COLS):
                    total = middle[c]
                    if j - c * SW >= 0 and j - c * SW < KW:
                        total += value * taps[j - c * SW]
                    updated = updated + (total,)  # noqa: RUF005
                middle = updated
        matrix = weight + (k[:, None] * cout + rn[None, :])
        if EVEN_K and EVEN_N:  # noqa: SIM108 (shorter than in a line)
            b = tl.load(matrix)
        else:
            b = tl.load(matrix, mask=(k < channels)[:, None] & (rn < cout)[None, :], other=0.0)
        products = ()
        for c in tl.static_range(COLS):
            # Always so, but Triton would else move the change into the product's layout up to each of the loads: a barrier for each.
            a = tl.where(first > -1, activate(middle[c], DW_ACT).to(x.dtype.element_ty), 0.0)
            total = product(a, b, sums[c], "ieee")
            products = products + (total,)  # noqa: RUF005
        sums = products
    pixel = line * out_width + out_col
    wanted = rn < cout
    for c in tl.static_range(COLS):
        y = sums[c]
        valid = (real & (out_col + c < out_width))[:, None] & wanted[None, :]
        if bias is not None:
            y += tl.load(bias + rn, mask=wanted, other=0.0)[None, :]
        if residual is not None:
            more = tl.load(residual + ((pixel + c)[:, None] * (ldr_units * OUT_UNIT) + rn[None, :]), mask=valid, other=0.0)
            y += more.to(tl.float32)
        y = activate(y, ACT)
        tl.store(out + ((pixel + c)[:, None] * (ldo_units * OUT_UNIT) + rn[None, :]), y.to(out.dtype.element_ty), mask=valid)
