"""What a file may lack and what has no place in the network: filled in or folded, where there is one answer only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from convert.adopted import Adopted
from convert.core import Row, Shape
from convert.network import Layer
from convert.source import Stored, constant
from convert.steps import Minus
from weights.wording import counted

FOLDED = ("conv", "depthwise", "transposed", "dense")
"""Layers of a file's graph that may hold the BatchNorm behind them."""

BIASED = ("conv", "conv_from_linear", "transposed", "linear", "linear_from_conv")
"""Kinds of rows whose bias may have no place in ours."""
SHOWN = 3
"""Names that a note lists."""


def complete(
    adopted: Adopted,
    layers: Sequence[Layer],
    shapes: Mapping[str, Shape],
    rows: Sequence[Row],
    seen: Mapping[str, Stored],
    ops: Mapping[str, str] | None = None,
    shifted: Collection[str] = (),
) -> None:
    """Fill in what the file lacks, and fold the biases that have no place.

    A BatchNorm of which the file has nothing at all is taken for folded, and a bias for zeros, only where the file says what it computes:
    `ops` of its layers. A layer that is `shifted` has something behind it that may be its bias.
    """
    report, tensors = adopted.report, adopted.tensors
    norms = {layer.inputs[0]: layer for layer in layers if layer.kind == "norm" and len(layer.inputs) == 1 and layer.direct}
    fed = {name: sum(name in layer.inputs for layer in layers) for name in norms}
    absent = dict(report.missing)
    ops = ops or {}
    folded: list[str] = []
    shifting: list[str] = []
    for row in rows:
        norm = norms.get(row.ours)
        bias = f"{row.theirs}.bias"
        if row.kind in BIASED and bias in report.unmatched and norm is not None and fed[row.ours] == 1:
            mean = f"{norm.name}.running_mean"
            if mean in tensors:
                fold_bias(adopted, norm.name, seen[bias])
                adopted.moved.add(row.ours)
            elif mean in absent:
                _identity(adopted, norm, shapes, seen[bias], folded, shifting)
                for leaf in ("weight", "bias", "running_mean", "running_var"):
                    absent.pop(f"{norm.name}.{leaf}", None)
                adopted.moved.add(row.ours)
            else:
                continue
            report.unmatched.remove(bias)
        elif row.kind in BIASED and bias in report.unmatched and seen[bias].adds_nothing:
            report.unmatched.remove(bias)
            adopted.notes.append(f"{bias}: ours has no such bias, and the file's is zeros")
    for row in rows:
        norm = norms.get(row.ours)
        if norm is None or fed[row.ours] != 1 or ops.get(row.theirs) not in FOLDED:
            continue
        if f"{row.ours}.weight" in tensors and (held := _leaves(norm.name, shapes)) and all(name in absent for name in held):
            _identity(adopted, norm, shapes, None, folded, shifting)
            for name in held:
                absent.pop(name)
    eps = {layer.name: layer.eps or 0.0 for layer in layers}
    for row in rows:
        if row.kind == "norm" and ops.get(row.theirs) == "scale" and f"{row.ours}.weight" in tensors and row.ours in eps:
            like = tensors[f"{row.ours}.weight"]
            for leaf, value in (("running_mean", 0), ("running_var", 1 - eps[row.ours])):
                if absent.pop(f"{row.ours}.{leaf}", None) is not None:
                    tensors[f"{row.ours}.{leaf}"] = constant(value, like.shape, _wide(like.dtype), f"(in the file's scale: {value:g})")
    for row in rows:
        if row.kind == "norm" and f"{row.ours}.running_var" in tensors:
            like = tensors[f"{row.ours}.running_var"]
            for leaf, value in (("weight", 1), ("bias", 0)):
                name = f"{row.ours}.{leaf}"
                if name in absent:
                    tensors[name] = constant(value, like.shape, like.dtype, f"(none in the file: {'ones' if value else 'zeros'})")
                    absent.pop(name)
                    adopted.notes.append(f"{name}: the file's layer has none, which is {'ones' if value else 'zeros'}")
                    adopted.filled.append(name)
    for row in rows:  # an exporter leaves out a bias that is zeros
        name, weight = f"{row.ours}.bias", tensors.get(f"{row.ours}.weight")
        if row.kind in BIASED and name in absent and weight is not None and ops.get(row.theirs) in FOLDED and row.theirs not in shifted:
            tensors[name] = constant(0, tuple(shapes[name]), weight.dtype, "(none in the file's graph: zeros)")
            absent.pop(name)
            adopted.notes.append(f"{name}: the file's layer computes without one, which is zeros")
    for row in rows:
        for leaf in row.lacks if row.kind != "norm" else ():
            name, weight = f"{row.ours}.{leaf}", tensors.get(f"{row.ours}.weight")
            if name in absent and weight is not None and leaf == "bias":
                tensors[name] = constant(0, tuple(shapes[name]), weight.dtype, "(none in the file: zeros)")
                absent.pop(name)
                adopted.notes.append(f"{name}: the file's layer has none, which is zeros")
                adopted.filled.append(name)
    for norms_of, does in ((shifting, "add their biases and do nothing else"), (folded, "do nothing")):
        if norms_of:
            which = ", ".join([*norms_of[:SHOWN], *([f"and {len(norms_of) - SHOWN} more"] if len(norms_of) > SHOWN else [])])
            adopted.notes.append(
                f"{counted(len(norms_of), 'BatchNorm')} of the file: folded into the layers before them; ours {does}: {which}"
            )
    note_moved(adopted)
    report.missing[:] = [(ours, theirs) for ours, theirs in report.missing if ours in absent]
    report.unused[:] = [row for row in report.unused if f"{row.ours}.running_var" not in tensors]


