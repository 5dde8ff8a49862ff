"""Find attention inside windows among the calls that PyTorch's compiler is given. Its bias learns, as in Swin.

Networks write it as products and a softmax, with maps of all pairs of a window's pixels between them. Here the calls from the queries,
keys and values to the tokens that the last product gets become one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from zoo.kernels.training import kernels
from zoo.kernels.training.calls import DROPOUT, arguments, hanging_on, plainly, readers_of
from zoo.kernels.training.record import Call, Recording, Ref

_SHAPES = {"reshape", "view", "flatten", "unflatten", "contiguous"}
"""Calls that leave the numbers in their order."""
_SOFTMAX = {"input": None, "dim": None, "_stacklevel": 3, "dtype": None}
_PRODUCTS = {"matmul", "__matmul__", "bmm"}
_FACTORS = {"mul", "__mul__", "__rmul__", "multiply"}
_SUMS = {"add", "__add__", "__radd__"}
_EACH = ("query", "key", "value")


def attended(recording: Recording, calls: Sequence[Call], wanted: Sequence[int]) -> list[Call]:
    """Return the calls with those of attention in windows put together.

    Args:
        recording: whose calls they are.
        calls: a stretch of it.
        wanted: values that are read behind it.
    """
    return _Windows(recording, calls, wanted).calls()


@dataclass(slots=True)
class _Found:
    """What goes into attention, and the places of the calls between."""

    tokens: int
    heads: int
    factor: float
    bias: int | None
    mask: int | None
    windows: int
    inner: set[int]


class _Windows:
    def __init__(self, recording: Recording, calls: Sequence[Call], wanted: Sequence[int]) -> None:
        self.recording, self.values, self.given, self.wanted = recording, recording.values, list(calls), set(wanted)
        self.makers = {number: index for index, call in enumerate(calls) for number in call.makes}
        self.readers = readers_of(calls)
        self.written = {memory for call in calls for memory in call.writes}
        self.ever_written = {memory for call in recording.calls for memory in call.writes}
        buffers = [v.number for v in self.values if v.place in recording.buffers or v.constant is not None]
        self.still = hanging_on(self.values, recording.calls, buffers)
        """Values of which nobody asks a gradient."""

    def calls(self) -> list[Call]:
        instead: dict[int, Call] = {}
        inner: set[int] = set()
        for index, call in enumerate(self.given):
            if call.name == "softmax" and (made := self._attention(index)) is not None:
                place, found = made
                reads = (found.tokens, *(n for n in (found.bias, found.mask) if n is not None))
                args = (Ref(found.tokens), *(None if n is None else Ref(n) for n in (found.bias, found.mask)))
                run = partial(_reshaped, heads=found.heads, factor=found.factor, shapes=self._shapes(found))
                instead[place] = replace(self.given[place], func=run, args=args, kwargs={}, reads=reads)
                inner |= found.inner
        needed = set(self.wanted)
        kept: list[Call] = []
        for index in reversed(range(len(self.given))):
            call = instead.get(index, self.given[index])
            if index in inner and not needed & set(call.makes):
                continue
            kept.append(call)
            needed |= set(call.reads)
        return kept[::-1]

    def _shapes(self, found: _Found) -> tuple[tuple[int, ...], tuple[int, ...]]:
        t = self.values[found.tokens].shape[1]
        return (found.heads, t, t), (found.windows, t, t)

    def _attention(self, index: int) -> tuple[int, _Found] | None:
        """Return the place of the call that makes attention's result as tokens, and what goes into it."""
        call = self.given[index]
        given = arguments(call, _SOFTMAX) if plainly(call) and not call.writes else None
        if given is None or not isinstance(given["input"], Ref) or not isinstance(call.result, Ref):
            return None
        third = given["_stacklevel"]  # the third argument is the dtype of `torch.softmax`, and not of `functional.softmax`
        if not {given["dtype"], third if isinstance(third, torch.dtype) else None} <= {None, torch.float32}:
            return None
        logits = int(given["input"])
        shape = self.values[logits].shape
        if len(shape) != 4 or given["dim"] not in (-1, 3) or shape[2] != shape[3]:
            return None
        found = self._logits(logits, shape)
        behind = self._behind(index)
        if found is None or behind is None:
            return None
        place, values, inner = behind
        inner |= {index, *found.inner}
        tokens, made = self.values[found.tokens], self.values[int(self.given[place].result)]
        of_values = self._part(values)
        if of_values is None or of_values[:2] != (found.tokens, "value"):
            return None
        inner |= of_values[2]
        if tokens.dtype not in kernels.HALF or made.dtype != tokens.dtype:
            return None
        if made.shape != (shape[0], shape[2], tokens.shape[2] // 3):
            return None
        passed = [n for i in inner for n in self.given[i].makes]
        if any(self.values[n].memory in self.written for n in (*passed, found.tokens)):
            return None
        added = [n for n in (found.bias, found.mask) if n is not None]  # which are kept, and PyTorch's sums keep neither
        if any(self.values[n].memory in self.ever_written for n in added) or (found.mask is not None and found.mask not in self.still):
            return None
        device, like = self.recording.device, kernels.stand_in(tokens.shape, tokens.dtype)
        if kernels.window_attention_refuses(device, like, found.heads, found.windows):
            return None
        found.inner = inner - {place}
        return place, found

    def _behind(self, index: int) -> tuple[int, int, set[int]] | None:
        """Follow shares to the product with the values, and that to where its heads lie beside each other."""
        inner: set[int] = set()
        number = int(self.given[index].result)
        while True:
            if (place := self._reader(number)) is None:
                return None
            call = self.given[place]
            given = arguments(call, DROPOUT) if call.name == "dropout" else None
            rounds = call.name == "to" and len(call.reads) == 1  # as the product does
            if not rounds and (given is None or (given["p"] and given["training"])):
                break
            inner.add(place)
            number = int(call.result)
        if call.name not in _PRODUCTS or len(call.args) != 2 or call.args[0] != number or not isinstance(call.args[1], Ref):
            return None
        values = int(call.args[1])
        inner.add(place)
        heads = self._reader(int(call.result))
        if heads is None or not self._exchanges(self.given[heads], 1, 2):
            return None
        inner.add(heads)
        place = self._reader(int(self.given[heads].result))
        if place is None or self.given[place].name not in _SHAPES:
            return None
        return place, values, inner | {place}

    def _reader(self, number: int) -> int | None:
        """Return the place of the one call that reads a value, if it makes one value plainly and writes nothing."""
        readers = self.readers.get(number, [])
        if len(readers) != 1 or number in self.wanted:
            return None
        return readers[0] if self._is_plain(readers[0]) else None

    def _is_plain(self, place: int) -> bool:
        call = self.given[place]
        return plainly(call) and not call.writes and isinstance(call.result, Ref)

    def _maker(self, number: int, alone: bool = True) -> int | None:
        """Return the place of the call that makes a value, which nobody else reads if it is `alone`."""
        place = self.makers.get(number)
        if place is None or not plainly(self.given[place]) or self.given[place].writes:
            return None
        return None if alone and (number in self.wanted or len(self.readers.get(number, ())) != 1) else place

    def _exchanges(self, call: Call, one: int, other: int) -> bool:
        """Tell whether a call exchanges two axes of a tensor of four."""
        if call.name == "permute":
            axes = call.args[1] if len(call.args) == 2 else call.args[1:]
            order = list(range(4))
            order[one], order[other] = other, one
            return isinstance(axes, (tuple, list)) and [a % 4 for a in axes if isinstance(a, int)] == order
        axes = call.args[1:]
        return call.name in ("transpose", "swapaxes") and sorted(a % 4 for a in axes if isinstance(a, int)) == [one, other]

    def _logits(self, number: int, shape: tuple[int, ...]) -> _Found | None:
        """Follow logits (windows, heads, T, T) back through their sums to the product of queries and keys."""
        bias = mask = None
        windows, factor, summed = 1, 1.0, True
        inner: set[int] = set()
        while (place := self._maker(number)) is not None:
            call = self.given[place]
            inner.add(place)
            if call.name in _SHAPES and len(call.reads) == 1:
                number = call.reads[0]
                inside = self.values[number].shape
                if inside != shape and (len(inside) != 5 or inside[2:] != shape[1:]):
                    return None
            elif call.name in _SUMS and summed and (two := self._two(call)) is not None:
                here = self.values[number].shape
                rest = [(a, b) for a, b in (two, two[::-1]) if self.values[a].shape == here and self.values[b].shape != here]
                if len(rest) != 1 or self.values[rest[0][1]].shape[-2:] != shape[2:]:
                    return None
                number, other = rest[0]
                between = (1,) * (len(here) - len(self.values[other].shape)) + self.values[other].shape[:-2]
                if len(here) == 4 and between == (1, shape[1]) and bias is None:
                    bias = other
                elif len(here) == 5 and between == (1, here[1], 1) and mask is None:
                    mask, windows = other, here[1]
                else:
                    return None
            elif call.name in _FACTORS and (scaled := self._scaled(call)) is not None:
                number, times = scaled
                factor, summed = factor * times, False  # what were added before would be scaled too
            elif call.name in _PRODUCTS and (two := self._two(call)) is not None:
                return self._product(two, shape, factor, bias, mask, windows, inner)
            else:
                return None
        return None

    def _product(
        self, two: tuple[int, int], shape: tuple[int, ...], factor: float, bias: int | None, mask: int | None, windows: int, inner: set[int]
    ) -> _Found | None:
        queries, keys = two
        while (place := self._maker(queries)) is not None and self.given[place].name in _FACTORS:
            scaled = self._scaled(self.given[place])
            if scaled is None:
                return None
            queries, factor = scaled[0], factor * scaled[1]
            inner.add(place)
        place = self._maker(keys)
        if place is None or not self._exchanges(self.given[place], 2, 3):
            return None
        inner.add(place)
        of_queries, of_keys = self._part(queries), self._part(self.given[place].reads[0])
        if of_queries is None or of_keys is None or of_queries[1] != "query" or of_keys[:2] != (of_queries[0], "key"):
            return None
        return _Found(of_queries[0], shape[1], factor, bias, mask, windows, inner | of_queries[2] | of_keys[2])

    def _two(self, call: Call) -> tuple[int, int] | None:
        """Return the values of a call of two tensors and nothing else."""
        if len(call.args) != 2 or call.kwargs or call.args[0] == call.args[1] or not all(isinstance(arg, Ref) for arg in call.args):
            return None
        return int(call.args[0]), int(call.args[1])

    def _scaled(self, call: Call) -> tuple[int, float] | None:
        """Return the value and the number of a product of these."""
        if len(call.args) != 2 or call.kwargs:
            return None
        for value, number in (call.args, call.args[::-1]):
            if isinstance(value, Ref) and isinstance(number, (int, float)) and not isinstance(number, (bool, Ref)):
                return int(value), float(number)
        return None

    def _part(self, number: int) -> tuple[int, str, set[int]] | None:
        """Return the tokens (windows, T, 3 C) that queries, keys or values (windows, heads, T, E) were taken out of.

        Also returned are which of these they are, and the places of the calls between.
        """
        place = self._maker(number)
        if place is None:
            return None
        call = self.given[place]
        if call.name == "unbind":
            first = (call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)) == 0
            which = list(call.makes).index(number) if first and isinstance(call.result, (tuple, list)) else None
        elif call.name in ("__getitem__", "select"):
            where = call.args[1:] if call.name == "__getitem__" else call.args[2:] if call.args[1:2] == (0,) else ()
            which = where[0] if len(where) == 1 and type(where[0]) is int else None
        else:
            return None
        together = self._maker(call.reads[0], alone=False)
        if which is None or not -3 <= which < 3 or together is None or self.given[together].name != "permute":
            return None
        axes: Any = self.given[together].args[1:]
        axes = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        apart = self._maker(self.given[together].reads[0], alone=False)
        if tuple(axes) != (2, 0, 3, 1, 4) or apart is None or self.given[apart].name not in _SHAPES or len(self.given[apart].reads) != 1:
            return None
        tokens = self.given[apart].reads[0]
        (count, t, three, heads, each), whole = self.values[self.given[apart].makes[0]].shape, self.values[tokens].shape
        if three != 3 or whole != (count, t, 3 * heads * each):
            return None
        return tokens, _EACH[which], {place, together, apart}


def _reshaped(tokens: Any, bias: Any, mask: Any, *, heads: int, factor: float, shapes: tuple[tuple[int, ...], ...]) -> Any:
    """Attend. The bias has the shape (heads, T, T), the mask (windows, T, T)."""
    bias, mask = (None if t is None else t.reshape(shape) for t, shape in zip((bias, mask), shapes, strict=True))
    return kernels.window_attention(tokens, bias, mask, heads=heads, factor=factor)
