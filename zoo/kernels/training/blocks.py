"""Find DenseNet's blocks: layers that each read all that is there so far and append to it, whatever way a network concatenates.

Some networks append to the last concatenation, others concatenate a list anew for every layer. Both are the same here: a value is known
by the parts that it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from zoo.kernels.training import kernels
from zoo.kernels.training.calls import DROPOUT, NORMS, Convolution, Norm, activation_of, arguments, convolution_of, norm_of, plainly
from zoo.kernels.training.finder import Finder, Placed, in_order
from zoo.kernels.training.record import Call, Ref
from zoo.kernels.training.replay import Chain, Step, Without

_CAT = {"tensors": None, "dim": 0}
_CATS = ("cat", "concat", "concatenate")


@dataclass(frozen=True)
class _Layer:
    """A layer: what it reads, what it appends, its parameters' values, its calls, its numbers, and why no block may have it."""

    reads: int
    makes: int
    tensors: tuple[int, ...]
    indices: tuple[int, ...]
    options: dict[str, Any]
    reason: str


def dense_blocks(finder: Finder, found: list[Placed], without: Without) -> list[Placed]:
    """Return the chains with those of a dense block put together to one, in the order of their last calls."""
    finder.taken = set()
    layers: dict[int, _Layer] = {}
    for index, call in enumerate(finder.calls):
        if call.name in NORMS and (layer := _layer(finder, index)) is not None:
            layers[layer.reads] = layer
    if len(layers) < 2:
        return found
    parts, joined = _parts(finder)
    used: set[int] = set()
    for layer in layers.values():
        if layer.reads in used:
            continue
        run, have = [layer], (*parts.get(layer.reads, (layer.reads,)), layer.makes)
        ends = [joined.get(have)]
        while ends[-1] is not None and ends[-1] in layers:
            run.append(layers[ends[-1]])
            have = (*have, run[-1].makes)
            ends.append(joined.get(have))
        for count in range(len(run), 1, -1):
            end = ends[count - 1]
            if end is not None and (grown := _block(finder, found, run[:count], end, without)) is not None:
                found = grown
                used.update(part.reads for part in run[:count])
                break
    return in_order(found)


def _parts(finder: Finder) -> tuple[dict[int, tuple[int, ...]], dict[tuple[int, ...], int]]:
    """Return what concatenations of channels are made of, by their values, and the last one of the same parts."""
    parts: dict[int, tuple[int, ...]] = {}
    joined: dict[tuple[int, ...], int] = {}
    for call in finder.calls:
        given = arguments(call, _CAT) if call.name in _CATS and plainly(call) else None
        if given is None or given["dim"] not in (1, -3) or not all(isinstance(part, Ref) for part in given["tensors"]):
            continue
        number = int(call.result)
        parts[number] = tuple(p for part in given["tensors"] for p in parts.get(int(part), (int(part),)))
        joined[parts[number]] = number
    return parts, joined


def _layer(finder: Finder, index: int) -> _Layer | None:
    """Return the layer that begins with a BatchNorm, if one does."""
    first = _norm(finder, index)
    conv = None if first is None else _conv(finder, first.makes)
    second = None if conv is None else _norm(finder, finder.follower(conv[1].makes))
    last = None if second is None else _conv(finder, second.makes)
    if first is None or conv is None or second is None or last is None:
        return None
    (conv_index, narrow), (last_index, wide) = conv, last
    values, read = finder.values, first.norm.reads[0]
    if values[narrow.weight].shape[2:] != (1, 1) or values[wide.makes].shape[2:] != values[read].shape[2:]:
        return None
    makes, indices = wide.makes, (*first.indices, conv_index, *second.indices, last_index)
    reason = first.reason or second.reason
    after = finder.follower(makes)
    if after is not None and finder.calls[after].name == "dropout" and (given := arguments(finder.calls[after], DROPOUT)) is not None:
        makes, indices = int(finder.calls[after].result), (*indices, after)
        reason = reason or ("dropout between its layers" if given["p"] and given["training"] else "")
    kinds = {values[number].dtype for number in (read, narrow.makes, wide.makes, makes)}
    if len(kinds) > 1 or (narrow.padding, narrow.dilation) != ((0, 0), (1, 1)):
        return None
    tensors = (*first.norm.reads[1:], narrow.weight, *second.norm.reads[1:], wide.weight)
    options = {"first": first.options, "second": second.options, "padding": wide.padding, "dilation": wide.dilation}
    return _Layer(read, makes, tensors, indices, options, reason)


