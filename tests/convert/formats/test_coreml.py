"""Core ML's networks executed in float64 give what PyTorch computes of the same numbers, for Core ML itself runs on Apple's machines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from protobuf import message, packed
from seeds_coreml import conv, draw, few_bits, layer, model, program, small_network, weight, whole_program
from torch import Tensor

from convert import execute, formats
from convert.source import Source
from weights.errors import MalformedFile, UnsafeFormat, UnsupportedFormat


def executed(source: Source, images: np.ndarray) -> np.ndarray:
    assert source.format == "coreml"
    assert source.graph is not None
    assert source.graph.unknown == []
    (value,) = execute.run(source, images).values()
    return value


def read(folder: Path, held: bytes) -> Source:
    (folder / "x.mlmodel").write_bytes(held)
    return formats.read(folder / "x.mlmodel")


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(draw(*shape, seed=seed)).double()


@pytest.mark.parametrize("half", [False, True])
def test_a_network_with_what_is_done_to_its_image(half: bool, tmp_path: Path) -> None:
    source = read(tmp_path, small_network(half))
    images = np.random.default_rng(7).uniform(0, 255, (2, 3, 8, 8))
    wide = (lambda t: t.half().double()) if half else (lambda t: t)
    added = torch.tensor([-1.1, -1.0, -0.9]).double().reshape(-1, 1, 1)
    x = torch.from_numpy(images) * float(np.float32(1 / 127.5)) + added
    x = F.conv2d(F.pad(x, (0, 1, 0, 1)), wide(tensor(4, 3, 3, 3)), tensor(4), stride=2)
    spread = torch.from_numpy(np.abs(draw(4, seed=4)) + np.float32(0.5)).double()
    x = F.batch_norm(x, tensor(4, seed=3), spread, tensor(4, seed=1), tensor(4, seed=2), eps=float(np.float32(1e-3))).relu()
    x = F.avg_pool2d(F.conv2d(F.pad(x, (2, 1, 1, 0)), wide(tensor(4, 1, 3, 3)), groups=4), 2)
    expected = F.linear(x.permute(0, 2, 3, 1).flatten(1), tensor(5, 8), tensor(5)).softmax(1).numpy()
    assert np.abs(executed(source, images) - expected).max() < 1e-8
    told = dict(source.preprocessing)
    assert (source.flatten, told["channel_order"], told["range"]) == ("hwc", "rgb", "0..255")
    assert told["mean"] == pytest.approx((0.55, 0.5, 0.45))
    assert told["std"] == pytest.approx((0.5, 0.5, 0.5))
    assert source.facts == {"about": "a test", "author": "maker"}
    assert list(source.tensors)[:2] == ["stem.weight", "stem.bias"]
    assert source.tensors["dw.weight"].dtype == (np.float16 if half else np.float32)


def test_numbers_of_few_bits_are_what_they_stand_for(tmp_path: Path) -> None:
    source = read(tmp_path, few_bits())
    places = np.arange(4 * 27).reshape(4, 3, 3, 3) % 32
    scale, bias = (np.array(held, np.float32).reshape(4, 1, 1, 1) for held in ([0.5, 0.25, 1, 2], [1, 2, 3, 4]))
    assert (source.tensors["a.weight"].array() == places * scale + bias).all()
    assert source.tensors["b.weight"].array().reshape(-1).tolist() == [-1, 0, 0.5, 3] * 2
    assert "5 bits" in source.tensors["a.weight"].origin


def test_the_other_layers(tmp_path: Path) -> None:
    slope, sizes, added = weight(draw(4, seed=3)), packed(4, 1, 1), weight(draw(4, seed=6))
    layers = [
        conv("up", "image", weight(draw(3, 4, 3, 3)), (4, 3, 3, 3), stride=(2, 2), pads=(1, 0, 1, 0), back=1),
        layer("leaky", ["up"], ["leaky"], 130, (15, message((1, 0.3)))),
        layer("prelu", ["up"], ["prelu"], 130, (25, message((1, slope)))),
        layer("sum", ["leaky", "prelu"], ["sum"], 230),
        layer("parts", ["sum"], ["first", "second"], 330, (1, 2)),
        layer("both", ["second", "first"], ["both"], 320),
        layer("scale", ["both"], ["scaled"], 245, (1, sizes), (2, weight(draw(4, seed=5))), (3, 1), (4, sizes), (5, added)),
        layer("low", ["scaled"], ["low"], 220, (1, 7), (2, -1.0), (5, 2.0)),
        layer("pad", ["low"], ["pad"], 200, (1, message((1, 0.5))), (10, message((10, message((1, 1))), (10, message((2, 2)))))),
        layer("max", ["pad"], ["max"], 120, (10, packed(3, 3)), (20, packed(2, 2)), (32, message((10, packed(0, 0))))),
        layer("large", ["max"], ["large"], 210, (1, packed(2, 3))),
        layer("lrn", ["large"], ["lrn"], 180, (1, 1e-2), (2, 0.75), (3, 3), (4, 1.0)),
        layer("all", ["lrn"], ["all"], 120, (1, 1), (60, 1)),
    ]  # fmt: skip
    images = draw(2, 3, 8, 8, seed=7)
    x = F.conv_transpose2d(torch.from_numpy(images).double(), tensor(3, 4, 3, 3), stride=2)[:, :, 1:, 1:]
    x = F.leaky_relu(x, float(np.float32(0.3))) + F.prelu(x, tensor(4, seed=3))
    x = torch.cat([x[:, 2:], x[:, :2]], 1) * tensor(4, 1, 1, seed=5) + tensor(4, 1, 1, seed=6)
    x = F.pad((2 * x).clamp(min=-1), (0, 2, 1, 0), value=0.5)
    x = F.interpolate(F.max_pool2d(x, 3, 2, ceil_mode=True), scale_factor=(2, 3))
    expected = F.local_response_norm(x, 3, float(np.float32(1e-2)), 0.75, 1.0).mean((2, 3)).numpy()
    value = executed(read(tmp_path, model(layers, "all")), images)
    assert np.abs(value.reshape(2, 4) - expected).max() < 1e-10


def test_a_program_gives_its_weights(tmp_path: Path) -> None:
    path = program(tmp_path)
    for place in (path, path / "Data" / "com.apple.CoreML" / "model.mlmodel"):
        source = formats.read(place)
        assert list(source.tensors) == ["stem.weight", "stem.bias"]
        assert (source.tensors["stem.weight"].array() == draw(4, 3, 3, 3).astype(np.float16)).all()
        assert (source.tensors["stem.bias"].array() == draw(4)).all()
        assert (source.graph, source.framework) == (None, "Core ML, specification 8, ML program")


def test_a_program_is_executed_of_weights_in_halves_in_eight_bits_and_of_a_table(tmp_path: Path) -> None:
    path = whole_program(tmp_path)
    images = draw(2, 3, 8, 8, seed=7)
    with formats.read(path) as source, formats.read(path / "Data" / "com.apple.CoreML" / "model.mlmodel") as inner:
        value = executed(source, images)
        assert list(source.tensors) == ["stem.weight", "stem.bias", "middle.weight", "head.weight"]
        assert (source.beside, inner.beside) == ((), ("weights/weight.bin",))
    x = F.conv2d(F.pad(torch.from_numpy(images).double(), (0, 1, 0, 1)), tensor(4, 3, 3, 3).half().double(), tensor(4), stride=2)
    scale, zero = (torch.arange(start, start + 6).double().reshape(6, 1, 1, 1) for start in (1, 0))
    middle = (torch.arange(-12, 12).double().reshape(6, 4, 1, 1) - zero) * scale / 8
    head = torch.tensor([-1, 0, 0.5, 3] * 6).double().reshape(4, 6)
    expected = F.linear(F.silu(F.conv2d(x.clamp(0, 6), middle)).mean((2, 3)), head).numpy()
    assert np.abs(value - expected).max() < 1e-10


def test_layers_of_later_specifications(tmp_path: Path) -> None:
    dense = [(5, 4), (6, 5), (7, 1), (8, weight(draw(4, 5))), (9, weight(draw(5, seed=2)))]
    layers = [
        conv("a", "image", weight(draw(4, 3, 1, 1)), (4, 3, 1, 1)),
        layer("pad", ["a"], ["pad"], 1155, (1, 0.5), (2, packed(0, 0, 0, 0, 1, 2, 0, 1))),
        layer("clip", ["pad"], ["clip"], 660, (1, -0.25), (2, 0.75)),
        layer("sum", ["clip", "pad"], ["sum"], 880),
        layer("product", ["sum", "clip"], ["product"], 900),
        layer("both", ["product", "sum"], ["both"], 980, (1, 1)),
        layer("half", ["both"], ["half"], 795, (1, 0)),
        layer("less", ["half", "both"], ["less"], 905),
        conv("b", "less", weight(draw(4, 8, 1, 1, seed=3)), (4, 8, 1, 1)),
        layer("mean", ["b"], ["mean"], 1280, (1, packed(2, 3)), (2, 1)),
        layer("flat", ["mean"], ["flat"], 1140, (1, packed(1, 4))),
        layer("dense", ["flat"], ["dense"], 1045, *dense),
        layer("ends", ["dense"], ["ends"], 950, (1, 1)),
    ]
    images = draw(2, 3, 8, 8, seed=7)
    x = F.pad(F.conv2d(torch.from_numpy(images).double(), tensor(4, 3, 1, 1)), (0, 1, 1, 2), value=0.5)
    kept = x.clamp(-0.25, 0.75)
    both = torch.cat([(kept + x) * kept, kept + x], 1)
    x = F.conv2d(F.gelu(both) - both, tensor(4, 8, 1, 1, seed=3)).mean((2, 3))
    expected = F.linear(x, tensor(4, 5).T, tensor(5, seed=2)).softmax(1).numpy()
    assert np.abs(executed(read(tmp_path, model(layers, "ends")), images) - expected).max() < 1e-10


def test_a_program_whose_weights_lead_elsewhere_is_refused(tmp_path: Path) -> None:
    inside = program(tmp_path) / "Data" / "com.apple.CoreML"
    held = (inside / "model.mlmodel").read_bytes()
    (inside / "model.mlmodel").write_bytes(held.replace(b"@model_path/weights/weight.bin", b"@model_path/weights/../../a.b0"))
    with pytest.raises(UnsafeFormat, match="only files inside"):
        formats.read(tmp_path / "net.mlpackage")
    (inside / "model.mlmodel").write_bytes(held)
    (inside / "weights" / "weight.bin").rename(tmp_path / "elsewhere")
    (inside / "weights" / "weight.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MalformedFile, match="or a link"):
        formats.read(tmp_path / "net.mlpackage")


def test_what_is_no_network_is_named(tmp_path: Path) -> None:
    described = message((1, message((1, "image"))))
    for number, words in ((200, "a pipeline of several models"), (402, "no neural network")):
        with pytest.raises(UnsupportedFormat, match=words):
            read(tmp_path, message((1, 3), (2, described), (number, b"")))
    source = read(tmp_path, model([conv("a", "image", weight(draw(2, 3, 1, 1)), (2, 3, 1, 1)), layer("odd", ["a"], ["odd"], 500)], "odd"))
    assert source.graph is not None
    assert source.graph.unknown == ["custom"]


def test_a_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MalformedFile, match=r"a\.weight of shape \(4, 3, 3, 3\) needs 432 bytes and has 24"):
        read(tmp_path, model([conv("a", "image", weight(draw(6)), (4, 3, 3, 3))], "a"))


@pytest.mark.real
def test_a_real_network_computes_what_its_keras_file_does(real: Path) -> None:
    images = np.random.default_rng(0).uniform(0, 255, (2, 1, 28, 28))
    folder = real / "real" / "coreml"
    with formats.read(folder / "mnistCNN.mlmodel") as source, formats.read(folder / "mnistCNN.h5") as keras:
        value = executed(source, images)
        (expected,) = execute.run(keras, images * float(np.float32(1 / 255))).values()
    assert np.abs(value - expected).max() < 1e-7
