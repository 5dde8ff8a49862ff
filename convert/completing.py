"""What a file may lack and what has no place in the network: filled in or folded, where there is one answer only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from convert.adopted import Adopted
from convert.core import Row, Shape
from convert.network import Layer
from convert.source import Stored, constant
from convert.steps import Minus
from weights.wording import counted


def complete(
    adopted: Adopted, layers: Sequence[Layer], shapes: Mapping[str, Shape], rows: Sequence[Row], seen: Mapping[str, Stored]
) -> None:
    """Fill in what the file lacks, and fold the biases that have no place."""
    report, tensors = adopted.report, adopted.tensors
    norms = {layer.inputs[0]: layer for layer in layers if layer.kind == "norm" and len(layer.inputs) == 1}
    fed = {name: sum(name in layer.inputs for layer in layers) for name in norms}
    absent = dict(report.missing)
    for row in rows:
        norm = norms.get(row.ours)
        bias = f"{row.theirs}.bias"
        if row.kind in ("conv", "conv_from_linear", "transposed") and bias in report.unmatched and norm is not None and fed[row.ours] == 1:
            mean = f"{norm.name}.running_mean"
            if mean in tensors:
                fold_bias(adopted, norm.name, seen[bias])
                adopted.moved.add(row.ours)
            elif mean in absent:
                _identity(adopted, norm, shapes, seen[bias])
                for leaf in ("weight", "bias", "running_mean", "running_var"):
                    absent.pop(f"{norm.name}.{leaf}", None)
                adopted.moved.add(row.ours)
            else:
                continue
            report.unmatched.remove(bias)
    for row in rows:
        if row.kind == "norm" and f"{row.ours}.running_var" in tensors:
            like = tensors[f"{row.ours}.running_var"]
            for leaf, value in (("weight", 1), ("bias", 0)):
                name = f"{row.ours}.{leaf}"
                if name in absent:
                    tensors[name] = constant(value, like.shape, like.dtype, f"(none in the file: {'ones' if value else 'zeros'})")
                    absent.pop(name)
                    adopted.notes.append(f"{name}: the file's layer has none, which is {'ones' if value else 'zeros'}")
    for row in rows:
        for leaf in row.lacks if row.kind != "norm" else ():
            name, weight = f"{row.ours}.{leaf}", tensors.get(f"{row.ours}.weight")
            if name in absent and weight is not None and leaf == "bias":
                tensors[name] = constant(0, tuple(shapes[name]), weight.dtype, "(none in the file: zeros)")
                absent.pop(name)
                adopted.notes.append(f"{name}: the file's layer has none, which is zeros")
    note_moved(adopted)
    report.missing[:] = [(ours, theirs) for ours, theirs in report.missing if ours in absent]
    report.unused[:] = [row for row in report.unused if f"{row.ours}.running_var" not in tensors]


def _identity(adopted: Adopted, norm: Layer, shapes: Mapping[str, Shape], bias: Stored) -> None:
    """Make a BatchNorm that adds a bias and does nothing else, for a file whose BatchNorms are folded into its convolutions."""
    shape, eps = tuple(shapes[f"{norm.name}.running_var"]), norm.eps or 0.0
    dtype = bias.dtype
    adopted.tensors[f"{norm.name}.weight"] = constant(1, shape, dtype, "(folded in the file: one)")
    adopted.tensors[f"{norm.name}.bias"] = bias
    adopted.tensors[f"{norm.name}.running_mean"] = constant(0, shape, dtype, "(folded in the file: zero)")
    adopted.tensors[f"{norm.name}.running_var"] = constant(1 - eps, shape, dtype, f"(folded in the file: 1 - {eps:g})")
    adopted.notes.append(f"{norm.name}: the file's BatchNorm is folded into the convolution; ours adds its bias and does nothing else")


def fold_bias(adopted: Adopted, norm: str, bias: Stored) -> None:
    """Take the bias of a convolution from the mean of the BatchNorm behind it, which computes the same."""
    mean = f"{norm}.running_mean"
    values = bias.array().astype(np.float64)  # a few thousand numbers
    adopted.tensors[mean] = adopted.tensors[mean].then(Minus(values, bias.origin))


def note_moved(adopted: Adopted) -> None:
    """Write down how many convolutions gave their biases away."""
    if adopted.moved:
        adopted.notes.append(f"the biases of {counted(len(adopted.moved), 'convolution')} went into the BatchNorms behind them")
