"""Convolution, bias, residual and activation as one graph of cuDNN's, by the plan of our choice among those that its heuristic ranks.

The same arguments as `cudnn_conv`'s, but more activations fuse, maps may be channel slices on both sides, and cuDNN's first guess
needn't be the one. Needs the package nvidia-cudnn-frontend, the extra "cudnn".
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from . import cudnn_conv
from ._arguments import of, partly
from ._layout import empty_map, pixel_stride
from .cudnn_conv import CASES, LARGE_CASES, PACK, Config, cost, make, prepare, reference, sizes

__all__ = [
    "CASES", "LARGE_CASES", "PACK", "TOLERANCE", "compiled_late", "configs", "cost", "launch", "make", "prepare", "reference", "supports"
]  # fmt: skip

TOLERANCE = {torch.float32: cudnn_conv.TOLERANCE[torch.float32], torch.bfloat16: 8e-3, torch.float16: 1e-3}

ABSENT = "nvidia-cudnn-frontend is not installed: pip install 'kernelzoo[cudnn]'"
MOST_PLANS = 12
"""Plans to try: on an H200 the best of the first dozen was never beaten by the rest."""

_KINDS = {torch.float32: "FLOAT", torch.bfloat16: "BFLOAT16", torch.float16: "HALF", torch.int8: "INT8"}
"""Of `cudnn.data_type`."""

_ACTIVATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda graph, y: y,
    "relu": lambda graph, y: graph.relu(input=y),
    "relu6": lambda graph, y: graph.relu(input=y, lower_clip=0.0, upper_clip=6.0),
    "silu": lambda graph, y: graph.swish(input=y, swish_beta=1.0),
    "sigmoid": lambda graph, y: graph.sigmoid(input=y),
    "leaky_relu_0.1": lambda graph, y: graph.leaky_relu(input=y, negative_slope=0.1),
    "leaky_relu_0.01": lambda graph, y: graph.leaky_relu(input=y, negative_slope=0.01),
    "gelu": lambda graph, y: graph.gelu(input=y),
}


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("cudnn") is not None


@of(reference)
def supports(x, residual, act, tf32, **others) -> str:
    """Return "" where cuDNN's graphs may take these arguments of `reference`, else the reason why not.

    Whether cuDNN has a plan for a graph is known only when it is asked: `launch` raises where it has none.
    """
    if refused := cudnn_conv.refusal(x, residual=residual, act=act, **others):
        return refused
    if act not in _ACTIVATIONS:
        return f"no node for the activation {act}"
    if pixel_stride(x) is None or (residual is not None and pixel_stride(residual) is None):
        return "maps that are not channels_last"
    if not x.is_cuda:
        return "cuDNN runs on CUDA devices"
    if x.dtype == torch.float32 and not tf32:
        return "float32 that must not be rounded to TF32"
    if not _installed():
        return ABSENT
    return ""


class _NoPlan(RuntimeError):
    """cuDNN can't compute this."""


@contextmanager
def _as_runtime_error() -> Iterator[None]:
    """Let the front end's own error, which is no RuntimeError, be one."""
    try:
        yield
    except importlib.import_module("cudnn").cudnnGraphNotSupportedError as error:
        raise _NoPlan(f"cuDNN has no plan for this graph: {error}") from error


class _Graph:
    """A graph with its plans, which live as long as the process: captured CUDA graphs hold their kernels.

    Made and executed by the thread that holds the device's handle, one at a time: the front end reuses its buffer of pointers too.
    """

    def __init__(self, describe: Callable[[Any, Any], dict[str, Any]], dtype: torch.dtype, handle: Any) -> None:
        cudnn = importlib.import_module("cudnn")
        kind, single = getattr(cudnn.data_type, _KINDS[dtype]), cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=single, compute_data_type=single, handle=handle)
        self.tensors = describe(self.graph, kind)
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        names = [self.graph.get_plan_name_at_index(index) for index in range(self.graph.get_execution_plan_count())]
        self.plans = [index for index, name in enumerate(names) if name not in names[:index]][:MOST_PLANS]
        self.workspaces: dict[int, int] = {}

    def compiles(self, plan: int) -> bool:
        """Tell whether cuDNN compiles a plan's kernel when it is first executed."""
        note = importlib.import_module("cudnn").behavior_note.RUNTIME_COMPILATION
        try:
            return note in self.graph.get_behavior_notes_for_plan_at_index(self.plans[plan])
        except RuntimeError:  # a plan of which nothing is noted
            return False

    def execute(self, plan: int, maps: dict[str, Tensor | None], handle: Any) -> None:
        index = self.plans[plan]
        if index not in self.workspaces:
            with _as_runtime_error():
                self.graph.build_plan_at_index(index)
            self.workspaces[index] = max(1, self.graph.get_workspace_size_plan_at_index(index))
        like = next(value for value in maps.values() if value is not None)
        workspace = torch.empty(self.workspaces[index], dtype=torch.uint8, device=like.device)
        pack = {tensor: maps[name] for name, tensor in self.tensors.items()}
        self.graph.execute_plan_at_index(pack, workspace, index, handle=handle)