@dataclass(frozen=True)
class _Active:
    """A BatchNorm and the activation behind it: both calls' places, and the value that they make."""

    norm: Norm
    act: str
    indices: tuple[int, int]
    makes: int

    @property
    def options(self) -> dict[str, Any]:
        return {"momentum": self.norm.options["momentum"], "eps": self.norm.options["eps"], "act": self.act}

    @property
    def reason(self) -> str:
        """Why no block may have it; empty where one may."""
        if not self.norm.training:
            return "a BatchNorm in eval mode amid its layers"
        return "its BatchNorms exchange statistics, which its kernels don't" if self.norm.shared else ""


def _norm(finder: Finder, index: int | None) -> _Active | None:
    norm = None if index is None else norm_of(finder.values, finder.calls[index])
    after = None if index is None or norm is None else finder.follower(int(finder.calls[index].result))
    act = activation_of(finder.calls[after]) if after is not None and plainly(finder.calls[after]) else None
    if index is None or norm is None or after is None or act is None or act not in kernels.ACTIVATIONS:
        return None
    return _Active(norm, act, (index, after), int(finder.calls[after].result))


def _conv(finder: Finder, number: int) -> tuple[int, Convolution] | None:
    """Return a convolution that alone reads a value, by its place, if it strides over no pixels and has neither a bias nor groups."""
    index = finder.follower(number)
    conv = None if index is None else convolution_of(finder.values, finder.calls[index])
    if index is None or conv is None or (conv.x, conv.bias, conv.groups, conv.stride) != (number, None, 1, (1, 1)):
        return None
    return index, conv


def _block(finder: Finder, found: list[Placed], run: Sequence[_Layer], end: int, without: Without) -> list[Placed] | None:
    """Return the chains with these layers as one, None where somebody would notice or kernels don't take them."""
    makers = {number: index for index, call in enumerate(finder.calls) for number in call.makes}
    start = run[0].reads
    indices = {index for layer in run for index in layer.indices} | {makers[layer.reads] for layer in run[1:]} | {makers[end]}
    if (begin := makers.get(start)) is not None and _copies(finder, begin, run[0]):
        indices.add(begin)
        start = int(finder.calls[begin].args[0][0])
    order = tuple(sorted(indices))
    inner = [number for index in order for number in finder.calls[index].makes if number != end]
    reads = (start, *(number for layer in run for number in layer.tensors))
    seen = any(not indices.issuperset(finder.readers.get(number, ())) or number in finder.outputs for number in inner)
    written = end in finder.outputs or any(finder.values[end].memory in call.writes for call in finder.calls)
    fits = {finder.values[number].dtype for number in (start, end)} == {finder.values[run[0].makes].dtype}
    if seen or written or not fits or len(set(reads)) < len(reads) or order[-1] != makers[end]:
        return None
    if not finder.untouched(reads, order) or not finder.hidden(inner, order[-1]):
        return None
    calls = tuple(finder.calls[index] for index in order)
    layers = tuple(layer.options for layer in run)
    if kernels.dense_block_refuses(finder.device, *(finder.like(number) for number in reads), layers=layers):
        return None
    pieces = _pieces(finder, found, order)
    if pieces is None:
        return None
    chain = Chain("dense block", partial(kernels.dense_block, layers=layers), reads, end, calls, pieces=pieces, whole=True)
    if reason := without.get((end, 0)) or next((layer.reason for layer in run if layer.reason), ""):
        return [*found, (replace(chain, note=reason), ())]
    rest = [place for place in found if not _within(place, indices, calls)]
    chain.row_out = 1 + max([len(finder.values), *(other.row_out for other, _ in rest if other.row_out is not None)])
    for other, _ in rest:
        if other.norm and other.reads[0] == end:
            other.row_in = chain.row_out
    return [*rest, (chain, order)]


def _copies(finder: Finder, index: int, layer: _Layer) -> bool:
    """Tell whether a call concatenates one map, for a block's first layer alone."""
    call = finder.calls[index]
    alone = call.name in _CATS and bool(call.args) and len(call.args[0]) == 1 and finder.readers[layer.reads] == [layer.indices[0]]
    return alone and finder.values[int(call.args[0][0])].dtype == finder.values[layer.reads].dtype


def _within(place: Placed, indices: set[int], calls: Sequence[Call]) -> bool:
    chain, own = place
    return indices.issuperset(own) if own else all(call in calls for call in chain.calls)


def _pieces(finder: Finder, found: list[Placed], order: Sequence[int]) -> tuple[Step, ...] | None:
    """Return the chains and calls that a block would be otherwise, None where a chain reaches out of it."""
    at: dict[int, Step] = {}
    covered: set[int] = set()
    for chain, own in found:
        if chain.note or not set(order) & set(own):
            continue
        if not set(order).issuperset(own):
            return None
        at[own[-1]] = chain
        covered.update(own)
    return tuple(at[index] if index in at else finder.calls[index] for index in order if index in at or index not in covered)
