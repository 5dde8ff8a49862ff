"""`zoo inspect`: a weight file of any framework, described, and the network of the zoo that it probably is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from convert import formats, sandbox
from convert.conversion import JULIA
from convert.inspect import Inspection, Likely, Tensor
from convert.inspect import inspect as describe
from weights.documents import MISREAD, read_json
from weights.errors import ConvertError
from weights.wording import escape
from zoo.conversion.likeness import SURE, recognise
from zoo.conversion.notes import NOTES

if TYPE_CHECKING:
    from zoo.networks.model import Model


def inspect(path: Path, format: str = "auto", *, isolated: bool = True, weights_of: str | None = None) -> Inspection:
    """Describe a weight file of any format and name the networks of the zoo that it may be of; no tensor is read.

    Args:
        path: the file, or the folder of a format that is one.
        format: the file's format; "auto" asks the content.
        isolated: False reads the file in this process, see `convert.sandbox`.
        weights_of: which of several sets of weights in it is described, "ema".

    Raises:
        FileNotFoundError: there is nothing at this path.
        ConvertError: the file can't be read.
    """
    with sandbox.read(Path(path), format, isolated=isolated, weights_of=weights_of) as source:
        return replace(describe(source), likely=tuple(recognise(source)))


def chosen(path: Path, model: str | None, format: str = "auto", weights_of: str | None = None) -> type[Model]:
    """Find the network that the user means, or that the file must be of.

    Args:
        path: the file.
        model: a name of the catalogue; None leaves it to the file.
        format: the file's format; a naming's name is taken for "auto".
        weights_of: which of several sets of weights in it is looked at, "ema".

    Raises:
        ConvertError: the file is like no network, or like several; the message names them.
        LookupError: no network of this name.
    """
    from zoo.catalogue import model_class

    if model is not None:
        return model_class(model)
    with sandbox.read(Path(path), format if format in formats.formats() else "auto", weights_of=weights_of) as source:
        found = recognise(source)
    best = [one for one in found if one.confidence >= SURE and one.confidence == found[0].confidence]
    named = [one for one in best if one.naming] or best
    if len(named) == 1:
        return model_class(named[0].name)
    shown = ", ".join(f"{one.called} ({one.confidence:.0%})" for one in found)
    raise ConvertError(
        f"{path} does not say which network it is of. "
        + (f"Likest by its shapes: {shown}. " if shown else "No network here has tensors of such shapes. ")
        + "Name it: model=NAME, or model=mymodule:Class for a network of your own."
    )


def show(found: Inspection, out: Console, *, tensors: bool = False) -> None:
    """Print a description: the file in words, the networks that it may be of, the tree of its modules or all of its tensors."""
    out.print(f"[bold]{escape(found.path)}[/bold]", soft_wrap=True)
    for name, value in _facts(found):
        out.print(f"  {name:15}{escape(value)}", soft_wrap=True)
    for note in found.notes:
        out.print(f"  [dim]{escape(note)}[/dim]", soft_wrap=True)
    julia = found.format in JULIA
    heading = f"modules{', axes as in Julia' if julia else ''}" if found.tensors else "no tensors"
    out.print(_table(found) if tensors else _grown(Tree(f"[dim]{heading}[/dim]"), found.tree(), julia))


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "format", found.format
    yield "framework", found.framework
    yield (
        "tensors",
        f"{len(found.tensors)}, {found.parameters:,} numbers, {found.size_bytes:,} bytes"
        + ("; an order without names" if found.positional else ""),
    )
    if found.likely:
        yield "network", "; ".join(_network(one) for one in found.likely)
    kernels = ", ".join(f"{count} of {convention}" for convention, count in found.conventions.items())
    yield "kernels", f"{kernels}: {found.convention_reason}" if kernels else found.convention_reason
    orders = {"hw": "height, width", "wh": "width, height", "unknown": "unknown which is height and which is width"}
    if found.conventions:
        yield "kernel axes", orders[found.spatial]
    if found.flatten != "chw":
        yield "flattens", ", ".join({"c": "channels", "h": "height", "w": "width"}[letter] for letter in found.flatten)
    if found.layers is not None:
        unknown = f"; unknown: {', '.join(found.unknown_ops)}" if found.unknown_ops else ""
        yield "graph", f"{sum(found.layers.values())} layers{unknown}"
    if found.preprocessing:
        yield "images", ", ".join(f"{key} {value}" for key, value in found.preprocessing.items())
    for key, value in found.metadata.items():
        yield (key[:14], _short(value)) if key != NOTES else ("converted", _short(_noted(value)))


def _noted(text: str) -> str:
    """Say in a line what `zoo convert` noted."""
    try:
        told = read_json(text, "the notes")
        return f"from {told['source']['file']}, for {told['model']}; {told['parity']['verdict']}"
    except MISREAD:
        return "damaged notes"


def _network(one: Likely) -> str:
    return f"{one.called} {one.confidence:.0%}" + (f", named as {one.naming} does" if one.naming else "")


def _grown(tree: Tree, modules: Mapping[str, Any], julia: bool) -> Tree:
    for name, inner in modules.items():
        if isinstance(inner, Tensor):
            tree.add(f"{escape(name)} [dim]{_leaf(inner, julia)}[/dim]")
        elif all(isinstance(part, Tensor) for part in inner.values()):
            leaves = ", ".join(f"{escape(leaf)} {_leaf(tensor, julia)}" for leaf, tensor in inner.items())
            tree.add(f"{escape(name)} [dim]{leaves}[/dim]")
        else:
            _grown(tree.add(escape(name)), inner, julia)
    return tree


def _leaf(tensor: Tensor, julia: bool) -> str:
    shape = tensor.stored_shape[::-1] if julia else tensor.shape
    return ("x".join(map(str, shape)) or "scalar") + (f" {tensor.dtype}" if tensor.dtype != "float32" else "")


def _table(found: Inspection) -> Table:
    table = Table("name", "in the file", "shape", "stored as", "dtype", "convention", "steps")
    for tensor in found.tensors:
        shapes = ("x".join(map(str, shape)) for shape in (tensor.shape, tensor.stored_shape))
        cells = (tensor.name, tensor.origin, *shapes, tensor.dtype, tensor.convention or "", "; ".join(tensor.steps))
        table.add_row(*(escape(cell) for cell in cells))
    return table


def _short(value: str) -> str:
    line = " ".join(value.split())
    return line if len(line) <= 200 else f"{line[:200]} …"
