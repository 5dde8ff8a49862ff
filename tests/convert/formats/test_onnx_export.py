"""An exported network runs in onnxruntime with the same logits, gives every bit back, and names nothing of the machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import zoo
from convert import execute
from convert.formats import _onnx_export, safetensors
from convert.formats import onnx as formats_onnx
from weights.errors import ConvertError
from weights.record import Preprocessing
from zoo.conversion.convert import convert
from zoo.images.preprocess import preprocess

pytestmark = pytest.mark.reference


def lively(model: nn.Module) -> nn.Module:
    """Statistics as training leaves them: at their initial values many mistakes can't be seen."""
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.uniform_(layer.bias, -0.2, 0.2)
            assert layer.running_mean is not None
            assert layer.running_var is not None
            nn.init.uniform_(layer.running_mean, -0.2, 0.2)
            nn.init.uniform_(layer.running_var, 0.5, 1.5)
    return model.eval()


def logits(path: Path, images: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: images})[0]


NETWORKS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "shortcuts without parameters": ("ResNet20", {}, (32, 32)),
    "concatenations": ("DenseNet_BC_100_12", {}, (32, 32)),
    "ceil mode": ("SqueezeNet1_1", {}, (45, 38)),
    "gates and hard swish": ("MobileNetV3Small", {}, (64, 64)),
    "same padding at odd sizes": ("MobileNetV3Small", {"padding": "same"}, (62, 67)),
    "relu6": ("MobileNetV1_025", {"padding": "same", "activation": "relu6"}, (64, 62)),
    "silu": ("EfficientNetB0", {}, (40, 64)),
    "branches": ("GoogLeNet", {}, (64, 64)),
    "groups": ("ResNet18", {}, (64, 64)),
    "gates": ("SEResNet18", {}, (64, 64)),
    "one input channel and ten classes": ("MobileNetV2_035", {"in_channels": 1, "num_classes": 10}, (64, 64)),
}


REPEATS = ("groups", "gates", "branches", "gates and hard swish")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if name in REPEATS else name for name in NETWORKS])
def test_logits_are_ours_and_every_bit_comes_back(tmp_path: Path, name: str) -> None:
    variant, options, size = NETWORKS[name]
    model = lively(zoo.CATALOGUE[variant](**options))
    channels, path = options.get("in_channels", 3), tmp_path / "net.onnx"
    assert (formats_onnx.export(model, path, input_shape=(channels, *size), metadata={"a": "b"}) or 1) < 1e-4
    onnx.checker.check_model(str(path), full_check=True)
    images = torch.randn(3, channels, *size)  # a batch that was not exported
    with torch.inference_mode():
        expected = model(images).numpy()
    assert np.abs(logits(path, images.numpy()) - expected).max() < 1e-4 * np.abs(expected).max()
    with formats_onnx.read(path) as source:
        state = {key: tensor for key, tensor in model.state_dict().items() if not key.endswith("num_batches_tracked")}
        assert source.tensors.keys() == state.keys()
        assert all(source.tensors[key].array().tobytes() == tensor.numpy().tobytes() for key, tensor in state.items())
        assert source.facts["a"] == "b"
        assert source.graph is not None
        assert source.graph.unknown == []
        (value,) = execute.run(source, images[:1].numpy()).values()
        assert np.abs(value - expected[:1]).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("variant", ["ConvNeXt_Atto", "ConvNeXtV2_Atto"])
def test_dense_layers_over_maps_come_back_where_nothing_here_executes_what_is_around_them(tmp_path: Path, variant: str) -> None:
    """The exporter transposes their weights, and gives the names of those that are equal, as all fresh zeros are, to one."""
    model, path = lively(zoo.CATALOGUE[variant]()), tmp_path / "net.onnx"
    with torch.no_grad():
        model.features[1][1].block[3].weight.copy_(model.features[1][0].block[3].weight)
    assert (formats_onnx.export(model, path, input_shape=(3, 64, 40), metadata={}) or 1) < 1e-4
    images = torch.randn(3, 3, 64, 40)
    with torch.inference_mode():
        expected = model(images).numpy()
    assert np.abs(logits(path, images.numpy()) - expected).max() < 1e-4 * np.abs(expected).max()
    with formats_onnx.read(path) as source:
        assert source.tensors.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            if name.endswith("layer_scale"):
                tensor = tensor.flatten()
            assert source.tensors[name].array().tobytes() == tensor.numpy().tobytes(), name
        assert source.graph is not None
        assert "MatMul" in source.graph.unknown


