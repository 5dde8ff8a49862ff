"""Which tiles of the dense convolution are worth trying: a model of one SM's time, in clocks, orders them."""

from __future__ import annotations

from math import ceil
from typing import Any

SMS = 132
"""Streaming multiprocessors of an H100 or H200; elsewhere the order is a little off, which tuning mends."""

SHARED = 227 * 1024
TILES = (
    (256, 128, 64, 8), (128, 256, 64, 8), (256, 64, 64, 8), (128, 128, 64, 8), (128, 128, 64, 4), (128, 64, 64, 4),
    (64, 256, 64, 4), (64, 128, 64, 4), (64, 256, 64, 8), (64, 64, 64, 4), (128, 32, 64, 4), (64, 32, 64, 4), (128, 16, 64, 4),
    (64, 16, 64, 4), (256, 32, 64, 8), (256, 16, 64, 8), (16, 64, 128, 4), (16, 32, 256, 4), (32, 32, 128, 4), (32, 64, 128, 4),
)  # fmt: skip
"""(rows, channels, k, warps) of a block on tensor cores."""

EXACT = (
    (64, 64, 16, 8), (64, 32, 16, 4), (32, 64, 16, 4), (32, 32, 32, 4), (16, 32, 64, 4), (128, 32, 16, 8), (64, 16, 16, 4), (16, 16, 32, 4),
)  # fmt: skip
"""The same for float32 without tensor cores, where a wide k would only take registers."""


def by_image(pixels: int, bm: int) -> bool:
    """Tell whether tiles of `bm` pixels keep to one image each: where at least half of a tile's rows are filled so."""
    return ceil(pixels / bm) * bm <= 2 * pixels


