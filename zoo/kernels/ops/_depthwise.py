"""The kernel of the depthwise convolution, and what it shares with the op that appends a 1x1 convolution."""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops import _layout
from zoo.kernels.ops._activation import activate
from zoo.kernels.ops._overlap import begin


def pack(weight: Tensor) -> Tensor:
    """Return the weight (C, 1, KH, KW) as (KH, KW, C), the channels of a tap beside each other.

    Args:
        weight: the weight as PyTorch lays it out.

    Returns:
        The same numbers in the same dtype, contiguous.
    """
    return weight[:, 0].permute(1, 2, 0).contiguous()


def kernel_size(weight: Tensor) -> tuple[int, int]:
    """Return (KH, KW) of a depthwise weight, packed or not."""
    return (weight.shape[2], weight.shape[3]) if weight.dim() == 4 else (weight.shape[0], weight.shape[1])


def out_sizes(
    x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int, int, int], dilation: tuple[int, int]
) -> tuple[int, int]:
    """Return (OH, OW) of a depthwise convolution, its weight packed or not."""
    return _layout.out_sizes(x, kernel_size(weight), stride, padding, dilation)


@triton.jit
def _load(
    x, origin, row, col, last_row, height, width, pitch, SHAPE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, Q: tl.constexpr
):
    """Load what a patch needs of its input row Q, as it is stored; what lies outside the image is 0."""
    COUNT: tl.constexpr = SHAPE[1]
    WORDS: tl.constexpr = SHAPE[0]
    here = row + Q * SHAPE[2]
    # One block of addresses a row, to which columns are added as numbers: Triton's passes take a time that grows with the
    # instructions' square for each of the loads.
    line = x + ((origin + here * width * pitch) * WORDS + tl.arange(0, WORDS)[None, :])
    below = (here > -1) & (here <= last_row)
    values = ()
    for i in tl.static_range(COUNT):
        where = line + (i * SHAPE[3] * WORDS) * pitch
        beside = (col + i * SHAPE[3] > -1) & (col + i * SHAPE[3] < width)
        if i < COLUMNS[0] or i >= COLUMNS[1] or ROWS[0] > Q or ROWS[1] <= Q:
            value = tl.zeros(where.shape, x.dtype.element_ty)
        elif i >= COLUMNS[2] and i < COLUMNS[3]:
            value = tl.load(where) if ROWS[2] else tl.load(where, mask=below, other=0.0)
        else:
            value = tl.load(where, mask=beside if ROWS[2] else beside & below, other=0.0)
        values = values + (value,)  # noqa: RUF005 (Triton knows no unpacking)
    return values


@triton.jit
def _widen(value):
    """Return what was loaded as float32; two bfloat16 in a word are shifted and masked into place, one instruction each."""
    if value.dtype == tl.int32:
        low = (value << 16).to(tl.float32, bitcast=True)
        high = (value & -65536).to(tl.float32, bitcast=True)
        result = tl.reshape(tl.join(low, high), (value.shape[0], 2 * value.shape[1]))
    else:
        result = value.to(tl.float32)
    return result


