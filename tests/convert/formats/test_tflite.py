"""TFLite's graph executed in float64 gives what LiteRT computes, its layers have TensorFlow's names, and real files are Keras's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from seeds_tflite import CONV, DEPTHWISE, Making, draw, quantised_network, small_network

from convert import execute, formats, home
from convert.source import Source
from weights.errors import LimitExceeded, MalformedFile

pytestmark = pytest.mark.reference


def at_home(held: bytes, images: np.ndarray) -> np.ndarray:
    """Run a model in LiteRT, image by image, channels last."""
    interpreter = Interpreter(model_content=held, experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
    interpreter.allocate_tensors()
    given, made = interpreter.get_input_details()[0], interpreter.get_output_details()[0]
    outputs: list[np.ndarray] = []
    for image in images:
        if given["dtype"] == np.int8:
            scale, zero = given["quantization"]
            image = np.clip(np.rint(image / scale) + zero, -128, 127).astype(np.int8)
        interpreter.set_tensor(given["index"], image[None])
        interpreter.invoke()
        outputs.append(interpreter.get_tensor(made["index"]))
    return np.concatenate(outputs)


def executed(source: Source, images: np.ndarray) -> np.ndarray:
    assert source.graph is not None
    assert source.graph.unknown == []
    (value,) = execute.run(source, images.transpose(0, 3, 1, 2)).values()
    return value.transpose(0, 2, 3, 1) if value.ndim == 4 else value


def compared(folder: Path, held: bytes) -> Source:
    path = folder / "model.tflite"
    path.write_bytes(held)
    source = formats.read(path)
    images = draw(2, 8, 8, 3, seed=7)
    expected, value = at_home(held, images), executed(source, images)
    assert value.shape == expected.shape
    assert np.abs(value - expected).max() < 1e-5 * max(1, np.abs(expected).max())
    return source


@pytest.mark.parametrize("half", [False, True])
def test_a_small_network_computes_what_it_does_at_home(half: bool, tmp_path: Path) -> None:
    source = compared(tmp_path, small_network(half))
    assert list(source.tensors) == ["stem.weight", "stem.bias", "dw.weight", "dw.bias", "head.weight", "head.bias"]
    assert [source.tensors[f"{name}.weight"].shape for name in ("stem", "dw", "head")] == [(4, 3, 3, 3), (8, 1, 3, 3), (5, 32)]
    assert source.tensors["stem.weight"].dtype == np.float32 or half
    assert (source.flatten, source.format) == ("hwc", "tflite")


def test_whole_numbers_are_read_as_what_they_stand_for(tmp_path: Path) -> None:
    (tmp_path / "whole.tflite").write_bytes(quantised_network())
    source = formats.read(tmp_path / "whole.tflite")
    whole, scales = np.random.default_rng(0), np.array([0.01, 0.02, 0.03, 0.015], np.float32)
    weight = whole.integers(-127, 128, (4, 3, 3, 3)).astype(np.float32) * scales.reshape(4, 1, 1, 1)
    assert (source.tensors["stem.weight"].array() == weight.transpose(0, 3, 1, 2)).all()
    bias = whole.integers(-500, 500, 4) * (scales / 64).astype(np.float64)
    assert (source.tensors["stem.bias"].array() == bias.astype(np.float32)).all()
    assert "dequantised from int8" in source.tensors["stem.weight"].origin
    assert source.facts["quantised"] == "2 of int8, 2 of int32"
    images = np.clip(draw(4, 8, 8, 3, seed=7) / 2, -1.9, 1.9)
    steps = np.abs(executed(source, images) - at_home(quantised_network(), images)) / 0.1
    assert steps.max() < 1.5  # LiteRT rounds its images and every value between: a step or so of the last one's


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_runtime_that_rounds_what_layers_read_is_no_word_against_their_weights(dynamic: bool, tmp_path: Path) -> None:
    m = Making(1, 8, 8, 3)
    whole = np.random.default_rng(0).integers(-127, 128, (4, 3, 3, 3))
    if dynamic:
        weight = m.constant("stem/Conv2D", whole, "int8", scale=np.array([0.01, 0.02, 0.03, 0.015], np.float32), zero=[0] * 4)
    else:
        weight = m.constant("stem/Conv2D", whole.astype(np.float32))
    last = m.add("CONV_2D", [m.x, weight, m.constant("stem/BiasAdd", draw(4))], 1, 8, 8, 4, name="y", version=2, **CONV)
    (tmp_path / "a.tflite").write_bytes(m.bytes(last))
    with formats.read(tmp_path / "a.tflite") as source:
        made = home.outputs(source, draw(2, 3, 8, 8))
        assert isinstance(made, str) == dynamic
        assert not dynamic or "rounds what each layer of eight-bit weights reads" in str(made)


def test_four_bits_are_two_numbers_a_byte(tmp_path: Path) -> None:
    m = Making(1, 8, 8, 3)
    weight = m.constant("net/head/MatMul", np.array([0x1F, 0x8E, 0x27], np.uint8), "uint8", scale=[0.5], zero=[0])
    tensor = m.graph.tensors[weight]
    tensor.type, tensor.shape = 17, [2, 3]
    flat = m.add("MEAN", [m.x, m.constant("axes", [1, 2], "int32")], 1, 3, of="ReducerOptions")
    (tmp_path / "x.tflite").write_bytes(m.bytes(m.add("FULLY_CONNECTED", [flat, weight], 1, 2, of="FullyConnectedOptions")))
    source = formats.read(tmp_path / "x.tflite")
    assert source.tensors["head.weight"].array().tolist() == [[-0.5, 0.5, -1.0], [-4.0, 3.5, 1.0]]


def conv(m: Making, x: int, outs: int = 4) -> int:
    weight, bias = m.constant("c/Conv2D", draw(outs, 3, 3, 3)), m.constant("c/BiasAdd", draw(outs))
    return m.add("CONV_2D", [x, weight, bias], 1, 8, 8, outs, **CONV)


def shrinking(m: Making) -> int:
    return m.add(
        "CONV_2D",
        [m.x, m.constant("w", draw(4, 3, 2, 3)), m.constant("b", draw(4))],
        1,
        2,
        4,
        4,
        **{**CONV, "padding": 1, "strideH": 2, "strideW": 2, "dilationHFactor": 2, "dilationWFactor": 1},
    )


def multiplied(m: Making) -> int:
    return m.add(
        "DEPTHWISE_CONV_2D",
        [m.x, m.constant("w", draw(1, 3, 3, 6)), m.constant("b", draw(6))],
        1,
        8,
        8,
        6,
        **{**DEPTHWISE, "depthMultiplier": 2},
    )


def grouped(m: Making) -> int:
    return m.add("CONV_2D", [m.x, m.constant("w", draw(6, 3, 3, 1)), m.constant("b", draw(6))], 1, 8, 8, 6, version=6, **CONV)


def enlarged(m: Making, padding: int, size: int) -> int:
    sizes = m.constant("sizes", [1, size, size, 4], "int32")
    return m.add(
        "TRANSPOSE_CONV",
        [sizes, m.constant("w", draw(4, 3, 3, 3)), conv(m, m.x, 3)],
        1,
        size,
        size,
        4,
        of="TransposeConvOptions",
        strideH=2,
        strideW=2,
        padding=padding,
    )


def joined(m: Making) -> int:
    a, b = conv(m, m.x, 3), m.add("LOGISTIC", [m.x], 1, 8, 8, 3)
    c = m.add("CONCATENATION", [a, b], 1, 8, 8, 6, of="ConcatenationOptions", axis=3)
    d = m.add("MUL", [c, m.constant("net/bn/mul", draw(6))], 1, 8, 8, 6, of="MulOptions")
    return m.add("ADD", [d, m.constant("net/bn/sub", draw(6, seed=1))], 1, 8, 8, 6, of="AddOptions", fusedActivationFunction=1)


def margins(m: Making) -> int:
    a = m.add("PAD", [m.x, m.constant("p", [[0, 0], [1, 2], [0, 3], [0, 0]], "int32")], 1, 11, 11, 3, of="PadOptions")
    b = m.add("MAX_POOL_2D", [a], 1, 5, 5, 3, of="Pool2DOptions", padding=1, strideH=2, strideW=2, filterHeight=3, filterWidth=3)
    return conv_of(m, b, 5)


def conv_of(m: Making, x: int, size: int) -> int:
    return m.add("CONV_2D", [x, m.constant("k", draw(2, 1, 1, 3)), m.constant("kb", draw(2))], 1, size, size, 2, **CONV)


def channels(m: Making) -> int:
    a = conv(m, m.x, 8)
    bounds = [m.constant(n, v, "int32") for n, v in (("begin", [0, 0, 0, 2]), ("size", [-1, -1, -1, 3]))]
    return m.add("SLICE", [a, *bounds], 1, 8, 8, 3, of="SliceOptions")


def every_other(m: Making) -> int:
    a = conv(m, m.x, 2)
    bounds = [m.constant(n, v, "int32") for n, v in (("b", [0, 1, 0, 0]), ("e", [0, 8, 8, 0]), ("s", [1, 2, 2, 1]))]
    return m.add("STRIDED_SLICE", [a, *bounds], 1, 4, 4, 2, of="StridedSliceOptions", beginMask=9, endMask=9)


def activations(m: Making) -> int:
    a = conv(m, m.x, 3)
    operators: tuple[tuple[str, dict[str, Any]], ...] = (
        ("LEAKY_RELU", {"of": "LeakyReluOptions", "alpha": 0.2}),
        ("ELU", {}),
        ("TANH", {}),
        ("HARD_SWISH", {}),
        ("RELU6", {}),
        ("GELU", {"of": "GeluOptions"}),
        ("RELU_N1_TO_1", {}),
    )
    for op, options in operators:
        a = m.add(op, [a], 1, 8, 8, 3, **options)
    return m.add("PRELU", [a, m.constant("slope", draw(1, 1, 3))], 1, 8, 8, 3)


def larger(m: Making, op: str, of: str, half: bool) -> int:
    sizes = m.constant("sizes", [16, 16], "int32")
    return m.add(op, [conv(m, m.x, 3), sizes], 1, 16, 16, 3, version=3, of=of, halfPixelCenters=half)


def squeezed(m: Making) -> int:
    a = m.add("MEAN", [conv(m, m.x), m.constant("a", [1, 2], "int32")], 1, 1, 1, 4, of="ReducerOptions", keepDims=True)
    return m.add("SQUEEZE", [a], 1, 4, of="SqueezeOptions", squeezeDims=[1, 2])


CASES: dict[str, Callable[[Making], int]] = {
    "valid, dilated": shrinking,
    "depth multiplier": multiplied,
    "groups": grouped,
    "transposed, same": lambda m: enlarged(m, 0, 16),
    "transposed, valid": lambda m: enlarged(m, 1, 17),
    "branches and constants": joined,
    "margins": margins,
    "channels cut out": channels,
    "every other pixel": every_other,
    "activations": activations,
    "nearest": lambda m: larger(m, "RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighborOptions", False),
    "bilinear": lambda m: larger(m, "RESIZE_BILINEAR", "ResizeBilinearOptions", True),
    "squeeze": squeezed,
}


@pytest.mark.parametrize("case", CASES)
def test_every_operator_computes_what_it_does_at_home(case: str, tmp_path: Path) -> None:
    m = Making(1, 8, 8, 3)
    if case == "depth multiplier":
        assert "groups" in str(compared(tmp_path, m.bytes(CASES[case](m))).graph)
    else:
        y = CASES[case](m)
        if not any(code.builtinCode in (3, 4, 67) for code in m.model.operatorCodes):
            y = conv(m, y)
        compared(tmp_path, m.bytes(y))


def test_images_whose_channels_come_first_are_told_by_the_transpose_behind_them(tmp_path: Path) -> None:
    m = Making(1, 3, 8, 8)
    turned = m.add("TRANSPOSE", [m.x, m.constant("order", [0, 2, 3, 1], "int32")], 1, 8, 8, 3, of="TransposeOptions")
    held = m.bytes(m.add("MEAN", [conv(m, turned), m.constant("a", [1, 2], "int32")], 1, 4, of="ReducerOptions"))
    (tmp_path / "x.tflite").write_bytes(held)
    source, images = formats.read(tmp_path / "x.tflite"), draw(2, 3, 8, 8, seed=7)
    (value,) = execute.run(source, images).values()
    assert np.abs(value - at_home(held, images)).max() < 1e-5


def test_what_onnx_has_no_word_for_keeps_its_place_and_is_not_executed(tmp_path: Path) -> None:
    m = Making(1, 8, 8, 3)
    y = m.add("SPACE_TO_DEPTH", [conv(m, m.x)], 1, 4, 4, 16, of="SpaceToDepthOptions", blockSize=2)
    (tmp_path / "x.tflite").write_bytes(m.bytes(y))
    source = formats.read(tmp_path / "x.tflite")
    assert source.graph is not None
    assert source.graph.unknown == ["SPACE_TO_DEPTH"]
    assert list(source.tensors) == ["c.weight", "c.bias"]


def test_a_tensor_that_leads_out_of_the_file_is_refused(tmp_path: Path) -> None:
    m = Making(1, 8, 8, 3)
    y = conv(m, m.x)
    m.graph.tensors[1].shape = [4, 3, 3, 300]
    (tmp_path / "x.tflite").write_bytes(m.bytes(y))
    with pytest.raises(MalformedFile, match=r"c/Conv2D of shape \(4, 3, 3, 300\) needs 43200 bytes and has 432"):
        formats.read(tmp_path / "x.tflite")
    m.graph.tensors[1].shape = [4, 3, 3, 3] + [1] * 9
    (tmp_path / "x.tflite").write_bytes(m.bytes(y))
    with pytest.raises(LimitExceeded, match="13 axes"):
        formats.read(tmp_path / "x.tflite")


@pytest.mark.real
@pytest.mark.parametrize(
    ("file", "keras", "size"), [("pretrainedResnet", "mlperf_tiny_pretrainedResnet", 32), ("vww_96_float", "mlperf_tiny_vww_96", 96)]
)
def test_real_files_compute_what_their_keras_files_do(file: str, keras: str, size: int, real: Path) -> None:
    images = np.random.default_rng(0).uniform(0, 255 if size == 32 else 1, (2, size, size, 3)).astype(np.float32)
    path = real / "real" / "tflite" / f"{file}.tflite"
    with formats.read(path) as source, formats.read(real / "real" / "keras" / f"{keras}.h5") as original:
        value = executed(source, images)
        expected: Any = executed(original, images)
    assert np.abs(value - expected).max() < 1e-5
    assert np.abs(value - at_home(path.read_bytes(), images)).max() < 1e-5