def spent(m: int, n: int, channels: int, taps: int, item: int, config: dict[str, Any], fold: bool, residual: bool) -> float:
    """Estimate the clocks that a launch takes, for arguments as of `tiled`; only the order of the estimates matters."""
    bm, bn, bk, split, warps, stages = (config[name] for name in ("BM", "BN", "BK", "SPLIT", "warps", "stages"))
    steps = ceil(taps * channels / bk) if fold else taps * ceil(channels / bk)
    mine = ceil(steps / split)
    programs = ceil(m / bm) * ceil(n / bn) * split
    shared = max(min(stages, mine + 1) * (bm + bn) * bk * item, bm * bn * (4 if split > 1 else 2))
    sums = bm * bn // (32 * warps)
    registers = sums + 64 + (sums // 2 if config["EARLY"] else 0)
    resident = max(1, min(SHARED // (shared + 1024), 65536 // (min(registers, 255) * 32 * warps), 64 // warps, 8))
    rate = 2048 * (1.0 if bm >= 64 else 0.25) * min(1.0, (bn + 32) / 160 if bm >= 64 else 0.5)
    step = max(bm * bn * bk / rate * (item / 2) ** 2, (bm + bn) * min(bk, max(channels, 16)) * item / 40.0) + 50.0
    tail = 700 + bm * bn * item * (2 if residual else 1) / 24.0
    per_sm = ceil(programs / SMS)
    # Residents hide each other's latencies; a lone block hides nothing but what its pipeline does.
    overlap = min(per_sm, resident)
    exposed = ((500 if config["EARLY"] or not residual else 900) + tail) * ceil(per_sm / overlap)
    busy = per_sm * (mine * step + tail * 0.5)
    if overlap == 1:
        busy += per_sm * mine * step * 0.1
    total = busy + exposed
    if split > 1:
        total += 1500 + split * bm * bn * 4 / 32.0
    moved = (m * channels * min(taps, 1) + m * n * (2 if residual else 1) + n * channels * taps) * item
    if mine > 1:  # what the pipeline and the other residents don't hide of a load's latency
        total = max(total, per_sm * mine * 900.0 / (max(stages - 2, 0.7) * overlap) + exposed)
    total *= 1.0 if registers < 240 else 1.3  # spilled
    return max(total, moved / 2400.0) + 0.02 * total


def tiled(
    m: int, n: int, channels: int, taps: int, item: int, *, fold: bool, residual: bool, exact: bool, block: int = 0, pixels: int = 0
) -> list[dict[str, Any]]:
    """Return launch parameters of the tiled kernel, the most promising first.

    Args:
        m: output pixels.
        n: output channels.
        channels: input channels.
        taps: kernel height times width.
        item: bytes of an element.
        fold: whether k may run over taps and channels as one.
        residual: whether a residual is read.
        exact: whether products are float32's own, without tensor cores.
        block: output channels of a block of a block-diagonal weight, no tile having more than one's; 0 for a dense one.
        pixels: of an image, where images have gates and tiles may keep to one; else 0.
    """
    tiles = TILES
    if exact:
        tiles = EXACT
    elif item == 4:
        tiles = tuple((bm, bn, bk // 2, warps) for bm, bn, bk, warps in tiles if bm * bn <= 128 * 128)
    ranked: list[tuple[float, int, dict[str, Any]]] = []
    for bm, bn, widest, warps in tiles:
        if block and bn >= 2 * block:
            continue
        wide = n // block * ceil(block / bn) * bn if block else n  # with what is empty in the last tile of each block
        if (bm > 64 and bm >= 2 * m) or (bn > 16 and bn >= 2 * max(n, 9)) or (bm < 64 and m > 64 and not exact):
            continue
        for bk in sorted({max(widest >> halvings, 16) for halvings in range(2 if exact else 4)}, reverse=True):
            if bk < 16 or (bk > 16 and bk >= 2 * channels * (taps if fold else 1)):
                continue
            whole = ceil(taps * channels / bk) if fold else taps * ceil(channels / bk)
            filled = max(m // pixels, 1) * ceil(pixels / bm) * bm if pixels and by_image(pixels, bm) else m
            grid = ceil(filled / bm) * ceil(wide / bn)
            for split in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
                if split > 1 and (grid * split > 3 * SMS or whole < 2 * split or grid >= SMS):
                    continue
                if ceil(whole / split) * (split - 1) >= whole:
                    continue
                mine = ceil(whole / split)
                depths = {1} if mine == 1 else {min(3, mine), min(4, mine), min(5, mine)}
                for stages in sorted(depths):
                    if stages * (bm + bn) * bk * item > SHARED - 4096:
                        continue
                    for early in (True, False) if residual and split == 1 and mine <= 4 else (False,):
                        config = {
                            "kind": "tile", "BM": bm, "BN": bn, "BK": bk, "SPLIT": split, "warps": warps, "stages": stages,
                            "GROUP": 1 if m > n * taps else 16, "EARLY": early,
                        }  # fmt: skip
                        ranked.append((spent(filled, wide, channels, taps, item, config, fold, residual), len(ranked), config))
    ranked.sort(key=lambda entry: entry[:2])
    chosen: list[dict[str, Any]] = []
    for alike in (1, 2):  # first one of a kind, so that a short search sees different ones, then their neighbours
        for _, _, config in ranked:
            near = [c for c in chosen if (c["BM"], c["BN"]) == (config["BM"], config["BN"])]
            if len(near) < alike and config not in chosen and len(chosen) < 10 * alike:
                chosen.append(config)
    return chosen


def rowwise(n: int, channels: int) -> list[dict[str, Any]]:
    """Return launch parameters of the row kernel, the most promising first.

    Args:
        n: output channels.
        channels: input channels.
    """
    width = 128
    while width < min(channels, 2048):
        width *= 2
    found = []
    for bn, bk in ((4, 1024), (2, 1024), (4, 512), (2, 2048), (8, 512), (1, 2048)):
        entry = {"kind": "row", "BN": bn, "BK": min(bk, width), "warps": 4}
        if entry not in found and (n // bn >= SMS or bn <= 2):
            found.append(entry)
    return found
