"""Convolution, bias, residual and activation as one graph of cuDNN's, by the plan of our choice among those that its heuristic ranks.

The same arguments as `cudnn_conv`'s, but more activations fuse, maps may be channel slices on both sides, and cuDNN's first guess
needn't be the one. Needs the package nvidia-cudnn-frontend, the extra "cudnn".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _cudnn, cudnn_conv
from ._arguments import of, partly
from ._layout import empty_map, pixel_stride
from .cudnn_conv import CASES, LARGE_CASES, PACK, Config, cost, make, prepare, reference, sizes

__all__ = [
    "CASES", "LARGE_CASES", "PACK", "TOLERANCE", "compiled_late", "configs", "cost", "launch", "make", "prepare", "reference", "supports"
]  # fmt: skip

TOLERANCE = {torch.float32: cudnn_conv.TOLERANCE[torch.float32], torch.bfloat16: 8e-3, torch.float16: 1e-3}


@of(reference)
def supports(x, residual, act, tf32, **others) -> str:
    """Return "" where cuDNN's graphs may take these arguments of `reference`, else the reason why not.

    Whether cuDNN has a plan for a graph is known only when it is asked: `launch` raises where it has none.
    """
    if refused := cudnn_conv.refusal(x, residual=residual, act=act, **others):
        return refused
    if act not in _cudnn.ACTIVATIONS:
        return f"no node for the activation {act}"
    if pixel_stride(x) is None or (residual is not None and pixel_stride(residual) is None):
        return "maps that are not channels_last"
    if not x.is_cuda:
        return "cuDNN runs on CUDA devices"
    if x.dtype == torch.float32 and not tf32:
        return "float32 that must not be rounded to TF32"
    if not _cudnn.installed():
        return _cudnn.ABSENT
    return ""


def _graph(
    maps: dict[str, Tensor | None], handle: Any, stride: list[int], padding: list[int], dilation: list[int], act: str
) -> _cudnn.Graph:
    x = maps["x"]
    assert x is not None
    given = {name: (tuple(value.shape), _cudnn.pitch_of(name, value)) for name, value in maps.items() if value is not None}
    key = (x.device.index, x.dtype, *given.items(), *stride, *padding, *dilation, act)

    def describe(graph: Any, kind: Any) -> dict[str, Any]:
        tensors = {
            name: graph.tensor(name=name, dim=list(shape), stride=_cudnn.row_strides(shape, pitch), data_type=kind)
            for name, (shape, pitch) in given.items()
            if name != "out"
        }
        pre, post = [padding[0], padding[2]], [padding[1], padding[3]]
        y = graph.conv_fprop(
            image=tensors["x"], weight=tensors["weight"], pre_padding=pre, post_padding=post, stride=stride, dilation=dilation
        )
        if "bias" in tensors:
            y = graph.bias(input=y, bias=tensors["bias"])
        if "residual" in tensors:
            y = graph.add(a=y, b=tensors["residual"])
        y = _cudnn.ACTIVATIONS[act](graph, y)
        shape, pitch = given["out"]
        y.set_output(True).set_data_type(kind).set_dim(list(shape)).set_stride(_cudnn.row_strides(shape, pitch))
        return tensors | {"out": y}

    return _cudnn.kept(key, describe, x.dtype, handle)


@of(reference)
def configs(**given) -> list[Config]:
    """Return the plans to try in the order in which cuDNN's heuristic ranks them, for an `out` that is no slice.

    Takes tens of milliseconds at the first time that a shape is seen. Off the GPU it is a guess.
    """
    graph = _asked(**given)
    return [{"plan": plan} for plan in range(len(graph.plans) if graph is not None else 1)] or [{"plan": 0}]


def compiled_late(tried: list[Config], *args: Any, **given: Any) -> list[Config]:
    """Return which of these plans cuDNN compiles at their first launch: half a second each, in which no other thread runs Python.

    On an H100 so were all plans with SiLU, or with bias, residual and no activation, and some with ReLU6. Of what `configs` guesses
    nothing is known.
    """
    graph = _asked(*args, **given)
    return [] if graph is None else [config for config in tried if graph.compiles(config["plan"])]


@partly(reference)
def _asked(x, weight, bias, residual, **options) -> _cudnn.Graph | None:
    """Return the graph for an `out` that is no slice; None where there is no GPU to ask, or cuDNN has none: `launch` says why."""
    if not x.is_cuda or not x.numel() or not _cudnn.installed():
        return None
    out = empty_map(x.shape[0], weight.shape[0], *sizes(x, weight, options), x)
    try:
        with torch.cuda.device(x.device), _cudnn.handle(x.device) as handle:
            return _prepared(x, weight, bias, residual, out, options, handle)
    except (RuntimeError, ValueError):
        return None


def _maps(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> dict[str, Tensor | None]:
    vector = None if bias is None else bias.to(x.dtype).view(1, -1, 1, 1)
    return {"x": x, "weight": weight, "bias": vector, "residual": residual, "out": out}


def _prepared(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, options: dict[str, Any], handle: Any
) -> _cudnn.Graph:
    stride, padding, dilation = ([*options[name]] for name in ("stride", "padding", "dilation"))
    return _graph(_maps(x, weight, bias, residual, out), handle, stride, padding, dilation, options["act"])


@partly(reference)
def launch(x, weight, bias, residual, out: Tensor | None = None, config: Config | None = None, **options) -> Tensor:
    """Run a plan; the first time that a shape is seen, build it, which can't be captured into a CUDA graph.

    Args:
        x: may be a channel slice, copied if it doesn't begin at a multiple of 16 bytes, as `residual`.
        weight: in channels_last memory, in the type of `x`, as `prepare` returns it and `bias`.
        padding: opposite sides may differ.
        out: where to write, maybe a channel slice, written by way of a copy if it doesn't begin at a multiple of 16 bytes.
        config: {"plan": i}, the i-th of the plans that cuDNN's heuristic ranks.

    Returns:
        `out`, (N, K, output height, output width), channels_last; products accumulate in float32.

    Raises:
        RuntimeError: cuDNN has no such plan for these arguments.
        ValueError: a map's pixels are no rows.
    """
    out = empty_map(x.shape[0], weight.shape[0], *sizes(x, weight, options), x) if out is None else out
    if out.numel() == 0:
        return out
    x, residual = _cudnn.in_place(x), None if residual is None else _cudnn.in_place(residual)
    target = out if _cudnn.aligned(out) else empty_map(*out.shape, like=out)
    with torch.cuda.device(x.device), _cudnn.handle(x.device) as handle:
        graph = _prepared(x, weight, bias, residual, target, options, handle)
        plan = (config or {"plan": 0})["plan"]
        if plan >= len(graph.plans):
            raise RuntimeError(f"cuDNN has {len(graph.plans)} plans for this graph, none of number {plan}")
        graph.execute(plan, _maps(x, weight, bias, residual, target), handle)
    return out if target is out else out.copy_(target)
