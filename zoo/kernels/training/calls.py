"""How calls of PyTorch's functions are read: arguments by name, and what they mean to kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zoo.kernels.training.record import Call, Ref, Value

BATCH_NORM = {
    "input": None, "running_mean": None, "running_var": None, "weight": None, "bias": None,
    "training": False, "momentum": 0.1, "eps": 1e-5,
}  # fmt: skip
SHARED_BATCH_NORM = {**BATCH_NORM, "training": True, "group": None}
NORMS = {"batch_norm": BATCH_NORM, "shared_batch_norm": SHARED_BATCH_NORM}
DROPOUT = {"input": None, "p": 0.5, "training": True, "inplace": False}
NEW = {"new_empty", "new_zeros", "new_ones"}
"""Calls that read of a tensor no more than its dtype and device."""
CONV2D = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def arguments(call: Call, names: dict[str, Any]) -> dict[str, Any] | None:
    """Return a call's arguments by name, or None where it has others."""
    if len(call.args) > len(names) or not call.kwargs.keys() <= names.keys():
        return None
    return {**names, **dict(zip(names, call.args, strict=False)), **call.kwargs}


@dataclass(frozen=True, slots=True)
class Convolution:
    """A call of `conv2d`: the values that it reads and makes, and its window, down and right."""

    x: int
    weight: int
    bias: int | None
    makes: int
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def convolution_of(values: Sequence[Value], call: Call) -> Convolution | None:
    """Read a convolution of maps, padded by numbers, that is made plainly; None of another call."""
    given = arguments(call, CONV2D) if call.name == "conv2d" and plainly(call) else None
    if given is None or isinstance(given["padding"], str):
        return None
    x, weight, bias = (given[name] for name in ("input", "weight", "bias"))
    if not all(isinstance(part, Ref) for part in (x, weight, call.result)) or len(values[x].shape) != 4:
        return None
    if bias is not None and not isinstance(bias, Ref):
        return None
    stride, padding, dilation = (pair(given[name]) for name in ("stride", "padding", "dilation"))
    tensors = int(x), int(weight), None if bias is None else int(bias), int(call.result)
    return Convolution(*tensors, stride, padding, dilation, given["groups"])


@dataclass(frozen=True, slots=True)
class Norm:
    """A call of a BatchNorm with all its tensors: map, weight, bias, running mean and variance; and its `momentum`, `eps` and `group`."""

    reads: tuple[int, ...]
    options: dict[str, Any]
    training: bool
    shared: bool


def norm_of(values: Sequence[Value], call: Call) -> Norm | None:
    """Read a BatchNorm of maps, with a weight, a bias and statistics, that is made plainly; None of another call."""
    names = NORMS.get(call.name)
    given = arguments(call, names) if names is not None and plainly(call) else None
    if given is None or not isinstance(given["momentum"], float):
        return None
    reads = tuple(given[name] for name in ("input", "weight", "bias", "running_mean", "running_var"))
    if not all(isinstance(part, Ref) for part in reads) or len(values[reads[0]].shape) != 4:
        return None
    options = {"momentum": given["momentum"], "eps": given["eps"], "group": given.get("group")}
    return Norm(tuple(map(int, reads)), options, given["training"], names is SHARED_BATCH_NORM)


def activation_of(call: Call) -> str | None:
    """Return the name of the activation that a call computes, None where it is none that kernels know."""
    name = call.name.removesuffix("_")
    if name in ("relu", "relu6", "hardswish", "silu", "hardsigmoid"):
        return name
    if name == "hardtanh":
        given = arguments(call, {"input": None, "min_val": -1.0, "max_val": 1.0, "inplace": False})
        return "relu6" if given is not None and (given["min_val"], given["max_val"]) == (0, 6) else None
    if name == "leaky_relu":
        given = arguments(call, {"input": None, "negative_slope": 0.01, "inplace": False})
        return None if given is None else f"leaky_relu_{given['negative_slope']:g}"
    return None


def hanging_on(values: Sequence[Value], calls: Sequence[Call], given: Iterable[int] = ()) -> set[int]:
    """Return the values that hang on nothing but the `given` ones, random numbers, shapes and dtypes.

    What lies in memory that a call fills with something else is none of them, whenever it does.
    """
    filled: set[int] = set()
    while True:
        found = {number for number in given if values[number].memory not in filled}
        before = len(filled)
        for call in calls:
            alone = not call.kwargs.get("requires_grad") and (call.name in NEW or all(number in found for number in call.reads))
            if alone:
                found |= {number for number in call.makes if values[number].memory not in filled}
            else:
                filled |= call.writes
        if len(filled) == before:
            return found


def readers_of(calls: Sequence[Call]) -> dict[int, list[int]]:
    """Return the places of the calls that read each value, in their order; one that reads it twice stands there once."""
    found: dict[int, list[int]] = {}
    for index, call in enumerate(calls):
        for number in dict.fromkeys(call.reads):
            found.setdefault(number, []).append(index)
    return found


def plainly(call: Call) -> bool:
    """Tell whether a call is made under the caller's autograd and autocast."""
    return call.grad and call.autocast is None


def pair(value: Any) -> tuple[int, int]:
    """Return down and right of what is one number or two."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))
