"""Which tensor is which in a file that keeps only an order: walks through our network that the shapes allow; unique or refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from convert.core import Row
from convert.match import NoUniqueMatch, compatible, leaves, only_norms_read
from convert.network import Layer
from convert.source import Positional, Source, Stored
from convert.steps import Shape
from convert.topology import of_layers
from weights.errors import ConvertError

MAX_TRIES = 200_000
"""Places at which a walk is tried; a network whose shapes are all alike would have more walks than time."""

Leaves = tuple[tuple[str, Shape], ...]


def match_positional(source: Source, layers: Sequence[Layer], shapes: Mapping[str, Shape]) -> tuple[Source, list[Row]]:
    """Derive which tensors of a file without names are which of ours.

    The file is cut into modules, each the leaves of one kind in the order of `Source.layout`, so that every module of ours occurs
    once. Modules of the same shapes follow each other as they compute, where one needs the other's result.

    Args:
        source: a positional file.
        layers: our network's.
        shapes: of our state dict.

    Returns:
        The same file with our names and the steps of its layout, and the rows that go with it.

    Raises:
        NoUniqueMatch: no cut fits, or two do, or modules of the same shapes are side by side.
        ConvertError: the file has names, or its reader doesn't say how it is laid out.
    """
    if not source.positional or source.layout is None:
        raise ConvertError(f"{source.path} is no file that keeps only an order, or its reader does not say how that is laid out")
    web, known, held = of_layers(layers), {layer.name: layer for layer in layers}, leaves(shapes)
    if uncalled := [name for name in held if name not in known]:
        raise ConvertError(f"our {', '.join(uncalled)} computes nothing, so that its place in an order can't be known")
    wanted: dict[Leaves, list[str]] = {}
    forms: dict[Leaves, Layer] = {}
    for layer in layers:
        ours = held.get(layer.name, {})
        form = (("kind " + layer.kind, ()), ("bias may go", (only_norms_read(layer.name, web, known),)), *sorted(ours.items()))
        wanted.setdefault(form, []).append(layer.name)
        forms.setdefault(form, layer)
    options = {form: _Option(layer, held.get(layer.name, {}), bool(form[1][1][0])) for form, layer in forms.items()}
    cuts = _cuts(source, source.layout, wanted, options)
    for names in wanted.values():
        if side_by_side := [(a, b) for a, b in pairwise(names) if a not in web.before[b]]:
            a, b = side_by_side[0]
            raise NoUniqueMatch(
                f"{source.path} keeps only an order, and our {a} and {b} have the same shapes and are side by side: either may come first"
            )
    return _named(source, cuts, wanted)


@dataclass(frozen=True, slots=True)
class _Option:
    layer: Layer
    ours: Mapping[str, Shape]
    bias_may_go: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    form: Leaves
    row: Row
    tensors: Mapping[str, Stored]


def _cuts(source: Source, layout: Positional, wanted: Mapping[Leaves, list[str]], options: Mapping[Leaves, _Option]) -> list[_Piece]:
    """Find the one way to cut the file into our modules."""
    stored = list(source.tensors.values())
    found: list[list[_Piece]] = []
    tries = 0
    left = Counter({form: len(names) for form, names in wanted.items()})
    path: list[_Piece] = []
    furthest = 0

    def pieces(place: int) -> Iterator[tuple[_Piece, int]]:
        for form, count in left.items():
            if count:
                yield from _pieces(form, options[form], stored, place, layout)

    stack = [pieces(0)]
    places = [0]
    while stack and len(found) < 2:
        tries += 1
        if tries > MAX_TRIES:
            raise NoUniqueMatch(f"{source.path}: too many tensors of the same shapes to find out which is which by order alone")
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
            places.pop()
            if path:
                left[path.pop().form] += 1
            continue
        piece, after = step
        path.append(piece)
        left[piece.form] -= 1
        furthest = max(furthest, after)
        if after == len(stored) and not any(left.values()):
            found.append(list(path))
        if after < len(stored):
            stack.append(pieces(after))
            places.append(after)
        else:
            left[path.pop().form] += 1
    if not found:
        raise _no_cut(source, stored, furthest, wanted, left)
    if len(found) > 1:
        at = next(i for i, (a, b) in enumerate(zip(*found, strict=False)) if a != b)
        raise NoUniqueMatch(
            f"{source.path}: its {len(stored)} tensors can be cut into our modules in two ways, which part at {_where(found, at)}"
        )
    return found[0]


def _where(found: Sequence[Sequence[_Piece]], at: int) -> str:
    first, second = (path[at].row for path in found[:2])
    return f"module {at}: {first.kind} like {first.ours}, or {second.kind} like {second.ours}"


def _pieces(form: Leaves, option: _Option, stored: Sequence[Stored], place: int, layout: Positional) -> Iterator[tuple[_Piece, int]]:
    """Try a module here, with a bias that only the file has or without it."""
    kind = option.layer.kind
    order = layout.leaves.get(kind, layout.leaves.get("conv" if kind == "depthwise" else kind, ()))
    extra = ("bias",) if option.bias_may_go and "bias" not in option.ours else ()
    for adds in ((), extra) if extra else ((),):
        names = [leaf for leaf in order if leaf in option.ours or leaf in adds]
        here = stored[place : place + len(names)]
        if not names or len(here) < len(names):
            continue
        shaped = {leaf: _shaped(tensor, kind, leaf, layout) for leaf, tensor in zip(names, here, strict=True)}
        if any(tensor is None for tensor in shaped.values()):
            continue
        tensors = {leaf: tensor for leaf, tensor in shaped.items() if tensor is not None}
        row = compatible(
            option.layer,
            option.ours,
            {leaf: t.shape for leaf, t in tensors.items()},
            bias_may_go=option.bias_may_go,
            name=option.layer.name,
        )
        if row is not None and (not adds or tensors["bias"].shape == (option.ours["weight"][0],)):
            yield _Piece(form, row, tensors), place + len(names)


def _shaped(stored: Stored, kind: str, leaf: str, layout: Positional) -> Stored | None:
    try:
        shaped = replace(stored, steps=layout.steps(kind, leaf, stored.stored_shape))
        len(shaped.shape)
    except (ValueError, IndexError, KeyError):  # a tensor of another rank is no such leaf
        return None
    return replace(shaped, convention=layout.convention) if leaf == "weight" and len(shaped.shape) > 2 else shaped


def _named(source: Source, cut: Sequence[_Piece], wanted: Mapping[Leaves, list[str]]) -> tuple[Source, list[Row]]:
    waiting = {form: iter(names) for form, names in wanted.items()}
    tensors: dict[str, Stored] = {}
    rows: list[Row] = []
    for piece in cut:
        name = next(waiting[piece.form])
        rows.append(replace(piece.row, theirs=name, ours=name))
        tensors |= {f"{name}.{leaf}": stored for leaf, stored in piece.tensors.items()}
    return replace(source, tensors=tensors, positional=False, layout=None), rows


def _no_cut(
    source: Source, stored: Sequence[Stored], furthest: int, wanted: Mapping[Leaves, list[str]], left: Mapping[Leaves, int]
) -> NoUniqueMatch:
    shown = ", ".join(
        f"{number}: {'x'.join(map(str, tensor.stored_shape))}" for number, tensor in enumerate(stored[furthest : furthest + 6], furthest)
    )
    total = sum(map(len, wanted.values()))
    del left
    what = f"from there it has {shown}" if shown else "it ends there"
    error = NoUniqueMatch(
        f"{source.path}: its {len(stored)} tensors can't be cut into our {total} modules; the first {furthest} can, and {what}. "
        "Is it this network, with this number of classes?"
    )
    error.missing = [name for names in wanted.values() for name in names]
    error.unmatched = [str(number) for number in range(furthest, len(stored))]
    return error
