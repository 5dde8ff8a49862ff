"""A network without what it draws: dropout and random numbers give their means, so that two runs of it can be compared."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zoo.kernels.training.record import name_of

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p")
"""Arguments of PyTorch's attention, of which Python can't ask the signature."""


class Undrawn(TorchFunctionMode):
    """Makes drawing functions give their mean: rounding is compared, not luck; and nobody's random numbers are used up."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func) if kwargs.get("generator") is None else ""  # the check's own draws have one
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if "attention" in name:
            args, kwargs = _attending(func, name, args, kwargs)
        elif name in RECURRENT:  # of their arguments only the dropout is a float
            args = tuple(0.0 if isinstance(one, float) else one for one in args)
        if name == "bernoulli_":
            return args[0].fill_(1)
        if name in ("uniform_", "normal_", "random_", "exponential_"):
            return args[0].fill_(0.5)
        if name in ("rand", "randn", "rand_like", "randn_like", "bernoulli"):
            return (
                torch.full_like(args[0], 0.5)
                if isinstance(args[0], Tensor)
                else torch.full(args if isinstance(args[0], int) else args[0], 0.5)
            )
        return func(*args, **kwargs)


def _attending(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of attention that drops nothing: what is drawn inside of it no mode sees."""
    if "dropout_p" in kwargs:
        return args, {**kwargs, "dropout_p": 0.0}
    schema = getattr(func, "_schema", None)
    if schema is not None:
        names = [argument.name for argument in schema.arguments]
    elif name == "scaled_dot_product_attention":
        names = [*ATTENTION]
    else:
        names = list(inspect.signature(func).parameters) if inspect.isfunction(func) else []
    at = names.index("dropout_p") if "dropout_p" in names else len(args)
    return tuple(0.0 if index == at else one for index, one in enumerate(args)), dict(kwargs)
