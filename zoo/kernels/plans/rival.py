"""The network as PyTorch's own compiler runs it, captured as a CUDA graph: what a plan has to beat before it is served."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.copies import channels_last, compacted, on_device, own_dtype, tensors_of
from zoo.kernels.comparing.parity import Parity, Reference
from zoo.kernels.comparing.precision import products
from zoo.kernels.compilation.forking import compiling
from zoo.kernels.measuring.timing import alternate, recording
from zoo.kernels.memory.workspaces import clear_workspaces
from zoo.kernels.plans.replayed import Replayed
from zoo.kernels.tuning.steps import Setting

WARMUPS = 3
"""Calls before the capture: the first compiles, the next ones make what libraries keep."""
ROUNDS = 9
"""Samples of each in a race."""
FASTER = 0.98
"""Share of a plan's time below which the compiler's is served: two measurements of one thing differ by a hundredth or two."""


class Compiled(Replayed):
    """One shape's calls by PyTorch's compiler: BatchNorms folded where torch.fx can, channels_last, in one CUDA graph.

    Args:
        network: as the caller has it; a copy is compiled.
        args: of the shape, in the network's own dtype.
        kwargs: likewise.
        setting: device and dtype.
        dtypes: of the flat outputs, of which those that hold fractions get theirs; None for what is no tensor.

    Raises:
        Exception: whatever the compiler or the capture stumbles over.
    """

    keeps_rooms = False  # a network may write into its input

    def __init__(
        self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], setting: Setting, dtypes: list[torch.dtype | None]
    ) -> None:
        super().__init__(setting.device)
        self.setting = setting
        leaves, inside = pytree.tree_flatten((args, kwargs))
        own = own_dtype(network)
        self._buffers = [_buffer(tensor, setting) for tensor in tensors_of((args, kwargs))]
        module = on_device(network, setting.device)

        def answer(*given: Tensor) -> Any:
            waiting = iter(given)
            filled = [next(waiting) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            some, named = pytree.tree_unflatten(filled, inside)
            return module(*some, **named)

        def call(*given: Tensor) -> list[Any]:
            found = pytree.tree_leaves(answer(*given))
            return [_given(leaf, dtype) for leaf, dtype in zip(found, dtypes, strict=True)]

        with products(setting.tf32, benchmark=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's, about itself
            _fold(module, lambda: answer(*[_given(t, own) for t in self._buffers]))
            compacted(channels_last(module.to(setting.dtype)))
            with compiling():
                self._graph, self.outputs = self._captured(torch.compile(with_own_code(call), dynamic=False, fullgraph=True))
        self._kept = module  # without it the weights would go, and others' tensors take their place under the graph

    def _captured(self, call: Callable[..., list[Any]]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
        device = self.setting.device
        stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        collecting = gc.isenabled()
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                call(*self._buffers)
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()  # inside of the capture nothing can be freed
            clear_workspaces()  # cuBLAS's is made anew in the graph's own memory
            gc.disable()  # a tensor of a plan that is collected while capturing would end up in the graph
            try:
                with recording(graph):
                    outputs = call(*self._buffers)
            finally:
                if collecting:
                    gc.enable()
                clear_workspaces()  # while the graph lives: PyTorch 2.11 crashes where one is freed whose pool is gone
        torch.cuda.current_stream(device).wait_stream(stream)
        return graph, outputs

    @property
    def captured(self) -> bool:
        """Always."""
        return True

    def _rooms(self) -> list[Tensor | None]:
        return [*self._buffers]

    def _own_memory(self) -> list[Tensor]:
        return self._buffers

    def _constants(self) -> Iterator[Tensor]:
        yield from self._kept.parameters()
        yield from self._kept.buffers()
        for module in self._kept.modules():
            yield from (value for value in vars(module).values() if isinstance(value, Tensor))

    def _replay(self, tensors: list[Tensor]) -> list[Any]:
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            if tensor is not buffer:
                buffer.copy_(tensor)
        self._graph.replay()
        return self.outputs


def parity(rival: Compiled, batches: list[Any], reference: Reference, replays: int) -> Parity:
    """Compare the compiler's answers, each given behind other images, as a plan's are."""
    worst: Parity | None = None
    for _ in range(replays):
        found = []
        for batch in batches:
            tensors = tensors_of(batch)
            rival([t.flip(0).neg() if t.is_floating_point() and t.dim() else t for t in tensors])
            found.append([leaf for leaf in rival(tensors) if isinstance(leaf, Tensor)])
        compared = reference.compare(found)
        worst = compared if worst is None or compared.fast > worst.fast else worst
    assert worst is not None
    return worst


def race(plan: Callable[[list[Tensor]], Any], rival: Compiled, tensors: list[Tensor]) -> tuple[float, float]:
    """Time whole calls of a plan and of its rival in turns; medians in microseconds."""
    times = alternate({"plan": lambda: plan(tensors), "rival": lambda: rival(tensors)}, ROUNDS)
    return median(times["plan"]), median(times["rival"])


def _fold(module: nn.Module, run: Callable[[], Any]) -> Any:
    """Run a network once and fold each BatchNorm into the convolution whose output it was given, in place; return what it answered.

    Where that output is read by something else too, the folded network computes something else, which the comparison with the plain one
    finds.
    """
    made: dict[int, tuple[nn.Module, int]] = {}
    pairs: list[tuple[nn.Module, nn.Module]] = []
    calls: Counter[nn.Module] = Counter()
    alive: list[Tensor] = []  # or another tensor could have the same id

    def seen(layer: nn.Module, given: Any, output: Any) -> None:
        calls[layer] += 1
        if type(layer) is nn.BatchNorm2d and given and layer.running_mean is not None:
            conv, version = made.get(id(given[0]), (None, 0))
            if conv is not None and version == given[0]._version:  # nothing was written into it since
                pairs.append((conv, layer))
        elif type(layer) is nn.Conv2d:
            made[id(output)] = layer, output._version
            alive.append(output)

    handles = [layer.register_forward_hook(seen) for layer in module.modules() if type(layer) in (nn.Conv2d, nn.BatchNorm2d)]
    try:
        with torch.no_grad():
            answer = run()
    finally:
        for handle in handles:
            handle.remove()
    instead: dict[nn.Module, nn.Module] = {}
    for conv, norm in pairs:
        if calls[conv] == calls[norm] == 1:
            instead |= {conv: fuse_conv_bn_eval(cast(nn.Conv2d, conv), cast(nn.BatchNorm2d, norm)), norm: nn.Identity()}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if child in instead:
                setattr(parent, name, instead[child])
    return answer


def _given(leaf: Any, dtype: torch.dtype | None) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() and dtype is not None else leaf


def with_own_code(call: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function code of its own: the compiler counts how often it compiles the same, and stops at eight."""
    function = cast(FunctionType, call)
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def _buffer(tensor: Tensor, setting: Setting) -> Tensor:
    form = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
    dtype = setting.dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(setting.device, dtype, copy=True).contiguous(memory_format=form)
