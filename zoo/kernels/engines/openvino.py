"""OpenVINO: Intel's inference engine, for any x86 or ARM processor."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.kernels.engines.engine import NotFinite
from zoo.kernels.engines.export import EngineError, Exported, Form, as_array
from zoo.kernels.engines.keep_nan import WATCH, keep_nan

AHEAD = 4
"""Parts of a batch that are handed over for each one that is computed, so that no core waits for Python."""
CAPABILITY = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
PRECISION = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_IMPORTING = threading.Lock()


def precision(dtype: torch.dtype) -> torch.dtype:
    """Return the type that this processor computes in when `dtype` is asked for: itself, or float32 where it lacks the instructions.

    Raises:
        ImportError: OpenVINO is not installed.
    """
    return dtype if CAPABILITY.get(dtype) in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else torch.float32


def streams(parts: int) -> int:
    """Return how many parts of a batch are computed at once; the threads are divided among them."""
    return min(torch.get_num_threads(), parts)


def build(exported: Exported, form: Form, dtype: torch.dtype, parts: int = 1) -> Callable[..., Any]:
    """Compile a graph for this machine, for the least latency of a batch, with as many threads as PyTorch has.

    Args:
        exported: the network; its tensors are packed into a copy, and those that need no packing are read where they are.
        form: of what the network returns.
        dtype: to compute in; see `precision`.
        parts: of the graph's size that a batch has, each computed by itself.

    Returns:
        What takes the network's inputs, all parts of them, and returns its output, in fresh tensors; any number of threads may call it
        at once.
    """
    model, weights = read(exported)
    watches = keep_nan(model, dtype)
    return compiled(model, exported.inputs, (*exported.outputs, *([WATCH] if watches else [])), form, dtype, parts, weights)


def read(exported: Exported) -> tuple[Any, list[Any]]:
    """Return a graph as an `ov.Model`, and the arrays that it reads and does not own."""
    ov = imported()
    model = core().read_model(exported.graph)
    return model, _insert_weights(ov, model, exported)


def compiled(
    model: Any, inputs: tuple[str, ...], outputs: tuple[str, ...], form: Form, dtype: torch.dtype, parts: int = 1, weights: Any = ()
) -> Callable[..., Any]:
    """Compile an `ov.Model` for this machine; see `build`.

    Args:
        model: the graph.
        inputs: names of what it takes, in the order of the network's.
        outputs: names of what it returns, in pytree's order; `WATCH` may stand behind them.
        form: of what the network returns.
        dtype: to compute in, but for what is quantised.
        parts: of the graph's size that a batch has.
        weights: what has to live as long as the model.
    """
    made = core().compile_model(
        model,
        "CPU",
        {
            **({"PERFORMANCE_HINT": "LATENCY"} if parts == 1 else {"NUM_STREAMS": streams(parts)}),
            "INFERENCE_PRECISION_HINT": PRECISION[dtype],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            # Pinned, the threads of every process on the machine would sit on the same few cores.
            "ENABLE_CPU_PINNING": False,
        },
    )
    asked, given = _positions(made.inputs), _positions(made.outputs)
    taken = [(index, asked[name]) for index, name in enumerate(inputs) if name in asked]
    return _Requests(imported(), made, taken, [given[name] for name in outputs], form, list(weights), parts)


class _Requests:
    """Runs a compiled model with as many requests as there are calls, or parts of calls, at once: a request has buffers of its own."""

    def __init__(
        self, ov: Any, compiled: Any, inputs: list[tuple[int, int]], outputs: list[int], form: Form, weights: list[Any], parts: int
    ) -> None:
        self.tensor, self.compiled, self.inputs, self.outputs, self.form = ov.Tensor, compiled, inputs, outputs, form
        self.weights = weights  # OpenVINO reads some of them and owns none
        self.parts, self.ahead = parts, AHEAD * streams(parts)
        self.idle: deque[Any] = deque()

    def __call__(self, *given: Tensor) -> Any:
        return self.form.build(self.flat(*given))

    def flat(self, *given: Tensor) -> list[Tensor]:
        """Return the tensors of the output, in the types that the network itself returns."""
        arrays = [(position, as_array(given[index])) for index, position in self.inputs]  # OpenVINO keeps none of them alive
        if self.parts == 1:
            request = self._request(arrays)
            request.infer()
            made = [request.get_output_tensor(position).data.copy() for position in self.outputs]  # its next call overwrites its own
            self.idle.append(request)  # not after an error: what state it is in then is not known
        else:
            made = self._together(arrays)
        if not all(np.isfinite(watch).all() for watch in made[self.form.count :]):
            raise NotFinite("NaN or infinity arose inside")
        return self.form.tensors(made[: self.form.count])

    def _request(self, arrays: list[tuple[int, Any]]) -> Any:
        try:
            request = self.idle.pop()  # atomic: no two threads get the same
        except IndexError:
            request = self.compiled.create_infer_request()
        for position, array in arrays:
            request.set_input_tensor(position, self.tensor(array, shared_memory=True))
        return request

    def _together(self, arrays: list[tuple[int, Any]]) -> list[Any]:
        """Compute all parts, some at once, and lay their outputs behind each other."""
        parted = [(position, np.split(array, self.parts)) for position, array in arrays]
        made: list[Any] = []
        running: deque[Any] = deque()

        def finish(part: int) -> None:
            request = running[0]
            request.wait()
            outputs = [request.get_output_tensor(position).data for position in self.outputs]
            if not made:
                made.extend(np.empty((self.parts, *output.shape), output.dtype) for output in outputs)
            for whole, output in zip(made, outputs, strict=True):
                whole[part] = output
            running.popleft()
            if len(self.idle) < self.ahead:  # however many threads call at once
                self.idle.append(request)

        try:
            for part in range(self.parts):
                if len(running) == self.ahead:
                    finish(part - len(running))
                running.append(self._request([(position, array[part]) for position, array in parted]))
                running[-1].start_async()
            for part in range(self.parts - len(running), self.parts):
                finish(part)
        finally:
            for request in running:  # after an error, which goes on: they still read the arrays
                with suppress(BaseException):  # a second interrupt too
                    request.wait()
        return [whole.reshape(whole.shape[0] * whole.shape[1], *whole.shape[2:]) for whole in made]


def _positions(ports: list[Any]) -> dict[str, int]:
    """Return the place of each name; a port's own index is among the ports of its node, which has one."""
    return {name: index for index, port in enumerate(ports) for name in port.get_names()}


