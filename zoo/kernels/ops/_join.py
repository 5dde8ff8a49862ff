"""The kernels of `join.py`, chunks of the wide map between 1x1 convolutions or the narrow one whole; and which tiles are worth trying."""

# Triton's ranges are no iterators to Python, and what a constant condition leaves undefined is never read.
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import itertools
from math import ceil
from typing import Any, NamedTuple

import triton
import triton.language as tl

from zoo.kernels.ops._activation import activate
from zoo.kernels.ops._dense import product
from zoo.kernels.ops._overlap import begin


@triton.jit
def _tile(X, rows, LD: tl.constexpr, K: tl.constexpr, start, BK: tl.constexpr):
    """Load channels start.. of some pixels; channels behind the last are 0."""
    k = start + tl.arange(0, BK)
    at = X + rows[:, None] * LD + k[None, :]
    return tl.load(at) if K % BK == 0 else tl.load(at, mask=k[None, :] < K, other=0.0)


@triton.jit
def _weights(W, start, K: tl.constexpr, BK: tl.constexpr, column, N: tl.constexpr, BN: tl.constexpr):
    """Load the [BK, BN] part of (N, K) weights, transposed; what lies outside is 0."""
    k = start + tl.arange(0, BK)
    n = column + tl.arange(0, BN)
    at = W + n[None, :] * K + k[:, None]
    if K % BK == 0 and N % BN == 0:
        return tl.load(at)
    return tl.load(at, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)


@triton.jit
def _vector(B, start, N: tl.constexpr, BN: tl.constexpr):
    n = start + tl.arange(0, BN)
    return tl.load(B + n) if N % BN == 0 else tl.load(B + n, mask=n < N, other=0.0)


@triton.jit
def _store(Y, value, rows, M, LD: tl.constexpr, start, N: tl.constexpr, BN: tl.constexpr):
    n = start + tl.arange(0, BN)
    mask = rows[:, None] < M
    if N % BN != 0:
        mask = mask & (n[None, :] < N)
    tl.store(Y + rows[:, None] * LD + n[None, :], value, mask=mask)


@triton.jit
def _steps(
    X, W, acc, rows, column, LD: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, last,
):  # fmt: skip
    """Add the product of some pixels and BN columns of the weights, over K in steps."""
    # A bound that only the launch knows keeps LLVM from unrolling long loops, which would take it half a minute.
    for k in tl.range(0, K if K <= 2 * BK else last, BK, num_stages=STAGES):
        acc = product(_tile(X, rows, LD, K, k, BK), _weights(W, k, K, BK, column, N, BN), acc, PRECISION)
    return acc


@triton.jit
def _sampled(rows, H, WIDTH, H2, WIDTH2, SH: tl.constexpr, SW: tl.constexpr):
    """Return the pixels of the shortcut's map that lie under these pixels."""
    if SH == 1 and SW == 1:
        return rows
    line = rows // WIDTH
    image = line // H
    return (image * H2 + (line - image * H) * SH) * WIDTH2 + (rows - line * WIDTH) * SW


_FREE = ["M", "H", "WIDTH", "H2", "WIDTH2", "LAST", "LAST2"]


