"""`nn.RNN`, `nn.LSTM` and `nn.GRU` as one operator of the trace: taken apart they are hundreds, some of which write in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends import cudnn
from torch.backends.cudnn import rnn

_OF = {"lstm": torch.lstm, "gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu}


CUDNN_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Those of which cuDNN's recurrent layers take weights in one piece; PyTorch's `flatten_parameters` leaves bfloat16 out."""


@torch.library.custom_op("kernelzoo::recurrent", mutates_args=())
def recurrent(
    kind: str, x: Tensor, states: list[Tensor], weights: list[Tensor], biased: bool, layers: int, both_ways: bool, images_first: bool
) -> list[Tensor]:
    """Compute what `torch.lstm`, `torch.gru`, `torch.rnn_tanh` or `torch.rnn_relu` does without dropout.

    Args:
        kind: the name of that function.
        x: sequences (L, N, C), or (N, L, C) with `images_first`.
        states: the first hidden state (layers x directions, N, H), of an LSTM also its cells'.
        weights: of each layer and direction, as PyTorch's modules keep them.
        biased: whether there are biases among them.
        layers: how many there are.
        both_ways: whether each goes over a sequence from its end too.
        images_first: whether the first axis of `x` is the batch.

    Returns:
        The outputs, as `x` lies, and the last states.
    """
    first: Any = states if kind == "lstm" else states[0]
    if x.is_cuda:
        weights = _in_one_piece(kind, x, states, weights, biased, layers, both_ways, images_first)
    return [
        part.clone(memory_format=torch.contiguous_format)
        for part in _OF[kind](x, first, weights, biased, layers, 0.0, False, both_ways, images_first)
    ]


def _in_one_piece(
    kind: str, x: Tensor, states: list[Tensor], weights: list[Tensor], biased: bool, layers: int, both_ways: bool, images_first: bool
) -> list[Tensor]:
    """Return the weights in one piece of memory, as cuDNN wants them: it copies them itself otherwise, in every call, and warns of it."""
    apart = len({w.untyped_storage().data_ptr() for w in weights}) == len(weights)
    if not (apart and cudnn.enabled and cudnn.is_available()) or any(w.dtype != x.dtype or w.dtype not in CUDNN_TYPES for w in weights):
        return weights
    aliases = [weight.data for weight in weights]  # which are given other memory; the weights themselves stay where they are
    mode, hidden = rnn.get_cudnn_mode(kind.upper()), states[0].shape[-1]
    torch.ops.aten._cudnn_rnn_flatten_weight(aliases, 4 if biased else 2, x.shape[-1], mode, hidden, 0, layers, images_first, both_ways)
    return aliases


@recurrent.register_fake
def _(
    kind: str, x: Tensor, states: list[Tensor], weights: list[Tensor], biased: bool, layers: int, both_ways: bool, images_first: bool
) -> list[Tensor]:
    out = x.new_empty((*x.shape[:-1], states[0].shape[-1] * (2 if both_ways else 1)))
    return [out, *(torch.empty_like(state) for state in states)]


def _whole(kind: str) -> Callable[..., Any]:
    """Return what is called in a function's place; sequences of several lengths, packed, come with other arguments and stay as they are."""

    def call(*args: Any, **kwargs: Any) -> Any:
        plain = len(args) == _ARGUMENTS and not kwargs and isinstance(args[3], bool)
        if not plain or (args[6] and args[5]):
            return _OF[kind](*args, **kwargs)
        x, first, weights, biased, layers, _, _, both_ways, images_first = args
        states = list(first) if kind == "lstm" else [first]
        projected = kind == "lstm" and states[0].shape[-1] != states[1].shape[-1]
        if projected:
            return _OF[kind](*args)
        return tuple(recurrent(kind, x, states, list(weights), biased, layers, both_ways, images_first))

    return call


_ARGUMENTS = 9
INSTEAD: dict[Any, Any] = {function: _whole(kind) for kind, function in _OF.items()}
"""What a trace calls instead of PyTorch's functions."""