@triton.jit
def _feed(rows, values, taps, KERNEL: tl.constexpr, COLS: tl.constexpr, COLUMNS: tl.constexpr, TAP: tl.constexpr, LIVE: tl.constexpr):
    """Add an input row to the LIVE first open rows: to the first with tap TAP, to each further one with the tap a stride earlier."""
    OPEN: tl.constexpr = (KERNEL[0] + KERNEL[2] - 1) // KERNEL[2]
    KW: tl.constexpr = KERNEL[1]
    TIN: tl.constexpr = (COLS - 1) * KERNEL[3] + KW
    wide = ()
    for i in tl.static_range(TIN):
        value = _widen(values[i])
        wide = wide + (value,)  # noqa: RUF005
    result = ()
    for a in tl.static_range(OPEN * COLS):
        value = rows[a]
        if a // COLS < LIVE:
            for kw in tl.static_range(KW):
                if (
                    TAP - (a // COLS) * KERNEL[2] >= 0
                    and TAP - (a // COLS) * KERNEL[2] < KERNEL[0]
                    and (a % COLS) * KERNEL[3] + kw >= COLUMNS[0]
                    and (a % COLS) * KERNEL[3] + kw < COLUMNS[1]
                ):
                    tap = taps[(TAP - (a // COLS) * KERNEL[2]) * KERNEL[1] + kw]
                    value = tl.fma(wide[(a % COLS) * KERNEL[3] + kw], tap, value)
        result = result + (value,)  # noqa: RUF005
    return result


@triton.jit
def depthwise_kernel(
    x, weight, bias, out, sums, total, groups, tiles, strips, height, width, out_height, out_width, pitch, out_pitch, top, left,
    LANES: tl.constexpr, VECTOR: tl.constexpr, COLS: tl.constexpr, STEPS: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr,
    STRIDE: tl.constexpr, REPEAT: tl.constexpr, KERNEL: tl.constexpr, SHAPE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, SUMS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One patch a lane; sizes in vectors of VECTOR channels, so that the compiler knows what divides them.

    KERNEL is (KH, KW, stride down, right), strides counted in dilations; SHAPE is (words of a vector, input columns of a patch, dilation
    down, right); COLUMNS says between which of those columns some lie inside an image, and between which all do; ROWS, between which
    input rows lie inside, and whether all of those do; EVEN, whether patches tile the columns, and the rows; REPEAT, how far apart a
    patch's outputs are, down and right.
    """
    KH: tl.constexpr = KERNEL[0]
    KW: tl.constexpr = KERNEL[1]
    SH: tl.constexpr = KERNEL[2]
    DH: tl.constexpr = SHAPE[2]
    FRESH: tl.constexpr = min(SH, KH)
    EARLY: tl.constexpr = KH - FRESH
    OPEN: tl.constexpr = (KH + SH - 1) // SH
    TIN: tl.constexpr = SHAPE[1]
    begin(OVERLAP)
    # The last program's spare lanes repeat the last one: they store the same numbers, which costs less than a mask on everything.
    lane = tl.minimum(tl.program_id(0) * LANES + tl.arange(0, LANES), total - 1)[:, None]
    group = lane % groups
    patch = lane // groups
    tile = patch % tiles
    strip = (patch // tiles) % strips
    image = patch // (tiles * strips)
    out_col = tile % REPEAT[1] + (tile // REPEAT[1]) * (COLS * REPEAT[1])
    out_row = strip % REPEAT[0] + (strip // REPEAT[0]) * (STEPS * BLOCKS * REPEAT[0])
    col = out_col * STRIDE[1] - left
    row = out_row * STRIDE[0] - top
    last_row = tl.minimum(row + ((STEPS * BLOCKS - 1) * SH + KH - 1) * DH, height - 1)
    origin = (image * height * width + col) * pitch + group
    lanes = tl.arange(0, VECTOR)[None, :]
    if SHAPE[0] < VECTOR:
        x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    queue = ()
    for q in tl.static_range(EARLY):
        queue = queue + _load(x, origin, row, col, last_row, height, width, pitch, SHAPE, COLUMNS, ROWS, q)
    for q in tl.static_range(AHEAD * FRESH):
        queue = queue + _load(
            x, origin, row, col, last_row, height, width, pitch, SHAPE, COLUMNS, ROWS, (q // FRESH) * SH + EARLY + q % FRESH
        )
    taps = ()
    here = weight + (group * VECTOR + lanes)
    for k in tl.static_range(KH * KW):
        tap = tl.load(here + (k * VECTOR) * groups).to(tl.float32)
        taps = taps + (tap,)  # noqa: RUF005
    start = tl.zeros((LANES, VECTOR), tl.float32)
    if BIAS:
        start += tl.load(bias + group * VECTOR + lanes)
    fresh = ()
    for _ in tl.static_range(COLS):
        fresh = fresh + (start,)  # noqa: RUF005
    rows = ()
    for _ in tl.static_range(OPEN):
        rows = rows + fresh
    for q in tl.static_range(EARLY):
        if q >= ROWS[0] and q < ROWS[1]:
            rows = _feed(rows, queue[q * TIN : q * TIN + TIN], taps, KERNEL, COLS, COLUMNS, q, STEPS * BLOCKS)
    queue = queue[EARLY * TIN :]
    amount = tl.zeros((LANES, VECTOR), tl.float32)
    for block in range(BLOCKS):
        first = row + block * (STEPS * SH * DH)
        for s in tl.static_range(STEPS):
            for t in tl.static_range(FRESH):
                ahead = _load(x, origin, first, col, last_row, height, width, pitch, SHAPE, COLUMNS, ROWS, (s + AHEAD) * SH + EARLY + t)
                queue = queue + ahead
            for t in tl.static_range(FRESH):
                if s * SH + EARLY + t >= ROWS[0] and s * SH + EARLY + t < ROWS[1]:
                    rows = _feed(
                        rows, queue[t * TIN : t * TIN + TIN], taps, KERNEL, COLS, COLUMNS, EARLY + t, OPEN if BLOCKS > 1 else STEPS - s
                    )
            queue = queue[FRESH * TIN :]
            down = out_row + (block * STEPS + s) * REPEAT[0]
            target = out + ((((image * out_height + down) * out_width + out_col) * out_pitch + group) * VECTOR + lanes)
            for i in tl.static_range(COLS):
                y = activate(rows[i], ACT)
                where = target + (i * REPEAT[1] * VECTOR) * out_pitch
                if EVEN[0] and EVEN[1]:
                    tl.store(where, y.to(out.dtype.element_ty))
                else:
                    if EVEN[0]:
                        valid = down < out_height
                    elif EVEN[1]:
                        valid = out_col + i * REPEAT[1] < out_width
                    else:
                        valid = (down < out_height) & (out_col + i * REPEAT[1] < out_width)
                    tl.store(where, y.to(out.dtype.element_ty), mask=valid)
                    y = tl.where(valid, y, 0.0)
                if SUMS:
                    amount += y
            rows = rows[COLS:] + fresh
    if SUMS:
        tl.store(sums + ((patch * groups + group) * VECTOR + lanes), amount)
