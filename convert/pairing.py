"""Which tensor of one file is which of another: by name, by the values themselves in whatever order they lie, by shape."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from convert.core import by_module
from convert.source import Stored

RANKS = 32
"""How many values of a sorted tensor are compared, evenly spaced from the least to the greatest."""
NEAR = 1e-3
"""Of the largest value: as far as the ranks of one tensor may lie apart in two files, which covers half precision."""
CLOSE = 1e-5
"""Of the largest value: as far as folding in float32 moves numbers."""

Pairs = dict[str, tuple[str, str]]
"""A's name to B's, and how they were paired."""


def pair(a: Mapping[str, Stored], b: Mapping[str, Stored]) -> Pairs:
    """Pair the tensors of two files, each at most once.

    Names that are equal are paired if the sizes are. Of the rest, those with the same values are, in whatever order the values
    lie: no flip, transposition or reshaping changes which they are. Then those whose values are nearly the same, as after a cast,
    and at last those of a leaf and shape that occur once in each.
    """
    found: Pairs = {name: (name, "name") for name, stored in a.items() if name in b and _size(stored) == _size(b[name])}
    _by(_hash, "values", a, b, found)
    _by(lambda name, stored: (_leaf(name), _hash(name, stored)), "leaf and values", a, b, found, repeated=True)
    _by_ranks(a, b, found)
    _by(lambda name, stored: (_leaf(name), *stored.shape), "shape", a, b, found)
    _by(lambda name, stored: (_leaf(name), *sorted(stored.shape)), "shape", a, b, found)
    return found


def ranks(array: np.ndarray) -> np.ndarray:
    """Take evenly spaced values of the sorted tensor: the same for every order of its values."""
    ordered = np.sort(np.asarray(array, np.float64).ravel())
    if not len(ordered):
        return np.zeros(RANKS)
    return ordered[np.linspace(0, len(ordered) - 1, RANKS).astype(np.int64)]


def alike(first: np.ndarray, second: np.ndarray) -> bool:
    """Tell whether the ranks of two tensors agree as far as a cast to half precision leaves them."""
    scale = max(float(np.abs(first).max()), float(np.abs(second).max()))
    return bool(np.isfinite(scale)) and float(np.abs(first - second).max()) <= NEAR * scale


def _by(
    key: Callable[[str, Stored], Hashable],
    how: str,
    a: Mapping[str, Stored],
    b: Mapping[str, Stored],
    found: Pairs,
    *,
    repeated: bool = False,
) -> None:
    """Pair what has the same key: one with one, or, where what is repeated is equal, one after the other."""
    there = {other for other, _ in found.values()}
    ours = _grouped(key, {n: s for n, s in a.items() if n not in found})
    theirs = _grouped(key, {n: s for n, s in b.items() if n not in there})
    for value, names in ours.items():
        others = theirs.get(value, [])
        if (len(names) == len(others) == 1) or (repeated and others):
            found.update({name: (other, how.rpartition(" ")[2]) for name, other in zip(names, others, strict=False)})


def _grouped(key: Callable[[str, Stored], Hashable], tensors: Mapping[str, Stored]) -> dict[Hashable, list[str]]:
    groups: dict[Hashable, list[str]] = {}
    for name, stored in tensors.items():
        groups.setdefault(key(name, stored), []).append(name)
    return groups


def _by_ranks(a: Mapping[str, Stored], b: Mapping[str, Stored], found: Pairs) -> None:
    there = {other for other, _ in found.values()}
    sizes = {_size(stored) for name, stored in a.items() if name not in found}
    left = {name: stored for name, stored in b.items() if name not in there and _size(stored) in sizes}
    wanted = {_size(stored) for stored in left.values()}
    ours = {name: ranks(stored.array()) for name, stored in a.items() if name not in found and _size(stored) in wanted}
    theirs = {name: ranks(stored.array()) for name, stored in left.items()}
    options = {
        name: [other for other, values in theirs.items() if _size(b[other]) == _size(a[name]) and alike(mine, values)]
        for name, mine in ours.items()
    }
    wanting = [other for others in options.values() for other in others]
    for name, others in options.items():
        if len(others) == 1 and wanting.count(others[0]) == 1:
            found[name] = (others[0], "values")


def _hash(name: str, stored: Stored) -> Hashable:
    del name
    array = stored.array()
    if array.dtype.kind != "f":
        return _size(stored), array.dtype.kind, hashlib.blake2b(np.sort(array.ravel()).tobytes()).digest()
    # widening is exact, so that two files of different precision with the same values are paired; zero has two signs
    return _size(stored), "f", hashlib.blake2b((np.sort(array.astype(np.float64).ravel()) + 0.0).tobytes()).digest()


def _size(stored: Stored) -> int:
    return math.prod(stored.stored_shape)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def folded(tensors: Mapping[str, Stored], eps: float, norms: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Fold BatchNorms into the convolutions before them, in float64.

    Args:
        tensors: of one file.
        eps: added to the variances.
        norms: each convolution's BatchNorm.

    Returns:
        Weight and bias of each such convolution.
    """
    known = by_module(tensors)
    result: dict[str, np.ndarray] = {}
    for name, norm in norms.items():
        held, weight = known[norm], known[name]["weight"].as_correlation().array().astype(np.float64)
        one, zero = np.ones(len(weight)), np.zeros(len(weight))
        gamma, beta, bias = (
            _wide(part, leaf, otherwise)
            for part, leaf, otherwise in ((held, "weight", one), (held, "bias", zero), (known[name], "bias", zero))
        )
        scale = gamma / np.sqrt(_wide(held, "running_var", one) + eps)
        result[f"{name}.weight"] = weight * scale.reshape(-1, *(1 for _ in weight.shape[1:]))
        result[f"{name}.bias"] = beta + (bias - _wide(held, "running_mean", zero)) * scale
    return result


