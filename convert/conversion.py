"""A file's tensors become a network's, and back: orientation, names, flatten orders, and what has to be folded or filled on the way.

Everything here describes; no tensor is read before `Stored.array`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from convert import names
from convert.core import COUNTER, KINDS, Report, Row, Shape
from convert.network import Layer
from convert.source import Convention, Part, Positional, Source, Spatial, Stored, in_memory
from convert.steps import FlattenOrder, Minus, ScaleOutputs, Transpose
from weights.errors import ConvertError
from weights.wording import counted

SHOWN = 10


class Undecided(ConvertError):
    """A kernel convention or an axis order can't be known from the file, and no evidence was given or it was too weak."""


@dataclass(slots=True)
class Adopted:
    """A file's tensors as those of a network.

    Attributes:
        naming: what explained the file's names; "position" and "match" where none did.
        tensors: by our names.
        pairs: their module to ours.
        report: what did not fit; complete when everything found its place.
        theirs: the shapes of all their tensors in PyTorch's form, by their names.
        moved: our convolutions whose bias went into the BatchNorm behind them, so that their own outputs differ by it.
        notes: what was filled in or folded.
    """

    naming: str
    tensors: dict[str, Stored]
    pairs: dict[str, str]
    report: Report
    theirs: dict[str, Shape] = field(default_factory=dict[str, Shape])
    moved: set[str] = field(default_factory=set[str])
    notes: list[str] = field(default_factory=list[str])


def adopt(
    source: Source,
    layers: Sequence[Layer],
    shapes: Mapping[str, Shape],
    *,
    family: type | str,
    naming: str = "auto",
    rows: Sequence[Row] | None = None,
    convention: Convention | None = None,
    spatial: Spatial | None = None,
) -> Adopted:
    """Say which of the file's tensors is which of the network's, and how it gets there.

    Args:
        source: the file.
        layers: of the network, from `convert.network.layers`.
        shapes: of the network's state dict.
        family: the network's class, or the name of its family.
        naming: a name in `convert.names.NAMINGS`; "auto" takes the first that explains everything, else the one that explains most.
        rows: a mapping of the user's own, or one that was derived, instead of a naming's.
        convention: of all spatial kernels, whatever the file says; None believes the file.
        spatial: "wh" where the file's networks have width for height; None believes the file.

    Raises:
        Undecided: the file doesn't say one of the two, and it was not given.
        LookupError: no naming of this name.
        ConvertError: no naming knows the order of a file that keeps only an order.
    """
    if rows is not None:
        return _carried(source, layers, shapes, "match" if naming == "auto" else naming, rows, convention, spatial)
    if naming != "auto" and naming not in names.NAMINGS:
        raise LookupError(f"no naming {naming!r}; there are {', '.join(names.NAMINGS)}")
    candidates = names.of_format(source.format) if naming == "auto" else [naming]
    if source.positional:
        candidates = [name for name in candidates if hasattr(names.NAMINGS[name], "order")]
        if not candidates:
            raise ConvertError(
                f"{source.path} keeps only an order of tensors, and no naming knows which order that is; try zoo convert --match"
            )
    best: Adopted | None = None
    for name in candidates:
        found = (
            _counted(source, layers, shapes, name, family, convention, spatial)
            if source.positional
            else _carried(source, layers, shapes, name, names.rows(name, family, shapes), convention, spatial)
        )
        if best is None or _missed(found) < _missed(best):
            best = found
        if best.report.complete:
            break
    assert best is not None
    return best


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
    for row in rows:
        layer = known.get(row.ours)
        kind = layer.kind if layer is not None and row.kind in ("conv", "linear", "norm", "transposed") else row.kind
        kind = {"linear_from_conv": "conv", "conv_from_linear": "linear"}.get(kind, kind)
        leaves: dict[str, Stored] = {}
        for leaf in KINDS[row.kind].leaves:
            ours = f"{row.ours}.{leaf}" if row.ours else leaf
            if ours not in tensors:
                continue
            used.add(ours)
            stored = tensors[ours]
            if leaf in row.lacks:
                _check_neutral(stored, leaf, row)
            elif leaf != COUNTER:
                leaves[leaf] = _as_theirs(stored, row) if leaf == "weight" else stored
        for leaf in row.adds:
            width = leaves["weight"].shape[0]
            leaves[leaf] = in_memory("(none: zeros)", np.zeros(width, leaves["weight"].dtype))
        if leaves:
            eps, groups, grid = (layer.eps, layer.groups, layer.grid) if layer is not None else (None, 1, None)
            found.append(Part(row.theirs, kind, leaves, groups, eps, grid, row.ours))
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
        before = layer.inputs[0] if len(layer.inputs) == 1 else ""
        alone = sum(before in other.inputs for other in layers) == 1
        if (gamma == 1).all() or not alone or f"{before}.weight" not in made:
            continue
        for leaf in (f"{before}.weight", f"{before}.bias", f"{row.ours}.running_mean"):
            if leaf in made:
                made[leaf] = made[leaf].then(ScaleOutputs(gamma, f"{name}, which has no place there"))
        made[name] = _constant(1, made[name].shape, made[name].dtype, "(folded into the convolution: ones)")
    return made


