"""Real Keras files: networks with the outputs that Keras itself gave, right and wrong side by side."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from convert import execute, formats
from convert.source import Convention, Source

os.environ.setdefault("KERAS_BACKEND", "torch")

FILES = (
    "fer2013_mini_XCEPTION.102-0.66.hdf5",
    "mlperf_tiny_pretrainedResnet.h5",
    "mlperf_tiny_vww_96.h5",
    "mobilenet_2_5_224_tf_no_top.h5",
)


class Same(nn.Conv2d):
    """A convolution with TensorFlow's padding, the odd pixel at the end, or half of the kernel on both sides."""

    symmetric = False

    def forward(self, input: Tensor) -> Tensor:
        size, stride = self.kernel_size[0], self.stride[0]
        if self.symmetric:
            return F.conv2d(input, self.weight, self.bias, self.stride, size // 2, groups=self.groups)
        total = max((-(-input.shape[2] // stride) - 1) * stride + size - input.shape[2], 0)
        before, after = total // 2, total - total // 2
        return F.conv2d(F.pad(input, (before, after, before, after)), self.weight, self.bias, self.stride, groups=self.groups)


class ResNet8(nn.Module):
    """MLPerf Tiny's image classifier; modules have Keras's names."""

    def __init__(self) -> None:
        super().__init__()
        plan = [(3, 16, 3, 1), (16, 16, 3, 1), (16, 16, 3, 1), (16, 32, 3, 2), (32, 32, 3, 1), (16, 32, 1, 2)]
        plan += [(32, 64, 3, 2), (64, 64, 3, 1), (32, 64, 1, 2)]
        for number, (ins, outs, size, stride) in enumerate(plan):
            self.add_module(f"conv2d_{number}" if number else "conv2d", Same(ins, outs, size, stride))
        for number, width in enumerate((16, 16, 16, 32, 32, 64, 64)):
            self.add_module(f"batch_normalization_{number}" if number else "batch_normalization", nn.BatchNorm2d(width, eps=1e-3))
        self.dense = nn.Linear(64, 10)

    def unit(self, x: Tensor, conv: int, norm: int) -> Tensor:
        modules = dict(self.named_children())
        return modules[f"batch_normalization_{norm}"](modules[f"conv2d_{conv}"](x))

    def forward(self, x: Tensor) -> Tensor:
        modules = dict(self.named_children())
        x = F.relu(modules["batch_normalization"](modules["conv2d"](x)))
        x = F.relu(x + self.unit(F.relu(self.unit(x, 1, 1)), 2, 2))
        x = F.relu(modules["conv2d_5"](x) + self.unit(F.relu(self.unit(x, 3, 3)), 4, 4))
        x = F.relu(modules["conv2d_8"](x) + self.unit(F.relu(self.unit(x, 6, 5)), 7, 6))
        return self.dense(x.mean((2, 3)))


class MobileNet(nn.Sequential):
    """MLPerf Tiny's person detector: MobileNetV1 x0.25 at 96 pixels, in the order of its layers."""

    def __init__(self) -> None:
        widths = [(8, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), *((128, 128, 1),) * 5, (128, 256, 2)]
        layers: list[nn.Module] = [Same(3, 8, 3, 2), nn.BatchNorm2d(8, eps=1e-3), nn.ReLU()]
        for ins, outs, stride in (*widths, (256, 256, 1)):
            layers += [Same(ins, ins, 3, stride, groups=ins), nn.BatchNorm2d(ins, eps=1e-3), nn.ReLU()]
            layers += [Same(ins, outs, 1), nn.BatchNorm2d(outs, eps=1e-3), nn.ReLU()]
        super().__init__(*layers, nn.AvgPool2d(3), nn.Flatten(), nn.Linear(256, 2))


def loaded(network: nn.Module, source: Source, names: dict[str, str], convention: Convention | None = None) -> nn.Module:
    """Fill a network with a file's tensors, through the steps; `names` leads from the network's modules to the file's."""
    state = {}
    for name in network.state_dict():
        module, _, leaf = name.rpartition(".")
        if leaf != "num_batches_tracked":
            stored = source.tensors[f"{names.get(module, module)}.{leaf}"].as_correlation(convention)
            state[name] = torch.from_numpy(np.array(stored.array()))
    network.load_state_dict(state, strict=False)
    return network.eval()


def in_order(network: nn.Module, source: Source) -> dict[str, str]:
    """Pair the modules of a network with those of a file by order, kind by kind."""
    theirs = list(dict.fromkeys(name.rpartition(".")[0] for name in source.tensors))
    kinds = {nn.BatchNorm2d: "batch_norm", nn.Linear: "dense"}
    pools = {kind: iter([name for name in theirs if name.startswith(kind)]) for kind in ("batch_norm", "dense", "depthwise", "conv2d")}
    pairs = {}
    for name, module in network.named_modules():
        if isinstance(module, Same):
            pairs[name] = next(pools["depthwise" if module.groups > 1 else "conv2d"])
        elif type(module) in kinds:
            pairs[name] = next(pools[kinds[type(module)]])
    return pairs


def outputs(network: nn.Module, images: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return network(torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))).softmax(1).numpy()


@pytest.mark.real
@pytest.mark.parametrize("name", FILES)
def test_every_tensor_of_a_real_file_loads(real: Path, name: str) -> None:
    source = formats.read(real / "real" / "keras" / name)
    assert source.format == "keras"
    assert source.conventions == {"correlation"}
    assert source.facts["backend"] == "tensorflow"
    for stored in source.tensors.values():
        array = stored.array()
        assert array.shape == stored.shape
        assert np.isfinite(array).all()
    if name.startswith("mobilenet"):
        assert sum(stored.load().size for stored in source.tensors.values()) == 218_544


@pytest.mark.real
@pytest.mark.parametrize("name", ["resnet8", "vww"])
def test_mlperf_networks_give_keras_s_outputs_and_wrong_ones_do_not(real: Path, name: str) -> None:
    file = {"resnet8": "mlperf_tiny_pretrainedResnet.h5", "vww": "mlperf_tiny_vww_96.h5"}[name]
    source = formats.read(real / "real" / "keras" / file)
    known = np.load(real / "real" / "fixtures" / f"{name}.npz")
    network: nn.Module = ResNet8() if name == "resnet8" else MobileNet()
    names = {} if name == "resnet8" else in_order(network, source)

    right = outputs(loaded(network, source, names), known["x"])
    np.testing.assert_allclose(right, known["y"], atol=1e-5)

    flipped = outputs(loaded(network, source, names, "convolution"), known["x"])
    loaded(network, source, names)
    for module in network.modules():
        if isinstance(module, Same):
            module.symmetric = True
    symmetric = outputs(network, known["x"])
    assert np.abs(flipped - known["y"]).max() > 1e-3
    assert np.abs(symmetric - known["y"]).max() > (0.9 if name == "resnet8" else 1e-3)


@pytest.mark.real
def test_mlperf_resnet_8_knows_cifar_and_a_flipped_one_does_not(real: Path) -> None:
    source = formats.read(real / "real" / "keras" / "mlperf_tiny_pretrainedResnet.h5")
    data = np.load(real / "data" / "cifar10_test.npz")
    jpeg, offset = data["jpeg"].tobytes(), data["offset"]
    images = np.stack([np.asarray(Image.open(io.BytesIO(jpeg[offset[i] : offset[i + 1]]))) for i in range(1000)]).astype(np.float32)
    scores = {}
    for convention in (None, "convolution"):
        network = loaded(ResNet8(), source, {}, convention)
        scores[convention] = float((outputs(network, images).argmax(1) == data["label"][:1000]).mean())
    assert scores[None] > 0.7
    assert scores["convolution"] < scores[None] - 0.3


@pytest.mark.real
@pytest.mark.parametrize("name", ["resnet8", "vww"])
def test_the_graph_of_a_file_computes_what_keras_computes(real: Path, name: str) -> None:
    file = {"resnet8": "mlperf_tiny_pretrainedResnet.h5", "vww": "mlperf_tiny_vww_96.h5"}[name]
    known = np.load(real / "real" / "fixtures" / f"{name}.npz")
    source = formats.read(real / "real" / "keras" / file)
    assert source.graph is not None
    (output,) = source.graph.outputs
    found = execute.run(source, known["x"][:1].transpose(0, 3, 1, 2))[output]
    np.testing.assert_allclose(found, known["y"][:1], atol=1e-6)


@pytest.mark.real
@pytest.mark.reference
@pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")  # Keras's torch backend under NumPy 2
def test_mini_xception_computes_what_keras_computes(real: Path) -> None:
    import keras

    path = real / "real" / "keras" / FILES[0]
    images = np.random.default_rng(0).uniform(-1, 1, (2, 64, 64, 1)).astype(np.float32)
    theirs = keras.ops.convert_to_numpy(keras.models.load_model(path, compile=False)([images], training=False))
    source = formats.read(path)
    assert source.graph is not None
    ours = execute.run(source, images.transpose(0, 3, 1, 2))[source.graph.outputs[0]]
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.real
def test_the_three_files_of_one_network_hold_the_same(real: Path) -> None:
    sources = [formats.read(real / "real" / "fixtures" / name) for name in ("t.h5", "t.keras", "t.weights.h5")]
    first = sources[0].tensors
    assert {name.rpartition(".")[0] for name in first} == {"myconv", "mybn", "mysep.depthwise", "mysep.pointwise", "mydw"}
    for other in sources[1:]:
        assert other.tensors.keys() == first.keys()
        for name, stored in other.tensors.items():
            np.testing.assert_array_equal(stored.array(), first[name].array())


@pytest.mark.real
@pytest.mark.parametrize(("name", "kind", "layout"), [("dw", "depthwise", "HWCM"), ("ct", "transposed", "HWOI"), ("gr", "conv", "HWIO")])
def test_layouts_give_the_outputs_that_keras_gave(real: Path, name: str, kind: str, layout: str) -> None:
    from convert.formats._keras_layers import Era, kernel_layout
    from convert.steps import from_layout

    known = np.load(real / "real" / "fixtures" / f"{name}.npz")
    layer = {"dw": "DepthwiseConv2D", "ct": "Conv2DTranspose", "gr": "Conv2D"}[name]
    assert kernel_layout(layer, "depthwise_kernel" if name == "dw" else "kernel", Era("3"), 4) == (kind, layout)
    array = known["k"]
    for step in from_layout(kind, layout, array.shape):
        array = step.do(array)
    weight, images = (torch.from_numpy(np.ascontiguousarray(a)) for a in (array, known["x"].transpose(0, 3, 1, 2)))
    if name == "ct":
        found = F.conv_transpose2d(images, weight, stride=2)[:, :, : known["y"].shape[1], : known["y"].shape[2]]
    else:
        found = F.conv2d(images, weight, groups=images.shape[1] // weight.shape[1])
    np.testing.assert_allclose(found.numpy(), known["y"].transpose(0, 3, 1, 2), atol=1e-5)
