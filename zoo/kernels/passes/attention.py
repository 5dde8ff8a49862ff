"""Attention as one operator of the trace: PyTorch would take it apart into products and a softmax before anybody could see it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from zoo.kernels.passes import recurrent

_pytorchs = torch.ops.aten.scaled_dot_product_attention.default


@torch.library.custom_op("kernelzoo::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` without dropout, by whichever kernel PyTorch has for the device.

    The result lies in memory as that kernel leaves it: on a GPU mostly (N, L, heads, E), so that heads come together for nothing.
    """
    return _pytorchs(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped)


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool) -> Tensor:
    return _pytorchs(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped)


class Whole(TorchFunctionMode):
    """Calls `attention` and `recurrent` where a network asks for PyTorch's; what drops something is left as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


def _called(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p > 0:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def _several_heads() -> Any:
    """Return what `torch.nn.MultiheadAttention` calls, calling `_called`: inside of what a mode was asked for it is not asked again."""
    theirs: Any = F.multi_head_attention_forward
    ours = FunctionType(theirs.__code__, {**vars(F), "scaled_dot_product_attention": _called}, argdefs=theirs.__defaults__)
    ours.__kwdefaults__ = theirs.__kwdefaults__
    return ours


_general = _several_heads()
_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_ABSENT = ("bias_k", "bias_v", "static_k", "static_v", "key_padding_mask", "attn_mask")
_OFF = ("add_zero_attn", "need_weights", "use_separate_proj_weight", "is_causal")


def of_itself(attend: Callable[[Tensor, Tensor, Tensor], Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, None] | None:
    """Compute what `torch.nn.MultiheadAttention` does of one sequence (L, N, E) for each image: with images first, nothing is moved.

    Args:
        attend: computes attention of queries, keys and values (N, heads, L, E / heads).
        args: of `torch.nn.functional.multi_head_attention_forward`.
        kwargs: likewise.

    Returns:
        What that returns, (L, N, E) and no weights; None where something else is asked for.
    """
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    a = given.arguments
    x, heads, weight = a["query"], a["num_heads"], a["in_proj_weight"]
    plain = x is a["key"] and x is a["value"] and x.dim() == 3 and not (a["training"] and a["dropout_p"])
    usual = all(a[name] is None for name in _ABSENT) and not any(a[name] for name in _OFF)
    if not (plain and usual and weight is not None and x.shape[2] == a["embed_dim_to_check"] and x.shape[2] % heads == 0):
        return None
    x = x.transpose(0, 1)
    n, length, channels = x.shape
    parts = F.linear(x, weight, a["in_proj_bias"]).view(n, length, 3, heads, channels // heads).permute(2, 0, 3, 1, 4)
    y = attend(*parts.unbind(0)).transpose(1, 2).reshape(n, length, channels)
    return F.linear(y, a["out_proj_weight"], a["out_proj_bias"]).transpose(0, 1), None


def _heads(*args: Any, **kwargs: Any) -> Any:
    return of_itself(lambda q, k, v: attention(q, k, v, None, False, None, False), *args, **kwargs) or _general(*args, **kwargs)


_INSTEAD: dict[Any, Any] = {F.scaled_dot_product_attention: _called, F.multi_head_attention_forward: _heads, **recurrent.INSTEAD}
