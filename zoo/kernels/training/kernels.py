"""The ops that chains call: on a GPU those of `zoo.kernels.differentiable`, on a CPU PyTorch's functions, of the same numbers.

A function that is named `…_refuses` says, of shapes and dtypes alone, why kernels would not take its arguments.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels import activations
from zoo.kernels.training import shared

P = ParamSpec("P")
Pair = tuple[int, int]
HALF = (torch.bfloat16, torch.float16)
"""Types that tensor cores multiply as they are: products of kernels in float32 would be no faster than PyTorch's."""

WIDER = 2
"""Times the channels that a 1x1 convolution reads: a BatchNorm behind it takes its sums of those where there are so many, or more."""

ACTIVATIONS = {name: one.function for name, one in activations.ACTIVATIONS.items() if one.slope is not None}
"""Those with a derivative that kernels know."""


def on_kernels(device: torch.device) -> bool:
    """Tell whether kernels compute what lies there; in a process that only compiles them, nothing lies anywhere."""
    if device.type == "meta" and _triton():
        from zoo.kernels.ops._overlap import assumed

        return assumed()
    return device.type == "cuda" and _triton()


@contextmanager
def tuning(device: torch.device, most: int) -> Iterator[None]:
    """Let kernels try up to `most` launch parameters each in what runs meanwhile; 0 tries none."""
    if not most or not on_kernels(device):
        yield
        return
    from zoo.kernels.ops import _tuned

    with _tuned.tuning(most):
        yield


@lru_cache(maxsize=1)
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _ours(name: str) -> Callable[..., Any]:
    """Return a function of the room with the kernels, which is loaded only now: it needs Triton."""
    from zoo.kernels import differentiable

    return getattr(differentiable, name)


def _forwarded(name: str) -> Callable[..., Any]:
    """Return an op that only runs where kernels do; `zoo.kernels.differentiable` says what it takes."""

    def op(*args: Any, **options: Any) -> Any:
        return _ours(name)(*args, **options)

    op.__name__ = op.__qualname__ = name  # by which it is pickled
    return op


def _or_ours(plain: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Make PyTorch's way to an op the op: where kernels run, its namesake in `zoo.kernels.differentiable` is called instead."""

    @wraps(plain)
    def op(*args: P.args, **options: P.kwargs) -> Tensor:
        x: Any = args[0]
        return _ours(plain.__name__)(*args, **options) if on_kernels(x.device) else plain(*args, **options)

    return op


def _refusing(name: str, elsewhere: str = "") -> Callable[..., str]:
    """Return what says why kernels would not take an op's arguments, tensors without data; where no kernels run, why there is no need."""

    def refuses(device: torch.device, *args: Any, **options: Any) -> str:
        return _ours(f"{name}_refused")(*args, **options) if on_kernels(device) else elsewhere

    return refuses


def batch_norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None = None,
    *,
    momentum: float,
    eps: float,
    act: str,
    group: Any = None,
    row: Tensor | None = None,
) -> Tensor:
    """Normalise a map by its own statistics, add a residual, apply an activation; the running statistics are updated as torch's.

    With a group of processes they are the statistics of all their pixels, but for a check, which each process does by itself. A `row`
    holds the map's own, where the convolution that wrote it has taken them.
    """
    group = None if shared.is_alone() else group
    if on_kernels(x.device) or group is not None:
        options: dict[str, Any] = {"momentum": momentum, "eps": eps, "act": act, "group": group, "row": row}
        return _ours("batch_norm_act")(x, weight, bias, running_mean, running_var, residual, **options)
    y = F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)
    return ACTIVATIONS[act](y if residual is None else y + residual)


def kept_of(y: Tensor) -> Any:
    """Return what `made_again` makes a map from; None where that is not kept, or PyTorch made it, which doesn't say."""
    return None if y.grad_fn is None or not _triton() else _ours("kept_of")(y)


def norm_act_conv(*tensors: Tensor, group: Any = None, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Normalise a map, apply an activation, convolve with a 1x1 kernel, and take the statistics of the result."""
    return _ours("norm_act_conv")(*tensors, group=None if shared.is_alone() else group, **options)


def dense_block(x: Tensor, *tensors: Tensor, layers: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Append to a map what each layer makes of all that is there; also returned are the statistics of the whole.

    Of a layer there are ten tensors: weight, bias, running mean and variance of its first BatchNorm, its 1x1 kernel, the same of its
    second; and `first`, `second` (momentum, eps, act of both), `padding` and `dilation` of the second kernel.
    """
    return _ours("dense_block")(x, *tensors, layers=_ours("dense_layers")(layers))


made_again = _forwarded("made_again")
conv_norm_act = _forwarded("conv_norm_act")
conv_stats = _forwarded("conv_stats")
shortcut_conv = _forwarded("shortcut_conv")
stem_conv = _forwarded("stem_conv")
add_layer_norm = _forwarded("add_layer_norm")
gelu = _forwarded("gelu")
gelu_linear = _forwarded("gelu_linear")
glu = _forwarded("glu")
glu_linear = _forwarded("glu_linear")
response_linear = _forwarded("response_linear")
mean_and_map = _forwarded("mean_and_map")
cross_entropy = _forwarded("cross_entropy")
add_branch = _forwarded("add_branch")
window_attention = _forwarded("window_attention")


@_or_ours
def depthwise_conv(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, bias: Tensor | None = None) -> Tensor:
    """Convolve each channel with its own kernel, which is rounded to the dtype of `x`, and add a bias."""
    return F.conv2d(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), stride, padding, dilation, x.shape[1])