@pytest.mark.parametrize("order", ["rgb", "bgr"])
def test_preprocessing_inside_takes_pixels_as_an_image_decoder_gives_them(tmp_path: Path, order: str) -> None:
    record = Preprocessing(None, None, "bilinear", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), order)
    model, path = lively(zoo.SqueezeNet1_1(num_classes=10)), tmp_path / "net.onnx"
    formats_onnx.export(model, path, input_shape=(3, 48, 40), metadata={}, preprocessing=record)
    onnx.checker.check_model(str(path), full_check=True)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 48, 40, 3), dtype=np.uint8)
    with torch.inference_mode():
        expected = model(preprocess(list(pixels), record)).numpy()
    assert np.abs(logits(path, pixels) - expected).max() < 1e-5 * np.abs(expected).max()
    with formats_onnx.read(path) as source:
        assert source.preprocessing["channel_order"] == order
        assert np.allclose(source.preprocessing["mean"], record.mean)
        assert np.allclose(source.preprocessing["std"], record.std)
        assert source.tensors.keys() == model.state_dict().keys()
        (value,) = execute.run(source, pixels.transpose(0, 3, 1, 2)).values()
    assert np.abs(value - expected).max() < 1e-5 * np.abs(expected).max()


def test_the_same_network_gives_the_same_bytes_and_no_path(tmp_path: Path) -> None:
    model = lively(zoo.MobileNetV1_025())
    files = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for path in files:
        formats_onnx.export(model, path, input_shape=(3, 32, 32), metadata={"z": "1", "a": "2"})
    assert files[0].read_bytes() == files[1].read_bytes()
    assert str(Path(torch.__file__).parent).encode() not in files[0].read_bytes()


def test_parameters_that_are_equal_all_come_back(tmp_path: Path) -> None:
    """A fresh network's scales are all one; PyTorch's exporter would write one of them."""
    model = zoo.MobileNetV1_025()
    formats_onnx.export(model, tmp_path / "net.onnx", input_shape=(3, 32, 32), metadata={})
    with formats_onnx.read(tmp_path / "net.onnx") as source:
        assert source.tensors.keys() == {key for key in model.state_dict() if not key.endswith("num_batches_tracked")}


def test_the_network_is_left_as_it_was(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Conv2d(4, 2, 1)).train().half()
    before = {name: (tensor.data_ptr(), tensor.dtype, tensor.clone()) for name, tensor in model.state_dict().items()}
    formats_onnx.export(model, tmp_path / "net.onnx", input_shape=(3, 8, 8), metadata={})
    assert model.training
    assert model[1].training
    for name, tensor in model.state_dict().items():
        pointer, dtype, value = before[name]
        assert (tensor.data_ptr(), tensor.dtype) == (pointer, dtype)
        assert torch.equal(tensor, value)


@pytest.mark.parametrize(("size", "unknown"), [(32, False), (7, False), (10, True)])
def test_adaptive_pools_of_every_size_are_exported(tmp_path: Path, size: int, unknown: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d((16 if size == 32 else 7, 7 if size != 32 else 8)), nn.Flatten())
    path = tmp_path / "net.onnx"
    assert (formats_onnx.export(model, path, input_shape=(3, size, size), metadata={}) or 1) < 1e-5
    with formats_onnx.read(path) as source:
        assert source.graph is not None
        assert bool(source.graph.unknown) == unknown


def test_an_operator_that_onnx_has_not_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="adaptive_max_pool2d"):
        formats_onnx.export(nn.AdaptiveMaxPool2d((3, 5)), tmp_path / "net.onnx", input_shape=(3, 32, 32), metadata={})
    assert not (tmp_path / "net.onnx").exists()


def test_a_file_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the graph of a network without its activation."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1))
    traced = _onnx_export._traced
    monkeypatch.setattr(_onnx_export, "_traced", lambda network, *how: traced(_without(network), *how))
    with pytest.raises(ConvertError, match="computes other outputs"):
        formats_onnx.export(model, tmp_path / "net.onnx", input_shape=(3, 8, 8), metadata={})


def _without(network: nn.Module) -> nn.Module:
    assert isinstance(network, nn.Sequential)
    return nn.Sequential(network[0], nn.Identity(), network[2]).eval()


def test_preprocessing_for_another_number_of_channels_is_refused(tmp_path: Path) -> None:
    record = Preprocessing(None, None, "bilinear", (0.5,), (0.5,))
    with pytest.raises(ConvertError, match="1 means and 1 deviations, the network 3 channels"):
        formats_onnx.export(nn.Conv2d(3, 4, 3), tmp_path / "net.onnx", input_shape=(3, 8, 8), metadata={}, preprocessing=record)


