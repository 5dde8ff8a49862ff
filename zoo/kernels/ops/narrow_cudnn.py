"""Convolution of int8 maps, its factors, bias, residual and ReLU as one graph of cuDNN's, by the plan of our choice.

The same arguments as `narrow_conv`'s. Needs the package nvidia-cudnn-frontend, the extra "cudnn". cuDNN's fp8 was no faster than its
bfloat16 on an H200 (docs/notes/int8.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _cudnn, narrow_conv
from ._arguments import of, partly
from ._layout import empty_map, out_sizes
from .narrow_conv import CASES, LARGE_CASES, PACK, TOLERANCE, Config, cost, make, reference

__all__ = ["CASES", "LARGE_CASES", "PACK", "TOLERANCE", "compiled_late", "configs", "cost", "launch", "make", "reference", "supports"]


@of(reference)
def supports(x, act, residual, **others) -> str:
    """Return "" where cuDNN's graphs may take these arguments of `reference`, else the reason why not; as `cudnn_graph.supports`."""
    if refused := narrow_conv.supports(x, act=act, residual=residual, **others):
        return refused
    if x.dtype != torch.int8:
        return "another type than int8"
    if act not in _cudnn.ACTIVATIONS:
        return f"no node for the activation {act}"
    if residual is not None and residual.dtype != torch.int8:
        return "a wide residual"
    if not x.is_cuda:
        return "cuDNN runs on CUDA devices"
    return "" if _cudnn.installed() else _cudnn.ABSENT


def _prepared(
    maps: dict[str, Tensor | None], handle: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], act: str
) -> _cudnn.Graph:
    x, out = maps["x"], maps["out"]
    assert x is not None
    assert out is not None
    given = {name: (tuple(value.shape), _cudnn.pitch_of(name, value), value.dtype) for name, value in maps.items() if value is not None}
    key = ("narrow", x.device.index, *given.items(), *stride, *padding, *dilation, act)

    def describe(graph: Any, kind: Any) -> dict[str, Any]:
        kinds = importlib.import_module("cudnn").data_type
        tensors = {
            name: graph.tensor(
                name=name, dim=list(shape), stride=_cudnn.row_strides(shape, pitch), data_type=getattr(kinds, _cudnn.KINDS[dtype])
            )
            for name, (shape, pitch, dtype) in given.items()
            if name != "out"
        }
        y = graph.conv_fprop(
            image=tensors["x"], weight=tensors["weight"], pre_padding=[padding[0], padding[2]], post_padding=[padding[1], padding[3]],
            stride=[*stride], dilation=[*dilation], compute_data_type=kinds.INT32,
        )  # fmt: skip
        y.set_data_type(kinds.INT32)
        y = graph.mul(a=y, b=tensors["factor"])
        if "bias" in tensors:
            y = graph.add(a=y, b=tensors["bias"])
        if "residual" in tensors:
            y = graph.add(a=y, b=graph.mul(a=tensors["residual"], b=tensors["residual_factor"]))
        y = _cudnn.ACTIVATIONS[act](graph, y)
        if "out_factor" in tensors:
            y = graph.mul(a=y, b=tensors["out_factor"])
        shape, pitch, dtype = given["out"]
        y.set_output(True).set_data_type(getattr(kinds, _cudnn.KINDS[dtype]))
        y.set_dim(list(shape)).set_stride(_cudnn.row_strides(shape, pitch))
        return tensors | {"out": y}

    return _cudnn.kept(key, describe, torch.int8, handle)


def _maps(x, weight, factor, bias, residual, residual_factor, out_factor, out) -> dict[str, Tensor | None]:
    vectors = {"factor": factor, "bias": bias, "residual_factor": residual_factor, "out_factor": out_factor}
    shaped = {name: None if value is None else value.view(1, -1, 1, 1) for name, value in vectors.items()}
    return {"x": x, "weight": weight, "residual": residual, "out": out, **shaped}


@of(reference)
def configs(**given) -> list[Config]:
    """Return the plans to try in the order in which cuDNN's heuristic ranks them; off the GPU it is a guess."""
    graph = _asked(**given)
    return [{"plan": plan} for plan in range(len(graph.plans) if graph is not None else 1)] or [{"plan": 0}]


def compiled_late(tried: list[Config], *args: Any, **given: Any) -> list[Config]:
    """Return which of these plans cuDNN compiles at their first launch; see `cudnn_graph.compiled_late`."""
    graph = _asked(*args, **given)
    return [] if graph is None else [config for config in tried if graph.compiles(config["plan"])]


@partly(reference)
def _asked(
    x, weight, factor, bias, residual, residual_factor, out_factor, out_dtype, stride, padding, dilation, act
) -> _cudnn.Graph | None:
    """Return the graph for an `out` that is no slice; None where there is no GPU to ask, or cuDNN has none: `launch` says why."""
    if not x.is_cuda or not x.numel() or not _cudnn.installed():
        return None
    out = empty_map(x.shape[0], weight.shape[0], *out_sizes(x, weight.shape[2:], stride, padding, dilation), x, out_dtype)
    try:
        with torch.cuda.device(x.device), _cudnn.handle(x.device) as handle:
            maps = _maps(x, weight, factor, bias, residual, residual_factor, out_factor, out)
            return _prepared(maps, handle, stride, padding, dilation, act)
    except (RuntimeError, ValueError):
        return None


@partly(reference)
def launch(
    x, weight, factor, bias, residual, residual_factor, out_factor, out_dtype, stride, padding, dilation, act,
    out: Tensor | None = None, config: Config | None = None,
) -> Tensor:  # fmt: skip
    """Run a plan; the first time that a shape is seen, build it, which can't be captured into a CUDA graph.

    Args:
        weight: in channels_last memory, as `PACK` lays it out.
        out: where to write, maybe a channel slice, written by way of a copy if it doesn't begin at a multiple of 16 bytes; made if None.
        config: {"plan": i}, the i-th of the plans that cuDNN's heuristic ranks.

    Returns:
        `out`.

    Raises:
        RuntimeError: cuDNN has no such plan for these arguments.
    """
    if out is None:
        out = empty_map(x.shape[0], weight.shape[0], *out_sizes(x, weight.shape[2:], stride, padding, dilation), x, out_dtype)
    if out.numel() == 0:
        return out
    x, residual = _cudnn.in_place(x), None if residual is None else _cudnn.in_place(residual)
    target = out if _cudnn.aligned(out) else empty_map(*out.shape, like=out)
    maps = _maps(x, weight, factor, bias, residual, residual_factor, out_factor, target)
    with torch.cuda.device(x.device), _cudnn.handle(x.device) as handle:
        graph = _prepared(maps, handle, stride, padding, dilation, act)
        plan = (config or {"plan": 0})["plan"]
        if plan >= len(graph.plans):
            raise RuntimeError(f"cuDNN has {len(graph.plans)} plans for this graph, none of number {plan}")
        graph.execute(plan, maps, handle)
    return out if target is out else out.copy_(target)
