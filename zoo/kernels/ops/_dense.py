"""The kernels of the dense convolution: an implicit matrix product over pixels, and a matrix-vector product for a few rows."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import triton
import triton.language as tl

from ._activation import activate
from ._overlap import begin

COUNTERS = 4096
"""Tiles that a split launch may have; each has an int32 arrival counter in the workspace."""


_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""A default of arguments, which Triton reads where it is defined. A kernel that read a global `tl.constexpr` would have a hash, the name of
what it compiles to on disk, that in Triton 3.6 depends on which kernel was hashed first: processes would not find each other's."""


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr = _INTERPRETED):
    """Return ``acc + a @ b``, accumulated in float32, of int8 in int32."""
    if INTERPRETED:  # Triton's interpreter would multiply the bit patterns of bfloat16
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc.to(tl.float32), input_precision=PRECISION).to(acc.dtype)
    else:  # noqa: RET505 (Triton compiles both branches unless one is dead)
        return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def nearest(x, KIND: tl.constexpr, INTERPRETED: tl.constexpr = _INTERPRETED):
    """Round a float32 block to the type KIND."""
    if INTERPRETED and tl.bfloat16 == KIND:  # Triton's interpreter would cut the lower bits off
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = ((bits >> 16) << 16).to(tl.float32, bitcast=True)
    return x.to(KIND)


@triton.jit
def narrowed(x, KIND: tl.constexpr, INTERPRETED: tl.constexpr = _INTERPRETED):
    """Round a float32 block to the type KIND of 8 bits: to the nearest, ties to even, what lies beyond its range to the end of it."""
    if tl.int8 == KIND:
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
        x = (x + 12582912.0) - 12582912.0  # 1.5 * 2**23, where float32 has no fractions
    elif tl.float8e4nv == KIND:
        x = x + (x - x)  # NaN of infinity, which has no other form there
        x = tl.minimum(tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL), 448.0, propagate_nan=tl.PropagateNan.ALL)
        if INTERPRETED:  # which would cut the lower bits off, and so make a number of a NaN whose upper ones are not all set
            bits = x.to(tl.uint32, bitcast=True)
            bits = tl.where(x == x, bits + 0x7FFFF + ((bits >> 20) & 1), 0x7FFFFFFF)
            small = (x + 24576.0) - 24576.0  # below 2**-6 in steps of 2**-9
            x = tl.where(tl.abs(x) < 0.015625, small, ((bits >> 20) << 20).to(tl.float32, bitcast=True))
    return x.to(KIND)


