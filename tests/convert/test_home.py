"""A checkpoint's own framework runs it where it is installed; where it isn't, the reason is said."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from convert import _framework, formats, sandbox
from convert.graph import Graph, Node
from convert.home import AtHome, architectures, outputs
from convert.source import Source

IMAGES = np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype(np.float32)


def a_source(format: str, graph: Graph | None = None) -> Source:
    return Source(Path(f"a.{format}"), format, "somebody's", {}, graph=graph)


@pytest.fixture
def exported(tmp_path: Path) -> tuple[nn.Module, Path]:
    from convert.formats import onnx

    network = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)).eval()
    onnx.export(network, tmp_path / "a.onnx", input_shape=(3, 32, 32), metadata={}, verify=False)
    return network, tmp_path / "a.onnx"


LAYER = {"module": "keras.layers", "class_name": "Conv2D", "config": {}, "registered_name": None}
ZEROS = {"module": "keras.initializers", "class_name": "Zeros", "config": {}, "registered_name": None}


@pytest.mark.parametrize(
    ("item", "named"),
    [
        (LAYER | {"config": {"bias_initializer": ZEROS}}, ""),
        ({"class_name": "__keras_tensor__", "config": {"shape": [1]}}, ""),
        (LAYER | {"config": {"activation": {"module": "builtins", "class_name": "function", "config": "relu"}}}, ""),
        ({"module": "keras.src.models.functional", "class_name": "Functional", "config": {"layers": [LAYER]}}, ""),
        ({"module": "keras.optimizers.schedules", "class_name": "CosineDecay", "config": {}}, ""),
        (LAYER | {"class_name": "Lambda"}, "keras.layers.Lambda"),
        (LAYER | {"class_name": "TFSMLayer"}, "keras.layers.TFSMLayer"),
        (LAYER | {"class_name": "TorchModuleWrapper"}, "keras.layers.TorchModuleWrapper"),
        (LAYER | {"module": "keras.src.layers.core.lambda_layer", "class_name": "Lambda"}, "keras.src.layers.core.lambda_layer.Lambda"),
        (LAYER | {"module": "keras.utils", "class_name": "get_file"}, "keras.utils.get_file"),
        (LAYER | {"module": "keras.config", "class_name": "enable_unsafe_deserialization"}, "keras.config.enable_unsafe_deserialization"),
        (LAYER | {"module": "keras.losses", "class_name": "deserialize"}, "keras.losses.deserialize"),
        (LAYER | {"config": {"activation": {"module": "os", "class_name": "function", "config": "system"}}}, "os.function"),
        ({"module": "builtins", "class_name": "function", "config": "deserialize"}, "builtins.function"),
        ({"module": "builtins", "class_name": "function", "config": {}}, "builtins.function"),
        (LAYER | {"compile_config": {"optimizer": {"module": "os", "class_name": "Adam"}}}, "os.Adam"),
        ({"class_name": "__lambda__", "config": {"value": "x"}}, "None.__lambda__"),
        ({"class_name": "Conv2D", "config": {}}, "None.Conv2D"),
        ({"module": "keras.layers", "class_name": ["Conv2D"], "config": {}}, "keras.layers.['Conv2D']"),
        ({"module": ["keras"], "class_name": "Model", "config": {}}, "['keras'].Model"),
    ],
)
def test_keras_is_given_nothing_that_could_do_more_than_compute(item: dict[str, Any], named: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
        archive.writestr("config.json", json.dumps({"config": {"layers": [LAYER, item]}}))
    assert _framework._strange(tmp_path / "a.keras") == named


def test_how_a_file_was_trained_is_nothing_that_keras_builds(tmp_path: Path) -> None:
    """An optimiser of the backend's own is written there, in every file that was compiled."""
    adam = {"module": "keras.src.backend.torch.optimizers.torch_adam", "class_name": "Adam", "config": {}}
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as archive:
        archive.writestr("config.json", json.dumps({"config": {"layers": [LAYER]}, "compile_config": {"optimizer": adam, "loss": "mse"}}))
    assert _framework._strange(tmp_path / "a.keras") == ""


@pytest.mark.reference
def test_onnxruntime_runs_an_onnx_file(exported: tuple[nn.Module, Path]) -> None:
    network, path = exported
    with formats.read(path) as source:
        found = outputs(source, IMAGES)
    assert isinstance(found, AtHome)
    assert found.by.startswith("onnxruntime ")
    with torch.no_grad():
        assert np.abs(found.outputs - network(torch.from_numpy(IMAGES)).numpy()).max() < 1e-5


@pytest.mark.reference
def test_images_that_a_framework_refuses_are_a_reason_and_no_error(exported: tuple[nn.Module, Path]) -> None:
    with formats.read(exported[1]) as source:
        found = outputs(source, np.zeros((1, 7, 9, 9), np.float32))
    assert isinstance(found, str)
    assert found.startswith("its framework refuses it: ")
    assert len(found) < 250