def explain(adopted: Adopted, shapes: Mapping[str, Shape]) -> str:
    """List all that did not fit, both names and shapes; "" when everything did."""
    report = adopted.report
    lines: list[str] = []
    for heading, entries in (
        (
            "of our tensors nothing becomes",
            [f"{ours}, {_x(shapes[ours])}" + (f": {theirs} was looked for" if theirs else "") for ours, theirs in report.missing],
        ),
        (
            "of their tensors have no place",
            [f"{n}, {_x(adopted.theirs.get(n, ()))}" for n in sorted(report.unmatched, key=lambda n: n.endswith(COUNTER))],
        ),
        ("don't fit", [f"{theirs}, {_x(was)}, is not {ours}, {_x(wanted)}" for theirs, ours, was, wanted in report.misshaped]),
        ("are named by two rows", report.contested),
        ("rows found nothing", [] if report.missing else [f"{row.theirs} → {row.ours} ({row.kind})" for row in report.unused]),
    ):
        if entries:
            lines.append(f"  {len(entries)} {heading}:")
            lines += [f"    {entry}" for entry in entries[:SHOWN]]
            if len(entries) > SHOWN:
                lines.append(f"    … and {len(entries) - SHOWN} more")
    return "\n".join(lines)


def _missed(found: Adopted) -> int:
    return len(found.report.missing) + len(found.report.unmatched) + len(found.report.contested)


def _carried(
    source: Source,
    layers: Sequence[Layer],
    shapes: Mapping[str, Shape],
    naming: str,
    rows: Sequence[Row],
    convention: Convention | None,
    spatial: Spatial | None,
) -> Adopted:
    turned = {name: _oriented(stored, source, convention, spatial) for name, stored in source.tensors.items()}
    carried, report, seen = names.carry(naming, turned, rows, shapes)
    spelt = names.spelt(naming, source.tensors, rows, shapes)
    own = {name.rpartition(".")[0]: known.rpartition(".")[0] for name, known in spelt.items()}
    pairs = {own.get(row.theirs, row.theirs): row.ours for row in rows if row not in report.unused}
    adopted = Adopted(naming, carried, pairs, report, {name: stored.shape for name, stored in seen.items()})
    _complete(adopted, layers, shapes, rows, seen)
    _reflatten(adopted, source, layers, spatial)
    return adopted


