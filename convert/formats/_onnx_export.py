"""Write a network as ONNX: PyTorch's exporter, then what it leaves undone: names, order, preprocessing."""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from convert import _guard
from convert.formats._onnx_graph import scope
from convert.formats._onnx_proto import Operator
from convert.kinds import is_row
from weights.errors import ConvertError

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("convert")

OPSET = 17
LARGEST_BYTES = 2**31 - 2**20
"""A protobuf message ends at 2 GiB; the rest is for the graph."""


def write(
    network: nn.Module, path: Path, *, input_shape: Sequence[int], metadata: Mapping[str, str], preprocessing: Any, opset: int
) -> tuple[nn.Module, Any]:
    """Write a network, as `convert.formats.onnx.export` says, and return the copy that was traced, and the images it was traced with."""
    import torch

    onnx = _guard.need("onnx")
    state = network.state_dict()
    if sum(tensor.nbytes for tensor in state.values()) > LARGEST_BYTES:
        raise ConvertError(f"{path}: an ONNX file holds 2 GiB at the most, and the network has more")
    twin = _twin(network)
    example = torch.randn(2, *input_shape, generator=torch.Generator().manual_seed(0))
    for fold in (True, False):  # unfolded, every transposition and reshaping of a parameter is an operator of the graph
        model = onnx.load_from_string(_traced(twin, example, opset, fold))
        wanted = _tidy(model, twin.state_dict(), onnx)
        lost = [given.name for given in model.graph.input if given.name != "images" and given.name not in wanted]
        if not lost:
            break
    else:
        readers = [node.name.strip("/") or node.op_type for node in model.graph.node if lost[0] in node.input]
        raise ConvertError(
            f"{path}: PyTorch's exporter changed a parameter on the way to {', '.join(readers[:3])} and did not say which it was; "
            "keep it in a layer of torch.nn, unchanged"
        )
    if preprocessing is not None:
        _prepend(model, preprocessing, input_shape, onnx)
    del model.metadata_props[:]
    for key in sorted(metadata):
        model.metadata_props.add(key=key, value=metadata[key])
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise ConvertError(f"{path}: PyTorch exported a graph that ONNX's checker refuses: {str(error)[:300]}") from error
    _write(model, wanted, Path(path))
    return twin, example


def _twin(network: nn.Module) -> nn.Module:
    """Copy the modules to the CPU, in float32 and eval mode; tensors that are there already are shared, not copied."""
    import copy

    import torch

    tensors = (*network.parameters(), *network.buffers())
    shared = {id(t): t for t in tensors if t.device.type == "cpu" and (t.dtype == torch.float32 or not t.is_floating_point())}
    twin = copy.deepcopy(network, shared).cpu().float().eval()
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.AdaptiveAvgPool2d:
                setattr(module, name, _pooling(child.output_size))
    return twin


