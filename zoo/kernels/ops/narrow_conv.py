"""Dense convolution of 8-bit maps, int8 or fp8 (e4m3), as an implicit matrix product: factors, bias, residual and activation behind it.

A stored number is its value divided by a scale. The kernel is `conv`'s, which sums int8 in int32 and fp8 in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import conv
from ._activation import ACTIVATIONS
from ._arguments import Drawing, given, launches, of
from ._layout import LARGEST, NARROW, empty_map, out_sizes, pixel_stride, reachable
from ._narrow import narrowed
from ._tiles import SMS, tiled

Config = dict[str, Any]
OUTPUTS = (torch.float32, torch.bfloat16, torch.float16, *NARROW)
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.int8: 3e-2, torch.float8_e4m3fn: 4e-2}
"""By the output's type. Of the narrow ones it is what rounding to them costs; tensor cores sum fp8 with fewer bits than float32 has."""
PACK = {"weight": lambda weight: weight.contiguous(memory_format=torch.channels_last)}
workspace = conv.workspace


def reference(
    x: Tensor,
    weight: Tensor,
    factor: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    residual_factor: Tensor | None = None,
    out_factor: Tensor | None = None,
    *,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    dilation: Sequence[int] = (1, 1),
    act: str = "none",
    out_dtype: torch.dtype,
) -> Tensor:
    """Return ``act(conv(x) * factor + bias + residual * residual_factor) * out_factor`` in `out_dtype`.

    Args:
        x: (N, C, H, W) of int8 or float8_e4m3fn, channels_last; 16 divides C.
        weight: (K, C, kernel height, kernel width) in the type of `x`; 16 divides K.
        factor: (K,), float32: what a product of the stored numbers counts, scale of `x` times that of the output channel's weights.
        bias: (K,), float32.
        residual: (N, K, output height, output width), stored as `x` is if `residual_factor` is given, else half or float32.
        residual_factor: (1,), float32: its scale.
        out_factor: (1,), float32: one over the output's scale, where that is narrow.
        stride: vertical, horizontal, pixels.
        padding: top, bottom, left, right, pixels.
        dilation: vertical, horizontal, pixels.
        act: what is applied last, a name of `ACTIVATIONS`.
        out_dtype: float32, bfloat16, float16, or the type of `x`.

    Returns:
        (N, K, output height, output width), rounded once; what lies beyond the range of a narrow type is the end of that.
    """
    exact = torch.promote_types(factor.dtype, torch.float32)
    y = conv.convolved(x.to(exact), weight.to(exact), None, stride, padding, dilation) * factor[:, None, None]
    if bias is not None:
        y = y + bias[:, None, None]
    if residual is not None:
        more = residual.to(exact)
        y = y + (more if residual_factor is None else more * residual_factor)
    y = ACTIVATIONS[act](y)
    if out_factor is not None:
        y = y * out_factor
    return narrowed(y, out_dtype).contiguous(memory_format=torch.channels_last)


@of(reference)
def supports(x, weight, factor, bias, residual, residual_factor, out_factor, stride, padding, dilation, act, out_dtype) -> str:
    """Return "" where the kernel takes these arguments (see `reference`), else the reason why not."""
    n, c, _, _ = x.shape
    k, wc, kh, kw = weight.shape
    ho, wo = out_sizes(x, weight.shape[2:], stride, padding, dilation)
    vectors = ((factor, k), (bias, k), (residual_factor, 1), (out_factor, 1))
    reasons = (
        (x.dtype not in NARROW or weight.dtype != x.dtype, f"types {x.dtype} and {weight.dtype}"),
        (out_dtype not in OUTPUTS or (out_dtype in NARROW and out_dtype != x.dtype), f"output type {out_dtype}"),
        ((out_dtype in NARROW) != (out_factor is not None), "a narrow output without its factor, or a factor without such an output"),
        (residual is not None and (residual.dtype in NARROW) != (residual_factor is not None), "a narrow residual without its factor"),
        (wc != c, "grouped convolution"),
        (c % 16 != 0 or k % 16 != 0, "channels that 16 does not divide"),
        (act not in ACTIVATIONS, f"activation {act}"),
        (ho < 1 or wo < 1, "window larger than the padded image"),
        (kh > 31 or kw > 31, "a kernel of more than 31 pixels"),
        (any(v is not None and (v.dtype != torch.float32 or tuple(v.shape) != (s,) or not v.is_contiguous()) for v, s in vectors),
         "a factor or bias that is no contiguous float32 vector"),
        (residual is not None and tuple(residual.shape) != (n, k, ho, wo), "a residual of another shape"),
        (pixel_stride(x) is None or (residual is not None and pixel_stride(residual) is None), "maps that are not channels_last"),
        (not reachable(x, residual) or max(weight.numel(), n * max(ho, 0) * max(wo, 0) * k) > LARGEST, "maps beyond 32-bit reach"),
    )  # fmt: skip
    return next((reason for wrong, reason in reasons if wrong), "")