@triton.jit
def finish(
    acc, early, bias, residual, out, rm, rn, rows, end, ldr, ldo, EARLY: tl.constexpr, ACT: tl.constexpr,
    factor=None, residual_factor=None, out_factor=None,
):  # fmt: skip
    """Add bias and residual to a float32 tile, activate it, store it in the output's type; of narrow types with their factors."""
    inside = (rm < rows)[:, None] & (rn < end)[None, :]
    if factor is not None:
        acc = acc.to(tl.float32) * tl.load(factor + rn, mask=rn < end, other=0.0)[None, :]
    if bias is not None:
        acc += tl.load(bias + rn, mask=rn < end, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        more = early
        if not EARLY:
            more = tl.load(residual + (rm[:, None] * ldr + rn[None, :]), mask=inside, other=0.0)
        more = more.to(tl.float32)
        if residual_factor is not None:
            more *= tl.load(residual_factor)
        acc += more
    acc = activate(acc, ACT)
    if out_factor is not None:
        acc = acc * tl.load(out_factor)
    tl.store(out + (rm[:, None] * ldo + rn[None, :]), narrowed(acc, out.dtype.element_ty), mask=inside)


UNSPECIALISED = [
    "rows", "height", "width", "out_height", "out_width", "cin_units", "ldx_units", "cout_units", "ldr_units", "ldo_units"
]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALISED)
def conv_kernel(
    x, weight, bias, residual, scale, shift, gate, factor, residual_factor, out_factor, out, counters, partials,
    rows, height, width, out_height, out_width, cin_units, ldx_units, cout_units, ldr_units, ldo_units,
    X_UNIT: tl.constexpr, OUT_UNIT: tl.constexpr, FLAT: tl.constexpr, MASKED: tl.constexpr, EVEN: tl.constexpr, FOLD: tl.constexpr,
    BY_IMAGE: tl.constexpr, DIAGONAL: tl.constexpr, FEW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PT: tl.constexpr, PL: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, PRE_ACT: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One BM x BN tile of the output, or one of its SPLIT ranges of k; rows are output pixels, columns output channels.

    Sizes come in units of X_UNIT and OUT_UNIT elements, so that the compiler knows what divides them and loads 16 bytes at once.
    FOLD is the number of input channels where k runs over taps and channels as one, 0 where every tap has blocks of its own.
    BY_IMAGE says that no tile has pixels of two images, so that all its rows have one gate, a vector and no matrix.
    DIAGONAL is 0, or the output channels of a block of a block-diagonal weight, whose blocks read `cin` channels each. No tile has channels
    of two blocks: the last tile of a block that BN doesn't divide is partly empty.
    FEW says that a tile has more rows than there are, of an image where it keeps to one: partial sums are of those that there are.
    """
    begin(OVERLAP)
    cin = cin_units * X_UNIT
    ldx = ldx_units * X_UNIT
    cout = cout_units * OUT_UNIT
    ldr = ldr_units * OUT_UNIT
    ldo = ldo_units * OUT_UNIT

    pid = tl.program_id(0)
    n_tiles = tl.cdiv(cout, BN)
    if DIAGONAL:
        block_tiles: tl.constexpr = (DIAGONAL + BN - 1) // BN
        n_tiles = (cout // DIAGONAL) * block_tiles
    m_tiles = tl.cdiv(rows, BM)
    high = rows
    if BY_IMAGE:
        pixels = out_height * out_width
        high = pixels
        image_tiles = tl.cdiv(pixels, BM)
        m_tiles = (rows // pixels) * image_tiles
    if GROUP == 1:
        pid_m = pid // n_tiles
        pid_n = pid % n_tiles
    else:
        band = pid // (GROUP * n_tiles)
        size = tl.minimum(m_tiles - band * GROUP, GROUP)
        place = pid % (GROUP * n_tiles)
        pid_m = band * GROUP + place % size
        pid_n = place // size
    rm = pid_m * BM + tl.arange(0, BM)
    if BY_IMAGE:
        its = pid_m // image_tiles
        rm = its * pixels + (pid_m % image_tiles) * BM + tl.arange(0, BM)
        rows = (its + 1) * pixels
    rn = pid_n * BN + tl.arange(0, BN)
    end = cout
    if DIAGONAL:
        block = pid_n // block_tiles
        rn = block * DIAGONAL + (pid_n % block_tiles) * BN + tl.arange(0, BN)
        end = (block + 1) * DIAGONAL
    rk = tl.arange(0, BK)
    safe_m = tl.minimum(rm, rows - 1)
    safe_n = tl.minimum(rn, end - 1)

    h0 = safe_m
    w0 = safe_m
    taps = safe_m
    columns = safe_m
    if FLAT:
        origin = safe_m * ldx
    else:
        image = safe_m // (out_height * out_width)
        pixel = safe_m % (out_height * out_width)
        h0 = (pixel // out_width) * SH - PT
        w0 = (pixel % out_width) * SW - PL
        origin = ((image * height + h0) * width + w0) * ldx
        if MASKED:
            # One bit a tap, so that a tap's test in the loop is a shift.
            taps = tl.zeros([BM], tl.int32)
            columns = tl.zeros([BM], tl.int32)
            for s in tl.static_range(KW):
                columns |= ((w0 + s * DW >= 0) & (w0 + s * DW < width)).to(tl.int32) << s
            for r in tl.static_range(KH):
                inside = (h0 + r * DH >= 0) & (h0 + r * DH < height)
                if KH * KW < 32:
                    taps |= tl.where(inside, columns << (r * KW), 0)
                else:
                    taps |= inside.to(tl.int32) << r

    if DIAGONAL:
        origin += block * cin

    k_total = KH * KW * cin
    if FOLD:
        k_total = KH * KW * FOLD
    w_rows = safe_n * k_total

    early = 0.0
    if EARLY:
        early = tl.load(
            residual + (rm[:, None] * ldr + rn[None, :]), mask=(rm < rows)[:, None] & (rn < end)[None, :], other=0.0
        )  # fmt: skip

    if gate is not None:
        if BY_IMAGE:
            gate += its * cin
        else:
            gate_rows = (safe_m // (out_height * out_width)) * cin

    blocks = tl.cdiv(cin, BK)
    steps = tl.cdiv(KH * KW * FOLD, BK) if FOLD else KH * KW * blocks
    first = 0
    last = steps
    if SPLIT > 1:
        share = tl.cdiv(steps, SPLIT)
        first = tl.program_id(1) * share
        last = tl.minimum(first + share, steps)

    acc = tl.zeros([BM, BN], tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32)
    for step in range(first, last):
        if FOLD:
            k = step * BK + rk
            tap = k // FOLD
            channel = k % FOLD
            dy = tap // KW
            dx = tap % KW
            a_columns = (dy * (DH * width) + dx * DW) * ldx + channel
            b_columns = k
            filled = k < KH * KW * FOLD
            if MASKED:
                if KH * KW < 32:
                    seen = ((taps[:, None] >> tap[None, :]) & 1) != 0
                else:
                    seen = ((taps[:, None] >> dy[None, :]) & (columns[:, None] >> dx[None, :]) & 1) != 0
        else:
            if KH * KW == 1:
                tap = 0
                dy = 0
                dx = 0
                channel = step * BK + rk
                a_columns = channel
                b_columns = channel
            else:
                tap = step // blocks
                dy = tap // KW
                dx = tap % KW
                channel = (step - tap * blocks) * BK + rk
                a_columns = (dy * (DH * width) + dx * DW) * ldx + channel
                b_columns = tap * cin + channel
            filled = channel < cin
            if MASKED:
                bit = taps >> tap if KH * KW < 32 else (taps >> dy) & (columns >> dx)
                seen = ((bit & 1) != 0)[:, None]
        a_pointers = x + (origin[:, None] + a_columns[None, :])
        b_pointers = weight + (w_rows[None, :] + b_columns[:, None])
        if EVEN:
            b = tl.load(b_pointers)
            if MASKED:
                kept = seen & (rk >= 0)[None, :]
                a = tl.load(a_pointers, mask=kept, other=0.0)
            else:
                a = tl.load(a_pointers)
        else:
            b = tl.load(b_pointers, mask=filled[:, None], other=0.0)
            kept = (rm >= 0)[:, None] & filled[None, :]
            if MASKED:
                kept = seen & filled[None, :]
            a = tl.load(a_pointers, mask=kept, other=0.0)
        if scale is not None:
            f = tl.load(scale + channel, mask=filled, other=0.0)
            g = tl.load(shift + channel, mask=filled, other=0.0)
            v = activate(a.to(tl.float32) * f[None, :] + g[None, :], PRE_ACT)
            if MASKED or not EVEN:
                v = tl.where(kept, v, 0.0)
            a = v.to(x.dtype.element_ty)
        elif PRE_ACT != "none":
            v = activate(a.to(tl.float32), PRE_ACT)
            if MASKED or not EVEN:
                v = tl.where(kept, v, 0.0)
            a = v.to(x.dtype.element_ty)
        if gate is not None:
            if BY_IMAGE:
                e = (tl.load(gate + channel) if EVEN else tl.load(gate + channel, mask=filled, other=0.0))[None, :]
            elif EVEN:
                e = tl.load(gate + (gate_rows[:, None] + channel[None, :]))
            else:
                e = tl.load(gate + (gate_rows[:, None] + channel[None, :]), mask=kept, other=0.0)
            a = (a.to(tl.float32) * e.to(tl.float32)).to(x.dtype.element_ty)
        acc = product(a, b, acc, PRECISION)

    if SPLIT == 1:
        finish(acc, early, bias, residual, out, rm, rn, rows, end, ldr, ldo, EARLY, ACT, factor, residual_factor, out_factor)
    else:
        acc = acc.to(tl.float32)
        index = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tiles = tl.num_programs(0)
        if FEW:
            size = high * BN
            there = (tl.arange(0, BM) < high)[:, None] & (tl.arange(0, BN) >= 0)[None, :]
            tl.store(partials + ((tl.program_id(1) * tiles + pid) * size + index), acc, mask=there)
        else:
            size = BM * BN
            tl.store(partials + ((tl.program_id(1) * tiles + pid) * size + index), acc)
        # Every thread's part is written before the one thread that counts says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters + pid, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            if FEW:
                total = tl.load(partials + (pid * size + index), mask=there, other=0.0, cache_modifier=".cg")
                for part in tl.static_range(1, SPLIT):
                    total += tl.load(partials + ((part * tiles + pid) * size + index), mask=there, other=0.0, cache_modifier=".cg")
            else:
                total = tl.load(partials + (pid * size + index), cache_modifier=".cg")
                for part in tl.static_range(1, SPLIT):
                    total += tl.load(partials + ((part * tiles + pid) * size + index), cache_modifier=".cg")
            finish(total, early, bias, residual, out, rm, rn, rows, end, ldr, ldo, EARLY, ACT, factor, residual_factor, out_factor)
            # Zero again for the next launch that borrows this workspace.
            tl.store(counters + pid, 0)


@triton.jit(do_not_specialize=["cin_units", "ldx_units", "cout", "ldr", "ldo"])
def row_kernel(
    x, weight, bias, residual, scale, shift, gate, out, cin_units, ldx_units, cout, ldr, ldo,
    X_UNIT: tl.constexpr, EVEN: tl.constexpr, PRE_ACT: tl.constexpr, ACT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """BN output channels of one row: products of 16-byte loads summed along k at the end, no tensor cores.

    Rows are the fastest axis of the grid, so that the programs of the same weights run side by side and share them in L2.
    """
    begin(OVERLAP)
    cin = cin_units * X_UNIT
    row = tl.program_id(0)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    w_rows = tl.minimum(rn, cout - 1) * cin
    acc = tl.zeros([BN, BK], tl.float32)
    for start in range(0, cin, BK):
        k = start + tl.arange(0, BK)
        if EVEN:
            w = tl.load(weight + (w_rows[:, None] + k[None, :]), eviction_policy="evict_first")
            a = tl.load(x + (row * (ldx_units * X_UNIT) + k)).to(tl.float32)
        else:
            w = tl.load(weight + (w_rows[:, None] + k[None, :]), mask=(k < cin)[None, :], other=0.0, eviction_policy="evict_first")
            a = tl.load(x + (row * (ldx_units * X_UNIT) + k), mask=k < cin, other=0.0).to(tl.float32)
        if scale is not None:
            a = a * tl.load(scale + k, mask=k < cin, other=0.0) + tl.load(shift + k, mask=k < cin, other=0.0)
        if (scale is not None) or PRE_ACT != "none":
            a = tl.where(k < cin, activate(a, PRE_ACT), 0.0).to(x.dtype.element_ty).to(tl.float32)
        if gate is not None:
            e = tl.load(gate + (row * cin + k), mask=k < cin, other=0.0).to(tl.float32)
            a = (a * e).to(x.dtype.element_ty).to(tl.float32)
        acc += w.to(tl.float32) * a[None, :]
    y = tl.sum(acc, axis=1)
    inside = rn < cout
    if bias is not None:
        y += tl.load(bias + rn, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        y += tl.load(residual + (row * ldr + rn), mask=inside, other=0.0).to(tl.float32)
    y = activate(y, ACT)
    tl.store(out + (row * ldo + rn), y.to(out.dtype.element_ty), mask=inside)