def test_a_framework_that_is_not_installed_is_named(exported: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with formats.read(exported[1]) as source:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert outputs(source, IMAGES) == "onnxruntime is not installed"


@pytest.mark.parametrize("format", ["bson", "caffe", "npz", "darknet"])
def test_formats_that_nothing_runs_say_so(format: str) -> None:
    assert outputs(a_source(format, Graph((), ())), IMAGES) == f"no framework that is run here takes files of the format {format}"


def test_weights_without_a_graph_are_not_run() -> None:
    for format in ("keras", "pytorch", "safetensors"):
        assert outputs(a_source(format), IMAGES) == "the file holds weights and no graph"


def test_an_operation_that_nobody_knows_is_never_given_to_a_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> Any:
        raise AssertionError("the file's code was run")

    monkeypatch.setattr(sandbox, "run", run)
    graph = Graph((Node("evil", "unknown:Lambda", ()),), ("evil",))
    assert outputs(a_source("keras", graph), IMAGES) == "the graph holds Lambda, which is not run"


@pytest.mark.parametrize(
    ("naming", "family", "wanted"),
    [
        ("torchvision", "VGG19_BN", "vgg19_bn"),
        ("torchvision", "WideResNet50_2", "wide_resnet50_2"),
        ("torchvision", "MobileNetV3Large", "mobilenet_v3_large"),
        ("torchvision", "EfficientNetB3", "efficientnet_b3"),
        ("torchvision", "InceptionV3", "inception_v3"),
        ("timm", "ResNet50", "resnet50"),
        ("timm", "EfficientNetB0", "efficientnet_b0"),
        ("timm", "MobileNetV2", "mobilenetv2_100"),
        ("timm", "Xception", "legacy_xception"),
        ("timm", "GhostNet_050", "ghostnet_050"),
        ("timm", "NASNetALarge", "nasnetalarge"),
        ("timm", "InceptionV4", "inception_v4"),
        ("timm", "InceptionResNetV2", "inception_resnet_v2"),
        ("torchvision", "RegNetY_1_6GF", "regnet_y_1_6gf"),
        ("torchvision", "MNASNet0_75", "mnasnet0_75"),
        ("timm", "RegNetX_400MF", "regnetx_004_tv"),
        ("timm", "RegNetX_3_2GF", "regnetx_032"),
        ("timm", "RegNetY_128GF", "regnety_1280"),
        ("torchvision", "ConvNeXt_Tiny", "convnext_tiny"),
        ("timm", "ConvNeXt_Atto", "convnext_atto"),
        ("torchvision", "Swin_T", "swin_t"),
        ("timm", "Swin_S", "swin_small_patch4_window7_224"),
        ("torchvision", "Swin_V2_T", "swin_v2_t"),
        ("timm", "Swin_V2_T", "swinv2_tiny_window8_256"),
        ("torchvision", "MaxViT_T", "maxvit_t"),
        ("timm", "ConvNeXtV2_Tiny", "convnextv2_tiny"),
    ],
)
@pytest.mark.reference
def test_variants_are_found_in_their_libraries(naming: str, family: str, wanted: str) -> None:
    assert wanted in architectures(naming, (family, "Model"))
    if naming == "timm":
        import timm

        assert timm.is_model(wanted)
    else:
        from torchvision import models

        assert wanted in models.list_models()


def test_no_family_has_no_architecture() -> None:
    assert architectures("timm", ()) == []


@pytest.mark.parametrize(
    ("architecture", "family", "another"),
    [("squeezenet1_1", "SqueezeNet1_1", "SqueezeNet1_0"), ("mnasnet0_5", "MNASNet0_5", "MNASNet0_75")],
)
@pytest.mark.reference
def test_torchvision_runs_its_own_checkpoint(tmp_path: Path, architecture: str, family: str, another: str) -> None:
    from torchvision import models

    network = models.get_model(architecture, num_classes=4).eval()
    torch.save(network.state_dict(), tmp_path / "a.pth")
    images = np.random.default_rng(0).normal(size=(1, 3, 64, 64)).astype(np.float32)
    with formats.read(tmp_path / "a.pth") as source:
        found = outputs(source, images, naming="torchvision", family=family, classes=4)
        other = outputs(source, images, naming="torchvision", family=another, classes=4)
        nobody = outputs(source, images, naming="torchvision", family="ResNet20", classes=4)
    assert isinstance(found, AtHome)
    assert found.by.endswith(f", {architecture}")
    with torch.no_grad():
        assert np.array_equal(found.outputs, network(torch.from_numpy(images)).numpy())
    assert isinstance(other, AtHome) is False
    assert nobody == "torchvision builds no such network from its defaults"
