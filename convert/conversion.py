"""A file's tensors become a network's: orientation, names, flatten orders. `completing` fills and folds, `writing` is the way back.

Everything here describes; no tensor is read before `Stored.array`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from convert import names
from convert.adopted import Adopted
from convert.completing import complete, fold_bias, note_moved
from convert.core import COUNTER, Report, Row, Shape
from convert.network import Layer
from convert.source import Convention, Positional, Source, Spatial, Stored
from convert.steps import FlattenOrder, Transpose
from weights.errors import ConvertError

SHOWN = 10
JULIA = ("bson", "jld2")
"""Formats that Julia writes, whose users count axes from the other end."""
IN_ORDER = "position"
"""Stands for a naming where tensors are given to modules in the order in which those compute."""


class Undecided(ConvertError):
    """A kernel convention or an axis order can't be known from the file, and no evidence was given or it was too weak."""


def adopt(
    source: Source,
    layers: Sequence[Layer],
    shapes: Mapping[str, Shape],
    *,
    family: type | str,
    naming: str = "",
    rows: Sequence[Row] | None = None,
    order: Sequence[str] | None = None,
    convention: Convention | None = None,
    spatial: Spatial | None = None,
) -> Adopted:
    """Say which of the file's tensors is which of the network's, and how it gets there.

    Args:
        source: the file.
        layers: of the network, from `convert.network.layers`.
        shapes: of the network's state dict.
        family: the network's class, or the name of its family.
        naming: a name in `convert.names.NAMINGS`; which explains a file best, `zoo.conversion.namings` finds out.
        rows: a mapping of the user's own, or one that was derived, instead of a naming's.
        order: our modules in the order of a file that keeps only an order, instead of a naming's.
        convention: of all spatial kernels, whatever the file says; None believes the file.
        spatial: "wh" where the file's networks have width for height; None believes the file.

    Raises:
        Undecided: the file doesn't say one of the two, and it was not given.
        LookupError: no naming of this name, or one without an order for a file that keeps nothing else.
        ConvertError: the reader does not say how an order of tensors is laid out.
    """
    source = _settled(source, convention, spatial)
    if rows is not None:
        return _carried(source, layers, shapes, naming or "match", rows)
    if order is not None:
        return _counted(source, layers, shapes, IN_ORDER, order, {})
    if naming not in names.NAMINGS:
        raise LookupError(f"no naming {naming!r}; there are {', '.join(names.NAMINGS)}")
    if not source.positional:
        return _carried(source, layers, shapes, naming, names.rows(naming, family, shapes))
    module = names.NAMINGS[naming]
    if not hasattr(module, "order"):
        raise LookupError(f"the naming {naming} knows no order, and this file keeps nothing else")
    return _counted(source, layers, shapes, naming, module.order(names.lineage(family), shapes), names.fact(naming, "biased", family))


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


def _settled(source: Source, convention: Convention | None, spatial: Spatial | None) -> Source:
    """Take what was said of all spatial kernels for what the file says of them."""
    if convention is not None:
        kernels = {name: replace(stored, convention=convention) for name, stored in source.tensors.items() if stored.convention is not None}
        layout = replace(source.layout, convention=convention) if source.layout is not None else None
        source = replace(source, tensors={**source.tensors, **kernels}, layout=layout)
    return source if spatial is None else replace(source, spatial=spatial)


def _carried(source: Source, layers: Sequence[Layer], shapes: Mapping[str, Shape], naming: str, rows: Sequence[Row]) -> Adopted:
    turned = {name: _oriented(stored, source) for name, stored in source.tensors.items()}
    carried, report, seen = names.carry(naming, turned, rows, shapes)
    spelt = names.spelt(naming, source.tensors, rows, shapes)
    own = {name.rpartition(".")[0]: known.rpartition(".")[0] for name, known in spelt.items()}
    pairs = {own.get(row.theirs, row.theirs): row.ours for row in rows if row not in report.unused}
    adopted = Adopted(naming, carried, pairs, report, {name: stored.shape for name, stored in seen.items()})
    nodes = () if source.graph is None else source.graph.nodes
    shifted = {name for node in nodes if node.may_shift for name in node.inputs}
    complete(adopted, layers, shapes, rows, seen, {node.name: node.op for node in nodes}, shifted)
    _reflatten(adopted, source, layers)
    return adopted


