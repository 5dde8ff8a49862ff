"""Write a network as TFLite: as ONNX first, whose operators are then said in TFLite's, with channels last and BatchNorms folded.

The tables of the file are made by the schema that ai-edge-litert brings along, which also runs it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.formats import _flatbuffer, _onnx_export, _tflite_model
from convert.formats._mapped import mapped
from convert.formats._tflite_handlers import HANDLERS
from convert.formats._tflite_writer import Numbers, Writer
from convert.formats._wire import Budget
from weights.errors import MissingLibrary

if TYPE_CHECKING:
    from torch import nn


def schema() -> Any:
    """Import the tables of the format.

    Raises:
        MissingLibrary: they are not installed.
    """
    try:
        importlib.import_module("flatbuffers")
        return importlib.import_module("ai_edge_litert.schema_py_generated")
    except ImportError as error:
        raise MissingLibrary(
            "ai-edge-litert is needed to write a .tflite file and is not installed: pip install 'kernelzoo[tflite]'"
        ) from error


def write(network: nn.Module, path: Path, *, input_shape: Sequence[int], metadata: Mapping[str, str]) -> tuple[nn.Module, Any, nn.Module]:
    """Write a network, as `convert.formats.tflite.export` says.

    Returns:
        The copy that was traced, its images, and a copy with the numbers of the file, whose BatchNorms are folded.
    """
    tables = schema()
    onnx: Any = importlib.import_module("onnx")
    with tempfile.TemporaryDirectory() as folder:
        between = Path(folder) / "network.onnx"
        twin, example = _onnx_export.write(
            network, between, input_shape=input_shape, metadata={}, preprocessing=None, opset=_onnx_export.OPSET
        )
        model = onnx.load(str(between))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    model = _computed(model, onnx)
    writer = Writer(tables, onnx, model, path, HANDLERS)
    content = writer.file(metadata)
    with path.open("wb") as file:
        file.write(content)
    return twin, example, _with_numbers(twin, writer.numbers)


def _with_numbers(network: nn.Module, numbers: Sequence[Numbers]) -> nn.Module:
    """Copy a network and give its layers the numbers of the file; a layer that is called twice keeps its own."""
    import copy

    import torch

    made = copy.deepcopy(network)
    calls = Counter(each.layer for each in numbers)
    for each in numbers:
        if calls[each.layer] > 1:
            continue
        layer: Any = made.get_submodule(each.layer)
        norm: Any = made.get_submodule(each.norm)
        weight, bias = (torch.from_numpy(np.array(array)) for array in (each.weight, each.bias))  # pyright: ignore[reportUnknownMemberType]  # its argument is untyped
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
        norm.running_mean, norm.running_var, norm.eps = torch.zeros_like(norm.running_mean), torch.ones_like(norm.running_var), 0.0
        if layer is not norm:
            norm.weight = norm.bias = None
    return made


def _computed(model: Any, onnx: Any) -> Any:
    """Compute what depends on no pixel, the sizes of maps and of margins, and tell the shape of every value."""
    reference: Any = importlib.import_module("onnx.reference")
    known = {n.output[0]: onnx.numpy_helper.to_array(n.attribute[0].t) for n in model.graph.node if n.op_type == "Constant"}
    while True:
        del model.graph.value_info[:]
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        shapes = {
            one.name: [axis.dim_value for axis in one.type.tensor_type.shape.dim]
            for one in model.graph.value_info
            if len(one.type.tensor_type.shape.dim)
        }
        left: list[Any] = []
        for node in model.graph.node:
            if node.op_type == "Shape" and 0 not in shapes.get(node.input[0], [0]):
                found = np.array(shapes[node.input[0]], np.int64)
            elif (
                node.op_type == "Constant"
                or not node.input
                or not all(name in known for name in node.input if name)
                or len(node.output) > 1
            ):
                left.append(node)
                continue
            else:
                given = {name: known[name] for name in node.input if name}
                whole = onnx.helper.make_graph(
                    [node], "one", [onnx.helper.make_empty_tensor_value_info(name) for name in given],
                    [onnx.helper.make_empty_tensor_value_info(node.output[0])],
                )  # fmt: skip
                alone = onnx.helper.make_model(whole, opset_imports=model.opset_import)
                found = np.asarray(reference.ReferenceEvaluator(alone).run(None, given)[0])
            known[node.output[0]] = found
            model.graph.initializer.append(onnx.numpy_helper.from_array(found, node.output[0]))
        if len(left) == len(model.graph.node):
            return model
        kind: Any = onnx.NodeProto
        kept: list[Any] = [kind.FromString(node.SerializeToString()) for node in left]
        del model.graph.node[:]
        model.graph.node.extend(kept)


def outputs(path: Path, images: np.ndarray, last: bool) -> tuple[np.ndarray, str] | str:
    """Let LiteRT run a file on images (B, C, H, W); `last` turns them for a file that takes the channels last. Or say why not."""
    module: Any = importlib.import_module("ai_edge_litert.interpreter")
    plain = module.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    interpreter = module.Interpreter(model_content=path.read_bytes(), num_threads=1, experimental_op_resolver_type=plain)
    interpreter.allocate_tensors()
    (given, *_), (gives, *_) = interpreter.get_input_details(), interpreter.get_output_details()
    if given["dtype"] != np.float32 or gives["dtype"] != np.float32:
        return "its images or outputs are whole numbers, which it rounds"
    data = mapped(path)
    if _tflite_model.rounds(_tflite_model.parse(_flatbuffer.root(data, Budget()), data)):
        return "its runtime rounds what each layer of eight-bit weights reads to eight bits too"
    made: list[np.ndarray] = []
    for image in images:
        interpreter.set_tensor(given["index"], (image.transpose(1, 2, 0) if last else image)[None])
        interpreter.invoke()
        made.append(interpreter.get_tensor(gives["index"]).copy())
    return np.concatenate(made), f"LiteRT {importlib.metadata.version('ai-edge-litert')}"