def _insert_weights(ov: Any, model: Any, exported: Exported) -> list[Any]:
    """Replace the parameters that stand for weights by constants on the network's own memory, which is returned.

    OpenVINO would keep a copy of its own beside the packed one: VGG19 took 1.2 GB that way, and takes 0.6 GB this way.
    """
    held = []
    for parameter in list(model.get_parameters()):
        name = next((name for name in parameter.output(0).get_names() if name in exported.tensors), None)
        if name is None:
            continue
        held.append(exported.tensors[name].contiguous().numpy())
        constant = ov.op.Constant(ov.Tensor(held[-1], shared_memory=True), shared_memory=True)
        constant.set_friendly_name(name)
        parameter.output(0).replace(constant.output(0))
        model.remove_parameter(parameter)
    model.validate_nodes_and_infer_types()
    if unknown := [name for port in model.inputs for name in port.get_names() if name not in exported.inputs]:
        raise EngineError(f"the exported graph asks for {', '.join(unknown[:5])}, which the network does not have")
    return held


@cache
def core() -> Any:
    """Return OpenVINO's core, of which a process has one."""
    return imported().Core()


def imported() -> Any:
    """Import OpenVINO without its telemetry: importing it otherwise reports to Google Analytics, from a forked process."""
    with _IMPORTING:
        if "openvino" in sys.modules:
            return sys.modules["openvino"]
        with silent_telemetry():
            import openvino
            import openvino.opset13  # what `keep_nan` builds with
        return openvino


@contextmanager
def silent_telemetry() -> Iterator[None]:
    """Import something while OpenVINO's telemetry looks as if it were not installed."""
    had = sys.modules.get("openvino_telemetry", ...)
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # to the import statement: not installed
    try:
        yield
    finally:
        if had is ...:
            del sys.modules["openvino_telemetry"]
        else:
            sys.modules["openvino_telemetry"] = had
