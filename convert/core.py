"""The heart of every conversion: rows say which module becomes which, and pure functions carry the tensors over.

A row names a module on both sides and its kind; the kind knows the module's tensors and how each is stored. Nothing here
knows a file format or a framework: a tensor is anything with ``.shape`` and ``.reshape``.

Example:
    >>> import numpy as np
    >>> rows = [core.Row("block1_conv1", "features.0", "conv")]
    >>> tensors, _ = core.apply(rows, {"block1_conv1.weight": np.ones((8, 3, 3, 3))}, {"features.0.weight": (8, 3, 3, 3)})
    >>> list(tensors)
    ['features.0.weight']
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
Shape = tuple[int, ...]

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DataParallel and torch.compile put before every name."""

AVERAGED = "n_averaged"
"""AveragedModel's count of states; beside "module." names it is no part of a network."""

COUNTER = "num_batches_tracked"
"""BatchNorm's step counter: no part of what a network computes, and absent from files older than PyTorch 0.4.1."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a row's module is.

    Attributes:
        leaves: names of its tensors; a module may lack those that it doesn't need, a bias for example. "" is the row's name itself.
        reshaped: whether weight, or the one tensor, has the same numbers in the same order on both sides, under another shape.
        own: whether theirs is no module but the weight itself, inputs first.
    """

    leaves: tuple[str, ...]
    reshaped: bool = False
    own: bool = False


KINDS: dict[str, Kind] = {
    "conv": Kind(("weight", "bias")),
    "transposed": Kind(("weight", "bias")),
    "linear": Kind(("weight", "bias")),
    "norm": Kind(("weight", "bias", "running_mean", "running_var", COUNTER)),
    # VGG's first dense layer is a 7x7 convolution in timm, a gate's dense layers are 1x1 ones here and there: (O, I, h, w)
    # and (O, I*h*w) hold the same numbers in the same order
    "linear_from_conv": Kind(("weight", "bias"), reshaped=True),
    "conv_from_linear": Kind(("weight", "bias"), reshaped=True),
    # Queries, keys and values in one dense layer; there the biases of queries and values are tensors of the module around it, and keys
    # have none, for which ours has zeros
    "keyless": Kind(("weight", "bias")),
    # A dense layer that is a matrix there, (inputs, outputs), which a module holds beside its layers
    "projection": Kind(("weight", "bias"), own=True),
    # One tensor that a module holds beside its layers, a layer scale for example: the row names the tensor itself
    "parameter": Kind(("",), reshaped=True),
    "parameter_from_vector": Kind(("",), reshaped=True),  # (C, 1, 1) here and (C) there, where MATLAB's shapes end before a 1 anyway
    "parameter_from_map": Kind(("",), reshaped=True),  # (C) here and (1, 1, 1, C) there
    "parameter_from_table": Kind(("",), reshaped=True),  # (1, ..., C) here and (..., C) there: a token, or the positions of all
}