def _counted(
    source: Source,
    layers: Sequence[Layer],
    shapes: Mapping[str, Shape],
    naming: str,
    family: type | str,
    convention: Convention | None,
    spatial: Spatial | None,
) -> Adopted:
    """Give each position its name, walking through our modules in the file's order."""
    layout = source.layout
    if layout is None:
        raise ConvertError(f"{source.path}: the reader of {source.format} does not say how an order of tensors is laid out")
    kinds = {layer.name: layer.kind for layer in layers}
    left = list(source.tensors.items())
    found: dict[str, Stored] = {}
    extra: dict[str, Stored] = {}
    report = Report()
    order = names.NAMINGS[naming].order(names.lineage(family), shapes)
    # biases that theirs have before a BatchNorm are there if the file is longer by just as many tensors
    biased = names.fact(naming, "biased", family)
    expected = sum(f"{module}.{leaf}" in shapes for module in order for leaf in _leaves(layout, kinds, module))
    biased = biased if len(left) == expected + len(biased) else {}
    for module in order:
        kind = kinds.get(module, "other")
        for leaf in _leaves(layout, kinds, module):
            ours = f"{module}.{leaf}"
            if ours not in shapes:
                if leaf == "bias" and module in biased and left:
                    extra[biased[module]] = left.pop(0)[1]
                continue
            if not left:
                report.missing.append((ours, "the file has ended"))
                continue
            position, stored = left.pop(0)
            try:
                shaped = replace(stored, steps=layout.steps(kind, leaf, stored.stored_shape))
                was = shaped.shape
            except (ValueError, KeyError):
                shaped, was = stored, stored.stored_shape
            if leaf == "weight" and len(was) > 2:
                shaped = _oriented(replace(shaped, convention=layout.convention), source, convention, spatial)
            found[ours] = shaped
            if tuple(was) != tuple(shapes[ours]):
                report.misshaped.append((position, ours, tuple(was), tuple(shapes[ours])))
    report.unmatched.extend(position for position, _ in left)
    named = {name for name, _ in report.missing}
    report.missing.extend((ours, "") for ours in shapes if ours not in found and ours not in named and not ours.endswith(COUNTER))
    theirs = {name: stored.stored_shape for name, stored in source.tensors.items()}
    adopted = Adopted(naming, found, {module: module for module in order}, report, theirs)
    for norm, bias in extra.items():
        mean = f"{norm}.running_mean"
        if mean in found and found[mean].shape == bias.shape:
            found[mean] = found[mean].then(Minus(_lazy(bias), bias.origin))
            adopted.moved.update(module for module, behind in biased.items() if behind == norm)
    if adopted.moved:
        adopted.notes.append(f"the biases of {counted(len(adopted.moved), 'convolution')} went into the BatchNorms behind them")
    _reflatten(adopted, source, layers, spatial)
    return adopted


def _leaves(layout: Positional, kinds: Mapping[str, str], module: str) -> Sequence[str]:
    """List a module's leaves in the order in which a file that keeps only an order has them."""
    kind = kinds.get(module, "other")
    return layout.leaves.get(kind, layout.leaves.get("conv" if kind == "depthwise" else kind, ()))


def _oriented(stored: Stored, source: Source, convention: Convention | None, spatial: Spatial | None) -> Stored:
    """Turn a spatial kernel to cross-correlation over (height, width)."""
    if stored.convention is None or len(stored.shape) < 3:
        return stored
    if max(stored.shape[2:]) > 1:
        if convention is None and stored.convention == "unknown":
            raise Undecided(
                f"{source.path} does not say whether {stored.origin} is a kernel of true convolution or of cross-correlation, which have "
                "the same shape. Say --kernel-convention convolution or correlation to zoo convert or zoo add (in code "
                'kernel_convention="…"), or let zoo convert decide by evidence: --reference outputs.npz, or --images FOLDER.'
            )
        if spatial is None and source.spatial == "unknown":
            raise Undecided(
                f"{source.path} does not say whether the first axis of its kernels is the height or the width of the images. "
                'Say --spatial hw or wh to zoo convert or zoo add (in code spatial="…"), or let zoo convert decide by evidence: '
                "--reference outputs.npz, or --images FOLDER."
            )
    stored = replace(stored.as_correlation(convention), convention=convention or stored.convention)
    if (spatial or source.spatial) == "wh" and len(stored.shape) == 4:
        stored = stored.then(Transpose((0, 1, 3, 2)))
    return stored


