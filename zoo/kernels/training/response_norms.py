"""Find global response normalisation among calls: seven of them, or six with `addcmul`, of which none but its result is read elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from zoo.kernels.training.calls import arguments, plainly
from zoo.kernels.training.record import Call, Ref, Value

LENGTHS = ("linalg_vector_norm", "norm")
"""Calls that begin one."""
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "linalg_vector_norm": {"input": None, "ord": 2, "dim": None, "keepdim": False, "dtype": None},
    "norm": {"input": None, "p": "fro", "dim": None, "keepdim": False, "out": None, "dtype": None},
}
_MEAN = {"input": None, "dim": None, "keepdim": False, "dtype": None}
_ADDCMUL = {"input": None, "tensor1": None, "tensor2": None, "value": 1}
_ADD, _MUL = {"add", "__add__", "__radd__"}, {"mul", "__mul__", "__rmul__", "multiply"}
_DIV = {"div", "__truediv__", "true_divide", "divide"}


@dataclass(frozen=True, slots=True)
class Response:
    """Calls that compute ``y + y * n * scale + offset``.

    Attributes:
        y: the value.
        scale: that of float32, a number for each channel.
        offset: likewise.
        eps: added to the mean norm.
        places: of the calls, in order; the last makes the result.
    """

    y: int
    scale: int
    offset: int
    eps: float
    places: tuple[int, ...]


def response_norm(
    values: Sequence[Value], calls: Sequence[Call], readers: Mapping[int, Sequence[int]], wanted: Set[int], written: Set[int], index: int
) -> Response | None:
    """Return the response normalisation that a call of a norm begins, None if it is none.

    Args:
        values: of the recording.
        calls: a stretch of it.
        readers: places of the calls that read a value.
        wanted: values that are read behind the calls.
        written: memories that calls write to.
        index: the place of the norm.
    """

    def hidden(number: int) -> bool:
        return number not in wanted and values[number].memory not in written

    def alone(number: int) -> int | None:
        return readers[number][0] if len(readers.get(number, ())) == 1 and hidden(number) else None

    def pair(place: int, names: set[str]) -> tuple[int, int] | None:
        call = calls[place]
        if call.name not in names or len(call.args) != 2 or call.kwargs or not all(isinstance(arg, Ref) for arg in call.args):
            return None
        return None if call.args[0] == call.args[1] else (int(call.args[0]), int(call.args[1]))

    def of_channels(number: int) -> bool:
        value = values[number]
        fits = value.dtype == torch.float32 and value.memory not in written and number not in inside
        return fits and value.shape[-1:] == shape[-1:] and set(value.shape[:-1]) <= {1} and len(value.shape) <= len(shape)

    y = _normed(values, calls[index])
    if y is None or not hidden(y) or len(readers[y]) != 3:  # the norm, the product and the last sum
        return None
    norm, shape = int(calls[index].result), values[y].shape
    two = [*readers.get(norm, ())]
    if len(two) != 2 or not hidden(norm):
        return None
    mean, ratio = sorted(two, key=lambda place: calls[place].name != "mean")
    level = alone(int(calls[mean].result)) if _is_mean(calls[mean], len(shape)) else None
    eps = None if level is None else _plus(calls[level])
    if level is None or eps is None or alone(int(calls[level].result)) != ratio:
        return None
    if pair(ratio, _DIV) != (norm, int(calls[level].result)) or (scaled := alone(int(calls[ratio].result))) is None:
        return None
    if sorted(pair(scaled, _MUL) or ()) != sorted((y, int(calls[ratio].result))):
        return None
    places, scale, offset, added = [index, mean, level, ratio, scaled], None, None, False
    while scale is None or offset is None or not added:
        number = int(calls[places[-1]].result)
        if (place := alone(number)) is None:
            return None
        places.append(place)
        given = arguments(calls[place], _ADDCMUL) if calls[place].name == "addcmul" else None
        if given is not None and scale is None and offset is None and not added:
            parts = [given[name] for name in ("input", "tensor1", "tensor2")]
            if given["value"] != 1 or not all(isinstance(part, Ref) for part in parts) or parts.count(number) != 1 or number == parts[0]:
                return None
            offset, scale = int(parts[0]), int(parts[2] if parts[1] == number else parts[1])
            continue
        factors, addends = pair(place, _MUL), pair(place, _ADD)
        if factors is not None and scale is None and offset is None and not added:
            scale = factors[factors[0] == number]
        elif addends is not None and scale is not None:
            other = addends[addends[0] == number]
            if other == y and not added:
                added = True
            elif other != y and offset is None:
                offset = other
            else:
                return None
        else:
            return None
    inside = {y, *(number for place in places for number in calls[place].makes)}
    fits = of_channels(scale) and of_channels(offset) and {*readers[y]} <= {*places}
    if not fits or any(not plainly(calls[place]) or calls[place].writes for place in places):
        return None
    return Response(y, scale, offset, eps, tuple(places))


def _normed(values: Sequence[Value], call: Call) -> int | None:
    """Return what a call takes the norm of each channel of, over all axes but the first and the last."""
    given = arguments(call, _ARGUMENTS[call.name]) if call.name in LENGTHS else None
    if given is None or not isinstance(given["input"], Ref) or given.get("out") is not None or given["dtype"] is not None:
        return None
    length = len(values[given["input"]].shape)
    dims = given["dim"] if isinstance(given["dim"], (tuple, list)) else (given["dim"],)
    over = {dim % length for dim in dims if isinstance(dim, int)}
    order = given.get("ord", given.get("p"))
    fits = length > 2 and order in (2, "fro") and given["keepdim"] is True and over == {*range(1, length - 1)} and len(dims) == len(over)
    return int(given["input"]) if fits and isinstance(call.result, Ref) else None


def _is_mean(call: Call, length: int) -> bool:
    """Tell whether a call is the mean over the channels."""
    given = arguments(call, _MEAN) if call.name == "mean" else None
    if given is None or given["keepdim"] is not True or given["dtype"] is not None:
        return False
    dims = given["dim"] if isinstance(given["dim"], (tuple, list)) else (given["dim"],)
    return tuple(dims) in ((-1,), (length - 1,))


def _plus(call: Call) -> float | None:
    """Return the number that a call adds to a value."""
    numbers = [arg for arg in call.args if isinstance(arg, (int, float)) and not isinstance(arg, (bool, Ref))]
    return float(numbers[0]) if call.name in _ADD and len(call.args) == 2 and len(numbers) == 1 and not call.kwargs else None
