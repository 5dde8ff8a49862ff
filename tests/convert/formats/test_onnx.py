"""ONNX's graph executed in float64 gives what onnxruntime computes, its weights are named, and hostile files are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from seeds_onnx import converted_network, draw, model, node, quantised_network, seeds, small_network

from convert import execute, formats
from convert.formats import onnx as reader
from convert.formats import pytorch
from convert.source import Source
from weights.errors import ConvertError, LimitExceeded, MalformedFile, UnsafeFormat

pytestmark = pytest.mark.reference


def saved(folder: Path, held: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(held.SerializeToString())
    return path


def compared(folder: Path, held: onnx.ModelProto, *, known: bool = True) -> Source:
    """Run a model in onnxruntime and here, and compare every output."""
    path = saved(folder, held)
    source = formats.read(path)
    assert all(tuple(stored.array().shape) == stored.shape for stored in source.tensors.values())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    dims = [dim if isinstance(dim, int) else 2 for dim in session.get_inputs()[0].shape]
    images = np.random.default_rng(7).normal(size=dims).astype(np.float32)
    expected = session.run(None, {session.get_inputs()[0].name: images})
    assert source.graph is not None
    assert known == (source.graph.unknown == []), source.graph.unknown
    if known:
        last = source.graph.nodes[0].attrs["layout"] == "nhwc"
        given = images.transpose(0, 3, 1, 2) if last and images.ndim == 4 else images
        for value, wanted in zip(execute.run(source, given).values(), expected, strict=True):
            value = value.transpose(0, 2, 3, 1) if value.ndim == 4 and last and value.shape != wanted.shape else value
            assert value.shape == np.shape(wanted)
            assert np.abs(value - wanted).max() < 1e-5 * max(1, np.abs(wanted).max())
    return source


def test_a_state_dicts_names_are_kept_and_every_bit_with_them(tmp_path: Path) -> None:
    held = small_network()
    source = compared(tmp_path, held)
    assert source.framework == "ONNX opset 17, maker 1"
    assert source.tensors.keys() == {tensor.name for tensor in held.graph.initializer}
    for tensor in held.graph.initializer:
        assert source.tensors[tensor.name].array().tobytes() == numpy_helper.to_array(tensor).tobytes()
    assert {name: stored.convention for name, stored in source.tensors.items() if stored.convention} == {"stem.weight": "correlation"}
    assert [(n.name, n.op) for n in source.graph.nodes if n.name in ("stem", "bn", "fc")] == [
        ("stem", "conv"),
        ("bn", "norm"),
        ("fc", "dense"),
    ]  # pyright: ignore[reportOptionalMemberAccess]


def test_a_network_from_tensorflow_keeps_its_layouts_and_its_flatten_order(tmp_path: Path) -> None:
    source = compared(tmp_path, converted_network())
    assert source.flatten == "hwc"
    assert list(source.tensors) == ["stem.weight", "stem.bias", "head.weight", "head.bias"]
    assert [str(step) for step in source.tensors["stem.weight"].steps] == ["transpose(3,2,0,1)"]
    assert source.tensors["stem.weight"].stored_shape == (3, 3, 3, 4)
    assert source.tensors["head.weight"].shape == (5, 64)


def test_quantised_halved_and_reshaped_weights_are_followed(tmp_path: Path) -> None:
    held = quantised_network()
    source = compared(tmp_path, held)
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in held.graph.initializer}
    scale, zero = arrays["scale"].reshape(4, 1, 1, 1), arrays["zero"].reshape(4, 1, 1, 1).astype(np.float32)
    first, second = source.tensors["Conv_0.weight"], source.tensors["Conv_1.weight"]
    assert (first.array() == (arrays["w"].astype(np.float32) - zero) * scale).all()
    assert "dequantised from int8" in first.origin
    assert [str(step) for step in second.steps] == ["transpose(3,2,0,1)", "float16 to float32"]
    assert "reshape(16 to 4x4)" in source.tensors["Gemm_0.weight"].origin


def with_weights(nodes: Sequence[Any], tensors: dict[str, np.ndarray], opset: int = 17) -> onnx.ModelProto:
    """Add a layer with a kernel and an output of its own: a file without weights is none."""
    held = model([*nodes, node("Conv", "x other.weight", "aside")], {**tensors, "other.weight": draw(2, 3, 1, 1)}, opset=opset)
    held.graph.output.append(helper.make_tensor_value_info("aside", TensorProto.FLOAT, None))
    return held


W = draw(4, 3, 3, 3)
CASES: dict[str, tuple[Sequence[Any], dict[str, np.ndarray]]] = {
    "same lower": ([node("Conv", "x w", "y", auto_pad="SAME_LOWER", strides=[2, 2])], {"w": draw(4, 3, 2, 2)}),
    "valid": ([node("Conv", "x w", "y", auto_pad="VALID", dilations=[2, 1])], {"w": W}),
    "uneven pads": ([node("Conv", "x w b", "y", pads=[0, 1, 2, 3], strides=[2, 1])], {"w": W, "b": draw(4)}),
    "groups": ([node("Conv", "x w", "y", group=3)], {"w": draw(6, 1, 3, 2)}),
    "transposed": (
        [node("ConvTranspose", "x w b", "y", strides=[2, 2], pads=[1, 0, 1, 0], output_padding=[1, 0])],
        {"w": draw(3, 2, 3, 3), "b": draw(2)},
    ),
    "transposed in groups": ([node("ConvTranspose", "x w", "y", group=3)], {"w": draw(3, 2, 3, 3)}),
    "bias behind": ([node("Conv", "x w", "a"), node("Add", "b a", "y")], {"w": W, "b": draw(1, 4, 1, 1)}),
    "max pool ceil": ([node("MaxPool", "x", "y", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)], {}),
    "max pool padded ceil": ([node("MaxPool", "x", "y", kernel_shape=[2, 2], strides=[3, 3], pads=[1, 1, 1, 1], ceil_mode=1)], {}),
    "average without pads": ([node("AveragePool", "x", "y", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])], {}),
    "average with pads": ([node("AveragePool", "x", "y", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)], {}),
    "average same": ([node("AveragePool", "x", "y", kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER")], {}),
    "mean over space": ([node("ReduceMean", "x", "y", axes=[2, -1], keepdims=0)], {}),
    "clip": ([node("Clip", "x low high", "y")], {"low": np.float32(-0.5), "high": np.float32(0.5)}),
    "relu6": ([node("Clip", "x low high", "y")], {"low": np.float32(0), "high": np.float32(6)}),
    "clip below": ([node("Max", "x low", "y")], {"low": np.float32(-0.5)}),
    "silu": ([node("Sigmoid", "x", "a"), node("Mul", "x a", "y")], {}),
    "hard swish": ([node("HardSwish", "x", "y")], {}),
    "hard swish in two": ([node("HardSigmoid", "x", "a", alpha=1 / 6), node("Mul", "a x", "y")], {}),
    "hard sigmoid": ([node("HardSigmoid", "x", "y")], {}),
    "leaky": (
        [node("LeakyRelu", "x", "a", alpha=0.1), node("Elu", "a", "b", alpha=0.7), node("Tanh", "b", "c"), node("Softplus", "c", "y")],
        {},
    ),
    "prelu": ([node("PRelu", "x s", "y")], {"s": draw(3, 1, 1)}),
    "pixels": ([node("Sub", "x m", "a"), node("Div", "a s", "y")], {"m": draw(1, 3, 1, 1), "s": np.abs(draw(1, 3, 1, 1)) + 1}),
    "from a number": ([node("Sub", "one x", "y")], {"one": np.float32(1)}),
    "scale": (
        [node("Conv", "x w", "a"), node("Relu", "a", "b"), node("Mul", "b g", "c"), node("Add", "c h", "y")],
        {"w": W, "g": draw(4, 1, 1), "h": draw(4, 1, 1)},
    ),
    "joins": ([node("Relu", "x", "a"), node("Concat", "a x", "b", axis=1), node("Add", "b b", "c"), node("Max", "b c", "y")], {}),
    "gate": (
        [node("GlobalAveragePool", "x", "a"), node("Conv", "a w", "b"), node("Sigmoid", "b", "c"), node("Mul", "x c", "y")],
        {"w": draw(3, 3, 1, 1)},
    ),
    "pad": ([node("Pad", "x p v", "y")], {"p": np.array([0, 0, 1, 2, 0, 0, 3, 0]), "v": np.float32(0.5)}),
    "crop by pads": ([node("Pad", "x p", "y")], {"p": np.array([0, 0, -1, 0, 0, 0, 0, -2])}),
    "empty channels": ([node("Pad", "x p", "y")], {"p": np.array([0, 1, 0, 0, 0, 2, 0, 0])}),
    "every other pixel": (
        [node("Slice", "x s e a t", "y")],
        {"s": np.array([1, 0]), "e": np.array([8, 2**40]), "a": np.array([2, 3]), "t": np.array([2, 2])},
    ),
    "some channels": ([node("Slice", "x s e a", "y")], {"s": np.array([-2]), "e": np.array([2**40]), "a": np.array([1])}),
    "split": ([node("Split", "x n", "a b", axis=1), node("Mul", "b b", "c"), node("Concat", "c a", "y", axis=1)], {"n": np.array([1, 2])}),
    "bgr": ([node("Gather", "x o", "y", axis=1)], {"o": np.array([2, 1, 0])}),
    "nearest": (
        [node("Resize", "x n s", "y", coordinate_transformation_mode="asymmetric", nearest_mode="floor")],
        {"n": np.empty(0, np.float32), "s": np.array([1, 1, 2, 3], np.float32)},
    ),
    "bilinear": ([node("Resize", "x n s", "y", mode="linear")], {"n": np.empty(0, np.float32), "s": np.array([1, 1, 2, 2], np.float32)}),
    "lrn": ([node("LRN", "x", "y", size=3, alpha=0.3, beta=0.6, bias=1.5)], {}),
    "softmax": ([node("Flatten", "x", "a"), node("Gemm", "a w", "b"), node("Softmax", "b", "y")], {"w": draw(192, 5) / 10}),
    "dense": ([node("Flatten", "x", "a"), node("Gemm", "a w b", "y", transB=1)], {"w": draw(5, 192), "b": draw(1, 5)}),
    "flatten by shape": (
        [
            node("Shape", "x", "s"),
            node("Gather", "s z", "n"),
            node("Unsqueeze", "n a", "m"),
            node("Concat", "m r", "t", axis=0),
            node("Reshape", "x t", "f"),
            node("MatMul", "f w", "y"),
        ],
        {"z": np.array(0), "a": np.array([0]), "r": np.array([-1]), "w": draw(192, 5)},
    ),
    "squeeze": (
        [
            node("GlobalMaxPool", "x", "a"),
            node("Squeeze", "a d", "b"),
            node("Gemm", "b w", "c"),
            node("Unsqueeze", "c d", "e"),
            node("Mul", "x e", "y"),
        ],
        {"d": np.array([2, 3]), "w": draw(3, 3)},
    ),
    "average of all": ([node("Relu", "x", "a"), node("Mean", "a x", "b"), node("Sum", "a b x", "y")], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_computes_what_onnxruntime_computes(tmp_path: Path, name: str) -> None:
    compared(tmp_path, with_weights(*CASES[name]))


def test_older_operator_sets_keep_numbers_in_attributes(tmp_path: Path) -> None:
    nodes = [
        node("Pad", "x", "a", pads=[0, 0, 1, 1, 0, 0, 0, 0]),
        node("Clip", "a", "b", min=0.0, max=6.0),
        node("Upsample", "b s", "c", mode="nearest"),
        node("ReduceMean", "c", "d", axes=[2, 3], keepdims=1),
        node("Squeeze", "d", "e", axes=[2, 3]),
        node("Dropout", "e", "f"),
        node("Softmax", "f", "y"),
    ]
    compared(tmp_path, with_weights(nodes, {"s": np.array([1, 1, 2, 2], np.float32)}, opset=9))


@pytest.mark.parametrize(
    ("nodes", "tensors"),
    [
        ([node("Exp", "x", "y")], {}),
        ([node("Softmax", "x", "y", axis=3)], {}),
        ([node("Concat", "x x", "y", axis=2)], {}),
        ([node("Resize", "x n s", "y", mode="cubic")], {"n": np.empty(0, np.float32), "s": np.array([1, 1, 2, 2], np.float32)}),
        ([node("Transpose", "x", "y", perm=[0, 1, 3, 2])], {}),
        ([node("MaxPool", "x", "y", kernel_shape=[2, 2], dilations=[2, 2])], {}),
        ([node("Flatten", "x", "a"), node("Gemm", "a w", "y", alpha=2.0)], {"w": draw(192, 2)}),
    ],
    ids=lambda value: value[0].op_type if isinstance(value, list) else "",
)
def test_what_the_graph_has_no_words_for_is_unknown_and_not_guessed(
    tmp_path: Path, nodes: Sequence[Any], tensors: dict[str, np.ndarray]
) -> None:
    path = saved(tmp_path, model([*nodes[:-1], nodes[-1], node("Relu", "y", "z"), node("Conv", "x k", "q")], {**tensors, "k": W}))
    source = reader.read(path)
    assert source.graph is not None
    assert source.graph.unknown == [nodes[-1].op_type]


def test_names_of_pytorchs_scopes_are_modules(tmp_path: Path) -> None:
    nodes = [
        node("Conv", "x onnx::Conv_1 onnx::Conv_2", "a", name="/layer1/layer1.0/conv1/Conv"),
        node("Conv", "a onnx::Conv_3", "y", name="/features/features.1/conv/conv.0/conv.0.0/Conv"),
    ]
    tensors = {"onnx::Conv_1": W, "onnx::Conv_2": draw(4), "onnx::Conv_3": draw(2, 4, 1, 1)}
    source = compared(tmp_path, model(nodes, tensors))
    assert list(source.tensors) == ["layer1.0.conv1.weight", "layer1.0.conv1.bias", "features.1.conv.0.0.weight"]


def test_weights_that_two_layers_share_are_named_once(tmp_path: Path) -> None:
    nodes = [node("Conv", "x a.weight", "p"), node("Conv", "x a.weight", "q"), node("Add", "p q", "y")]
    source = compared(tmp_path, model(nodes, {"a.weight": W}), known=False)
    assert list(source.tensors) == ["a.weight"]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64", "int8"])
@pytest.mark.parametrize("raw", [True, False])
def test_every_type_is_read_from_raw_bytes_and_from_fields(tmp_path: Path, name: str, raw: bool) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name) if name.startswith(("bfloat", "float8")) else name)
    array = (np.arange(-6, 6).reshape(3, 4) / 2).astype(dtype)
    held = onnx.ModelProto(ir_version=8)
    held.graph.name = "g"
    tensor = numpy_helper.from_array(array, "fc.weight")
    held.graph.initializer.append(
        tensor if raw else helper.make_tensor("fc.weight", tensor.data_type, array.shape, array.reshape(-1).tolist())
    )
    stored = reader.read(saved(tmp_path, held)).tensors["fc.weight"]
    assert stored.stored_dtype == dtype
    assert stored.load().tobytes() == array.tobytes()


def external(folder: Path, location: str, **more: str) -> Path:
    held = small_network()
    tensor = held.graph.initializer[0]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=value)
    content = tensor.raw_data
    tensor.ClearField("raw_data")
    for place in (folder / "deep", folder.parent):
        place.mkdir(exist_ok=True)
        (place / "w.bin").write_bytes(b"\0" * 16 + content)
    return saved(folder, held)


def test_external_data_inside_the_folder_is_read(tmp_path: Path) -> None:
    source = reader.read(external(tmp_path, "deep/w.bin", offset="16", length="432"))
    assert (source.tensors["stem.weight"].load() == W).all()


@pytest.mark.parametrize(
    "location", ["../w.bin", "deep/../../w.bin", "/etc/hostname", "", "c:\\w.bin", "\\\\host\\w.bin", "link.bin", "links/w.bin", "deep"]
)
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    path = external(tmp_path, location, offset="16")
    (tmp_path / "link.bin").symlink_to(tmp_path / "deep" / "w.bin")
    (tmp_path / "links").symlink_to(tmp_path / "deep")
    with pytest.raises(UnsafeFormat, match="only"):
        reader.read(path)


@pytest.mark.parametrize(
    ("location", "more"),
    [
        ("gone.bin", {}),
        ("deep/w.bin", {"offset": "17"}),
        ("deep/w.bin", {"offset": "-1"}),
        ("deep/w.bin", {"length": "8"}),
        ("deep/w.bin", {"offset": "x"}),
    ],
)
def test_external_data_that_is_not_there_is_refused(tmp_path: Path, location: str, more: dict[str, str]) -> None:
    with pytest.raises(MalformedFile, match=r"stem\.weight"):
        reader.read(external(tmp_path, location, **more))


def test_a_tensor_that_claims_more_than_it_has_is_refused(tmp_path: Path) -> None:
    held = small_network()
    held.graph.initializer[0].dims[0] = 2**40
    with pytest.raises(MalformedFile, match=r"stem\.weight"):
        reader.read(saved(tmp_path, held))
    held.graph.initializer[0].dims[:] = [1] * 20
    with pytest.raises(LimitExceeded, match="20 axes"):
        reader.read(saved(tmp_path, held))


def test_a_file_of_countless_fields_is_refused_soon(tmp_path: Path) -> None:
    path = tmp_path / "many.onnx"
    path.write_bytes(b"\x08\x08\x3a" + b"\x80\x92\xf4\x01" + b"\x0a\x00" * 2_000_000)
    with pytest.raises(ConvertError):
        reader.read(path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, small_network())
    whole = path.read_bytes()
    for end in range(0, len(whole) - 1, 97):
        path.write_bytes(whole[:end])
        with pytest.raises(ConvertError):
            reader.read(path)


def test_seeds_are_all_read(tmp_path: Path) -> None:
    for path in seeds(tmp_path):
        source = formats.read(path)
        assert source.format == "onnx"
        for stored in source.tensors.values():
            stored.array()


def test_parts_are_not_written_and_the_message_says_what_writes(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"export\(network"):
        reader.write([], tmp_path / "x.onnx", convention="correlation", metadata={})
    with pytest.raises(ConvertError, match="computes cross-correlation"):
        reader.write([], tmp_path / "x.onnx", convention="convolution", metadata={})


@pytest.mark.real
@pytest.mark.parametrize(("name", "count"), [("slim", 184), ("RFB", 244)])
def test_the_face_detectors_weights_are_pytorchs_bit_for_bit(real: Path, name: str, count: int) -> None:
    folder = real / "real" / "ultralight" / "models"
    ours = reader.read(folder / "onnx" / f"version-{name}-320.onnx").tensors
    theirs = pytorch.read(folder / "pretrained" / f"version-{name}-320.pth").tensors
    assert len(ours) == count
    assert ours.keys() == theirs.keys()
    assert all(stored.array().tobytes() == theirs[key].array().tobytes() for key, stored in ours.items())


@pytest.mark.real
def test_the_simplified_face_detector_is_read_by_topology(real: Path) -> None:
    """Its BatchNorms are folded into convolutions, whose names are numbers: kernels are the trained ones, each channel scaled."""
    folder = real / "real" / "ultralight" / "models" / "onnx"
    whole, simple = (reader.read(folder / f"version-slim-320{end}.onnx") for end in ("", "_simplified"))
    assert whole.graph is not None
    assert simple.graph is not None
    order = [[node.name for node in source.graph.nodes if node.op == "conv"] for source in (whole, simple) if source.graph is not None]
    assert len(order[0]) == len(order[1]) == 42
    same = 0
    for ours, theirs in zip(*order, strict=True):
        a, b = (source.tensors[f"{name}.weight"].array() for source, name in ((whole, ours), (simple, theirs)))
        same += int(np.array_equal(a, b)) + int(f"{theirs}.bias" in whole.tensors and ours == theirs)
        ratio = (b / a).reshape(len(a), -1)
        assert np.allclose(ratio, ratio[:, :1], rtol=1e-4), ours
    assert same == 34


def test_a_file_whose_graph_stands_in_front_of_its_version_is_known(tmp_path: Path) -> None:
    """As pnnx writes it; Protocol Buffers' fields may come in any order."""
    first = next(path for path in seeds(tmp_path) if path.suffix == ".onnx")
    held = onnx.load(first)
    graph = held.graph.SerializeToString()
    held.ClearField("graph")
    size, length = len(graph), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    (tmp_path / "turned.onnx").write_bytes(b"\x3a" + bytes([*length, size]) + graph + held.SerializeToString())
    assert formats.sniff(tmp_path / "turned.onnx") == "onnx"
    with formats.read(tmp_path / "turned.onnx") as turned, formats.read(first) as source:
        assert list(turned.tensors) == list(source.tensors)
        assert all((turned.tensors[name].array() == stored.array()).all() for name, stored in source.tensors.items())
