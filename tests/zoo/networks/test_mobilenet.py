"""MobileNet V1, V2 and V3 compute what torchvision's and timm's do, with TensorFlow's padding too."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from parity import assert_equal, assert_same_initialisation
from torch import nn
from torchvision import models

from zoo import CATALOGUE, MobileNetV1, MobileNetV1_025, MobileNetV2, MobileNetV3Large, MobileNetV3Small


@pytest.mark.reference
@pytest.mark.parametrize(
    ("name", "theirs"),
    [("MobileNetV2", "mobilenet_v2"), ("MobileNetV3Large", "mobilenet_v3_large"), ("MobileNetV3Small", "mobilenet_v3_small")],
)
def test_logits_and_gradients_equal_torchvisions(name: str, theirs: str) -> None:
    assert_equal(CATALOGUE[name], getattr(models, theirs), size=64)


TENSORFLOW = {"padding": "same", "norm_eps": 1e-3}
TIMM: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("MobileNetV1", {"activation": "relu6"}, "mobilenetv1_100", {}),
    ("MobileNetV1", {"activation": "relu6", **TENSORFLOW}, "mobilenetv1_100", {"pad_type": "same", "bn_eps": 1e-3}),
    ("MobileNetV2_140", {}, "mobilenetv2_140", {}),
    ("MobileNetV2_075", {}, "mobilenetv2_075", {}),
    ("MobileNetV2_050", {}, "mobilenetv2_050", {}),
    ("MobileNetV2_035", TENSORFLOW, "mobilenetv2_035", {"pad_type": "same", "bn_eps": 1e-3}),
    ("MobileNetV3Large", TENSORFLOW, "tf_mobilenetv3_large_100", {}),
    ("MobileNetV3Small", TENSORFLOW, "tf_mobilenetv3_small_100", {}),
    ("MobileNetV3Small", {"norm_eps": 1e-5}, "mobilenetv3_small_100", {}),
]


@pytest.mark.reference
@pytest.mark.parametrize(("name", "options", "theirs", "their_options"), TIMM)
def test_logits_and_gradients_equal_timms(name: str, options: dict[str, Any], theirs: str, their_options: dict[str, Any]) -> None:
    v3 = "V3" in name
    assert_equal(
        lambda: CATALOGUE[name](dropout=0, **options),
        lambda: timm.create_model(theirs, **their_options),
        size=64,  # even: at odd sizes both paddings are the same
        by_order=True,
        statistics=not v3,  # timm has no momentum of 0.01
    )


@pytest.mark.reference
@pytest.mark.parametrize(
    ("ours", "theirs"), [(MobileNetV2, models.mobilenet_v2), (MobileNetV3Small, models.mobilenet_v3_small)], ids=["V2", "V3"]
)
def test_fresh_parameters_are_distributed_as_torchvisions(ours: Any, theirs: Any) -> None:
    assert_same_initialisation(ours(), theirs())


def test_v1_narrows_every_layer_by_its_width() -> None:
    def channels(cls: Any) -> list[int]:
        return [layer.out_channels for layer in cls().features.modules() if isinstance(layer, nn.Conv2d)]

    assert channels(MobileNetV1_025) == [width // 4 for width in channels(MobileNetV1)]


@pytest.mark.parametrize(("name", "kind"), [("relu", nn.ReLU), ("relu6", nn.ReLU6), ("leaky_relu_0.1", nn.LeakyReLU)])
def test_v1_has_the_activation_that_a_record_names_after_each_batchnorm(name: str, kind: type[nn.Module]) -> None:
    layers = [layer for layer in MobileNetV1_025(activation=name).features.modules() if not list(layer.children())]
    assert [type(layer) for layer in layers] == [nn.Conv2d, nn.BatchNorm2d, kind] * 27
    assert {layer.negative_slope for layer in layers if isinstance(layer, nn.LeakyReLU)} <= {0.1}


def test_v1_lists_the_activations_when_there_is_none_of_that_name() -> None:
    with pytest.raises(ValueError, match=r"no activation 'mish'; there are relu, relu6, leaky_relu_0\.1"):
        MobileNetV1_025(activation="mish")


@pytest.mark.parametrize("cls", [MobileNetV1_025, MobileNetV2, MobileNetV3Large])
def test_an_unknown_padding_is_refused(cls: Any) -> None:
    with pytest.raises(ValueError, match=r'"symmetric" \(PyTorch\) or "same" \(TensorFlow\), got \'valid\''):
        cls(padding="valid")


def test_v2_for_small_images_ends_in_16_pixels_and_its_weights_stay_the_same() -> None:
    usual, small = MobileNetV2(num_classes=3).eval(), MobileNetV2(num_classes=3, stem_stride=1, early_stride=1).eval()
    small.load_state_dict(usual.state_dict())
    x = torch.randn(1, 3, 32, 32)
    assert usual.forward_body(x).shape[-2:] == (1, 1)
    assert small.forward_body(x).shape[-2:] == (4, 4)
    for name in ("stem_stride", "early_stride"):
        with pytest.raises(ValueError, match=f"{name} is 1 or 2, got 3"):
            MobileNetV2(**{name: 3})
