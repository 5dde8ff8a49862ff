from __future__ import annotations

import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import zoo
from convert import conversion, names, network, writing
from convert.formats import npz, theano
from convert.source import Source, in_memory
from zoo.networks.model import Model


def described(model: Model) -> tuple[list[network.Layer], dict[str, tuple[int, ...]]]:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return network.layers(model, (3, model.input_size, model.input_size)), shapes


def adopt(source: Source, model: Model, convention: Any) -> conversion.Adopted:
    layers, shapes = described(model)
    found = conversion.adopt(source, layers, shapes, family=type(model), naming="lasagne", convention=convention)
    assert found.report.ok, conversion.explain(found, shapes)
    return found


def load(model: Model, tensors: dict[str, np.ndarray]) -> Model:
    model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in tensors.items()}, strict=False)
    return model.eval()


def modules_of(cls: type[Model], **options: Any) -> list[str]:
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in cls(**options).state_dict().items()}
    return names.NAMINGS["lasagne"].order(names.lineage(cls), shapes)


def test_a_projection_comes_first_in_resnet_50_and_last_on_cifar() -> None:
    order = modules_of(zoo.ResNet50)
    at = order.index("layer1.0.downsample.0")
    assert order[at - 1] == "bn1"
    assert order[at : at + 4] == ["layer1.0.downsample.0", "layer1.0.downsample.1", "layer1.0.conv1", "layer1.0.bn1"]
    order = modules_of(zoo.ResNet20, shortcut="B")
    assert order.index("layer2.0.downsample.0") == order.index("layer2.0.bn2") + 1


def test_vggs_layers_are_numbered_by_block() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in zoo.VGG19().state_dict().items()}
    found = {row.ours: row.theirs for row in names.rows("lasagne", zoo.VGG19, shapes)}
    assert [found[f"features.{n}"] for n in (0, 2, 5, 7, 10, 16, 34)] == [
        "conv1_1", "conv1_2", "conv2_1", "conv2_2", "conv3_1", "conv3_4", "conv5_4"
    ]  # fmt: skip
    assert found["classifier.6"] == "fc8"


@pytest.mark.parametrize("convention", ["correlation", "convolution"])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        pytest.param(zoo.ResNet50, {}, marks=pytest.mark.long),
        (zoo.ResNet20, {"shortcut": "B"}),
        (zoo.MobileNetV1_025, {}),
        (zoo.DenseNet_BC_100_12, {}),
        (zoo.GoogLeNet, {}),
    ],
)
def test_lists_give_every_bit_back(cls: type[Model], options: dict[str, Any], convention: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = cls(**options)
    for name, tensor in model.named_buffers():
        if name.endswith("running_var"):
            torch.nn.init.uniform_(tensor, 1e-7, 2)
    layers, shapes = described(model)
    rows = names.rows("lasagne", cls, shapes)
    state = {name: in_memory(name, tensor.numpy()) for name, tensor in model.state_dict().items()}
    parts = writing.parts(rows, layers, state)
    npz.write(parts, tmp_path / "list.npz", convention=convention, metadata={"naming": "lasagne"})
    theano.write(parts, tmp_path / "list.pkl", convention=convention, metadata={"naming": "lasagne"})
    for source in (npz.read(tmp_path / "list.npz"), theano.read(tmp_path / "list.pkl")):
        found = adopt(source, model, convention).tensors
        assert found.keys() == {name for name in state if "num_batches" not in name}
        for name, stored in found.items():
            assert stored.array().dtype == np.float32
            assert np.array_equal(stored.array(), state[name].load()), name


def test_the_bias_before_resnet_50s_first_batchnorm_goes_into_its_mean(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = zoo.ResNet50()
    layers, shapes = described(model)
    draw = np.random.default_rng(0)
    order = names.NAMINGS["lasagne"].order(names.lineage(zoo.ResNet50), shapes)
    leaves = {"conv": ("weight",), "linear": ("weight", "bias"), "norm": ("bias", "weight", "running_mean", "running_var")}
    kinds = {layer.name: layer.kind for layer in layers}
    values = {f"{m}.{leaf}": draw.uniform(0.5, 1, shapes[f"{m}.{leaf}"]).astype("f4") for m in order for leaf in leaves[kinds[m]]}
    listed = [value.T if name == "fc.weight" else value for name, value in values.items()]
    bias = draw.standard_normal(64).astype("f4")
    np.savez(tmp_path / "resnet50.npz", *listed[:1], bias, *listed[1:])
    found = adopt(npz.read(tmp_path / "resnet50.npz"), model, "correlation")
    assert found.moved == {"conv1"}
    assert np.array_equal(found.tensors["bn1.running_mean"].array(), (values["bn1.running_mean"].astype("f8") - bias).astype("f4"))
    assert np.array_equal(found.tensors["layer1.0.conv1.weight"].array(), values["layer1.0.conv1.weight"])


def test_a_list_does_not_say_whether_it_is_flipped(tmp_path: Path, real: Path) -> None:
    with torch.device("meta"):
        model = zoo.ResNet20()
    layers, shapes = described(model)
    arrays = [np.zeros(shape, "f4") for name, shape in shapes.items() if not re.search("num_batches", name)]
    np.savez(tmp_path / "list.npz", *arrays)
    with pytest.raises(conversion.Undecided, match="kernel-convention"):
        conversion.adopt(npz.read(tmp_path / "list.npz"), layers, shapes, family=zoo.ResNet20, naming="lasagne")


@cache
def pictures(shared: Path, split: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    with np.load(shared / "data" / f"cifar10_{split}.npz") as file:
        jpeg, offset, label = file["jpeg"], file["offset"], file["label"]
    chosen = range(0, len(label), step)
    decoded = [np.asarray(Image.open(io.BytesIO(jpeg[offset[i] : offset[i + 1]].tobytes()))) for i in chosen]
    return np.stack(decoded).transpose(0, 3, 1, 2).astype(np.float32) / 255, label[::step]


@pytest.mark.real
def test_the_real_resnet_32_is_right_unflipped_and_by_inverse_deviations(real: Path) -> None:
    """On a tenth of the test images: 79.5 % on another two thousand of them, 30.7 flipped, 10 with the moments taken for variances."""
    images, labels = pictures(real, "test", 10)
    mean = pictures(real, "train", 50)[0].mean(0)
    source = npz.read(real / "real" / "lasagne" / "cifar_resnet_n5.npz")
    model = zoo.ResNet32(**names.fact("lasagne", "options", zoo.ResNet32))
    inputs = torch.from_numpy(images - mean).contiguous(memory_format=torch.channels_last)

    def accuracy(tensors: dict[str, np.ndarray]) -> float:
        network = load(model, tensors).to(memory_format=torch.channels_last)
        with torch.inference_mode():  # a hundred at a time, which stay in the processor's cache
            found = torch.cat([network(some).argmax(1) for some in inputs.split(100)])
        return float((found.numpy() == labels).mean())

    right = adopt(source, model, "correlation").tensors
    values = {name: stored.array() for name, stored in right.items()}
    flipped = {name: stored.array() for name, stored in adopt(source, model, "convolution").tensors.items()}
    moments = {name: stored.load() if name.endswith("running_var") else values[name] for name, stored in right.items()}
    assert accuracy(values) > 0.77
    assert 0.25 < accuracy(flipped) < 0.36
    assert accuracy(moments) == pytest.approx(0.1, abs=0.02)
