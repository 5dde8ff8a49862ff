"""Find, among the calls that PyTorch's compiler is given, what kernels go back through: sums, layer norms, GELU, SwiGLU, response norms.

The calls of a stretch come back with some of them put together: ``x + branch`` and ``layer_norm`` are one, with the layer scale and
stochastic depth of that branch; ``gelu`` behind a product takes its bias's gradient, and so do ``silu(gate) * value`` behind one product
or two, and a sum of a product that it adds; GELU, a response norm and the product behind it are one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from zoo.kernels.activations import QUICK
from zoo.kernels.training import kernels
from zoo.kernels.training.calls import DROPOUT, arguments, hanging_on, plainly, readers_of
from zoo.kernels.training.record import Call, Recording, Ref
from zoo.kernels.training.response_norms import LENGTHS, response_norm

_ADD = {"add", "__add__", "__radd__"}
_MUL = {"mul", "__mul__", "__rmul__", "multiply"}
_MOVES = {
    "reshape", "view", "permute", "transpose", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "swapaxes", "movedim", "t",
    "view_as", "roll", "pad", "chunk", "split", "unbind", "__getitem__", "select", "narrow",
}  # fmt: skip
"""Calls that move numbers and compute nothing."""
_SHAPES = {"reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous"}
"""Those that leave the numbers in their order."""
_SWAPS = {"transpose", "swapaxes"}
_ROUNDING = {"linear", "multi_head_attention_forward", "conv2d"}
"""Calls that round their maps for autocast anyway."""
_LAYER_NORM = {"input": None, "normalized_shape": None, "weight": None, "bias": None, "eps": 1e-5}
_LINEAR = {"input": None, "weight": None, "bias": None}
_GELU = {"input": None, "approximate": "none"}
_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
_OUT_BIAS = 12
"""Where `multi_head_attention_forward` takes its last product's bias."""


def fused(recording: Recording, calls: Sequence[Call], wanted: Sequence[int]) -> list[Call]:
    """Return the calls with those put together whose way back kernels take.

    Args:
        recording: whose calls they are.
        calls: a stretch of it.
        wanted: values that are read behind it.
    """
    return _Streams(recording, calls, wanted).calls()


