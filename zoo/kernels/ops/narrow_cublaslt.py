"""A 1x1 convolution of fp8 maps, and so a linear layer, as cuBLASLt's product of the pixels' rows with the weight.

The same arguments as `narrow_conv`'s, less what a product has no place for. Factors are cuBLASLt's own scales, one for each output channel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from . import narrow_conv, quantize
from ._arguments import of, partly
from ._layout import empty_map, pixel_stride
from .cudnn_conv import activate_
from .narrow_conv import CASES, LARGE_CASES, TOLERANCE, Config, cost, make, reference

__all__ = ["CASES", "LARGE_CASES", "PACK", "TOLERANCE", "configs", "cost", "launch", "make", "prepare", "reference", "supports"]

PACK = {"weight": lambda weight: weight.flatten(1).contiguous()}


@of(reference)
def supports(x, weight, residual, out_dtype, stride, padding, **others) -> str:
    """Return "" where a product of matrices can do what `reference` says, else the reason why not."""
    options = {"residual": residual, "out_dtype": out_dtype, "stride": stride, "padding": padding}
    if refused := narrow_conv.supports(x, weight, **options, **others):
        return refused
    if x.dtype != torch.float8_e4m3fn:
        return "another type than fp8"
    if out_dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        return "an output that is no bfloat16, which alone a product with a scale for each row has, nor fp8, to which that is rounded"
    if weight.shape[2:].numel() != 1 or any(padding) or tuple(stride) != (1, 1):
        return "a window, stride or padding"
    if residual is not None:
        return "a residual"
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) < (9, 0):
        return "it runs on CUDA devices of capability 9.0 and later"
    rows = pixel_stride(x)
    return "" if rows is not None and rows % 16 == 0 and x.data_ptr() % 16 == 0 else "rows that 16 bytes do not divide"


@of(reference)
def configs(**_) -> list[Config]:
    """Return one empty config: cuBLASLt chooses by its heuristic."""
    return [{}]


@of(reference)
def prepare(weight, bias, **others) -> dict[str, Any]:
    """Return the arguments as `launch` takes them: the weight (K, C), the bias in bfloat16."""
    return {"weight": PACK["weight"](weight), "bias": None if bias is None else bias.to(torch.bfloat16), **others}


@functools.lru_cache(maxsize=64)
def _ones(rows: int, device: torch.device) -> Tensor:
    return torch.ones(rows, 1, device=device)


@partly(reference)
def launch(x, weight, factor, bias, out_factor, act, out_dtype, out: Tensor | None = None, config: Any = None, **_) -> Tensor:
    """Run the product; a narrow output is rounded by a pass of `quantize` behind it, which applies the activation too.

    Args:
        weight: (K, C) in fp8, as `prepare` returns it and `bias`, in bfloat16.
        out: where to write, maybe a channel slice, through a copy; made if None.
        config: {}.

    Returns:
        `out`, (N, K, H, W), channels_last; products accumulate as cuBLASLt's fast ones do, with fewer bits than float32 has.
    """
    n, c, h, w = x.shape
    out = empty_map(n, weight.shape[0], h, w, x, out_dtype) if out is None else out
    if out.numel() == 0:
        return out
    step = pixel_stride(x)
    assert step is not None
    rows = torch.as_strided(x, (n * h * w, c), (step, 1))
    direct = out.dtype == torch.bfloat16 and pixel_stride(out) == out.shape[1]
    product = out if direct else empty_map(*out.shape, like=x, dtype=torch.bfloat16)
    torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        rows, weight.t(), scale_a=_ones(len(rows), x.device), scale_b=factor.view(1, -1), bias=bias, out_dtype=torch.bfloat16,
        use_fast_accum=True, out=torch.as_strided(product, (len(rows), out.shape[1]), (out.shape[1], 1)),
    )  # fmt: skip
    if out_factor is not None:
        return quantize.launch(product, out_factor, act=act, out_dtype=out.dtype, out=out)
    activate_(product, act)
    return out if direct else out.copy_(product)
