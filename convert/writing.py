"""A network's tensors for a writer: the way back from `convert.conversion`, by the same rows.

Everything here describes; no tensor is read before `Stored.array`, but for scales and what must be ones or zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from convert.core import COUNTER, KINDS, Row, joined, pieces
from convert.network import Layer
from convert.source import Part, Stored, constant, in_memory
from convert.steps import ScaleOutputs
from weights.errors import ConvertError

SHOWN = 10
OTHERWISE = {"keyless": "linear", "linear_from_conv": "conv", "conv_from_linear": "linear"}
"""Kinds of rows that a writer knows by another name."""


def parts(rows: Sequence[Row], layers: Sequence[Layer], tensors: Mapping[str, Stored]) -> list[Part]:
    """Describe a network for a writer, in the order of `rows`: the way back, derived from the way here.

    A BatchNorm that has no scale there has its own folded into the convolution before it, see `fold_scales`.

    Raises:
        ConvertError: a tensor has no row, or their module has no place for what ours holds.
    """
    known = {layer.name: layer for layer in layers}
    tensors = fold_scales(rows, layers, tensors)
    used: set[str] = set()
    found: list[Part] = []
    cut: dict[str, dict[int, Stored]] = {}
    for row in rows:
        layer = known.get(row.ours)
        kind = layer.kind if layer is not None and row.kind in ("conv", "linear", "norm", "transposed") else row.kind
        kind = "parameter" if kind.startswith("parameter") or kind == "projection" else OTHERWISE.get(kind, kind)
        name, _, own = row.theirs.rpartition(".") if kind == "parameter" else (row.theirs, "", "")
        leaves: dict[str, Stored] = {}
        for leaf in KINDS[row.kind].leaves:
            ours = joined(row.ours, leaf)
            if ours not in tensors:
                continue
            used.add(ours)
            stored = tensors[ours]
            if leaf in row.lacks:
                _check_neutral(stored, leaf, row)
            elif leaf != COUNTER:
                grid = layer.grid if layer is not None else None
                leaves[own if kind == "parameter" else leaf] = _as_theirs(stored, row, grid) if leaf in ("weight", "") else stored
        if row.cut is not None and leaves:
            cut.setdefault(row.cut[0], {})[row.cut[1]] = leaves.pop(own)
        if row.pieces or row.kind == "keyless":
            found += _pieces(row, leaves, own)
        if row.positions and "token" not in row.ours and leaves:
            name, _, leaf = row.positions.rpartition(".")
            leaves = {leaf: leaves[own].behind_zeros()}
        for leaf in row.adds:
            width = leaves["weight"].shape[0]
            leaves[leaf] = in_memory("(none: zeros)", np.zeros(width, leaves["weight"].dtype))
        if leaves:
            eps, groups, grid = (layer.eps, layer.groups, layer.grid) if layer is not None else (None, 1, None)
            beside = next((part for part in found if kind == part.kind == "parameter" and part.name == name), None)
            if beside is not None and not (beside.leaves.keys() & leaves.keys()):  # a module's own tensors are one part
                found[found.index(beside)] = replace(beside, leaves={**beside.leaves, **leaves})
            else:
                found.append(Part(name, kind, leaves, groups, eps, grid, row.ours, row.heads))
    for whole, shares in cut.items():
        first, *others = (shares[place] for place in sorted(shares))
        module, _, leaf = whole.rpartition(".")
        found.append(Part(module, "parameter", {leaf: first.followed_by(others)}))
    if left := [name for name in tensors if name not in used and not name.endswith(COUNTER)]:
        raise ConvertError(f"no row leads to {len(left)} tensors of the network: {', '.join(left[:SHOWN])}")
    return found


def fold_scales(rows: Sequence[Row], layers: Sequence[Layer], tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Multiply the scale of each BatchNorm that has none in a naming into the convolution and the mean before it.

    gamma * (W x - mean) / deviation is (gamma W x - gamma mean) / deviation: exact but for rounding. Scales of one are left alone.
    """
    made = dict(tensors)
    known = {layer.name: layer for layer in layers}
    for row in rows:
        name = f"{row.ours}.weight"
        layer = known.get(row.ours)
        if "weight" not in row.lacks or row.kind != "norm" or layer is None or name not in made:
            continue
        gamma = made[name].array()
        before = layer.inputs[0] if len(layer.inputs) == 1 and layer.direct else ""
        alone = sum(before in other.inputs for other in layers) == 1
        if (gamma == 1).all() or not alone or f"{before}.weight" not in made:
            continue
        for leaf in (f"{before}.weight", f"{before}.bias", f"{row.ours}.running_mean"):
            if leaf in made:
                made[leaf] = made[leaf].then(ScaleOutputs(gamma, f"{name}, which has no place there"))
        made[name] = constant(1, made[name].shape, made[name].dtype, "(folded into the convolution: ones)")
    return made


def _check_neutral(stored: Stored, leaf: str, row: Row) -> None:
    value = 1 if leaf == "weight" else 0
    if not (stored.array() == value).all():
        raise ConvertError(
            f"{row.theirs} has no {leaf} there, and {row.ours}.{leaf} is not all {value}: the same network can't be written in that naming"
        )


def _pieces(row: Row, leaves: dict[str, Stored], own: str) -> list[Part]:
    """Describe the modules of theirs that together are one of ours, and take what they hold from `leaves`."""
    held: dict[str, dict[str, Stored]] = {}
    for leaf in KINDS[row.kind].leaves:
        names = pieces(row, leaf)
        if not names or (leaf or own) not in leaves:
            continue
        whole = leaves.pop(leaf or own)
        for place, name in enumerate(names):
            if name and not (row.kind == "keyless" and leaf == "bias" and place == 1):
                module, _, last = name.rpartition(".")
                held.setdefault(module, {})[last] = whole.part(place, place + 1, len(names))
    kinds = {name: "linear" if {"weight", "bias"} & tensors.keys() else "parameter" for name, tensors in held.items()}
    return [Part(name, kinds[name], tensors, heads=row.heads) for name, tensors in held.items()]


def _as_theirs(stored: Stored, row: Row, grid: tuple[int, int, int] | None) -> Stored:
    """Give a tensor its shape there: a dense weight that of a convolution over the map that it reads, or the other way round."""
    if row.kind == "conv_from_linear" and len(stored.shape) == 4:
        return stored.reshape(stored.shape[0], int(np.prod(stored.shape[1:])))
    if row.kind == "linear_from_conv" and len(stored.shape) == 2:
        return stored.reshape(stored.shape[0], *(grid or (stored.shape[1], 1, 1)))
    if row.kind == "projection":
        return stored.transpose(1, 0)
    if row.kind == "parameter_from_vector":
        return stored.reshape(int(np.prod(stored.shape)))
    if row.kind == "parameter_from_map":
        return stored.reshape(1, 1, 1, *stored.shape)
    if row.kind == "parameter_from_table":
        return stored.reshape(*(side for place, side in enumerate(stored.shape) if side > 1 or place == len(stored.shape) - 1))
    return stored
