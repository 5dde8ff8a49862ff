"""How calls of PyTorch's functions are read: arguments by name, and what they mean to kernels."""

from __future__ import annotations

from typing import Any

from zoo.kernels.training.record import Call

BATCH_NORM = {
    "input": None, "running_mean": None, "running_var": None, "weight": None, "bias": None,
    "training": False, "momentum": 0.1, "eps": 1e-5,
}  # fmt: skip
SHARED_BATCH_NORM = {**BATCH_NORM, "training": True, "group": None}
CONV2D = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def arguments(call: Call, names: dict[str, Any]) -> dict[str, Any] | None:
    """Return a call's arguments by name, or None where it has others."""
    if len(call.args) > len(names) or not call.kwargs.keys() <= names.keys():
        return None
    return {**names, **dict(zip(names, call.args, strict=False)), **call.kwargs}


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


def plainly(call: Call) -> bool:
    """Tell whether a call is made under the caller's autograd and autocast."""
    return call.grad and call.autocast is None


def pair(value: Any) -> tuple[int, int]:
    """Return down and right of what is one number or two."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))