@_or_ours
def grouped_conv(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, *, groups: int) -> Tensor:
    """Convolve groups of channels each with their own kernels, which are rounded to the dtype of `x`."""
    return F.conv2d(x, weight.to(x.dtype), None, stride, padding, dilation, groups)


def patch_conv(x: Tensor, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    """Convolve windows that lie side by side: one product of their pixels, rows of a matrix, with the weights.

    Pixels that no window reaches are left out. The weight's gradient is a product too, where cuDNN takes ten times as long for large ones.
    """
    (n, c, h, w), (k, _, kh, kw) = x.shape, weight.shape
    oh, ow = h // kh, w // kw
    pixels = x.to(dtype).permute(0, 2, 3, 1)[:, : oh * kh, : ow * kw]
    rows = pixels.reshape(n, oh, kh, ow, kw, c).transpose(2, 3).reshape(n * oh * ow, kh * kw * c)
    taken = None if bias is None else bias.to(dtype)
    return F.linear(rows, weight.permute(0, 2, 3, 1).reshape(k, -1).to(dtype), taken).view(n, oh, ow, k).permute(0, 3, 1, 2)


@_or_ours
def conv_bias_act(x: Tensor, weight: Tensor, bias: Tensor, *, act: str, pool: dict[str, Any] | None = None, **window: Any) -> Tensor:
    """Convolve with kernels and a bias, which are rounded to the dtype of `x`, apply an activation, take the largest of each window."""
    y = ACTIVATIONS[act](F.conv2d(x, weight.to(x.dtype), bias.to(x.dtype), **window))
    return y if pool is None else max_pool(y, **pool)


@_or_ours
def max_pool(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, ceil_mode: bool) -> Tensor:
    """Take the largest pixel of each window."""
    return F.max_pool2d(x, kernel, stride, padding, 1, ceil_mode)


@_or_ours
def avg_pool(x: Tensor, kernel: Pair, ceil_mode: bool) -> Tensor:
    """Average windows that lie side by side."""
    return F.avg_pool2d(x, kernel, kernel, 0, ceil_mode)


@_or_ours
def scale_channels(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply each image's channels by factors of their own."""
    return x * gate


batch_norm_act_refuses = _refusing("batch_norm_act")
conv_norm_act_refuses = _refusing("conv_norm_act", "PyTorch's functions are as good")
conv_stats_refuses = _refusing("conv_stats", "PyTorch's convolution is as good")
norm_act_conv_refuses = _refusing("norm_act_conv", "PyTorch's functions are as good")
depthwise_conv_refuses = _refusing("depthwise_conv")
conv_bias_act_refuses = _refusing("conv_bias_act")
grouped_conv_refuses = _refusing("grouped_conv", "PyTorch's convolution is as good")
max_pool_refuses = _refusing("max_pool")
avg_pool_refuses = _refusing("avg_pool")
scale_channels_refuses = _refusing("scale_channels")
window_attention_refuses = _refusing("window_attention", "PyTorch's functions are as good")
add_branch_refuses = _refusing("add_branch", "PyTorch's functions are as good")
mean_and_map_refuses = _refusing("mean_and_map", "PyTorch's sum is as good")


def shortcut_conv_refuses(device: torch.device) -> str:
    """Say why."""
    return "" if on_kernels(device) else "PyTorch's sum is as good"


def dense_block_refuses(device: torch.device, x: Tensor, *tensors: Tensor, layers: Sequence[dict[str, Any]]) -> str:
    """Say why; tensors without data."""
    if not on_kernels(device) or x.dtype not in HALF:
        return "PyTorch's functions are as good"
    return _ours("dense_block_refused")(x, tensors, _ours("dense_layers")(layers))


def stem_conv_refuses(device: torch.device, *tensors: Tensor | None, dtype: torch.dtype, **options: Any) -> str:
    """Say why; tensors without data."""
    if not on_kernels(device):
        return "PyTorch's convolution is as good"
    return "TF32 or not is cuDNN's to say" if dtype == torch.float32 else _ours("stem_conv_refused")(*tensors, dtype=dtype, **options)


@lru_cache(maxsize=1024)
def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make a tensor without data that has a shape, a dtype and, if it is a map, channels_last memory."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x