def norms_behind(tensors: Mapping[str, Stored], feeds: Mapping[str, Sequence[str]] | None = None) -> dict[str, str]:
    """Find the BatchNorm behind each convolution: the one that reads it, or without a graph the next module of as many channels."""
    known = by_module(tensors)
    found: dict[str, str] = {}
    previous = ""
    for name, held in known.items():
        if "running_mean" in held:
            before = feeds.get(name, ()) if feeds is not None else (previous,)
            conv = known.get(before[0], {}).get("weight") if len(before) == 1 else None
            if conv is not None and len(conv.shape) > 2 and conv.shape[:1] == held["running_mean"].shape:
                found[before[0]] = name
        previous = name
    return found


def norms_by_scale(a: Mapping[str, Stored], b: Mapping[str, Stored], eps: float) -> dict[str, str]:
    """Find each convolution's BatchNorm by the numbers: that of A by whose scale, over its own in B, the kernels of B are A's.

    Args:
        a, b: the tensors of two files that name their layers alike; B may have no BatchNorms.
        eps: added to the variances.

    Returns:
        The BatchNorm of each layer of whose outputs both files compute the same, scale and shift.
    """
    ours, theirs = by_module(a), by_module(b)
    norms = [name for name, held in ours.items() if "running_var" in held]
    found: dict[str, str] = {}
    for name, held in ours.items():
        one, other = held.get("weight"), theirs.get(name, {}).get("weight")
        if one is None or other is None or len(one.shape) < 2 or one.shape != other.shape or not math.prod(one.shape):
            continue
        x, y = (each.as_correlation().array().astype(np.float64).reshape(one.shape[0], -1) for each in (one, other))
        ratio = (x * y).sum(1) / np.maximum((x * x).sum(1), 1e-300)
        if not np.abs(y - x * ratio[:, None]).max(initial=0) <= CLOSE * np.abs(y).max(initial=0):
            continue
        for norm in norms:
            if norm in found.values() or ours[norm]["running_var"].shape != ratio.shape:
                continue
            (scale, shift), (left, rest) = (_effect(held_by, name, norm, eps) for held_by in (ours, theirs))
            if _close(ratio * left, scale) and _close(rest, shift):
                found[name] = norm
                break
    return found


def _effect(known: Mapping[str, Mapping[str, Stored]], conv: str, norm: str, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Tell by what a BatchNorm multiplies a layer's sums, and what it and the layer's bias add to them."""
    held, zero, one = known.get(norm, {}), np.zeros(1), np.ones(1)
    scale = _wide(held, "weight", one) / np.sqrt(_wide(held, "running_var", one) + (eps if held else 0.0))
    return scale, _wide(held, "bias", zero) + (_wide(known[conv], "bias", zero) - _wide(held, "running_mean", zero)) * scale


def _close(x: np.ndarray, y: np.ndarray) -> bool:
    return float(np.abs(x - y).max(initial=0)) <= CLOSE * max(float(np.abs(y).max(initial=0)), 1e-30)


def _wide(held: Mapping[str, Stored], leaf: str, otherwise: np.ndarray) -> np.ndarray:
    return held[leaf].array().astype(np.float64) if leaf in held else otherwise
