"""What config.json and preprocessor_config.json say, against transformers' own processors and networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import randomised, relative
from PIL import Image

import zoo
from convert import names
from weights import Preprocessing
from zoo.images.preprocess import preprocess

pytestmark = pytest.mark.reference

LEVEL = 1 / 255
"""A level of a pixel, on 0..1."""


def photograph() -> Image.Image:
    row, column = np.mgrid[0:300, 0:400]
    return Image.fromarray(np.stack([row / 300 * 255, column / 400 * 255, (row + column) % 256], -1).astype(np.uint8))


def processors() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        ("vit", "ViTImageProcessor", {}),
        ("vit", "ViTImageProcessor", {"do_rescale": False, "do_normalize": False}),
        ("vit", "ViTImageProcessor", {"size": {"height": 384, "width": 384}, "resample": 3}),
        ("deit", "DeiTImageProcessor", {}),
        ("clip", "CLIPImageProcessor", {}),
        ("siglip", "SiglipImageProcessor", {}),
        ("convnext", "ConvNextImageProcessor", {"size": {"shortest_edge": 224}, "crop_pct": 0.875}),
        ("convnext", "ConvNextImageProcessor", {"size": {"shortest_edge": 384}}),
        ("mobilenet_v1", "MobileNetV1ImageProcessor", {}),
        ("mobilenet_v2", "MobileNetV2ImageProcessor", {}),
        ("efficientnet", "EfficientNetImageProcessor", {"resample": 3, "size": {"height": 240, "width": 240}}),
        ("efficientnet", "EfficientNetImageProcessor", {"resample": 2, "include_top": False, "do_normalize": False}),
        ("efficientnet", "EfficientNetImageProcessor", {"resample": 2, "rescale_offset": True, "rescale_factor": 1 / 127.5}),
    ]


@pytest.mark.parametrize(("kind", "processor", "settings"), processors())
def test_images_are_prepared_as_transformers_does(kind: str, processor: str, settings: dict[str, Any], tmp_path: Path) -> None:
    import transformers as hf

    own = getattr(hf, processor)(**settings)
    own.save_pretrained(tmp_path)
    files = {
        "config.json": {"model_type": kind},
        "preprocessor_config.json": json.loads((tmp_path / "preprocessor_config.json").read_text()),
    }
    family = {"vit": "ViT", "deit": "DeiT", "clip": "CLIP", "siglip": "SigLIP", "convnext": "ConvNeXt", "efficientnet": "EfficientNet"}
    found = names.told(files, family.get(kind, kind.replace("mobilenet_v", "MobileNetV")))
    assert found is not None
    naming, told = found
    assert naming == "transformers"
    steps = Preprocessing(**{"mean": (0.0,) * 3, "std": (1.0,) * 3, "resize": None, "crop": None, **told["preprocessing"]})
    expected = own(photograph(), return_tensors="pt")["pixel_values"].float()
    ours = preprocess([photograph()], steps)
    assert ours.shape == expected.shape
    apart = (ours - expected).abs() * torch.tensor(steps.std)[:, None, None]
    assert apart.mean() < LEVEL  # PIL and torchvision round and place differently, by a level or two at edges
    assert apart.quantile(0.99) < 4 * LEVEL


@pytest.mark.parametrize(
    ("processor", "wanted"),
    [
        ({"feature_extractor_type": "ViTFeatureExtractor", "size": 224}, {"resize": 224, "crop": 224, "squash": True}),
        ({"feature_extractor_type": "CLIPFeatureExtractor", "size": 224, "crop_size": 224}, {"resize": 224, "crop": 224, "squash": False}),
        ({"feature_extractor_type": "DeiTFeatureExtractor", "size": 256, "crop_size": 224}, {"resize": 256, "crop": 224, "squash": True}),
        ({"feature_extractor_type": "ConvNextFeatureExtractor", "size": 224}, {"resize": 256, "crop": 224, "squash": False}),
    ],
)
def test_the_older_files_with_one_number_for_a_size_are_understood(processor: dict[str, Any], wanted: dict[str, Any]) -> None:
    from convert.names.transformers import told

    kinds = {"V": ("vit", "ViT"), "C": ("clip", "CLIP"), "D": ("deit", "DeiT")}
    name = processor["feature_extractor_type"]
    kind, family = ("convnext", "ConvNeXt") if name.startswith("Conv") else kinds[name[0]]
    found = told({"config.json": {"model_type": kind}, "preprocessor_config.json": processor}, (family,))
    assert found is not None
    assert {key: found["preprocessing"][key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("config", "processor", "match"),
    [
        ({"model_type": "vit", "hidden_act": "relu"}, {}, "its activation is 'relu'"),
        ({"model_type": "vit", "image_size": [224, 448]}, {}, "here they are square"),
        ({"model_type": "vit"}, {"size": {"height": 224, "width": 112}}, "here they are square"),
        ({"model_type": "vit"}, {"size": 224, "resample": 1}, "PIL's interpolation 1"),
        ({"model_type": "clip", "architectures": ["CLIPForImageClassification"]}, {}, "the mean of the patches before the last norm"),
    ],
)
def test_what_no_network_here_does_is_refused(config: dict[str, Any], processor: dict[str, Any], match: str) -> None:
    cls = zoo.CLIP_ViT_B_32 if config["model_type"] == "clip" else zoo.ViT_Ti_16
    with pytest.raises(ValueError, match=match):
        names.told({"config.json": config, "preprocessor_config.json": processor}, cls)


def test_a_resnet_that_strides_in_its_first_convolution_is_built_so(tmp_path: Path) -> None:
    import transformers as hf

    widths = {"embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [2, 2, 2, 2], "layer_type": "bottleneck"}
    model = hf.ResNetForImageClassification(hf.ResNetConfig(**widths, downsample_in_bottleneck=True))
    model.load_state_dict(randomised(model))
    model.eval().save_pretrained(tmp_path)
    network = zoo.trained("ResNet26", tmp_path / "model.safetensors")
    assert network.checkpoint is not None
    assert network.checkpoint.options == {"stride_on": "1x1"}
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert relative(network(images), model(images).logits) < 1e-4


def test_windows_of_swin_are_those_of_its_config(tmp_path: Path) -> None:
    import transformers as hf

    tables = {"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24]}
    config = hf.Swinv2Config(**tables, image_size=256, window_size=16, pretrained_window_sizes=[12, 12, 12, 6])
    model = hf.Swinv2ForImageClassification(config)
    model.load_state_dict(randomised(model), strict=False)
    model.eval().save_pretrained(tmp_path)
    network = zoo.trained("Swin_V2_T", tmp_path / "model.safetensors")
    assert network.checkpoint is not None
    assert network.checkpoint.options == {"window": 16, "last_window": 8, "trained_window": 12}
    images = torch.randn(2, 3, 256, 256, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert relative(network(images), model(images).logits) < 1e-4


@pytest.mark.parametrize("eps", [0, -1, float("nan"), float("inf"), "1e-6", None, True])
def test_an_epsilon_that_no_norm_adds_is_refused(eps: object) -> None:
    with pytest.raises(ValueError, match="layer_norm_eps"):
        names.told({"config.json": {"model_type": "vit", "layer_norm_eps": eps}}, "ViT")


@pytest.mark.parametrize(("config", "eps"), [({}, 1e-12), ({"layer_norm_eps": 1e-6}, 1e-6)])
def test_a_vit_gets_the_epsilon_of_its_file(config: dict[str, Any], eps: float) -> None:
    found = names.told({"config.json": {"model_type": "vit", **config}}, "ViT")
    assert found is not None
    model = zoo.ViT_Ti_16(**found[1]["options"])
    assert {layer.eps for layer in model.modules() if isinstance(layer, torch.nn.LayerNorm)} == {eps}
