"""onnxruntime: Microsoft's inference engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.kernels.engines.engine import NotFinite
from zoo.kernels.engines.export import EngineError, Exported, Form, as_array
from zoo.kernels.engines.keep_nan import WATCH
from zoo.kernels.engines.keep_nan_onnx import watch


def build(exported: Exported, form: Form) -> Callable[..., Any]:
    """Make a session, with every optimisation and as many threads as PyTorch has.

    Args:
        exported: the network; weights that onnxruntime does not pack into a copy are read from its tensors.
        form: of what the network returns.

    Returns:
        What takes the network's inputs and returns its output, in fresh tensors; any number of threads may call it at once. It
        computes in float32.

    Raises:
        ImportError: onnxruntime or onnx is not installed.
    """
    import onnxruntime

    graph, names, watches = _with_initialisers(exported)
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(exported.tensors[name].contiguous().numpy()) for name in names]
    outputs = (*exported.outputs, *([WATCH] if watches else []))
    return session(graph, exported.inputs, outputs, form, names, values)


def session(
    graph: bytes, inputs: tuple[str, ...], outputs: tuple[str, ...], form: Form, names: list[str] | None = None, values: Any = ()
) -> Callable[..., Any]:
    """Make a session of a graph; see `build`.

    Args:
        graph: the ONNX model.
        inputs: names of what it takes, in the order of the network's.
        outputs: names of what it returns, in pytree's order; `WATCH` may stand behind them.
        form: of what the network returns.
        names: of weights that lie outside of the graph.
        values: these weights.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    if names:
        options.add_external_initializers(names, list(values))
    made = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return _Session(made, inputs, outputs, form, list(values))


class _Session:
    """Runs a session, which keeps no state between runs, and gives each run's output memory of its own."""

    def __init__(self, session: Any, inputs: tuple[str, ...], outputs: tuple[str, ...], form: Form, weights: list[Any]) -> None:
        asked = {given.name for given in session.get_inputs()}
        self.inputs = [(index, name) for index, name in enumerate(inputs) if name in asked]
        self.session, self.outputs, self.form = session, list(outputs), form
        self.weights = weights  # the session reads them and does not own them

    def __call__(self, *given: Tensor) -> Any:
        return self.form.build(self.flat(*given))

    def flat(self, *given: Tensor) -> list[Tensor]:
        """Return the tensors of the output, in the types that the network itself returns."""
        fed = {name: as_array(given[index]) for index, name in self.inputs}
        made = self.session.run(self.outputs, fed)
        if not all(np.isfinite(watch) for watch in made[self.form.count :]):
            raise NotFinite("NaN or infinity arose inside")
        return self.form.tensors(made[: self.form.count])


def _with_initialisers(exported: Exported) -> tuple[bytes, list[str], bool]:
    """Turn the inputs that stand for weights into initialisers without data: which inputs are not. Tell whether it watches."""
    import onnx

    model = onnx.load_from_string(exported.graph)
    graph, kept, names = model.graph, [], []
    for given in graph.input:
        tensor = exported.tensors.get(given.name)
        if tensor is None:
            kept.append(given)
            continue
        names.append(given.name)
        made = graph.initializer.add(name=given.name, data_type=given.type.tensor_type.elem_type, dims=tuple(tensor.shape))
        made.data_location = onnx.TensorProto.EXTERNAL
        made.external_data.add(key="location", value="memory")
    if unknown := [given.name for given in kept if given.name not in exported.inputs]:
        raise EngineError(f"the exported graph asks for {', '.join(unknown[:5])}, which the network does not have")
    del graph.input[:]
    graph.input.extend(kept)
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in (*graph.value_info, *graph.input)}
    for number, node in enumerate(graph.node):
        if node.op_type == "GlobalMaxPool":  # which loses NaN, as the maximum over axes does not
            axes = np.arange(2, ranks.get(node.input[0], 4), dtype=np.int64)
            graph.initializer.append(onnx.numpy_helper.from_array(axes, f"axes of global max {number}"))
            node.op_type = "ReduceMax"
            node.input.append(f"axes of global max {number}")
    # Of weights that are equal the exporter asks for one and calls the others its Identity, which hides them from the folding.
    same = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Identity" and node.input[0] in names}
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = same.get(name, name)
    watches = watch(model, exported.tensors)
    return model.SerializeToString(), names, watches
