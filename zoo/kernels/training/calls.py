"""What a recorded call says: its arguments by name, the activation that it computes, whether it is one that a kernel may stand for."""

from __future__ import annotations

from typing import Any

from zoo.kernels.training.record import Call

CONV2D = {"input": None, "weight": None, "bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
"""Arguments of `F.conv2d` and what they are if left out."""


def arguments(call: Call, names: dict[str, Any]) -> dict[str, Any] | None:
    """Return a call's arguments by name, or None where it has others."""
    if len(call.args) > len(names) or not call.kwargs.keys() <= names.keys():
        return None
    return {**names, **dict(zip(names, call.args, strict=False)), **call.kwargs}


def activation(call: Call) -> str | None:
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


def plain(call: Call) -> bool:
    """Tell whether a call runs under autograd and the caller's autocast."""
    return call.grad and call.autocast is None


def pair(value: Any) -> tuple[int, int]:
    """Return a size for both axes."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))