def _leaves(norm: str, shapes: Mapping[str, Shape]) -> list[str]:
    names = (f"{norm}.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var"))
    return [name for name in names if name in shapes]


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Choose a dtype in which 1 less an epsilon is not 1, as it is in half precision: deep networks would compute something else."""
    return dtype if dtype.itemsize >= 4 else np.dtype(np.float32)


def _identity(
    adopted: Adopted, norm: Layer, shapes: Mapping[str, Shape], bias: Stored | None, folded: list[str], shifting: list[str]
) -> None:
    """Make a BatchNorm that adds a bias, if there is one, and does nothing else, for a file that has it in the layer before it."""
    shape, eps = tuple(shapes[f"{norm.name}.running_var"]), norm.eps or 0.0
    dtype = _wide(bias.dtype if bias is not None else adopted.tensors[f"{norm.inputs[0]}.weight"].dtype)
    made = {leaf: constant(value, shape, dtype, f"(folded in the file: {word})") for leaf, value, word in (
        ("weight", 1, "one"), ("bias", 0, "zero"), ("running_mean", 0, "zero"), ("running_var", 1 - eps, f"1 - {eps:g}"),
    )}  # fmt: skip
    if bias is not None and f"{norm.name}.bias" in shapes:
        made["bias"] = bias
    elif bias is not None:  # a norm without a shift of its own takes it up in its mean
        made["running_mean"] = made["running_mean"].then(Minus(bias.array().astype(np.float64), bias.origin))
    adopted.tensors.update({name: made[name.rpartition(".")[2]] for name in _leaves(norm.name, shapes)})
    (folded if bias is None else shifting).append(norm.name)


def fold_bias(adopted: Adopted, norm: str, bias: Stored) -> None:
    """Take the bias of a convolution from the mean of the BatchNorm behind it, which computes the same."""
    mean = f"{norm}.running_mean"
    values = bias.array().astype(np.float64)  # a few thousand numbers
    adopted.tensors[mean] = adopted.tensors[mean].then(Minus(values, bias.origin))


def note_moved(adopted: Adopted) -> None:
    """Write down how many convolutions gave their biases away."""
    if adopted.moved:
        adopted.notes.append(f"the biases of {counted(len(adopted.moved), 'convolution')} went into the BatchNorms behind them")
