"""Frozen graphs of TensorFlow's executed in float64 give what OpenVINO computes of them, and what onnxruntime does of the same LeNet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from protobuf import message
from seeds_graphdef import CONV, Making, draw, fused_network, small_network

from convert import execute, formats
from convert.formats._openvino_export import imported
from convert.source import Source
from weights.errors import MalformedFile

openvino = imported()  # without the report that it sends home

pytestmark = pytest.mark.reference


def at_home(path: Path, images: np.ndarray) -> np.ndarray:
    exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    model = openvino.Core().compile_model(path, "CPU", exact)
    return np.concatenate([next(iter(model(image[None]).values())) for image in images])


def compared(folder: Path, held: bytes, images: np.ndarray | None = None) -> Source:
    path = folder / "model.pb"
    path.write_bytes(held)
    source = formats.read(path)
    images = draw(2, 8, 8, 3, seed=7) if images is None else images
    expected = at_home(path, images)
    assert source.format == "graphdef"
    assert source.graph is not None
    assert source.graph.unknown == []
    last = source.graph.nodes[0].attrs["layout"] == "nhwc"
    (value,) = execute.run(source, images.transpose(0, 3, 1, 2) if last else images).values()
    value = value.transpose(0, 2, 3, 1) if value.ndim == 4 and last else value
    assert value.shape == expected.shape
    assert np.abs(value - expected).max() < 1e-5 * max(1, np.abs(expected).max())
    assert all(tuple(stored.array().shape) == stored.shape for stored in source.tensors.values())
    return source


def test_a_network_under_slims_names(tmp_path: Path) -> None:
    source = compared(tmp_path, small_network())
    norm = [f"net/stem/BatchNorm.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")]
    assert list(source.tensors) == ["net/stem.weight", *norm, "net/dw.weight", "net/dw.bias", "net/head.weight", "net/head.bias"]
    assert source.tensors["net/dw.weight"].shape == (8, 1, 3, 3)
    assert source.flatten == "hwc"


def test_fused_layers_are_taken_apart_and_computed_shapes_followed(tmp_path: Path) -> None:
    (tmp_path / "x.pb").write_bytes(fused_network())
    source = formats.read(tmp_path / "x.pb")  # which no reader but TensorFlow knows: it is compared with its own arithmetic
    images = draw(2, 8, 8, 3, seed=7)
    (value,) = execute.run(source, images.transpose(0, 3, 1, 2)).values()
    padded, kernel = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0))), draw(3, 3, 3, 4)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    maps = np.maximum(np.einsum("nxyihw,hwio->nxyo", windows, kernel) + draw(4), 0)
    assert np.abs(value - (maps.reshape(2, -1) @ draw(256, 5) + draw(5))).max() < 1e-4
    assert list(source.tensors) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def conv(m: Making, x: str, outs: int = 4, name: str = "c") -> str:
    made = m.add("Conv2D", [x, m.constant(f"{name}/kernel", draw(3, 3, 3, outs))], f"{name}/Conv2D", **CONV)
    return m.add("BiasAdd", [made, m.constant(f"{name}/bias", draw(outs, seed=1))], f"{name}/BiasAdd", data_format="NHWC")


def enlarged(m: Making, padding: str, size: int) -> None:
    inputs = [m.ints("sizes", 1, size, size, 4), m.constant("t/kernel", draw(3, 3, 4, 3)), conv(m, m.x, 3)]
    m.add("Conv2DBackpropInput", inputs, "t/conv2d_transpose", **{**CONV, "padding": padding, "strides": [1, 2, 2, 1]})


def taken_apart(m: Making) -> None:
    """A BatchNorm as TensorFlow 1 wrote it: of constants, each step a node."""
    a, variance = conv(m, m.x), m.constant("bn/moving_variance", np.abs(draw(4, seed=2)) + 0.5)
    root = m.add("Rsqrt", [m.add("AddV2", [variance, m.constant("bn/eps", np.float32(1e-3))], "bn/add")], "bn/Rsqrt")
    factor = m.add("Mul", [root, m.constant("bn/gamma", draw(4, seed=3))], "bn/mul")
    left = m.add("Mul", [m.constant("bn/moving_mean", draw(4, seed=4)), factor], "bn/mul_2")
    m.add(
        "AddV2", [m.add("Mul", [a, factor], "bn/mul_1"), m.add("Sub", [m.constant("bn/beta", draw(4, seed=5)), left], "bn/sub")], "bn/add_1"
    )


def joined(m: Making) -> None:
    a, b = conv(m, m.x), m.add("Sigmoid", [conv(m, m.x, 4, "d")], "gate")
    halves = m.add("Split", [m.constant("axis", np.array(3, np.int32)), a], "halves", num_split=2)
    c = m.add("ConcatV2", [m.add("Mul", [a, b], "gated"), f"{halves}:1", m.constant("last", np.array(-1, np.int32))], "both", N=2)
    m.add(
        "Pad",
        [m.add("LeakyRelu", [c], "leaky", alpha=0.3), m.constant("pads", np.array([[0, 0], [1, 0], [0, 2], [0, 0]], np.int32))],
        "padded",
        Tpaddings=("type", 3),
    )


def channels_first(m: Making) -> None:
    how = {"data_format": "NCHW", "padding": "VALID"}
    a = m.add("Conv2D", [m.x, m.constant("c/kernel", draw(3, 3, 3, 4))], "c/Conv2D", **{**CONV, **how, "strides": [1, 1, 2, 1]})
    a = m.add("BiasAdd", [a, m.constant("c/bias", draw(4))], "c/BiasAdd", data_format="NCHW")
    a = m.add("MaxPool", [a], "pool", ksize=[1, 1, 2, 2], strides=[1, 1, 2, 2], **how)
    m.add("Mean", [a, m.ints("axes", 2, 3)], "mean", keep_dims=False, Tidx=("type", 3))


def every_other(m: Making) -> None:
    bounds = [m.ints("b", 0, 1, 0), m.ints("e", 0, 8, 8), m.ints("s", 1, 2, 2)]
    m.add("StridedSlice", [conv(m, m.x), *bounds], "cut", begin_mask=1, end_mask=1, Index=("type", 3))


CASES: dict[str, Callable[[Making], object]] = {
    "transposed, same": lambda m: enlarged(m, "SAME", 16),
    "transposed, valid": lambda m: enlarged(m, "VALID", 17),
    "a norm taken apart": taken_apart,
    "branches": joined,
    "nearest": lambda m: m.add("ResizeNearestNeighbor", [conv(m, m.x), m.ints("to", 16, 24)], "up", half_pixel_centers=False),
    "bilinear": lambda m: m.add("ResizeBilinear", [conv(m, m.x), m.ints("to", 16, 16)], "up", half_pixel_centers=True),
    "every other": every_other,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_operation_computes_what_another_reader_says(case: str, tmp_path: Path) -> None:
    m = Making(1, 8, 8, 3)
    CASES[case](m)
    compared(tmp_path, m.bytes())


def test_channels_first(tmp_path: Path) -> None:
    m = Making(1, 3, 8, 8)
    channels_first(m)
    compared(tmp_path, m.bytes(), draw(2, 3, 8, 8, seed=7))


def test_numbers_one_by_one_are_those_that_are_raw_and_one_stands_for_all_that_are_missing(tmp_path: Path) -> None:
    (tmp_path / "raw.pb").write_bytes(small_network())
    (tmp_path / "listed.pb").write_bytes(small_network(listed=True))
    raw, listed = formats.read(tmp_path / "raw.pb"), formats.read(tmp_path / "listed.pb")
    assert all((held.array() == listed.tensors[name].array()).all() for name, held in raw.tensors.items())
    m = Making(1, 8, 8, 3)
    conv(m, m.x)
    tensor = message((1, 1), (2, message((2, message((1, 4))))), (5, np.array([0.5, 2], np.float32).tobytes()))
    m.nodes[-2] = message((1, "c/bias"), (2, "Const"), (5, message((1, "value"), (2, message((8, tensor))))))
    (tmp_path / "few.pb").write_bytes(m.bytes())
    assert formats.read(tmp_path / "few.pb").tensors["c.bias"].array().tolist() == [0.5, 2, 2, 2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.add("Relu", ["later"], "sooner") and m.add("Relu", ["sooner"], "later"), "needs itself"),
        (lambda m: m.add("Relu", [m.x], "c/Conv2D"), "two nodes have one name"),
    ],
)
def test_graphs_that_are_none_are_refused(change: Callable[[Making], object], words: str, tmp_path: Path) -> None:
    m = Making(1, 8, 8, 3)
    conv(m, m.x)
    change(m)
    (tmp_path / "x.pb").write_bytes(m.bytes())
    with pytest.raises(MalformedFile, match=words):
        formats.read(tmp_path / "x.pb")


def test_a_graph_without_its_weights_says_where_they_are(tmp_path: Path) -> None:
    m = Making(1, 8, 8, 3)
    m.add("Conv2D", [m.x, m.add("VariableV2", [], "c/weights")], "c/Conv2D", **CONV)
    (tmp_path / "x.pb").write_bytes(m.bytes())
    with pytest.raises(MalformedFile, match=r"1 variable lie in a checkpoint; name that"):
        formats.read(tmp_path / "x.pb")


@pytest.mark.real
def test_the_real_lenet_is_that_of_onnx(real: Path) -> None:
    folder, images = real / "real" / "samplenet", np.random.default_rng(0).uniform(0, 1, (2, 3, 32, 32)).astype(np.float32)
    with formats.read(folder / "samplenet.onnx") as other, formats.read(folder / "samplenet.pb") as source:
        ours, theirs = (next(iter(execute.run(held, images).values())) for held in (source, other))
        assert (ours == theirs).all()
        assert [held.array().tobytes() for held in source.tensors.values()] == [held.array().tobytes() for held in other.tensors.values()]
