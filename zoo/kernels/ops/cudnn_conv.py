"""Convolution by what PyTorch has of cuDNN: with ReLU, and with a residual too, in one kernel; other activations in passes of their own.

The same arguments as `conv`'s, less what cuDNN has no place for. cuDNN writes into memory of its own, so an `out` costs a copy; it
takes its input dense, so a channel slice costs another.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._activation import ACTIVATIONS
from ._arguments import Drawing, given, of, partly
from ._layout import DTYPES, empty_map, out_sizes
from .conv import case as _case
from .conv import convolved, work

Config = dict[str, Any]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
PACK = {"weight": lambda weight: weight.contiguous(memory_format=torch.channels_last)}

_IN_PLACE = {
    "none": lambda y: y,
    "relu": torch.relu_,
    "relu6": lambda y: F.hardtanh(y, 0.0, 6.0, inplace=True),
    "hardswish": lambda y: F.hardswish(y, inplace=True),
    "hardsigmoid": lambda y: F.hardsigmoid(y, inplace=True),
    "silu": lambda y: F.silu(y, inplace=True),
    "sigmoid": torch.sigmoid_,
    "leaky_relu_0.1": lambda y: F.leaky_relu(y, 0.1, inplace=True),
    "leaky_relu_0.01": lambda y: F.leaky_relu(y, 0.01, inplace=True),
    "gelu": lambda y: torch.ops.aten.gelu_(y),
}


def activate_(y: Tensor, act: str) -> Tensor:
    """Apply an activation of `ACTIVATIONS` in place, and return the map."""
    return _IN_PLACE[act](y)


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    act: str = "none",
    pre_act: str = "none",
    tf32: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``act(conv(x) + bias + residual)``.

    Args:
        x: (N, C, H, W), channels_last or a channel slice of such a map.
        weight: (K, C / groups, kernel height, kernel width).
        bias: (K,), float32; rounded to the type of `x`, which cuDNN demands.
        residual: (N, K, output height, output width).
        scale: not taken, as are `shift`, `gate`, `pre_act` and another `out_dtype`: they are `conv`'s.
        shift: not taken.
        gate: not taken.
        stride: vertical, horizontal, pixels.
        padding: top, bottom, left, right, pixels.
        dilation: vertical, horizontal, pixels.
        groups: channel groups.
        act: what is applied last, a name of `ACTIVATIONS`.
        pre_act: not taken.
        tf32: whether a GPU may round float32 factors to TF32.
        out_dtype: the type of `x`, or None.

    Returns:
        (N, K, output height, output width), channels_last; products accumulate in float32.
    """
    y = convolved(x, weight, None if bias is None else bias.to(x.dtype), stride, padding, dilation, groups)
    y = y if residual is None else y + residual
    return ACTIVATIONS[act](y).contiguous(memory_format=torch.channels_last)


def sizes(x: Tensor, weight: Tensor, options: dict[str, Any]) -> tuple[int, int]:
    """Return the height and width of a convolution's result, by the `stride`, `padding` and `dilation` of its options."""
    return out_sizes(x, weight.shape[2:], options["stride"], options["padding"], options["dilation"])


@of(reference)
def refusal(x, weight, bias, residual, scale, shift, gate, groups, act, pre_act, out_dtype, **window) -> str:
    """Return why no library's convolution takes these arguments, "" where one may."""
    if scale is not None or shift is not None or pre_act != "none":
        return "an affine map or an activation before"
    if gate is not None:
        return "a gate"
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return f"types {x.dtype} and {weight.dtype}"
    if out_dtype is not None and out_dtype != x.dtype:
        return f"a result of another type, {out_dtype}"
    if act not in ACTIVATIONS:
        return f"activation {act}"
    if x.dim() != 4 or weight.dim() != 4 or weight.shape[1] * groups != x.shape[1]:
        return "maps and weights that don't fit each other"
    ho, wo = sizes(x, weight, window)
    if ho < 1 or wo < 1 or min(window["padding"]) < 0:
        return "window larger than the padded image, or negative padding"
    if bias is not None and bias.shape != weight.shape[:1]:
        return "a bias that is no vector of the output channels"
    if residual is not None and (residual.shape != (x.shape[0], weight.shape[0], ho, wo) or residual.dtype != x.dtype):
        return "a residual of another shape or type"
    return ""


@of(reference)
def supports(x, **others) -> str:
    """Return "" where cuDNN takes these arguments of `reference`, else the reason why not."""
    return refusal(x, **others) or ("" if x.is_cuda and torch.backends.cudnn.is_available() else "cuDNN runs on CUDA devices")


@of(reference)
def configs(**_) -> list[Config]:
    """Return one empty config: cuDNN times its kernels itself at the first launch of a shape, in each thread; in float16 it guesses."""
    return [{}]


@of(reference)
def prepare(x, weight, bias, **others) -> dict[str, Any]:
    """Return the arguments as `launch` takes them: the weight in channels_last memory, the bias in the type of `x`."""
    return {"x": x, "weight": PACK["weight"](weight), "bias": None if bias is None else bias.to(x.dtype), **others}


_FLAGS = threading.Lock()


@contextlib.contextmanager
def cudnn_flags(dtype: torch.dtype, tf32: bool) -> Iterator[None]:
    """Let cuDNN choose by timing, and in TF32 or not: flags of the process, so that one thread at a time changes them.

    In float16 it chooses by its heuristic: timing takes kernels there, now and then, that make a number of -inf.
    """
    cudnn, timing = torch.backends.cudnn, dtype != torch.float16
    with _FLAGS, cudnn.flags(enabled=True, benchmark=timing, benchmark_limit=10, deterministic=False, allow_tf32=tf32):
        yield