def _counted(
    source: Source, layers: Sequence[Layer], shapes: Mapping[str, Shape], naming: str, order: Sequence[str], biased: Mapping[str, str]
) -> Adopted:
    """Give each position its name, walking through our modules in the file's order.

    `biased` names convolutions that have a bias there and none here, and the BatchNorm behind each.
    """
    layout = source.layout
    if layout is None:
        raise ConvertError(f"{source.path}: the reader of {source.format} does not say how an order of tensors is laid out")
    kinds = {layer.name: layer.kind for layer in layers}
    left = list(source.tensors.items())
    found: dict[str, Stored] = {}
    extra: dict[str, Stored] = {}
    report = Report()
    # biases that theirs have before a BatchNorm are there if the file is longer by just as many tensors
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
                shaped = _oriented(replace(shaped, convention=layout.convention), source)
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
            fold_bias(adopted, norm, bias)
            adopted.moved.update(module for module, behind in biased.items() if behind == norm)
    note_moved(adopted)
    _reflatten(adopted, source, layers)
    return adopted


def _leaves(layout: Positional, kinds: Mapping[str, str], module: str) -> Sequence[str]:
    """List a module's leaves in the order in which a file that keeps only an order has them."""
    kind = kinds.get(module, "other")
    return layout.leaves.get(kind, layout.leaves.get("conv" if kind == "depthwise" else kind, ()))


def _oriented(stored: Stored, source: Source) -> Stored:
    """Turn a spatial kernel to cross-correlation over (height, width)."""
    if stored.convention is None or len(stored.shape) < 3:
        return stored
    if max(stored.shape[2:]) > 1:
        julia = source.format in JULIA
        flux = ": Flux's Conv is a convolution, its CrossCor a correlation" if julia else ""
        axes = "(width, height, channels, batch) in Julia, which is hw, or (height, width, channels, batch), which is wh"
        axes = axes if julia else "given height first, which is hw, or width first, which is wh"
        if stored.convention == "unknown":
            raise Undecided(
                f"{source.path} does not say whether {stored.origin} is a kernel of true convolution or of cross-correlation, which have "
                "the same shape. Say --kernel-convention convolution or correlation to zoo convert or zoo add (`kernel_convention` in "
                f"Python){flux}, or let zoo convert decide by evidence: --reference outputs.npz, or --images FOLDER."
            )
        if source.spatial == "unknown":
            raise Undecided(
                f"{source.path} does not say whether its images were {axes}. Say --spatial hw or wh to zoo convert or zoo add "
                "(`spatial` in Python), or let zoo convert decide by evidence: --reference outputs.npz, or --images FOLDER."
            )
    stored = stored.as_correlation()
    return stored.then(Transpose((0, 1, 3, 2))) if source.spatial == "wh" and len(stored.shape) == 4 else stored


def _reflatten(adopted: Adopted, source: Source, layers: Sequence[Layer]) -> None:
    """Bring dense layers that read a flattened map to PyTorch's order."""
    order = source.flatten
    if source.spatial == "wh":
        order = order.translate(str.maketrans("hw", "wh"))
    if order == "chw":
        return
    for layer in layers:
        stored = adopted.tensors.get(f"{layer.name}.weight")
        if layer.kind == "linear" and layer.grid and stored is not None and len(stored.stored_shape) == 2:
            step = FlattenOrder(*layer.grid, order)
            if stored.shape[1] == int(np.prod(layer.grid)):
                adopted.tensors[f"{layer.name}.weight"] = stored.then(step)


def _x(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"
