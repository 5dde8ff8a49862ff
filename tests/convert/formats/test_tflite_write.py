"""Networks written as TFLite: LiteRT runs them and computes what PyTorch does, and our reader finds their layers by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from roundtrips import built
from torch import Tensor, nn

from convert import execute, formats
from convert.formats import _tflite_handlers, safetensors, tflite
from weights.errors import ConvertError, WeightsMismatch
from zoo.conversion.convert import convert

pytestmark = pytest.mark.reference


class Branched(nn.Module):
    """A norm before its convolution, a depthwise one, channels that are taken apart, moved and joined, margins on every side."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.stem = nn.BatchNorm2d(3), nn.Conv2d(3, 8, (3, 5), (2, 1), (1, 2), bias=False)
        self.bn, self.act = nn.BatchNorm2d(8), nn.Tanh()
        self.depth, self.point = nn.Conv2d(8, 16, 3, 2, 1, groups=8), nn.Conv2d(16, 8, 1, dilation=1)
        self.head = nn.Linear(8 * 3 * 3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.stem(self.norm(x))))
        x = self.point(nn.functional.hardswish(self.depth(x)))
        a, b = x.chunk(2, 1)
        x = torch.cat([b * 0.5, nn.functional.leaky_relu(a, 0.2)], 1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        x = nn.functional.avg_pool2d(nn.functional.pad(x, (0, 1, 1, 0)), 3, 2, 1)
        return self.head(x.flatten(1))


def drawn(network: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
            if name.endswith("running_var"):
                tensor.abs_().add_(0.5)
    return network.eval()


def computed(path: Path, images: Tensor) -> np.ndarray:
    with formats.read(path) as source:
        assert source.graph is not None
        assert source.graph.unknown == []
        (value,) = execute.run(source, images.numpy()).values()
    return value


CASES: dict[str, Any] = {
    "maxpool, rounded up": nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 2, ceil_mode=True)),
    "maxpool with a margin below zero": nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 2, 1)),
    "means that leave the margin out": nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
    "means that count the margin": nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(3, 2, 1)),
    "dilated": nn.Sequential(nn.Conv2d(3, 4, 3, padding=2, dilation=2), nn.ReLU6()),
    "transposed": nn.Sequential(nn.ConvTranspose2d(3, 4, 3, 2, 1), nn.Sigmoid()),
    "in groups": nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 3, 2, 1, groups=2, bias=False), nn.BatchNorm2d(4), nn.Hardsigmoid()),
    "larger": nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2), nn.ELU()),
}


@pytest.mark.parametrize("case", CASES)
def test_every_layer_computes_what_pytorchs_does(case: str, tmp_path: Path) -> None:
    network, path = drawn(CASES[case]), tmp_path / "a.tflite"
    difference = tflite.export(network, path, input_shape=(3, 10, 9), metadata={})
    assert difference is not None
    assert difference < 1e-5
    if case == "means that leave the margin out":  # are means times a map of numbers, which only LiteRT runs
        assert formats.read(path).graph.unknown == ["Mul"]  # type: ignore[union-attr]
        return
    images = torch.randn(2, 3, 10, 9, generator=torch.Generator().manual_seed(1))
    if case == "transposed":
        images = images[:1]  # the sizes of its outputs are numbers in the file, the batch among them
    with torch.no_grad():
        expected = network(images).numpy()
    value = computed(path, images)
    assert value.shape == expected.shape
    assert np.abs(value - expected).max() < 1e-5 * max(1, np.abs(expected).max())


def test_a_branched_network_is_written(tmp_path: Path) -> None:
    difference = tflite.export(drawn(Branched()), tmp_path / "a.tflite", input_shape=(3, 14, 9), metadata={})
    assert difference is not None
    assert difference < 1e-5


def test_the_same_network_gives_the_same_bytes_and_keeps_its_notes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tflite.export(drawn(Branched()), tmp_path / f"{name}.tflite", input_shape=(3, 14, 9), metadata={"kernelzoo": "{}", "other": "x"})
    assert (tmp_path / "a.tflite").read_bytes() == (tmp_path / "b.tflite").read_bytes()
    assert formats.read(tmp_path / "a.tflite").facts["kernelzoo"] == "{}"


