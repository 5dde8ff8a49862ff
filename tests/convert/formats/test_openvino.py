"""OpenVINO's IR executed in float64 gives what OpenVINO computes, and the one LeNet that is there in many formats is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from seeds_openvino import compressed_network, constant, draw, op, saved, small_network

from convert import execute, formats
from convert.formats import openvino as reader
from convert.formats import safetensors
from convert.formats._openvino_export import imported
from convert.source import Source
from weights.errors import ConvertError, LimitExceeded, MalformedFile, UnsafeFormat
from zoo import MobileNetV2_035, Model, ResNet20
from zoo.conversion.convert import convert

openvino = imported()  # without the report that it sends home

pytestmark = pytest.mark.reference


def at_home(path: Path, images: np.ndarray) -> np.ndarray:
    exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    return next(iter(openvino.Core().compile_model(path, "CPU", exact)(images).values()))


def compared(path: Path, images: np.ndarray | None = None, bound: float = 1e-5) -> Source:
    source = formats.read(path)
    images = draw(2, 3, 8, 8, seed=7) if images is None else images
    expected = at_home(path, images)
    assert source.graph is not None
    assert source.graph.unknown == []
    last = source.graph.nodes[0].attrs["layout"] == "nhwc"
    (value,) = execute.run(source, images.transpose(0, 3, 1, 2) if last else images).values()
    value = value.transpose(0, 2, 3, 1) if last and value.ndim == 4 else value
    assert value.shape == expected.shape
    assert np.abs(value - expected).max() < bound * max(1, np.abs(expected).max())
    assert all(tuple(stored.array().shape) == stored.shape for stored in source.tensors.values())
    return source


@pytest.mark.parametrize("half", [False, True])
def test_a_small_network_computes_what_it_does_at_home_under_its_own_names(half: bool, tmp_path: Path) -> None:
    source = compared(saved(tmp_path / "a.xml", small_network, half=half))
    assert list(source.tensors) == ["stem.weight", "stem.bias", "dw.weight", "head.weight", "head.bias"]
    shapes = [(4, 3, 3, 3), (4,), (8, 1, 3, 3), (5, 32), (5,)]
    assert [stored.shape for stored in source.tensors.values()] == shapes
    assert source.tensors["stem.weight"].stored_dtype == (np.float16 if half else np.float32)
    with formats.read(tmp_path / "a.bin") as other:  # either of the two may be named
        assert (other.format, list(other.tensors)) == ("openvino", list(source.tensors))


def test_weights_in_eight_bits_are_read_as_what_they_stand_for(tmp_path: Path) -> None:
    source = compared(saved(tmp_path / "a.xml", compressed_network))
    held = np.random.default_rng(0).integers(0, 255, (5, 4)).astype(np.float32)
    factor = (draw(5, 1, seed=1) ** 2 / 64).astype(np.float32)
    assert (source.tensors["head.weight"].array() == (held - 128) * factor).all()


def conv(x: Any, outs: int = 4) -> Any:
    return op.convolution(x, constant("c.weight", draw(outs, 3, 3, 3)), [1, 1], [1, 1], [1, 1], [1, 1])


def same(x: Any) -> Any:
    return op.convolution(x, op.constant(draw(4, 3, 2, 2)), [2, 2], [0, 0], [0, 0], [1, 1], "same_lower")


def enlarged(x: Any) -> Any:
    weight = op.constant(draw(3, 4, 3, 3))
    return op.convolution_backprop_data(x, weight, [2, 2], None, [1, 1], [1, 1], [1, 1], output_padding=[1, 1])


def enlarged_in_groups(x: Any) -> Any:
    return op.group_convolution_backprop_data(x, op.constant(draw(3, 1, 2, 3, 3)), [1, 1], None, [1, 1], [0, 0], [1, 1])


def normalised(x: Any) -> Any:
    a, ones = conv(x), np.abs(draw(4, seed=2)) + 0.5
    return op.batch_norm_inference(a, draw(4, seed=3), draw(4, seed=4), draw(4, seed=5), ones, 1e-3)


def joined(x: Any) -> Any:
    a, b = op.relu(conv(x)), op.sigmoid(conv(x))
    c = op.concat([a, op.multiply(a, b)], 1)
    return op.add(op.multiply(c, op.constant(draw(1, 8, 1, 1))), op.constant(draw(1, 8, 1, 1, seed=1)))


def pixels(x: Any) -> Any:
    return conv(op.divide(op.subtract(x, op.constant(draw(1, 3, 1, 1))), op.constant(np.float32(2))))


def activations(x: Any) -> Any:
    a = op.hswish(op.elu(op.tanh(conv(x)), 0.7))
    return op.swish(op.gelu(op.prelu(op.prelu(a, op.constant(draw(4))), op.constant(np.array([0.2], np.float32))), "erf"))


def cut(x: Any) -> Any:
    a = op.pad(conv(x), np.array([0, 0, 1, 2]), np.array([0, 0, 0, 1]), "constant", np.float32(0))
    a = op.split(a, np.int64(1), 2).output(1)
    return op.strided_slice(a, np.array([0, 0, 1, 0]), np.array([0, 0, 9, 0]), np.array([1, 1, 2, 2]), [1, 1, 0, 1], [1, 1, 0, 1])


def pooled(x: Any) -> Any:
    a = op.max_pool(conv(x), [2, 2], [1, 1], [0, 0], [0, 0], [3, 3], "ceil").output(0)
    return op.avg_pool(a, [2, 2], [1, 1], [1, 1], [3, 3], exclude_pad=True)


CASES: dict[str, Callable[[Any], Any]] = {
    "same, lower": same, "transposed": enlarged, "transposed in groups": enlarged_in_groups, "norm": normalised, "joined": joined,
    "pixels": pixels, "activations": activations, "cut": cut, "pooled": pooled,
    "maxima": lambda x: op.maximum(conv(x), op.constant(np.float32(0.1))),
    "squeezed": lambda x: op.squeeze(op.reduce_max(conv(x), np.array([2, 3]), keep_dims=True), np.array([2, 3])),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_layer_computes_what_it_does_at_home(case: str, tmp_path: Path) -> None:
    compared(saved(tmp_path / "a.xml", CASES[case]))


def test_channels_last_and_shapes_that_are_computed(tmp_path: Path) -> None:
    def build(x: Any) -> Any:
        a = op.transpose(conv(op.transpose(x, np.array([0, 3, 1, 2]))), np.array([0, 2, 3, 1]))
        batch = op.gather(op.shape_of(a), np.array([0]), np.int64(0))
        return op.matmul(op.reshape(a, op.concat([batch, op.constant(np.array([-1]))], 0), False), op.constant(draw(256, 5)), False, False)

    path = saved(tmp_path / "a.xml", build, (-1, 8, 8, 3))
    assert compared(path, draw(2, 8, 8, 3)).flatten == "hwc"


def test_what_cannot_be_said_keeps_its_place(tmp_path: Path) -> None:
    source = formats.read(saved(tmp_path / "a.xml", lambda x: op.mish(conv(x))))
    assert source.graph is not None
    assert source.graph.unknown == ["Mish"]


def test_values_that_are_rounded_between_layers_are_left_and_that_is_said(tmp_path: Path) -> None:
    def build(x: Any) -> Any:
        low, high = op.constant(np.float32(-4)), op.constant(np.float32(4))
        return conv(op.fake_quantize(x, low, high, low, high, 256))

    source = formats.read(saved(tmp_path / "a.xml", build))
    assert "rounds to fewer bits" in source.notes[0]


@pytest.mark.parametrize(
    ("old", "new", "kind", "words"),
    [
        ('version="11"', 'version="7"', MalformedFile, "version 7; those from 10 on"),
        (
            '<?xml version="1.0"?>',
            '<?xml version="1.0"?>\n<!-- x --><!DOCTYPE net [<!ENTITY a "b">]>',
            UnsafeFormat,
            "declares a document type",
        ),
        ('shape="4, 3, 3, 3" offset="0"', 'shape="4, 3, 3, 3" offset="999999"', MalformedFile, "from 999999 of"),
        ('from-layer="0"', 'from-layer="77"', MalformedFile, "of which one is not there"),
        ("<layers>", "<layers>" + "<x>" * 200, LimitExceeded, "nest deeper"),
        ("</net>", "", MalformedFile, "is no readable OpenVINO IR"),
    ],
)
def test_damaged_descriptions_are_refused(old: str, new: str, kind: type[Exception], words: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.xml", small_network)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(kind, match=words):
        formats.read(path, "openvino")


def test_a_description_without_its_constants_says_what_is_missing(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.xml", small_network)
    path.with_suffix(".bin").unlink()
    with pytest.raises(MalformedFile, match=r"a\.bin, which is not beside it"):
        formats.read(path)


@pytest.mark.parametrize("model", [ResNet20, MobileNetV2_035])
def test_a_network_that_is_written_is_run_by_openvino_and_read_back_bit_for_bit(model: type[Model], tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = model().eval()
    shape = (3, network.input_size, network.input_size)
    difference = reader.export(network, tmp_path / "0.xml", input_shape=shape, metadata={"a": "note"})
    assert difference is not None
    assert difference < 1e-5
    assert 'a value="note"' in (tmp_path / "0.xml").read_text()
    source, state = formats.read(tmp_path / "0.xml"), network.state_dict()
    assert source.graph is not None
    assert source.graph.unknown == []
    assert source.tensors.keys() == {name for name in state if not name.endswith("num_batches_tracked")}
    assert all((stored.array() == state[name].numpy()).all() for name, stored in source.tensors.items())
    images = draw(3, *shape)
    assert at_home(tmp_path / "0.xml", images).shape == (3, network.num_classes)  # any number of them


def test_a_conversion_to_an_ir_is_proven_by_running_it_and_so_is_the_way_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    safetensors.save(ResNet20().state_dict(), tmp_path / "ours.safetensors")
    made = convert(tmp_path / "ours.safetensors", tmp_path / "out.xml", ResNet20)
    kinds = {each.kind: each for each in made.certificate.evidence}
    assert kinds["read back"].proven
    assert kinds["destination outputs"].detail.startswith("openvino ")
    assert kinds["destination outputs"].proven
    back = convert(tmp_path / "out.xml", tmp_path / "back.safetensors", ResNet20)
    assert str(back.certificate.verdict).startswith("PROVEN by source outputs: openvino ")
    (tmp_path / "out.xml").unlink()
    with pytest.raises(FileExistsError, match=r"out\.bin is there already"):
        convert(tmp_path / "ours.safetensors", tmp_path / "out.xml", ResNet20)


def test_pixels_may_be_normalised_inside(tmp_path: Path) -> None:
    torch.manual_seed(0)
    safetensors.save(ResNet20().state_dict(), tmp_path / "ours.safetensors")
    convert(tmp_path / "ours.safetensors", tmp_path / "out.xml", ResNet20, preprocessing_inside=True, prove=False)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3)).astype(np.uint8)
    assert at_home(tmp_path / "out.xml", pixels).shape == (2, 10)


def test_parts_are_not_enough_for_an_ir(tmp_path: Path) -> None:
    for convention in ("correlation", "convolution"):
        with pytest.raises(ConvertError, match=r"whole computation|computes cross-correlation"):
            reader.write([], tmp_path / "a.xml", convention=convention, metadata={})


@pytest.mark.real
def test_the_real_lenet_is_caffes_and_onnx_with_its_channels_exchanged(real: Path) -> None:
    images = np.random.default_rng(0).uniform(0, 1, (2, 3, 32, 32)).astype(np.float32)
    folder = real / "real" / "samplenet"
    with formats.read(folder / "samplenet.onnx") as other:
        (expected,) = execute.run(other, images[:, ::-1]).values()
        source = formats.read(folder / "SampLeNet.xml")
        (value,) = execute.run(source, images).values()
        assert np.abs(value - expected).max() < 1e-12
        ours, theirs = ([held.tensors[name].array() for name in sorted(held.tensors)] for held in (source, other))
        assert (ours[1] == theirs[1][:, ::-1]).all()  # OpenCV's order, which Caffe's networks are fed in
        assert all((a == b).all() for a, b in zip([ours[0], *ours[2:]], [theirs[0], *theirs[2:]], strict=True))