class Twice(nn.Module):
    """One convolution and one PReLU that are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.PReLU(3), nn.Linear(3 * 64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.conv(self.act(self.conv(x)))).flatten(1))


SLOPES: dict[str, Any] = {
    "of each channel": nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Flatten(), nn.Linear(144, 5)),
    "one": nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(), nn.Flatten(), nn.Linear(144, 5)),
    "of a vector": nn.Sequential(nn.Flatten(), nn.Linear(192, 7), nn.PReLU(7), nn.Linear(7, 5)),
    "equal ones": nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.Conv2d(4, 4, 1), nn.PReLU(4), nn.Flatten(), nn.Linear(144, 5)),
}


@pytest.mark.parametrize("ending", [".onnx", ".xml", ".tflite"])
@pytest.mark.parametrize(
    "case", ["of each channel", "equal ones", *(pytest.param(case, marks=pytest.mark.long) for case in ("one", "of a vector"))]
)
def test_slopes_are_written_and_read_back(case: str, ending: str, tmp_path: Path) -> None:
    network = SLOPES[case]
    if case != "equal ones":
        with torch.no_grad():
            for number, tensor in enumerate(network.state_dict().values()):
                tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)) * 0.3)
    safetensors.save(network.state_dict(), tmp_path / "a.safetensors")
    made = convert(tmp_path / "a.safetensors", tmp_path / f"a{ending}", network, example=(3, 8, 8))
    kinds = {each.kind: each for each in made.certificate.evidence}
    assert kinds["read back"].worst == 0
    assert kinds["destination outputs"].proven


@pytest.mark.parametrize("ending", [".onnx", ".xml"])
@pytest.mark.parametrize("network", [Twice(), nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(144, 5))])
def test_a_file_whose_graph_is_not_executed_here_was_run_when_it_was_written(network: nn.Module, ending: str, tmp_path: Path) -> None:
    safetensors.save(network.state_dict(), tmp_path / "a.safetensors")
    made = convert(tmp_path / "a.safetensors", tmp_path / f"a{ending}", network, example=(3, 8, 8))
    (there,) = (each for each in made.certificate.evidence if each.kind == "destination outputs")
    assert there.proven
    assert there.worst is not None
    assert there.worst < 1e-4


def test_where_the_destination_is_not_run_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(144, 5))
    safetensors.save(network.state_dict(), tmp_path / "a.safetensors")
    monkeypatch.setattr(formats_onnx, "_proved", lambda *_: None)  # as without onnxruntime
    made = convert(tmp_path / "a.safetensors", tmp_path / "a.onnx", network, example=(3, 8, 8))
    assert any("was not run by its own framework: the graph holds Erf" in note for note in made.notes)


class Sloped(nn.Module):
    """Has a parameter of its own, which PyTorch's exporter reshapes and renames."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.slope = nn.Conv2d(3, 4, 3), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.prelu(self.conv(x), self.slope)


class OfTokens(nn.Module):
    """Attention or a recurrent layer over the tokens of a map: the exporter transposes, cuts and stacks their parameters."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.patches, self.layer, self.head = nn.Conv2d(3, 16, 2, 2), layer, nn.LazyLinear(5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        if isinstance(self.layer, nn.MultiheadAttention):
            tokens, _ = self.layer(tokens, tokens, tokens, need_weights=False)
        elif isinstance(self.layer, nn.TransformerEncoderLayer):
            tokens = self.layer(tokens)
        else:
            tokens, _ = self.layer(tokens)
        return self.head(tokens.mean(1))


class Joined(nn.Module):
    """Computes two layers as one, whose weights it joins at every call: the exporter computes them beforehand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches, self.width = nn.Conv2d(3, width, 2, 2), width
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).mean((2, 3))
        weight, bias = torch.cat([self.query.weight, self.key.weight]), torch.cat([self.query.bias, self.key.bias])
        return nn.functional.linear(tokens, weight, bias)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(Sloped()),
        lambda: Joined(8),
        lambda: Joined(300),
        lambda: OfTokens(nn.MultiheadAttention(16, 4, batch_first=True)),
        lambda: OfTokens(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)),
        lambda: OfTokens(nn.LSTM(16, 8, batch_first=True, bidirectional=True)),
        lambda: OfTokens(nn.GRU(16, 8, 2, batch_first=True)),
    ],
    ids=["a slope of its own", "two layers as one", "two wide layers as one", "attention", "encoder", "LSTM", "GRU"],
)
def test_parameters_that_the_exporter_changes_keep_their_names_and_values(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, x = make().eval(), torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        expected = network(x)
    formats_onnx.export(network, tmp_path / "a.onnx", input_shape=(3, 8, 8), metadata={})
    (found,) = onnxruntime.InferenceSession(tmp_path / "a.onnx").run(None, {"images": x.numpy()})
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)
    held = {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(tmp_path / "a.onnx").graph.initializer}
    for name, tensor in network.state_dict().items():
        np.testing.assert_array_equal(held[name], tensor.numpy())
    safetensors.save(network.state_dict(), tmp_path / "b.safetensors")
    for source, written in (("b.safetensors", "b.onnx"), ("b.onnx", "c.safetensors")):
        other = make()
        other(x)  # which shapes what is lazy
        convert(tmp_path / source, tmp_path / written, other, example=(3, 8, 8))
    for name, tensor in safetensors.read(tmp_path / "c.safetensors").tensors.items():
        np.testing.assert_array_equal(tensor.array(), network.state_dict()[name].numpy())


def test_a_parameter_that_was_changed_unseen_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = _onnx_export._traced
    monkeypatch.setattr(_onnx_export, "_traced", lambda network, example, opset, fold: traced(network, example, opset, True))
    with pytest.raises(ConvertError, match="changed a parameter on the way to PRelu"):
        formats_onnx.export(Sloped(), tmp_path / "a.onnx", input_shape=(3, 8, 8), metadata={})