@partly(reference)
def launch(
    x, weight, bias, residual, stride, padding, dilation, groups, act, tf32, out: Tensor | None = None, config: Any = None, **_
) -> Tensor:
    """Run cuDNN.

    The first launch of a shape in a thread times kernels and can't be captured into a CUDA graph; later ones of that thread can.

    Args:
        x: made dense if it is a slice.
        weight: in channels_last memory, in the type of `x`, as `prepare` returns it and `bias`.
        padding: where opposite sides differ, the input is padded in a pass of its own.
        out: where to copy the result, maybe a channel slice; cuDNN's own memory, uncopied, if None.
        config: {}.

    Returns:
        (N, K, output height, output width), channels_last: `out` if it was given.
    """
    ho, wo = sizes(x, weight, {"stride": stride, "padding": padding, "dilation": dilation})
    if x.shape[0] == 0:
        return empty_map(0, weight.shape[0], ho, wo, x) if out is None else out
    top, bottom, left, right = padding
    if top != bottom or left != right:
        x, top, left = F.pad(x, (left, right, top, bottom)), 0, 0
    x = x.contiguous(memory_format=torch.channels_last)
    strides, pads, dilations = list(stride), [top, left], list(dilation)
    if x.is_cuda and act == "relu":
        with cudnn_flags(x.dtype, tf32):
            if residual is None:
                y = torch.cudnn_convolution_relu(x, weight, bias, strides, pads, dilations, groups)
            else:
                residual = residual.contiguous(memory_format=torch.channels_last)
                y = torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, strides, pads, dilations, groups)
    else:
        with cudnn_flags(x.dtype, tf32):
            y = torch.convolution(x, weight, bias, strides, pads, dilations, False, [0, 0], groups)
        y = activate_(y if residual is None else y.add_(residual), act)
    return y.contiguous(memory_format=torch.channels_last) if out is None else out.copy_(y)


@of(reference)
def cost(x, weight, residual, **options) -> tuple[int, int]:
    """Return floating-point operations and bytes: each map and weight read once, the output written once."""
    return work(x, weight, residual, sizes(x, weight, options))


CASES: list[Config] = [
    _case("three with relu", 2, 16, 24, (6, 5), (3, 3), padding=(1, 1, 1, 1), act="relu"),
    _case("three with residual and relu", 1, 16, 16, (5, 7), (3, 3), padding=(1, 1, 1, 1), residual=True, act="relu"),
    _case("pointwise with residual", 2, 24, 8, (5, 5), (1, 1), residual=True),
    _case("stride 2 padded at two sides", 1, 8, 16, (6, 8), (3, 3), stride=(2, 2), padding=(0, 1, 0, 1), act="relu"),
    _case("stride 2 at odd sizes", 2, 8, 16, (7, 9), (3, 3), stride=(2, 2), padding=(1, 1, 1, 1), act="relu6"),
    _case("grouped", 2, 16, 32, (5, 5), (3, 3), padding=(1, 1, 1, 1), groups=4, act="relu"),
    _case("odd channels", 2, 13, 7, (3, 5), (3, 3), padding=(1, 1, 1, 1), residual=True, act="silu"),
    _case("seven by one, dilated", 1, 16, 8, (13, 4), (7, 1), padding=(6, 6, 0, 0), dilation=(2, 1), act="hardswish"),
    _case("one pixel", 3, 16, 8, (1, 1), (1, 1), act="gelu"),
    _case("slice in", 2, 16, 8, (4, 4), (3, 3), padding=(1, 1, 1, 1), wide=(40, 16), act="relu"),
    _case("no image", 0, 16, 8, (4, 4), (3, 3), padding=(1, 1, 1, 1), act="relu"),
]

LARGE_CASES: list[Config] = [
    _case(f"{name}, batch {n}", n, c, k, (size, size), (kernel, kernel), padding=(kernel // 2,) * 4, act="relu", residual=residual)
    for n in (256, 1)
    for name, c, k, size, kernel, residual in (
        ("expand 64 to 256, 56 px", 64, 256, 56, 1, True),
        ("three 64, 56 px", 64, 64, 56, 3, False),
        ("three 256, 14 px", 256, 256, 14, 3, False),
        ("three 512, 28 px", 512, 512, 28, 3, False),
    )
]


def make(case: Config, *how: Any) -> dict[str, Any]:
    """Return the arguments of a case, scaled so that outputs are near 1."""
    n, c, k, kernel, groups = case["n"], case["c"], case["k"], case["kernel"], case.get("groups", 1)
    draw, (wide, start) = Drawing(*how), case.get("wide", (c, 0))
    args: dict[str, Any] = {"stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1, "act": "none"}
    args |= given(case, *args)
    args["x"] = draw.map((n, wide, *case["size"]))[:, start : start + c]
    args["weight"] = draw.map((k, c // groups, *kernel)) * (c // groups * math.prod(kernel)) ** -0.5
    args["bias"] = draw.normal(k).to(draw.dtype).float() if case.get("bias", True) else None
    if case.get("residual"):
        args["residual"] = draw.map((n, k, *sizes(args["x"], args["weight"], args)))
    return args
