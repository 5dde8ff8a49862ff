"""The kernels of the way back through a depthwise convolution: the input's gradient where it strides, and the weight's.

Both work on tiles of places by channels. The weight's gradient slides down strips of the output: a lane keeps the input rows that the
next output row reads again in registers, has the next ones on their way while it multiplies, and holds one sum a tap.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from zoo.kernels.ops._overlap import begin


@triton.jit
def input_kernel(
    gradient, weight, out, units, across, down, channel_units, height, width, out_height, out_width, g_units, out_units, top, left,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, COLS: tl.constexpr, V: tl.constexpr, BP: tl.constexpr,
    BC: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute blocks of SH x SW pixels, COLS of them beside each other: all that the same few output pixels have reached."""
    begin(OVERLAP)
    JH: tl.constexpr = (KH + SH - 1) // SH
    JW: tl.constexpr = (KW + SW - 1) // SW
    channels = channel_units * V
    blocks = tl.cdiv(channels, BC)  # one axis: the others of a grid end at 65535
    c = ((tl.program_id(0) % blocks) * BC + tl.arange(0, BC))[None, :]
    unit = (tl.program_id(0) // blocks) * BP + tl.arange(0, BP)[:, None]
    image = unit // (across * down)
    a = (unit // across) % down + top // SH
    b = (unit % across) * COLS + left // SW
    alive = (unit < units) & (c < channels)
    values = ()
    for k in tl.static_range(JH * (COLS + JW - 1)):
        row = a - k // (COLS + JW - 1)
        col = b + k % (COLS + JW - 1) - (JW - 1)
        there = alive & (row >= 0) & (row < out_height) & (col >= 0) & (col < out_width)
        at = gradient + (((image * out_height + row) * out_width + col) * (g_units * V) + c)
        values = values + (tl.load(at, mask=there, other=0.0),)  # noqa: RUF005
    for phase in tl.static_range(SH * SW):
        for i in tl.static_range(COLS):
            total = tl.zeros([BP, BC], tl.float32)
            for k in tl.static_range(JH * JW):
                if phase // SW + (k // JW) * SH < KH and phase % SW + (k % JW) * SW < KW:
                    tap = (phase // SW + (k // JW) * SH) * KW + phase % SW + (k % JW) * SW
                    factor = tl.load(weight + (tap * channels + c), mask=c < channels, other=0.0).to(tl.float32)
                    total += values[(k // JW) * (COLS + JW - 1) + i + JW - 1 - k % JW].to(tl.float32) * factor
            row = a * SH + phase // SW - top
            col = (b + i) * SW + phase % SW - left
            there = alive & (row >= 0) & (row < height) & (col >= 0) & (col < width)
            at = out + (((image * height + row) * width + col) * (out_units * V) + c)
            tl.store(at, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _rows(x, at, row, col, height, width, step, c, alive, COUNT: tl.constexpr, ROWS: tl.constexpr):
    """Load COUNT pixels of each of ROWS rows; `at` is the first one's number, what lies outside is 0."""
    values = ()
    for r in tl.static_range(ROWS):
        down = alive & (row + r >= 0) & (row + r < height)
        where = x + ((at + r * width) * step + c)
        for k in tl.static_range(COUNT):
            there = down & (col + k >= 0) & (col + k < width)
            values = values + (tl.load(where + k * step, mask=there, other=0.0),)  # noqa: RUF005
    return values


@triton.jit
def weight_kernel(
    gradient, x, partials, units, across, down, channel_units, height, width, out_height, out_width, g_units, x_units, top, left, length,
    first_tap, KH: tl.constexpr, KW: tl.constexpr, TAPS: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, COLS: tl.constexpr,
    V: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the sums of a program's strips, `length` rows by COLS columns each, a row of C floats a tap, from the first one of TAPS on."""
    begin(OVERLAP)
    TIN: tl.constexpr = (COLS - 1) * SW + KW
    channels = channel_units * V
    step = x_units * V
    c = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    part = tl.program_id(1)
    sums = ()
    for _ in tl.static_range(KH * KW):
        sums = sums + (tl.zeros([BP, BC], tl.float32),)  # noqa: RUF005
    for first in range(part * BP, units, tl.num_programs(1) * BP):
        unit = first + tl.arange(0, BP)[:, None]
        image = unit // (across * down)
        out_row = ((unit // across) % down) * length
        out_col = (unit % across) * COLS
        row = out_row * SH - top
        col = out_col * SW - left
        alive = (unit < units) & (c < channels)
        at = (image * height + row) * width + col
        g_at = (image * out_height + out_row) * out_width + out_col
        kept = _rows(x, at, row, col, height, width, step, c, alive, TIN, KH - SH)
        row += KH - SH
        at += (KH - SH) * width
        fresh = _rows(x, at, row, col, height, width, step, c, alive, TIN, SH)
        gs = _rows(gradient, g_at, out_row, out_col, out_height, out_width, g_units * V, c, alive, COLS, 1)
        for r in range(length):
            more = alive & (unit * 0 + r < length - 1)
            row += SH
            at += SH * width
            next_fresh = _rows(x, at, row, col, height, width, step, c, more, TIN, SH)
            next_gs = _rows(
                gradient, g_at + (r + 1) * out_width, out_row + r + 1, out_col, out_height, out_width, g_units * V, c, more, COLS, 1
            )
            window = kept + fresh
            wide = ()
            for i in tl.static_range(KH * TIN):
                wide = wide + (window[i].to(tl.float32),)  # noqa: RUF005
            factors = ()
            for i in tl.static_range(COLS):
                factors = factors + (gs[i].to(tl.float32),)  # noqa: RUF005
            added = ()
            for tap in tl.static_range(KH * KW):
                total = sums[tap]
                for i in tl.static_range(COLS):
                    total += wide[(tap // KW) * TIN + i * SW + tap % KW] * factors[i]
                added = added + (total,)  # noqa: RUF005
            sums = added
            kept = window[SH * TIN :]
            fresh = next_fresh
            gs = next_gs
    for tap in tl.static_range(KH * KW):
        total = tl.sum(sums[tap], axis=0, keep_dims=True)
        tl.store(partials + ((part * TAPS + first_tap + tap) * channels + c), total, mask=c < channels)
