"""A 1x1 convolution, and so a linear layer, as cuBLASLt's product of the pixels' rows with the weight; bias and ReLU in its epilogue.

The same arguments as `conv`'s, less what a product has no place for. It reads and writes channel slices in place: a map's pixels are
rows of any distance. Activations but ReLU are applied in a pass of their own, as is ReLU in float16, where the epilogue makes 0 of NaN.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import cudnn_conv
from ._arguments import of, partly
from ._layout import empty_map, pixel_stride
from .conv import case as _case
from .cudnn_conv import TOLERANCE, Config, activate_, cost, make, reference

__all__ = ["CASES", "LARGE_CASES", "PACK", "TOLERANCE", "configs", "cost", "launch", "make", "prepare", "reference", "supports"]

PACK = {"weight": lambda weight: weight.flatten(1).contiguous()}


@of(reference)
def supports(**given) -> str:
    """Return "" where a product of matrices can do what `reference` says, else the reason why not."""
    return cudnn_conv.refusal(**given) or _no_product(**given)


def _no_product(x: Tensor, weight: Tensor, bias: Any, residual: Any, stride: Any, padding: Any, groups: int, **_: Any) -> str:
    if weight.shape[2:].numel() != 1 or any(padding) or tuple(stride) != (1, 1):
        return "a window, stride or padding"
    if groups != 1:
        return "groups"
    if residual is not None and bias is not None:
        return "a residual and a bias, of which PyTorch lets a product add one"
    if pixel_stride(x) is None or (residual is not None and pixel_stride(residual) is None):
        return "maps that are not channels_last"
    return ""


@of(reference)
def configs(**_) -> list[Config]:
    """Return one empty config: cuBLASLt chooses by its heuristic."""
    return [{}]


@of(reference)
def prepare(weight, **others) -> dict[str, Any]:
    """Return the arguments as `launch` takes them: the weight (K, C), the bias in the type of `x`."""
    return cudnn_conv.prepare(weight=weight, **others) | {"weight": PACK["weight"](weight)}


_PRECISION = threading.Lock()


@contextlib.contextmanager
def _tf32(x: Tensor, allowed: bool) -> Iterator[None]:
    """Let products of float32 round to TF32 or not: a flag of the process, so that one thread at a time changes it."""
    if x.dtype != torch.float32 or not x.is_cuda:
        yield
        return
    with _PRECISION:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def _rows(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    stride = pixel_stride(x)
    if stride is None:
        raise ValueError(f"strides {x.stride()}: not channels_last, nor a channel slice of such a map")
    return torch.as_strided(x, (n * h * w, c), (stride, 1))


@partly(reference)
def launch(x, weight, bias, residual, act, tf32, out: Tensor | None = None, config: Any = None, **_) -> Tensor:
    """Run the product.

    Args:
        weight: (K, C) in the type of `x`, as `prepare` returns it and `bias`.
        residual: channels_last or a channel slice; not together with `bias`.
        out: where to write, maybe a channel slice, or `residual` itself; made if None.
        config: {}.

    Returns:
        `out`, (N, K, H, W), channels_last; products accumulate in float32.

    Raises:
        ValueError: a map's pixels are no rows.
    """
    n, _, h, w = x.shape
    out = empty_map(n, weight.shape[0], h, w, x) if out is None else out
    if out.numel() == 0:
        return out
    rows, result, factor = _rows(x), _rows(out), weight.t()
    with _tf32(x, tf32):
        if residual is not None:
            torch.addmm(result if residual.data_ptr() == out.data_ptr() else _rows(residual), rows, factor, out=result)
        elif bias is None:
            torch.mm(rows, factor, out=result)
        elif act == "relu" and x.dtype != torch.float16:
            torch.ops.aten._addmm_activation(bias, rows, factor, use_gelu=False, out=result)
            return out
        else:
            torch.addmm(bias, rows, factor, out=result)
    activate_(result, act)
    return out


CASES: list[Config] = [
    _case("pointwise", 2, 16, 24, 5),
    _case("pointwise with relu", 1, 13, 7, 3, act="relu"),
    _case("pointwise with silu", 2, 24, 40, 3, act="silu"),
    _case("without bias, with residual", 2, 24, 16, 3, residual=True, bias=False, act="relu"),
    _case("linear", 3, 32, 10, 1, act="hardsigmoid"),
    _case("slice in", 2, 16, 8, 4, wide=(40, 16), act="relu"),
    _case("leaky", 2, 16, 8, 4, act="leaky_relu_0.1"),
    _case("no image", 0, 16, 8, 4, act="relu"),
]

LARGE_CASES: list[Config] = [
    _case(f"{name}, batch {n}", n, c, k, size, act=act)
    for n in (256, 1)
    for name, c, k, size, act in (
        ("256 to 64, 56 px", 256, 64, 56, "relu"),
        ("512 to 2048, 7 px", 512, 2048, 7, "relu"),
        ("96 to 24, 56 px", 96, 24, 56, "none"),
        ("linear 25088 to 4096", 25088, 4096, 1, "relu"),
        ("linear 2048 to 1000", 2048, 1000, 1, "none"),
    )
]