_GRAPHS: dict[tuple[Any, ...], _Graph | _NoPlan] = {}
"""By what they compute; where cuDNN has none, why."""
atexit.register(_GRAPHS.clear)  # the front end complains of what outlives it
_HANDLES: dict[int, Any] = {}
_USING = threading.RLock()


@contextmanager
def _handle(device: torch.device) -> Iterator[Any]:
    """Hold a device's handle of cuDNN, set to this thread's current stream; the device is the current one.

    There is one for all threads, and one thread at a time has it: each more would take 9 MiB of the GPU's memory, for good.
    """
    cudnn = importlib.import_module("cudnn")
    with _USING:
        if device.index not in _HANDLES:
            _HANDLES[device.index] = cudnn.create_handle()
        cudnn.set_stream(handle=_HANDLES[device.index], stream=torch.cuda.current_stream(device).cuda_stream)
        yield _HANDLES[device.index]


def _pitch(name: str, value: Tensor) -> int:
    pitch = pixel_stride(value)
    if pitch is None:
        raise ValueError(f"{name} with strides {value.stride()} is not channels_last, nor a channel slice of such a map")
    return pitch


def _row_strides(shape: Sequence[int], pitch: int) -> list[int]:
    """Return the strides of (N, C, H, W) whose pixels lie `pitch` elements apart, whatever PyTorch says of axes of size 1."""
    _, _, h, w = shape
    return [h * w * pitch, 1, w * pitch, pitch]


def _graph(maps: dict[str, Tensor | None], handle: Any, stride: list[int], padding: list[int], dilation: list[int], act: str) -> _Graph:
    x = maps["x"]
    assert x is not None
    given = {name: (tuple(value.shape), _pitch(name, value)) for name, value in maps.items() if value is not None}
    key = (x.device.index, x.dtype, *given.items(), *stride, *padding, *dilation, act)

    def describe(graph: Any, kind: Any) -> dict[str, Any]:
        tensors = {
            name: graph.tensor(name=name, dim=list(shape), stride=_row_strides(shape, pitch), data_type=kind)
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
        y = _ACTIVATIONS[act](graph, y)
        shape, pitch = given["out"]
        y.set_output(True).set_data_type(kind).set_dim(list(shape)).set_stride(_row_strides(shape, pitch))
        return tensors | {"out": y}

    if key not in _GRAPHS:
        try:
            with _as_runtime_error():
                _GRAPHS[key] = _Graph(describe, x.dtype, handle)
        except _NoPlan as error:  # to ask again takes as long as it took
            _GRAPHS[key] = _NoPlan(str(error))  # itself it would hold the maps that it was asked for
    found = _GRAPHS[key]
    if isinstance(found, _NoPlan):
        raise _NoPlan(str(found))
    return found


def _aligned(x: Tensor) -> bool:
    """Tell whether a map begins where cuDNN's plans expect it to: at a multiple of 16 bytes."""
    return x.data_ptr() % 16 == 0


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
def _asked(x, weight, bias, residual, **options) -> _Graph | None:
    """Return the graph for an `out` that is no slice; None where there is no GPU to ask, or cuDNN has none: `launch` says why."""
    if not x.is_cuda or not x.numel() or not _installed():
        return None
    out = empty_map(x.shape[0], weight.shape[0], *sizes(x, weight, options), x)
    try:
        with torch.cuda.device(x.device), _handle(x.device) as handle:
            return _prepared(x, weight, bias, residual, out, options, handle)
    except (RuntimeError, ValueError):
        return None


def _maps(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> dict[str, Tensor | None]:
    vector = None if bias is None else bias.to(x.dtype).view(1, -1, 1, 1)
    return {"x": x, "weight": weight, "bias": vector, "residual": residual, "out": out}


def _prepared(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor, options: dict[str, Any], handle: Any
) -> _Graph:
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
    x = x if _aligned(x) else x.clone(memory_format=torch.channels_last)
    if residual is not None and not _aligned(residual):
        residual = residual.clone(memory_format=torch.channels_last)
    target = out if _aligned(out) else empty_map(*out.shape, like=out)
    with torch.cuda.device(x.device), _handle(x.device) as handle:
        graph = _prepared(x, weight, bias, residual, target, options, handle)
        plan = (config or {"plan": 0})["plan"]
        if plan >= len(graph.plans):
            raise RuntimeError(f"cuDNN has {len(graph.plans)} plans for this graph, none of number {plan}")
        graph.execute(plan, _maps(x, weight, bias, residual, target), handle)
    return out if target is out else out.copy_(target)