class _Streams:
    def __init__(self, recording: Recording, calls: Sequence[Call], wanted: Sequence[int]) -> None:
        self.values, self.given, self.wanted = recording.values, list(calls), set(wanted)
        self.drawn = hanging_on(recording.values, recording.calls)
        self.makers = {number: index for index, call in enumerate(calls) for number in call.makes}
        self.readers = readers_of(calls)
        self.written = {memory for call in calls for memory in call.writes}
        self.free = 1 + max([len(self.values), *(number for call in calls for number in call.makes)])
        self.instead: dict[int, Call | None] = {}
        """Calls by the place that they take; None where a call is left out."""
        self.later: list[tuple[int, int, int]] = []
        """(place, old, new): calls behind the place read the new value and not the old one."""

    def calls(self) -> list[Call]:
        for index, call in enumerate(self.given):
            if call.name == "layer_norm":
                self._norm(index, call)
        for index, call in enumerate(self.given):
            if call.name in LENGTHS:
                self._response(index)
        for index, call in enumerate(self.given):
            if index in self.instead:
                continue
            if call.name == "gelu":
                self._gelu(index, call)
            elif call.name in _MUL:
                self._quick_gelu(index, call)
                if index not in self.instead:
                    self._swiglu(index, call)
        made: list[Call] = []
        for index in range(len(self.given)):
            call = self.instead.get(index, self.given[index])
            if call is not None:
                renamed = {old: new for place, old, new in self.later if place < index}
                made.append(_reading(call, renamed) if renamed else call)
        return made

    def _norm(self, index: int, call: Call) -> None:
        given = arguments(call, _LAYER_NORM) if plainly(call) and not call.writes else None
        if given is None or not all(isinstance(given[name], Ref) for name in ("input", "weight", "bias")):
            return
        total, weight, shift = (int(given[name]) for name in ("input", "weight", "bias"))
        shape = self.values[total].shape
        affine = [self.values[number] for number in (weight, shift)]
        if tuple(given["normalized_shape"]) != shape[-1:] or any(v.dtype != torch.float32 or v.shape != shape[-1:] for v in affine):
            return
        if len(shape) < 2 or self.values[total].memory in self.written:
            return
        makes = int(call.result)
        how = {"eps": float(given["eps"]), "dtype": self._dtype(makes)}
        place = self.makers.get(total)
        there = all(v.place is not None and v.memory not in self.written for v in affine)  # not made only behind the sum
        sum_of = self._sum(place) if there and place is not None and place not in self.instead else None
        if sum_of is None or place is None:
            stream, self.free = self.free, self.free + 1
            reads = (total, None, None, None, None, weight, shift)
            self.instead[index] = _call(call, partial(kernels.add_layer_norm, **how), reads, (stream, makes))
            self.later.append((index, total, stream))
            return
        x, branch, bias, scale, share = sum_of
        self.instead[place] = _call(
            call, partial(kernels.add_layer_norm, **how), (x, branch, bias, scale, share, weight, shift), (total, makes)
        )
        self.instead[index] = None

    def _sum(self, place: int) -> tuple[int, int, int | None, int | None, int | None] | None:
        """Return the stream, the branch that is added to it, a bias in that branch, its layer scale and its share of images."""
        call = self.given[place]
        numbers = self._two(call, _ADD)
        if numbers is None or call.writes or any(self.values[n].memory in self.written for n in numbers):
            return None
        if self.values[numbers[0]].shape != self.values[numbers[1]].shape:
            return None
        found = [(*self._scaled(branch), x) for branch, x in (numbers, numbers[::-1])]
        branch, scale, share, muls, bias, x = max(found, key=lambda one: (one[4] is not None, len(one[3]), self._is_half(one[0])))
        for index in muls:
            self.instead[index] = None
        if bias is not None:
            self._without_bias(bias)
        return x, branch, None if bias is None else self._bias_of(bias), scale, share

    def _is_half(self, number: int) -> bool:
        return self.values[number].dtype in kernels.HALF

    def _two(self, call: Call, names: set[str]) -> tuple[int, int] | None:
        """Return the values of a call of two tensors and nothing else."""
        if call.name not in names or not plainly(call) or len(call.args) != 2 or call.kwargs:
            return None
        if not all(isinstance(arg, Ref) for arg in call.args) or call.args[0] == call.args[1]:
            return None
        return int(call.args[0]), int(call.args[1])

    def _scaled(self, branch: int) -> tuple[int, int | None, int | None, tuple[int, ...], int | None]:
        """Return what a branch was before it was scaled, its scale and share, the products' places, and the product with a bias in it."""
        scale = share = None
        muls: list[int] = []
        shape = self.values[branch].shape
        while (index := self._alone(branch)) is not None:
            numbers = None if self.given[index].writes else self._two(self.given[index], _MUL)
            for factor, rest in () if numbers is None else (numbers, numbers[::-1]):
                if self.values[rest].shape != shape or any(self.values[number].memory in self.written for number in numbers or ()):
                    continue
                if scale is None and self._is_scale(factor, shape):
                    scale, branch = factor, rest
                    break
                if scale is None and share is None and self._is_share(factor, shape):  # a share behind a scale only, as networks have it
                    share, branch = factor, rest
                    break
            else:
                break
            muls.append(index)
        return branch, scale, share, tuple(muls), self._biased(branch)

    def _is_scale(self, number: int, shape: tuple[int, ...]) -> bool:
        value = self.values[number]
        return value.place is not None and value.dtype == torch.float32 and value.shape == shape[-1:]

    def _is_share(self, number: int, shape: tuple[int, ...]) -> bool:
        """Tell whether a value is a number for each image that was drawn before the stretch: nobody asks a gradient of that."""
        value = self.values[number]
        return number not in self.makers and value.shape == (shape[0], *(1 for _ in shape[1:])) != shape and number in self.drawn

    def _alone(self, number: int, readers: int = 1) -> int | None:
        """Return the place of the call that makes a value, which so many calls of the stretch read, and nobody writes to."""
        index = self.makers.get(number)
        if index is None or index in self.instead or number in self.wanted or len(self.readers.get(number, ())) != readers:
            return None
        return None if self.values[number].memory in self.written or self.given[index].makes != (number,) else index

    def _biased(self, number: int) -> int | None:
        """Return the place of the product with a bias that a value is, whatever way its numbers were moved; None if it is none."""
        c = self.values[number].shape[-1]
        while (index := self.makers.get(number)) is not None and index not in self.instead:
            call = self.given[index]
            if len(self.readers.get(number, ())) != 1 or number in self.wanted or not plainly(call) or call.writes:
                return None
            if call.name == "linear":
                given = arguments(call, _LINEAR)
                whole = given is not None and isinstance(given["bias"], Ref) and self._is_bias(int(given["bias"]), c)
                return index if whole else None
            if call.name == "multi_head_attention_forward":
                held = call.args[_OUT_BIAS] if len(call.args) > _OUT_BIAS else None
                first = isinstance(call.result, (tuple, list)) and call.result[0] == number
                return index if first and isinstance(held, Ref) and self._is_bias(int(held), c) else None
            idle = call.name == "dropout" and self._is_idle(index)
            if not (idle or self._keeps_channels(call)) or len(call.reads) != 1 or self.values[call.reads[0]].shape[-1] != c:
                return None
            number = call.reads[0]
        return None

    def _keeps_channels(self, call: Call) -> bool:
        """Tell whether a call moves tokens about and leaves the channels of each where they are."""
        if call.kwargs or any(isinstance(arg, torch.dtype) for arg in call.args):
            return False
        last = len(self.values[call.reads[0]].shape) - 1
        if call.name in _SWAPS:
            return all(isinstance(axis, int) and axis not in (last, -1) for axis in call.args[1:])
        if call.name == "permute":
            axes = call.args[1] if len(call.args) == 2 else call.args[1:]
            return axes[-1] in (last, -1)
        return call.name in _SHAPES

    def _is_bias(self, number: int, channels: int) -> bool:
        value = self.values[number]
        return value.place is not None and value.shape == (channels,)

    def _bias_of(self, index: int) -> int:
        call = self.given[index]
        if call.name == "linear":
            given = arguments(call, _LINEAR)
            assert given is not None
            return int(given["bias"])
        return int(call.args[_OUT_BIAS])

    def _without_bias(self, index: int) -> None:
        """Let a product's bias have no gradient there."""
        call = self.given[index]
        if call.name == "linear":
            given = arguments(call, _LINEAR)
            assert given is not None
            reads = tuple(given[name] for name in ("input", "weight", "bias"))
            self.instead[index] = replace(call, func=_linear, args=reads, kwargs={})
        else:
            self.instead[index] = replace(call, func=partial(_attention, call.func))

    def _gelu(self, index: int, call: Call) -> None:
        given = arguments(call, _GELU) if plainly(call) and not call.writes else None
        act = None if given is None else _GELUS.get(given["approximate"])
        if given is not None and act is not None and isinstance(given["input"], Ref):
            self._activation(index, int(given["input"]), act, [])

    def _response(self, index: int) -> None:
        """Take GELU of a product with a bias, its response normalisation, and the product behind that."""
        found = response_norm(self.values, self.given, self.readers, self.wanted, self.written, index)
        if found is None or any(place in self.instead for place in found.places):
            return
        number, gone = found.y, [*found.places]
        while (place := self.makers.get(number)) is not None and self.given[place].name == "dropout" and self._is_idle(place):
            gone.append(place)
            number = self.given[place].reads[0]
            if self._alone(number) is None:
                return
        call = self.given[place] if place is not None and place not in self.instead else None
        given = arguments(call, _GELU) if call is not None and call.name == "gelu" and plainly(call) and not call.writes else None
        act = None if given is None else _GELUS.get(given["approximate"])
        if place is None or given is None or act is None or not isinstance(given["input"], Ref):
            return
        before = int(given["input"])
        product = self._alone(before)
        if product is None or not self._is_biased_linear(product):
            return
        bias = self._bias_of(product)
        args = (Ref(before), Ref(bias), Ref(found.scale), Ref(found.offset))
        run = partial(kernels.response_linear, eps=found.eps, act=act)
        if self._linear_behind(found.places[-1], before, run, args):
            self._without_bias(product)
            self.instead |= dict.fromkeys([*gone, place])

    def _hidden(self, number: int) -> bool:
        return number not in self.wanted and self.values[number].memory not in self.written

    def _is_idle(self, place: int) -> bool:
        """Tell whether a dropout drops nothing."""
        call = self.given[place]
        given = arguments(call, DROPOUT) if plainly(call) and not call.writes else None
        return given is not None and not (given["p"] and given["training"])

    def _quick_gelu(self, index: int, call: Call) -> None:
        """Take a product with a sigmoid of 1.702 times the same."""
        two = None if call.writes else self._two(call, _MUL)
        for before, share in () if two is None else (two, two[::-1]):
            place = self._alone(share)
            if place is None or self.given[place].name != "sigmoid" or not plainly(self.given[place]) or len(self.given[place].reads) != 1:
                continue
            inner = self._alone(self.given[place].reads[0])
            scaled = None if inner is None else self.given[inner]
            if inner is None or scaled is None or scaled.name not in _MUL or not plainly(scaled) or scaled.reads != (before,):
                continue
            if any(type(arg) is float and arg == QUICK for arg in scaled.args) and len(scaled.args) == 2 and not scaled.kwargs:
                self._activation(index, before, "quick_gelu", [place, inner])
                return

    def _activation(self, index: int, before: int, act: str, inner: list[int]) -> None:
        """Let a call be the activation of a product with a bias, which none but it and the `inner` calls of it read."""
        product = self._alone(before, 2 if inner else 1)
        if index in self.instead or len(self.values[before].shape) < 2 or product is None or self.given[product].name != "linear":
            return
        if not self._is_biased_linear(product):
            return
        bias = self._bias_of(product)
        self._without_bias(product)
        self.instead |= dict.fromkeys(inner)
        run = kernels.gelu if act == "gelu" else partial(kernels.gelu, act=act)
        args = Ref(before), Ref(bias)
        self.instead[index] = replace(self.given[index], func=run, args=args, kwargs={}, reads=(before, bias))
        self._linear_behind(index, before, partial(kernels.gelu_linear, act=act), args)

    def _swiglu(self, index: int, call: Call) -> None:
        """Take the product of one half's SiLU and another, of one product with a bias or of two."""
        two = None if call.writes else self._two(call, _MUL)
        for activated, value in () if two is None else (two, two[::-1]):
            place = self._alone(activated)
            silu = None if place is None else self.given[place]
            if place is None or silu is None or silu.name != "silu" or not plainly(silu) or len(silu.reads) != 1:
                continue
            gate = silu.reads[0]
            halves = [self.values[number] for number in (gate, value, int(call.result))]
            if len(halves[0].shape) < 2 or any((h.shape, h.dtype) != (halves[0].shape, halves[0].dtype) for h in halves):
                continue
            if (found := self._halves(gate, value, place, index)) is None:
                continue
            first, second, products, gone, last = found
            biases = [self._bias_of(product) for product in products]
            for product in products:
                self._without_bias(product)
            self.instead |= dict.fromkeys([place, *gone])
            args = (Ref(first), None if second is None else Ref(second), Ref(biases[0]), Ref(biases[1]) if len(biases) > 1 else None)
            reads = tuple(int(arg) for arg in args if arg is not None)
            self.instead[index] = replace(call, func=partial(kernels.glu, last=last), args=args, kwargs={}, reads=reads)
            self._linear_behind(index, first, partial(kernels.glu_linear, last=last), args)
            return

    def _halves(self, gate: int, value: int, silu: int, mul: int) -> tuple[int, int | None, list[int], list[int], bool] | None:
        """Return what gate and value come from, the places of the products and of what goes, and whether the gate is the last half."""
        split = self.makers.get(gate)
        one = None if split is None else self.given[split]
        if split is not None and one is not None and one.name in ("chunk", "split") and set(one.makes) == {gate, value} and plainly(one):
            packed, half = one.reads[0], self.values[gate].shape
            read_once = self.readers.get(gate) == [silu] and self.readers.get(value) == [mul] and not {gate, value} & self.wanted
            if not read_once or len(one.makes) != 2 or self.values[packed].shape != (*half[:-1], 2 * half[-1]):
                return None
            product = self._alone(packed)
            if split in self.instead or product is None or not self._is_biased_linear(product):
                return None
            return packed, None, [product], [split], one.makes[0] == value
        products = [self._alone(gate), self._alone(value)]
        apart = [product for product in products if product is not None and self._is_biased_linear(product)]
        return (gate, value, apart, [], False) if len(apart) == 2 else None

    def _is_biased_linear(self, place: int) -> bool:
        """Tell whether a call is a product with a bias that learns by itself."""
        call = self.given[place]
        given = arguments(call, _LINEAR) if call.name == "linear" and plainly(call) and not call.writes else None
        made = self.values[call.makes[0]].shape[-1]
        return given is not None and isinstance(given["bias"], Ref) and self._is_bias(int(given["bias"]), made)

    def _linear_behind(self, index: int, before: int, behind: Callable[..., Any], args: tuple[Ref | None, ...]) -> bool:
        """Let the one product that reads an activation be one call with it, so that what the activation makes needn't be kept.

        Args:
            index: the place of the activation.
            before: what it reads first, to whose dtype the product rounds.
            behind: computes both.
            args: what it takes of the activation.

        Returns:
            Whether there is such a product.
        """
        gone, number = [index], int(self.given[index].result)
        while True:
            readers = self.readers.get(number, [])
            if len(readers) != 1 or not self._hidden(number):
                return False
            place = readers[0]
            call = self.given[place]
            if call.name != "dropout" or not self._is_idle(place):
                break
            gone.append(place)
            number = int(call.result)
        given = arguments(call, _LINEAR) if call.name == "linear" and plainly(call) and not call.writes else None
        if given is None or given["input"] != number or not isinstance(given["weight"], Ref) or given["weight"] == number:
            return False
        if len(self.values[int(given["weight"])].shape) != 2:
            return False
        held = self.instead.get(place, call)
        weight, shift = (given["weight"], given["bias"])
        learns = held is call  # else whoever adds the product takes its bias's gradient
        if self.values[int(call.result)].memory in self.written:  # what a function of ours makes of more axes may not be written to
            return False
        if held is None or (not learns and held.func is not _linear) or self.values[int(call.result)].dtype != self.values[before].dtype:
            return False
        self.instead |= dict.fromkeys(gone)
        args = (*args, weight, shift)
        reads = tuple(int(part) for part in args if part is not None)
        self.instead[place] = replace(call, func=partial(behind, learns=learns), args=args, kwargs={}, reads=reads)
        return True

    def _dtype(self, number: int) -> torch.dtype:
        """Return the dtype that a norm's result may have: that to which its one reader rounds, else its own.

        Several readers' gradients are added, which half precision would round once more.
        """
        dtype, rounded = self.values[number].dtype, self._rounded(number)
        half = rounded[0] if len(rounded) == 1 else None
        return dtype if half is None or dtype != torch.float32 else half

    def _rounded(self, number: int) -> list[torch.dtype | None]:
        """Return the dtypes to which those that read a value round it, None for one that doesn't."""
        found: list[torch.dtype | None] = [None] if number in self.wanted or self.values[number].memory in self.written else []
        for index in self.readers.get(number, ()):
            call = self.given[index]
            if call.name in _MOVES and plainly(call) and call.reads[0] == number and len(call.reads) == 1:
                for made in call.makes:
                    found += self._rounded(made)
            elif call.name in _ROUNDING and plainly(call) and len(call.makes) == 1 and self._is_half(call.makes[0]):
                found.append(self.values[call.makes[0]].dtype)
            else:
                found.append(None)
        return found


def _call(like: Call, func: Callable[..., Any], reads: tuple[int | None, ...], makes: tuple[int, ...]) -> Call:
    """Return a call of a function of values, some of them left out, that makes a tuple."""
    args = tuple(None if number is None else Ref(number) for number in reads)
    return replace(
        like, func=func, args=args, kwargs={}, reads=tuple(n for n in reads if n is not None), makes=makes, result=tuple(map(Ref, makes))
    )


def _reading(call: Call, renamed: dict[int, int]) -> Call:
    """Return a call that reads other values."""
    if not renamed.keys() & set(call.reads):
        return call
    args, kwargs = pytree.tree_map(lambda leaf: Ref(renamed.get(leaf, leaf)) if isinstance(leaf, Ref) else leaf, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs, reads=tuple(renamed.get(n, n) for n in call.reads))


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A product whose bias's gradient somebody else takes."""
    return F.linear(x, weight, bias.detach())


def _attention(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Attention whose last product's bias's gradient somebody else takes."""
    return function(*args[:_OUT_BIAS], args[_OUT_BIAS].detach(), *args[_OUT_BIAS + 1 :], **kwargs)