@dataclass(frozen=True, slots=True)
class Row:
    """The module `theirs` is our module `ours`.

    Attributes:
        theirs, ours: the module's names.
        kind: a name in `KINDS`.
        adds: leaves that theirs has and ours has not: the bias of a convolution that goes into the BatchNorm behind it. Zero on
            the way there.
        lacks: leaves that ours has and theirs has not: the weight of a BatchNorm without scale. One (weight) or zero (bias) on the
            way here.
        pieces: their modules that together are `theirs`, a name that no file has: one behind the other along the first axis, equally
            long. So are queries, keys and values of three layers.
        cut: their module of which `theirs`, again a name that no file has, is a part: from the first to before the second of so many
            equal parts of the first axis, ("attention.in_proj_weight", 1, 3, 3) for keys and values.
        positions: their tensor of the positions of all tokens, (1, 1 + N, C), where ours has those of patches alone: of the row of ours,
            whose `theirs` no file has, and of the row of the class token, to which its position is added.
        heads: of a layer of attention, where theirs has an axis for them.
    """

    theirs: str
    ours: str
    kind: str
    adds: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()
    cut: tuple[str, int, int, int] | None = None
    positions: str = ""
    heads: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What did not fit; empty lists say that everything did.

    Attributes:
        missing: our tensors that nothing of theirs becomes, with the name looked for or "" where no row leads there.
        unmatched: their tensors that no row takes.
        misshaped: (theirs, ours, their shape, our shape) of tensors that don't fit.
        contested: our or their tensors that two rows name.
        unused: rows that found none of their tensors.
    """

    missing: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    unmatched: list[str] = field(default_factory=list[str])
    misshaped: list[tuple[str, str, Shape, Shape]] = field(default_factory=list[tuple[str, str, Shape, Shape]])
    contested: list[str] = field(default_factory=list[str])
    unused: list[Row] = field(default_factory=list[Row])

    @property
    def complete(self) -> bool:
        """Whether every tensor found its place; shapes may still differ, as with another number of classes."""
        return not (self.missing or self.unmatched or self.contested or self.unused)

    @property
    def ok(self) -> bool:
        """Whether every tensor found its place and fits."""
        return self.complete and not self.misshaped


def apply(rows: Sequence[Row], tensors: Mapping[str, T], shapes: Mapping[str, Shape]) -> tuple[dict[str, T], Report]:
    """Carry tensors from one naming to the other.

    Args:
        rows: a row per module.
        tensors: by their names.
        shapes: what our side needs, by our names.

    Returns:
        The tensors by our names, misshaped ones as they came, and all that did not fit.
    """
    report, tensors = Report(), _assembled(rows, tensors)
    taken: Counter[str] = Counter()
    given: Counter[str] = Counter()
    carried: dict[str, T] = {}
    for row in rows:
        kind = KINDS[row.kind]
        used = False
        for leaf in kind.leaves:
            theirs, ours = row.theirs if kind.own and leaf == "weight" else joined(row.theirs, leaf), joined(row.ours, leaf)
            used = used or theirs in tensors
            if ours in shapes:
                given[ours] += 1
                if theirs in tensors:
                    taken[theirs] += 1
                    carried[ours] = _turned(tensors[theirs]) if kind.own else _fitted(tensors[theirs], shapes[ours], kind.reshaped)
                    if tuple(_shape(carried[ours])) != tuple(shapes[ours]):
                        report.misshaped.append((theirs, ours, tuple(_shape(tensors[theirs])), tuple(shapes[ours])))
                elif leaf != COUNTER:
                    report.missing.append((ours, theirs))
            elif leaf == COUNTER and theirs in tensors:
                taken[theirs] += 1
        if not used:
            report.unused.append(row)
    report.contested.extend(name for counts in (given, taken) for name, count in counts.items() if count > 1)
    report.missing.extend((ours, "") for ours in shapes if ours not in given and not ours.endswith(COUNTER))
    report.unmatched.extend(theirs for theirs in tensors if theirs not in taken)
    return carried, report


def _assembled(rows: Sequence[Row], tensors: Mapping[str, T]) -> Mapping[str, T]:
    """Make tensors that rows name and no file has: of several, or of a part of one. Keys without biases become zeros."""
    made: dict[str, Any] = {}
    used: set[str] = set()
    for row in rows:
        if row.cut is not None:
            whole, first, end, count = row.cut
            for leaf in KINDS[row.kind].leaves:
                if (name := joined(whole, leaf)) in tensors and len(_shape(tensors[name])) > 0:
                    made[joined(row.theirs, leaf)] = part(tensors[name], first, end, count)
                    used.add(name)
        elif row.positions and row.positions in tensors:
            made[row.theirs] = placed(tensors.get(row.theirs), tensors[row.positions])
            used.add(row.positions)
        elif row.pieces or row.kind == "keyless":
            for leaf in KINDS[row.kind].leaves:
                names = pieces(row, leaf)
                found = [tensors.get(name) if name else None for name in names]
                whole = None not in found or (leaf == "bias" and row.kind == "keyless" and found[1] is None)
                if names and whole and found[0] is not None and found[-1] is not None:
                    made[joined(row.theirs, leaf)] = _behind_each_other(found)
                    used.update(names)
    return {name: tensor for name, tensor in tensors.items() if name not in used} | made if made else tensors


def pieces(row: Row, leaf: str) -> tuple[str, ...]:
    """Name the tensors of theirs that together are one of a row's; "" for keys' biases where theirs are beside the layer."""
    if row.kind == "keyless" and not row.pieces:
        around = row.theirs.rpartition(".")[0]
        return (joined(around, "q_bias"), "", joined(around, "v_bias")) if leaf == "bias" else ()
    return tuple(joined(piece, leaf) for piece in row.pieces)


def part(tensor: Any, first: int, end: int, count: int) -> Any:
    """Take some of `count` equal parts of a tensor's first axis."""
    if hasattr(tensor, "part"):
        return tensor.part(first, end, count)
    length = _shape(tensor)[0] // count
    return tensor[first * length : end * length]


