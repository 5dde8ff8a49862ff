"""Graphs of cuDNN's front end: described once, kept with their plans, and run by one thread at a time. For ops that are such graphs."""

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

from ._layout import pixel_stride

ABSENT = "nvidia-cudnn-frontend is not installed: pip install 'kernelzoo[cudnn]'"
MOST_PLANS = 12
"""Plans to try: on an H200 the best of the first dozen was never beaten by the rest."""

KINDS = {torch.float32: "FLOAT", torch.bfloat16: "BFLOAT16", torch.float16: "HALF", torch.int8: "INT8"}
"""Of `cudnn.data_type`."""

ACTIVATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda graph, y: y,
    "relu": lambda graph, y: graph.relu(input=y),
    "relu6": lambda graph, y: graph.relu(input=y, lower_clip=0.0, upper_clip=6.0),
    "silu": lambda graph, y: graph.swish(input=y, swish_beta=1.0),
    "sigmoid": lambda graph, y: graph.sigmoid(input=y),
    "leaky_relu_0.1": lambda graph, y: graph.leaky_relu(input=y, negative_slope=0.1),
    "leaky_relu_0.01": lambda graph, y: graph.leaky_relu(input=y, negative_slope=0.01),
    "gelu": lambda graph, y: graph.gelu(input=y),
}
"""Nodes of a graph by activation; not for all of them it has a plan."""


@functools.cache
def installed() -> bool:
    """Tell whether the front end is there."""
    return importlib.util.find_spec("cudnn") is not None


class NoPlan(RuntimeError):
    """cuDNN can't compute this."""


@contextmanager
def as_runtime_error() -> Iterator[None]:
    """Let the front end's own error, which is no RuntimeError, be one."""
    try:
        yield
    except importlib.import_module("cudnn").cudnnGraphNotSupportedError as error:
        raise NoPlan(f"cuDNN has no plan for this graph: {error}") from error


class Graph:
    """A graph with its plans, which live as long as the process: captured CUDA graphs hold their kernels.

    Made and executed by the thread that holds the device's handle, one at a time: the front end reuses its buffer of pointers too.
    """

    def __init__(self, describe: Callable[[Any, Any], dict[str, Any]], dtype: torch.dtype, handle: Any) -> None:
        cudnn = importlib.import_module("cudnn")
        kind, single = getattr(cudnn.data_type, KINDS[dtype]), cudnn.data_type.FLOAT
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
        """Run a plan on maps by name, building it the first time."""
        index = self.plans[plan]
        if index not in self.workspaces:
            with as_runtime_error():
                self.graph.build_plan_at_index(index)
            self.workspaces[index] = max(1, self.graph.get_workspace_size_plan_at_index(index))
        like = next(value for value in maps.values() if value is not None)
        workspace = torch.empty(self.workspaces[index], dtype=torch.uint8, device=like.device)
        pack = {tensor: maps[name] for name, tensor in self.tensors.items()}
        self.graph.execute_plan_at_index(pack, workspace, index, handle=handle)


GRAPHS: dict[tuple[Any, ...], Graph | NoPlan] = {}
"""By what they compute; where cuDNN has none, why."""
atexit.register(GRAPHS.clear)  # the front end complains of what outlives it
HANDLES: dict[int, Any] = {}
USING = threading.RLock()


@contextmanager
def handle(device: torch.device) -> Iterator[Any]:
    """Hold a device's handle of cuDNN, set to this thread's current stream; the device is the current one.

    There is one for all threads, and one thread at a time has it: each more would take 9 MiB of the GPU's memory, for good.
    """
    cudnn = importlib.import_module("cudnn")
    with USING:
        if device.index not in HANDLES:
            HANDLES[device.index] = cudnn.create_handle()
        cudnn.set_stream(handle=HANDLES[device.index], stream=torch.cuda.current_stream(device).cuda_stream)
        yield HANDLES[device.index]


def pitch_of(name: str, value: Tensor) -> int:
    """Return how many elements lie between a map's pixels.

    Raises:
        ValueError: they are no rows.
    """
    pitch = pixel_stride(value)
    if pitch is None:
        raise ValueError(f"{name} with strides {value.stride()} is not channels_last, nor a channel slice of such a map")
    return pitch


def row_strides(shape: Sequence[int], pitch: int) -> list[int]:
    """Return the strides of (N, C, H, W) whose pixels lie `pitch` elements apart, whatever PyTorch says of axes of size 1."""
    _, _, h, w = shape
    return [h * w * pitch, 1, w * pitch, pitch]


def aligned(x: Tensor) -> bool:
    """Tell whether a map begins where cuDNN's plans expect it to: at a multiple of 16 bytes."""
    return x.data_ptr() % 16 == 0


def in_place(x: Tensor) -> Tensor:
    """Return a map where plans can read it: itself, or a copy."""
    return x if aligned(x) else x.clone(memory_format=torch.channels_last)


def kept(key: tuple[Any, ...], describe: Callable[[Any, Any], dict[str, Any]], dtype: torch.dtype, handle: Any) -> Graph:
    """Return the graph of a key, made if nobody has asked for it yet.

    Args:
        key: all that `describe` describes.
        describe: from the front end's graph and type to its tensors by name.
        dtype: of its maps.
        handle: what `handle` gave.

    Raises:
        NoPlan: cuDNN has no plan for it; to be told again costs nothing.
    """
    if key not in GRAPHS:
        try:
            with as_runtime_error():
                GRAPHS[key] = Graph(describe, dtype, handle)
        except NoPlan as error:  # to ask again takes as long as it took
            GRAPHS[key] = NoPlan(str(error))  # itself it would hold the maps that it was asked for
    found = GRAPHS[key]
    if isinstance(found, NoPlan):
        raise NoPlan(str(found))
    return found