def _reflatten(adopted: Adopted, source: Source, layers: Sequence[Layer], spatial: Spatial | None) -> None:
    """Bring dense layers that read a flattened map to PyTorch's order."""
    order = source.flatten
    if (spatial or source.spatial) == "wh":
        order = order.translate(str.maketrans("hw", "wh"))
    if order == "chw":
        return
    for layer in layers:
        stored = adopted.tensors.get(f"{layer.name}.weight")
        if layer.kind == "linear" and layer.grid and stored is not None and len(stored.stored_shape) == 2:
            step = FlattenOrder(*layer.grid, order)
            if stored.shape[1] == int(np.prod(layer.grid)):
                adopted.tensors[f"{layer.name}.weight"] = stored.then(step)


def _complete(
    adopted: Adopted, layers: Sequence[Layer], shapes: Mapping[str, Shape], rows: Sequence[Row], seen: Mapping[str, Stored]
) -> None:
    """Fill in what a file may lack, and fold what has no place here: both have one answer only."""
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
                tensors[mean] = tensors[mean].then(Minus(_lazy(seen[bias]), seen[bias].origin))
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
                    tensors[name] = _constant(value, like.shape, like.dtype, f"(none in the file: {'ones' if value else 'zeros'})")
                    absent.pop(name)
                    adopted.notes.append(f"{name}: the file's layer has none, which is {'ones' if value else 'zeros'}")
    for row in rows:
        for leaf in row.lacks if row.kind != "norm" else ():
            name, weight = f"{row.ours}.{leaf}", tensors.get(f"{row.ours}.weight")
            if name in absent and weight is not None and leaf == "bias":
                tensors[name] = _constant(0, tuple(shapes[name]), weight.dtype, "(none in the file: zeros)")
                absent.pop(name)
                adopted.notes.append(f"{name}: the file's layer has none, which is zeros")
    if adopted.moved:
        adopted.notes.append(f"the biases of {counted(len(adopted.moved), 'convolution')} went into the BatchNorms behind them")
    report.missing[:] = [(ours, theirs) for ours, theirs in report.missing if ours in absent]
    report.unused[:] = [row for row in report.unused if f"{row.ours}.running_var" not in tensors]


def _identity(adopted: Adopted, norm: Layer, shapes: Mapping[str, Shape], bias: Stored) -> None:
    """Make a BatchNorm that adds a bias and does nothing else, for a file whose BatchNorms are folded into its convolutions."""
    shape, eps = tuple(shapes[f"{norm.name}.running_var"]), norm.eps or 0.0
    dtype = bias.dtype
    adopted.tensors[f"{norm.name}.weight"] = _constant(1, shape, dtype, "(folded in the file: one)")
    adopted.tensors[f"{norm.name}.bias"] = bias
    adopted.tensors[f"{norm.name}.running_mean"] = _constant(0, shape, dtype, "(folded in the file: zero)")
    adopted.tensors[f"{norm.name}.running_var"] = _constant(1 - eps, shape, dtype, f"(folded in the file: 1 - {eps:g})")
    adopted.notes.append(f"{norm.name}: the file's BatchNorm is folded into the convolution; ours adds its bias and does nothing else")


def _constant(value: float, shape: Shape, dtype: np.dtype[Any], what: str) -> Stored:
    return Stored(what, shape, dtype, lambda: np.full(shape, value, dtype))


def _lazy(stored: Stored) -> np.ndarray:
    return stored.array().astype(np.float64)  # a bias: a few thousand numbers


def _check_neutral(stored: Stored, leaf: str, row: Row) -> None:
    value = 1 if leaf == "weight" else 0
    if not (stored.array() == value).all():
        raise ConvertError(
            f"{row.theirs} has no {leaf} there, and {row.ours}.{leaf} is not all {value}: the same network can't be written in that naming"
        )


def _as_theirs(stored: Stored, row: Row) -> Stored:
    """Give a dense weight the shape of the 1x1 convolution that it is there, and the other way round."""
    if row.kind == "conv_from_linear" and len(stored.shape) == 4:
        return stored.reshape(stored.shape[0], int(np.prod(stored.shape[1:])))
    if row.kind == "linear_from_conv" and len(stored.shape) == 2:
        return stored.reshape(*stored.shape, 1, 1)
    return stored


def _x(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"