@triton.jit(do_not_specialize=_FREE)
def wide_kernel(
    X, W, BIAS, R, X2, W2, NEXT, NEXT_BIAS, Y, Z, M, H, WIDTH, H2, WIDTH2, LAST, LAST2,
    LDX: tl.constexpr, LDR: tl.constexpr, LD2: tl.constexpr, LDY: tl.constexpr, LDZ: tl.constexpr,
    K: tl.constexpr, K2: tl.constexpr, N: tl.constexpr, N2: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    ACT: tl.constexpr, ACT2: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, WHOLE2: tl.constexpr, WHOLE_NEXT: tl.constexpr,
    KEEP: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    program = tl.program_id(0)
    rows = (program // PARTS) * BM + tl.arange(0, BM)
    first = (program % PARTS) * PART
    # Rows behind the last read the last pixel, so that no load of a map needs a mask of rows; they are not stored.
    source = tl.minimum(rows, M - 1)
    acc2 = tl.zeros((BM, WHOLE_NEXT), tl.float32)
    if X2 is not None:
        source2 = _sampled(source, H, WIDTH, H2, WIDTH2, SH, SW)
    if KEEP:
        x = _tile(X, source, LDX, K, 0, WHOLE)
        if X2 is not None:
            x2 = _tile(X2, source2, LD2, K2, 0, WHOLE2)
    # A loop over steps of K within is what overlaps loads then; this one must not be.
    for column in tl.range(first, min(first + PART, N), BN, num_stages=STAGES if KEEP else 1):
        if R is not None:
            shortcut = _tile(R, source, LDR, N, column, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        if KEEP:
            acc = product(x, _weights(W, 0, K, WHOLE, column, N, BN), acc, PRECISION)
            if X2 is not None:
                acc = product(x2, _weights(W2, 0, K2, WHOLE2, column, N, BN), acc, PRECISION)
        else:
            acc = _steps(X, W, acc, source, column, LDX, K, N, BN, BK, STAGES, PRECISION, LAST)
            if X2 is not None:
                acc = _steps(X2, W2, acc, source2, column, LD2, K2, N, BN, BK, STAGES, PRECISION, LAST2)
        acc += _vector(BIAS, column, N, BN)[None, :]
        if R is not None:
            acc += shortcut.to(tl.float32)
        y = activate(acc, ACT).to(Y.dtype.element_ty)
        _store(Y, y, rows, M, LDY, column, N, BN)
        if NEXT is not None:
            acc2 = product(y, _weights(NEXT, column, N, BN, 0, N2, WHOLE_NEXT), acc2, PRECISION)
    if NEXT is not None:
        acc2 += _vector(NEXT_BIAS, 0, N2, WHOLE_NEXT)[None, :]
        _store(Z, activate(acc2, ACT2).to(Z.dtype.element_ty), rows, M, LDZ, 0, N2, WHOLE_NEXT)


@triton.jit(do_not_specialize=_FREE)
def narrow_kernel(
    X, W, BIAS, R, X2, W2, NEXT, NEXT_BIAS, Y, Z, M, H, WIDTH, H2, WIDTH2, LAST, LAST2,
    LDX: tl.constexpr, LDR: tl.constexpr, LD2: tl.constexpr, LDY: tl.constexpr, LDZ: tl.constexpr,
    K: tl.constexpr, K2: tl.constexpr, N: tl.constexpr, N2: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    ACT: tl.constexpr, ACT2: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    source = tl.minimum(rows, M - 1)
    if R is not None:
        shortcut = _tile(R, source, LDR, N, 0, WHOLE)
    acc = tl.zeros((BM, WHOLE), tl.float32)
    acc = _steps(X, W, acc, source, 0, LDX, K, N, WHOLE, BK, STAGES, PRECISION, LAST)
    if X2 is not None:
        source2 = _sampled(source, H, WIDTH, H2, WIDTH2, SH, SW)
        acc = _steps(X2, W2, acc, source2, 0, LD2, K2, N, WHOLE, BK, STAGES, PRECISION, LAST2)
    acc += _vector(BIAS, 0, N, WHOLE)[None, :]
    if R is not None:
        acc += shortcut.to(tl.float32)
    y = activate(acc, ACT).to(Y.dtype.element_ty)
    _store(Y, y, rows, M, LDY, 0, N, WHOLE)
    for column in tl.range(0, N2, BN, num_stages=STAGES):
        z = product(y, _weights(NEXT, 0, N, WHOLE, column, N2, BN), tl.zeros((BM, BN), tl.float32), PRECISION)
        z += _vector(NEXT_BIAS, column, N2, BN)[None, :]
        _store(Z, activate(z, ACT2).to(Z.dtype.element_ty), rows, M, LDZ, column, N2, BN)


class Task(NamedTuple):
    """What a launch has to do, in pixels, channels and bytes of an element."""

    pixels: int
    k: int
    k2: int
    c: int
    c2: int
    item: int
    residual: bool
    exact: bool


SMS = 132
"""Streaming multiprocessors of an H100 or H200; elsewhere the order is a little off, which tuning mends."""

SHARED = 231_000
"""Bytes of shared memory that a block may ask for: 227 KB on Hopper, less what barriers take."""


def block(width: int) -> int:
    """Return the block that holds `width` channels: a power of two, of which a tensor core needs 16."""
    return max(16, triton.next_power_of_2(width))


def _spent(task: Task, config: dict[str, Any], sums: float, shared: float, chunks: int, steps: int) -> float:
    """Estimate a launch's microseconds on an H200; only the order of the estimates matters.

    Args:
        task: the work.
        config: the launch parameters.
        sums: registers a thread needs for sums and what is done with them.
        shared: bytes of shared memory of a program.
        chunks: chunks that a program makes one after another.
        steps: steps over K in each.
    """
    bm, warps = config["BM"], config["warps"]
    registers = config["registers"] or min(255, sums + 45)
    resident = max(1, min(65536 // int(registers * 32 * warps), 232_000 // int(shared + 1024), 16))
    programs = ceil(task.pixels / bm) * config["PARTS"]
    waves = programs / (SMS * resident)
    lost = ceil(waves) / waves
    weights = task.c * (task.k + task.k2 + task.c2)
    read = task.pixels * (task.k + task.k2 + task.c * task.residual)
    written = task.pixels * (task.c + task.c2)
    repeats = config["PARTS"] if config["KEEP"] else ceil(task.c / config["BN"]) if config["kind"] == "wide" else 1
    again = task.pixels * (task.k + task.k2) * (repeats - 1)
    # A lone block on a multiprocessor waits for its loads where another would work.
    memory = (read + written + weights) * task.item / 4.2e6 * (1.3, 1.1, 1.0)[min(resident, 3) - 1]
    cache = (read + again + written / 2 + weights * programs / config["PARTS"]) * task.item / 5.5e6
    padded = weights * (block(task.c) / task.c if config["kind"] == "narrow" else 1.0)
    rate = 40e6 if task.exact else (550e6 if bm >= 64 else 200e6) * (0.75 if config["BN"] < 64 else 1.0) * 2 / task.item
    arithmetic = 2 * ceil(task.pixels / bm) * bm * padded / rate
    latency = ceil(waves) * (2 + chunks * (0.45 + (0.3, 0.25, 0.2, 0.18)[config["stages"] - 1] * steps))
    terms = (memory, cache, arithmetic * lost, latency)
    # Without stages, a loop's loads pass through registers and nothing hides them.
    return (max(terms) + 0.15 * sum(terms)) * (1.4 if config["stages"] == 1 and chunks * steps > 1 else 1.0)


def wide_candidates(task: Task) -> list[tuple[float, dict[str, Any]]]:
    """Return (estimated microseconds, launch parameters) of `wide_kernel`, in no order."""
    whole, whole2, widest = block(task.k), block(task.k2) if task.k2 else 0, block(task.c2) if task.c2 else 0
    found: list[tuple[float, dict[str, Any]]] = []
    for bm, bn, warps, stages in itertools.product((16, 32, 64, 128, 256), (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)):
        if (task.pixels <= bm // 2 and bm > 16) or bn >= 2 * block(task.c) or (bm < 64 and task.pixels > 64 * SMS):
            continue
        if task.exact and (bm > 64 or bn > 32 or stages > 1):
            continue
        if not task.exact and (bn < 32 <= task.c and widest < 512):
            continue
        sums = (bm * widest + (2.2 if task.residual else 1.6) * bm * bn) / (32 * warps)
        if sums > 205:
            continue
        for keep, parts, cap in itertools.product((True, False), (1, 2, 4, 8, 16, 32, ceil(task.c / bn)), (0, 128)):
            if (parts > 1 and (widest or parts > ceil(task.c / bn))) or (cap and not (warps == 8 and 75 < sums <= 110)):
                continue
            chunks = ceil(ceil(task.c / bn) / parts)
            # A loop over K in a loop over chunks keeps the addresses of both in registers, and spills: rather more programs.
            if not keep and (cap or (chunks > 1 and not widest)):
                continue
            # Below 64 rows the tensor cores take the pixels from registers.
            if keep and (stages > 3 or (bm < 64 and whole + whole2 > 256)):
                continue
            mine = min(stages, chunks) if keep else stages
            bk = min(64 if task.item == 2 else 32, block(max(task.k, task.k2)))
            if keep:
                if task.exact and max(whole, whole2) > 64:
                    continue
                dots = (whole + whole2 + widest) * bn
                shared = bm * (whole + whole2) + (dots * mine + bm * bn * (mine - 1) * task.residual if mine > 1 else dots)
                steps = 1
            else:
                shared, steps = max(mine * (bm + bn) * bk, bn * widest), ceil((task.k + task.k2) / bk)
            shared = (shared + bm * bn) * task.item + 512
            if shared > SHARED or mine < stages or (not keep and steps < 3 and chunks > 1):
                continue
            config = {
                "kind": "wide", "BM": bm, "BN": bn, "BK": bk, "KEEP": keep, "PARTS": parts, "warps": warps, "stages": stages,
                "registers": cap,
            }  # fmt: skip
            found.append((_spent(task, config, sums, shared, chunks, steps), config))
    return found


def narrow_candidates(task: Task) -> list[tuple[float, dict[str, Any]]]:
    """Return (estimated microseconds, launch parameters) of `narrow_kernel`, in no order."""
    whole, widest = block(task.c), block(task.c2)
    found: list[tuple[float, dict[str, Any]]] = []
    for bm, bn, bk, warps, stages in itertools.product((16, 32, 64, 128), (32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3)):
        if (
            (task.pixels <= bm // 2 and bm > 16)
            or (bm < 64 and task.pixels > 64 * SMS and whole <= 256)
            or bn >= 2 * widest
            or bk >= 2 * block(max(task.k, task.k2))
        ):
            continue
        if task.exact and (bm > 64 or bn > 32 or bk > 32 or stages > 1):
            continue
        if (bk < 32 and task.k > 16 and not task.exact) or (bk * task.item > 128 and task.k < 4 * bk):
            continue
        sums = max((2.0 if task.residual else 1.5) * bm * whole, 0.5 * bm * whole + 1.8 * bm * bn) / (32 * warps)
        if sums > 205:
            continue
        steps = ceil(task.k / bk) + (ceil(task.k2 / bk) if task.k2 else 0)
        depth = min(stages, max(steps, 1))
        shared = (max(depth * (bm + whole) * bk, (stages if stages > 1 else 1) * whole * bn + bm * bn) + bm * whole) * task.item + 512
        if shared > SHARED:
            continue
        config = {
            "kind": "narrow", "BM": bm, "BN": bn, "BK": bk, "KEEP": False, "PARTS": 1, "warps": warps, "stages": stages, "registers": 0,
        }  # fmt: skip
        found.append((_spent(task, config, sums, shared, ceil(task.c2 / bn), 1) + 0.2 * steps, config))
    return found


def ranked(task: Task, wide: bool, narrow: bool) -> list[dict[str, Any]]:
    """Return at most 24 launch parameters, the most promising first, and different tiles before the neighbours of one.

    Args:
        task: the work.
        wide: whether `wide_kernel` may do it.
        narrow: whether `narrow_kernel` may do it.
    """
    found = (wide_candidates(task) if wide else []) + (narrow_candidates(task) if narrow else [])
    found.sort(key=lambda entry: entry[0])
    chosen: list[dict[str, Any]] = []
    for alike in (1, 2, 4):
        for _, config in found:
            near = [c for c in chosen if all(c[name] == config[name] for name in ("kind", "BM", "BN", "warps", "registers"))]
            if len(near) < alike and config not in chosen and len(chosen) < 8 * alike:
                chosen.append(config)
    return chosen[:24]