@of(reference)
def configs(x, weight, residual, stride, padding, dilation, **_) -> list[Config]:
    """Return launch parameters to try, the most promising first: tiles that were fastest on an H200, then `conv`'s for bytes."""
    k, c, kh, kw = weight.shape
    ho, wo = out_sizes(x, weight.shape[2:], stride, padding, dilation)
    rows, taps = max(x.shape[0] * ho * wo, 1), kh * kw
    found = tiled(rows, k, c, taps, 1, fold=False, residual=residual is not None, exact=False)
    found = [config | {"BK": max(config["BK"], 32)} for config in found]  # the least depth of a product of bytes
    ranked = _fast_tiles(rows, k, c, taps, residual is not None) + found
    return [config for index, config in enumerate(ranked) if config not in ranked[:index]][:16]


def _fast_tiles(rows: int, k: int, c: int, taps: int, residual: bool) -> list[Config]:
    """Return the tiles that were the fastest at batch 256 of ResNet50 and VGG19, those that leave no multiprocessor idle."""
    depth = next(depth for depth in (128, 64, 32) if c % depth == 0 or depth == 32)
    steps = taps * -(-c // depth)
    if k < 128:
        tiles = [(256, 64, 8, 3), (128, 64, 4, 3)] if taps > 1 else [(128, 64, 4, 3), (256, 64, 8, 3)]
    elif residual or steps <= 2:
        tiles = [(64, 128, 4, 3), (128, 128, 8, 3)]
    else:
        tiles = [(128, 128, 8, 3), (64, 128, 4, 3)]
    if k >= 256 and steps >= 4 and not residual:
        tiles.insert(0, (128, 256, 8, 4))
    return [
        {"kind": "tile", "BM": bm, "BN": bn, "BK": depth, "SPLIT": 1, "warps": warps, "stages": min(stages, steps),
         "GROUP": 1 if rows > k * taps else 16, "EARLY": False}
        for bm, bn, warps, stages in tiles
        if -(-rows // bm) * -(-k // bn) >= SMS
    ]  # fmt: skip


@launches(reference, configs)
def launch(
    x, weight, factor, bias, residual, residual_factor, out_factor, stride, padding, dilation, act, out_dtype, config,
    out: Tensor | None = None, workspace: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run the kernel; arguments as of `reference`, and

    Args:
        weight: in channels_last memory, as `PACK` lays it out.
        out: where to write, maybe a channel slice; made if None.
        config: one of `configs`.
        workspace: as `conv.launch` has it.

    Returns:
        `out`.

    Raises:
        ValueError: where the arguments are none that `supports` takes, or the workspace is too small.
    """
    if out is None:
        out = empty_map(x.shape[0], weight.shape[0], *out_sizes(x, weight.shape[2:], stride, padding, dilation), x, out_dtype)
    options: Any = {"stride": stride, "padding": padding, "dilation": dilation, "act": act, "config": config, "workspace": workspace}
    return conv.launch(x, weight, bias, residual, out=out, factors=(factor, residual_factor, out_factor), **options)


@of(reference)
def cost(x, weight, residual, stride, padding, dilation, out_dtype, **_) -> tuple[int, int]:
    """Return operations and bytes: each map and weight read once, the output written once."""
    return conv.work(x, weight, residual, out_sizes(x, weight.shape[2:], stride, padding, dilation), out_dtype)


def _case(name: str, *sizes: Any, kind: str = "int8", **options: Any) -> Config:
    return conv.case(name, *sizes, kind=kind, **options)


# `kind`: of maps and weights; `narrow`: the output has it too; `added`: "narrow" or "wide" residual.
CASES: list[Config] = [
    _case("pointwise", 2, 32, 16, (5, 7), bias=True, act="relu"),
    _case("pointwise, narrow output", 2, 32, 48, (5, 7), bias=True, act="relu", narrow=True),
    _case("pointwise, narrow residual", 2, 64, 32, 5, bias=True, act="relu", narrow=True, added="narrow"),
    _case("pointwise, wide residual", 1, 48, 32, 5, act="none", added="wide"),
    _case("three", 2, 32, 16, (6, 5), 3, padding=(1, 1, 1, 1), bias=True, act="relu", narrow=True),
    _case("three, stride 2", 1, 16, 32, (7, 9), 3, stride=(2, 2), padding=(0, 1, 0, 1), bias=True, act="silu", narrow=True),
    _case("three, dilated", 1, 16, 16, 7, 3, padding=(2, 2, 2, 2), dilation=(2, 2), act="leaky_relu_0.1"),
    _case("tokens", 3, 64, 96, 1, bias=True, act="gelu", narrow=True),
    _case("no image", 0, 16, 16, 4, 3, padding=(1, 1, 1, 1), bias=True),
    _case("fp8 pointwise", 2, 32, 16, (5, 7), kind="float8_e4m3fn", bias=True, act="relu"),
    _case("fp8 tokens", 3, 64, 96, 1, kind="float8_e4m3fn", bias=True, act="gelu", narrow=True),
    _case("fp8 three", 2, 32, 16, (6, 5), 3, kind="float8_e4m3fn", padding=(1, 1, 1, 1), bias=True, narrow=True, added="narrow"),
]  # fmt: skip
LARGE_CASES: list[Config] = [
    _case(f"{kind} {name}, batch 256", 256, c, k, size, kernel, kind=kind, padding=(kernel // 2,) * 4, bias=True, act="relu", narrow=True)
    for kind in ("int8", "float8_e4m3fn")
    for name, c, k, size, kernel in (
        ("256 to 64, 56 px", 256, 64, 56, 1), ("128 to 128, 28 px, 3x3", 128, 128, 28, 3), ("512 to 512, 28 px, 3x3", 512, 512, 28, 3),
        ("linear 768 to 3072", 768, 3072, 14, 1),
    )
]  # fmt: skip


def make(case: Config, *how: Any) -> dict[str, Any]:
    """Return the arguments of a case; its dtype is that of a wide output and residual."""
    draw, kind = Drawing(*how), getattr(torch, case["kind"])
    n, c, k = case["n"], case["c"], case["k"]
    most = 50.0 if kind == torch.int8 else 4.0

    def small(*size: int, form: torch.memory_format = torch.channels_last) -> Tensor:
        return narrowed(draw.normal(*size) * most, kind).contiguous(memory_format=form)

    x = small(n, c, *case["size"])
    weight = small(k, c, *case["kernel"])
    options = given(case, "stride", "padding", "dilation", "act")
    window: tuple[Any, ...] = (options.get("stride", (1, 1)), options.get("padding", (0,) * 4), options.get("dilation", (1, 1)))
    sizes = out_sizes(x, case["kernel"], *window)
    spread = most * most * (c * weight[0, 0].numel()) ** 0.5
    args: dict[str, Any] = {"x": x, "weight": weight, "factor": (1 + 0.1 * draw.normal(k)) / spread, **options}
    args["out_dtype"] = kind if case.get("narrow") else draw.dtype
    if case.get("bias"):
        args["bias"] = draw.normal(k)
    if case.get("narrow"):
        args["out_factor"] = torch.full((1,), 20.0, device=draw.device)
    if case.get("added") == "narrow":
        args |= {"residual": small(n, k, *sizes), "residual_factor": torch.full((1,), 1 / most, device=draw.device)}
    elif case.get("added"):
        args["residual"] = draw.map((n, k, *sizes))
    return args