def _pooling(output_size: Any) -> nn.Module:
    """Make an adaptive pool of a kind that ONNX can say: it has none whose windows differ in size."""
    import torch
    from torch.nn import functional as F

    class Pooling(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wanted = output_size if is_row(output_size) else (output_size, output_size)
            height, width = (int(side) for side in x.shape[2:])
            rows, columns = (side if side is not None else own for side, own in zip(wanted, (height, width), strict=True))
            if height % rows == 0 and width % columns == 0:
                return F.adaptive_avg_pool2d(x, (rows, columns))
            if rows % height == 0 and columns % width == 0:  # every pixel is repeated
                return F.interpolate(x, scale_factor=(float(rows // height), float(columns // width)), mode="nearest")
            down, across = (F.adaptive_avg_pool1d(torch.eye(side), count) for side, count in ((height, rows), (width, columns)))
            return down.T @ (x @ across)

    return Pooling()


def _traced(network: nn.Module, example: Any, opset: int, fold: bool) -> bytes:
    import torch

    held = io.BytesIO()
    axes = {"images": {0: "batch"}, "logits": {0: "batch"}}
    core: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    core._jit_set_onnx_log_enabled(False)  # which the exporter turns on, to print graphs that fail to stdout, and leaves on
    silent = mock.patch.object(core, "_jit_set_onnx_log_enabled")
    with warnings.catch_warnings(), torch.no_grad(), _fixed_sizes(), silent:
        # about the exporter's age, and about constants that are folded in spite of PRESERVE; the newer exporter takes twenty times
        # as long and writes a chain of operators for every convolution's absent bias
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(  # pyright: ignore[reportUnknownMemberType]  # torch leaves parts of its signature open
                network,
                (example,),
                held,  # pyright: ignore[reportArgumentType]  # it takes files, and says only that it takes paths
                dynamo=False,
                opset_version=opset,
                input_names=["images"],
                output_names=["logits"],
                dynamic_axes=axes,
                training=torch.onnx.TrainingMode.PRESERVE,  # else each BatchNorm is folded into the convolution before it
                do_constant_folding=fold,
                export_params=False,  # the tensors become inputs; copying them through the exporter takes a minute
            )
        except Exception as error:  # an exporter fails in any way whatever
            said = str(error).strip().splitlines()
            raise ConvertError(f"PyTorch can't export {type(network).__name__} to ONNX: {said[0][:300] if said else error!r}") from error
    return held.getvalue()


def _fixed_sizes() -> Any:
    """Make sizes other than the batch plain numbers while PyTorch traces, as height and width are the file's for good.

    Otherwise padding that depends on the size is written as arithmetic, in which the exporter rounds -31 / 2 to -15, not to -16.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    shape = torch.Tensor.shape.__get__  # type: ignore[attr-defined]

    class Fixed(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named: dict[str, Any] = kwargs or {}
            found = function(*args, **named)
            if function == shape or (function is torch.Tensor.size and len(args) == 1 and not named):
                return torch.Size([size if axis == 0 else int(size) for axis, size in enumerate(found)])
            if function is torch.Tensor.size and (args[1:] or named.get("dim", 0),)[0] not in ((0,), 0):
                return int(found)
            return found

    return Fixed()


def _tidy(model: Any, state: Mapping[str, Any], onnx: Any) -> dict[str, Any]:
    """List the tensors that the graph asks for as inputs, in the network's order, and leave out what names this machine's files.

    Of parameters that are equal, as all fresh scales are, the exporter asks for one, and calls the others its Identity; each is
    asked for here.
    """
    graph = model.graph
    graph.name, graph.doc_string = "network", ""
    del graph.value_info[:]
    for node in graph.node:
        node.doc_string = ""
        del node.metadata_props[:]
    _unfold(graph, state, onnx)
    asked = {given.name for given in graph.input}
    copies = [node for node in graph.node if node.op_type == "Identity" and node.input[0] in asked and node.output[0] in state]
    for node in copies:
        name = node.output[0]
        graph.node.remove(node)
        graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, list(state[name].shape)))
        asked.add(name)
    if absent := [name for name, tensor in state.items() if name not in asked and tensor.is_floating_point()]:
        log.info("the ONNX graph has no use for %s", ", ".join(absent[:10]))
    return {name: tensor for name, tensor in state.items() if name in asked}


def _unfold(graph: Any, state: Mapping[str, Any], onnx: Any) -> None:
    """Ask for what the exporter has changed and then left out: transposed weights, slopes, and vectors with more axes."""
    given = {one.name: one for one in graph.input if one.name not in state}
    asked = {one.name for one in graph.input}
    same = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Identity" and node.input[0] in given}
    nodes: list[Any] = []

    def ask(name: str) -> None:
        if name not in asked:
            graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, list(state[name].shape)))
            asked.add(name)

    slopes: dict[str, str] = {}
    for node in graph.node:
        if node.op_type == "PRelu" and (asked_as := same.get(node.input[1], node.input[1])) in given:
            weight = f"{scope(Operator(node.op_type, node.name, '', [], [], {}))}.weight"
            weight = weight if weight in state else slopes.get(asked_as, "")  # a module that is called again has another name there
            if weight and math.prod(state[weight].shape) == math.prod(_dims(given[asked_as])):
                slopes[asked_as] = weight
                ask(weight)
                place = node.name.rpartition("/")[0]
                shape = onnx.numpy_helper.from_array(np.array(_dims(given[asked_as]), np.int64), f"{place}/shape")
                graph.initializer.append(shape)
                node.input[1] = f"{place}/Reshape_output_0"
                nodes.append(onnx.helper.make_node("Reshape", [weight, shape.name], [node.input[1]], f"{place}/Reshape"))
        right = same.get(node.input[1], node.input[1]) if node.op_type == "MatMul" else ""
        place, weight = node.name.rpartition("/")[0], f"{scope(Operator(node.op_type, node.name, '', [], [], {}))}.weight"
        if right in given and weight in state and tuple(state[weight].shape) == _dims(given[right])[::-1]:
            node.input[1] = f"{place}/Transpose_output_0"
            nodes.append(onnx.helper.make_node("Transpose", [weight], [node.input[1]], f"{place}/Transpose", perm=[1, 0]))
            ask(weight)
        for place, read in enumerate(node.input):
            one = given.get(same.get(read, read))
            own = _held(node, _dims(one), state) if one is not None else ""
            if own:  # it has axes of 1 there, which were folded into it
                shaped, shape = f"{node.output[0]}/{own}", f"{node.output[0]}/{own}/shape"
                sizes = onnx.helper.make_tensor(shape, onnx.TensorProto.INT64, [len(_dims(one))], _dims(one))
                nodes.append(onnx.helper.make_node("Constant", [], [shape], f"{shaped}/Constant", value=sizes))
                nodes.append(onnx.helper.make_node("Reshape", [own, shape], [shaped], f"{shaped}/Reshape"))
                node.input[place] = shaped
                ask(own)
        nodes.append(node)
    read = {name for node in nodes for name in node.input}
    nodes = [node for node in nodes if node.output[0] not in same or node.output[0] in read]
    read = {name for node in nodes for name in node.input}
    del graph.node[:]
    graph.node.extend(nodes)
    for name, one in given.items():
        if name not in read and name != "images":
            graph.input.remove(one)


def _held(node: Any, dims: tuple[int, ...], state: Mapping[str, Any]) -> str:
    """Name the vector of a node's module that has these sizes but for axes of 1; "" where none has, or two that can't be told apart."""
    module, flat = scope(Operator(node.op_type, node.name, "", [], [], {})), tuple(size for size in dims if size != 1)
    names = [name for name, tensor in state.items() if name.rpartition(".")[0] == module and tuple(tensor.shape) == flat]
    if len(names) > 1 and node.op_type in ("Mul", "Add"):
        names = [name for name in names if name.endswith(".bias") == (node.op_type == "Add")]
    return names[0] if module and len(names) == 1 else ""


def _dims(given: Any) -> tuple[int, ...]:
    return tuple(axis.dim_value for axis in given.type.tensor_type.shape.dim)


def _write(model: Any, tensors: Mapping[str, Any], path: Path) -> None:
    """Write the graph, and the tensors behind it one by one: a message's fields may come in any order, so none is held in memory."""
    graph = model.graph
    inputs = [given for given in graph.input if given.name not in tensors]
    del graph.input[:]
    graph.input.extend(inputs)
    body = graph.SerializeToString(deterministic=True)
    model.ClearField("graph")
    shell = model.SerializeToString(deterministic=True)
    heads: list[bytes] = []
    for name, tensor in tensors.items():
        dims = b"".join(b"\x08" + _varint(size) for size in tensor.shape)
        label = name.encode()
        head = dims + b"\x10\x01" + b"\x42" + _varint(len(label)) + label + b"\x4a" + _varint(tensor.nbytes)  # type 1 is float32
        heads.append(b"\x2a" + _varint(len(head) + tensor.nbytes) + head)
    length = len(body) + sum(map(len, heads)) + sum(tensor.nbytes for tensor in tensors.values())
    with path.open("wb") as file:
        file.write(shell + b"\x3a" + _varint(length) + body)
        for head, tensor in zip(heads, tensors.values(), strict=True):
            file.write(head)
            file.write(tensor.detach().contiguous().numpy().astype("<f4", copy=False).data)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _prepend(model: Any, preprocessing: Any, input_shape: Sequence[int], onnx: Any) -> None:
    """Put the normalisation in front, in the order and the precision in which the record's own preprocessing does it."""
    graph, helper = model.graph, onnx.helper
    channels, height, width = input_shape
    mean, std = (np.asarray(values, np.float32) for values in (preprocessing.mean, preprocessing.std))
    if len(mean) != channels or len(std) != channels:
        raise ConvertError(f"the preprocessing has {len(mean)} means and {len(std)} deviations, the network {channels} channels")
    constants: dict[str, np.ndarray] = {
        "pixels.range": np.float32(255).reshape(1, 1, 1, 1),
        "pixels.mean": mean.reshape(1, -1, 1, 1),
        "pixels.std": std.reshape(1, -1, 1, 1),
    }
    nodes = [
        helper.make_node("Transpose", ["pixels"], ["pixels.planes"], "pixels.channels_first", perm=[0, 3, 1, 2]),
        helper.make_node("Cast", ["pixels.planes"], ["pixels.float"], "pixels.to_float", to=onnx.TensorProto.FLOAT),
        helper.make_node("Div", ["pixels.float", "pixels.range"], ["pixels.unit"], "pixels.to_unit"),
        helper.make_node("Sub", ["pixels.unit", "pixels.mean"], ["pixels.centred"], "pixels.centre"),
        helper.make_node("Div", ["pixels.centred", "pixels.std"], ["images"], "pixels.normalise"),
    ]
    if preprocessing.channel_order == "bgr":
        constants["pixels.order"] = np.arange(channels, dtype=np.int64)[::-1].copy()
        nodes.insert(2, helper.make_node("Gather", ["pixels.float", "pixels.order"], ["pixels.bgr"], "pixels.reverse", axis=1))
        nodes[3].input[0] = "pixels.bgr"
    graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])
    others = [given for given in graph.input if given.name != "images"]
    del graph.input[:]
    graph.input.append(helper.make_tensor_value_info("pixels", onnx.TensorProto.UINT8, ["batch", height, width, channels]))
    graph.input.extend(others)