def test_a_converted_network_is_proven_there_and_back(tmp_path: Path) -> None:
    safetensors.save(built("ResNet20").state_dict(), tmp_path / "a.safetensors")
    there = convert(tmp_path / "a.safetensors", tmp_path / "a.tflite", "ResNet20")
    kinds = {each.kind: each for each in there.certificate.evidence}
    assert "LiteRT" in kinds["destination outputs"].detail
    assert kinds["read back"].proven
    back = convert(tmp_path / "a.tflite", tmp_path / "b.safetensors", "ResNet20")
    assert back.certificate.proven
    executed = next(each for each in back.certificate.evidence if each.kind == "float64 execution")
    assert "19 convolutions whose bias is the BatchNorm's" in executed.detail


class TwoReaders(nn.Module):
    """A convolution that two norms read, so that neither is part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.left, self.right, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head((self.left(x).relu() + self.right(x)).flatten(1))


def head(width: int) -> tuple[nn.Module, nn.Module]:
    return nn.Flatten(), nn.Linear(width, 5)


NORMS: dict[str, Any] = {
    "behind a convolution with a bias": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *head(144)),
    "behind a convolution without": nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), *head(144)),
    "before a convolution": nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), *head(144)
    ),
    "behind an activation": nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.BatchNorm2d(4), *head(144)),
    "behind a depthwise one": nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4), *head(144)
    ),
    "behind a transposed one": nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
    "behind a dense layer": nn.Sequential(nn.Flatten(), nn.Linear(192, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 5)),
    "behind a dense layer without a bias": nn.Sequential(nn.Flatten(), nn.Linear(192, 7, bias=False), nn.BatchNorm1d(7), nn.Linear(7, 5)),
    "before a dense layer": nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 5)),
    "without a scale": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU(), *head(144)),
    "twice behind one convolution": TwoReaders(),
}


FOLDED = [(case, ".tflite") for case in NORMS]  # the other formats keep a norm as it is
WHOLE = [(case, ending) for ending in (".onnx", ".xml") for case in NORMS]
SHOWN = ("before a convolution", "behind a dense layer", "twice behind one convolution")


@pytest.mark.parametrize(
    ("case", "ending"),
    [*FOLDED, *(each if each[0] in SHOWN else pytest.param(*each, marks=pytest.mark.long) for each in WHOLE)],
)
def test_a_batchnorm_anywhere_is_read_back(case: str, ending: str, tmp_path: Path) -> None:
    network = drawn(NORMS[case])
    safetensors.save(network.state_dict(), tmp_path / "a.safetensors")
    there = convert(tmp_path / "a.safetensors", tmp_path / f"a{ending}", network, example=(3, 8, 8))
    kinds = {each.kind: each for each in there.certificate.evidence}
    assert kinds["destination outputs"].proven
    assert kinds["read back"].proven
    worst = kinds["read back"].worst
    assert worst is not None
    assert worst < 1e-6 if ending == ".tflite" else worst == 0


def test_a_wrong_fold_is_seen_when_it_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = _tflite_handlers._scale

    def wrong(out: Any, norm: Any) -> tuple[np.ndarray, np.ndarray]:
        scale, shift = right(out, norm)
        return scale * (1 + 1e-5), shift

    monkeypatch.setattr(_tflite_handlers, "_scale", wrong)
    network = drawn(NORMS["behind a convolution with a bias"])
    safetensors.save(network.state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(ConvertError, match="does not read back as it was written"):
        convert(tmp_path / "a.safetensors", tmp_path / "a.tflite", network, example=(3, 8, 8))


def test_no_batchnorm_is_taken_for_folded_in_a_file_without_a_graph(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *head(144))
    safetensors.save({name.replace("3.", "4."): held for name, held in plain.state_dict().items()}, tmp_path / "a.safetensors")
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *head(144))
    with pytest.raises(WeightsMismatch, match="running_mean"):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", network, example=(3, 8, 8))


def test_where_float32_has_no_digits_the_file_is_executed_in_float64(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    difference = tflite.export(built("SEResNet50"), tmp_path / "a.tflite", input_shape=(3, 128, 128), metadata={})
    assert difference is not None
    assert difference > 1e-4
    assert "rounding to float32 moves these outputs" in caplog.text


def test_what_has_no_word_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    class Erf(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.erf(x)

    with pytest.raises(ConvertError, match=r"the network's Erf.* is no operator that is written for TFLite"):
        tflite.export(nn.Sequential(nn.Conv2d(3, 4, 3), Erf()), tmp_path / "a.tflite", input_shape=(3, 8, 8), metadata={})
    assert not (tmp_path / "a.tflite").exists()


def test_preprocessing_is_not_written_inside(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="without the preprocessing"):
        tflite.export(nn.Conv2d(3, 4, 3), tmp_path / "a.tflite", input_shape=(3, 8, 8), metadata={}, preprocessing=object())