def no_bias(weight: Any) -> Any:
    """Make the zeros that are the bias of a layer without one."""
    length = _shape(weight)[0]
    if hasattr(weight, "new_zeros"):
        return weight.new_zeros(length)
    return importlib.import_module("numpy").zeros(length, weight.dtype)


def placed(token: Any, positions: Any) -> Any:
    """Add the first of all positions to a class token; without a token, return the others."""
    if hasattr(positions, "placed"):
        return positions.placed(token)
    return positions[:, 1:] if token is None else token + positions[:, :1]


def _behind_each_other(tensors: Sequence[Any]) -> Any:
    """Put tensors behind each other along the first axis; zeros for None."""
    like = tensors[0]
    if hasattr(like, "followed_by"):
        return like.followed_by(tensors[1:])
    library = importlib.import_module(type(like).__module__.partition(".")[0])
    return library.concatenate([library.zeros_like(like) if tensor is None else tensor for tensor in tensors])


def joined(module: str, leaf: str) -> str:
    """Name a tensor by its module and its leaf; either may be ""."""
    return f"{module}.{leaf}" if module and leaf else module or leaf


def modules(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Name the modules that these tensors belong to, and the kind of each as its tensors tell it.

    A tensor that is no leaf of a layer is listed by its own name, as a "parameter", and so is a bias without a weight.
    """
    found: dict[str, str] = {}
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "running_mean":
            found[module] = "norm"
        elif leaf == "weight" and f"{module}.running_mean" not in shapes:
            found[module] = "linear" if len(shape) == 2 else "conv"
        elif leaf not in KINDS["norm"].leaves or (leaf == "bias" and not shapes.keys() & {f"{module}.weight", f"{module}.running_mean"}):
            found[name] = "parameter"
    return found


def by_module(tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Group tensors, or their shapes, by module and leaf, in their order; BatchNorm's step counters are left out."""
    found: dict[str, dict[str, T]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf != COUNTER:
            found.setdefault(module, {})[leaf] = tensor
    return found


def strip_wrappers(tensors: Mapping[str, T]) -> dict[str, T]:
    """Take the prefixes of `WRAPPERS` from the names, each only when every name has it; and the counter that AveragedModel puts beside."""
    if len(tensors) > 1 and all(name == AVERAGED or name.startswith(WRAPPERS[0]) for name in tensors):
        tensors = {name: tensor for name, tensor in tensors.items() if name != AVERAGED}
    names = list(tensors)
    while names and (prefix := next((w for w in WRAPPERS if all(name.startswith(w) for name in names)), None)):
        names = [name.removeprefix(prefix) for name in names]
    return dict(zip(names, tensors.values(), strict=True))


def _turned(tensor: Any) -> Any:
    if len(_shape(tensor)) != 2:
        return tensor
    turned = tensor.transpose(1, 0)
    return turned.contiguous() if hasattr(turned, "contiguous") else turned


def _fitted(tensor: Any, shape: Shape, reshaped: bool) -> Any:
    if reshaped and 1 in (len(shape), shape[0]) and tuple(tensor.shape) != shape and math.prod(tensor.shape) == math.prod(shape):
        return tensor.reshape(*shape)
    if reshaped and len(tensor.shape) != len(shape) > 1 and math.prod(tensor.shape[1:]) == math.prod(shape[1:]):
        return tensor.reshape(tensor.shape[0], *shape[1:])  # the first axis may differ: another number of classes
    return tensor


def _shape(tensor: Any) -> Shape:
    return tensor.shape
