"""A U-Net gives logits for every pixel, whatever network of the zoo is its encoder, which stays what it is."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import randomised, relative
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from zoo import Model, ResNet18, ResNet20, UNet, fast, features, plain, trained
from zoo.segmentation.unet import Up


class ThinVGG(zoo.VGG, blocks=(1, 1, 2, 2, 2), channels=(8, 8, 16, 16, 16), batch_norm=True): ...


class ThinDenseNet(zoo.DenseNet, blocks=(2, 1, 2, 1), growth_rate=8, stem_channels=16): ...


class ThinEfficientNet(zoo.EfficientNet, width=0.25, depth=0.4, dropout=0.2): ...


class ThinRegNet(zoo.RegNet, depth=6, w0=8, wa=8.0, wm=2.0, group_width=8, squeeze_excite=True): ...


ENCODERS: dict[str, Any] = {
    "VGG": ThinVGG,
    "ResNet18": ResNet18,
    "DenseNet": ThinDenseNet,
    "MobileNetV2": zoo.MobileNetV2_035,
    "MobileNetV1-same": partial(zoo.MobileNetV1_025, padding="same"),
    "SqueezeNet": zoo.SqueezeNet1_1,
    "ShuffleNetV2": zoo.ShuffleNetV2_x0_5,
    "EfficientNet": ThinEfficientNet,
    "RegNet": ThinRegNet,
    "GoogLeNet-transform": partial(zoo.GoogLeNet, transform_input=True),
    "InceptionV3": zoo.InceptionV3,
}
every_encoder = pytest.mark.parametrize("encoder", ENCODERS)
THIN = ("VGG", "DenseNet", "MobileNetV1-same", "EfficientNet", "RegNet")


def alive(module: Any) -> Any:
    module.load_state_dict(randomised(module), assign=True)
    return module


def on_meta(make: Any, **options: Any) -> Any:
    with torch.device("meta"):
        return make(**options)


def unet(encoder: str, num_classes: int = 5, **options: Any) -> UNet:
    """Build one around living encoder and decoder."""
    with torch.device("meta"):
        network = UNet(ENCODERS[encoder](**options), num_classes)
    return alive(network).eval()


def images(network: Any, height: int, width: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, network.in_channels, height, width, generator=torch.Generator().manual_seed(0))


@every_encoder
@pytest.mark.parametrize("size", [(128, 96), (101, 119)])
def test_logits_are_as_large_as_the_image(encoder: str, size: tuple[int, int]) -> None:
    network = on_meta(lambda: UNet(ENCODERS[encoder](), num_classes=21))
    assert network(torch.empty(2, 3, *size, device="meta")).shape == (2, 21, *size)
    assert network.strides == ((1, 2, 4, 8, 16) if encoder == "SqueezeNet" else (1, 2, 4, 8, 16, 32))


@pytest.mark.parametrize("encoder", THIN)
def test_gradients_flow_to_every_parameter_and_to_the_image(encoder: str) -> None:
    network = unet(encoder).train()
    x = images(network, 64, 75).requires_grad_()
    F.cross_entropy(network(x), torch.randint(5, (2, 64, 75))).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("encoder", THIN)
def test_the_encoder_computes_what_the_network_does(encoder: str) -> None:
    classifier = alive(on_meta(ENCODERS[encoder])).eval()
    network = UNet(classifier)
    x = images(network, 64, 96)
    with torch.inference_mode():
        maps = network.encoder(x)
        taps = {f"stride{s}": f"stride/{s}" for s in network.strides if s != 1 or encoder == "VGG"}
        expected = features(classifier, taps)(x)
    assert maps.keys() == expected.keys()
    assert all(torch.equal(maps[key], expected[key]) for key in maps)


def test_the_way_up_is_the_papers() -> None:
    network = unet("VGG")
    x = images(network, 64, 64)
    with torch.inference_mode():
        *beside, y = network.encoder(x).values()
        for up, skip in zip(network.decoder, reversed(beside), strict=True):
            y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)  # and the 1x1 convolution behind it
            y = torch.cat([up.get_submodule("reduce")(y), skip], 1)
            y = up.get_submodule("convs")(y)
            assert y.shape == skip.shape
        expected = network.classifier(y)
        assert relative(network(x), expected) < 1e-5


def test_the_image_is_joined_where_the_encoder_has_no_map_of_its_size() -> None:
    network = on_meta(lambda: UNet(ResNet18(in_channels=4)))
    joined = [up.convs[0][0].in_channels - up.reduce.out_channels for up in network.decoder]
    assert joined == [256, 128, 64, 64, 4]
    assert [up.reduce.out_channels for up in network.decoder] == [256, 128, 64, 64, 32]


def test_a_step_gives_the_size_of_the_map_beside_it() -> None:
    up = Up(8, 3, 5).eval()
    assert up(torch.randn(1, 8, 4, 3), torch.randn(1, 3, 9, 5)).shape == (1, 5, 9, 5)


def test_trained_encoders_keep_their_weights_and_their_record(tmp_path: Path) -> None:
    state = randomised(on_meta(zoo.MobileNetV1_025))
    save_file(state, tmp_path / "weights.safetensors")
    classifier = trained(zoo.MobileNetV1_025, str(tmp_path / "weights.safetensors"))
    before = copy.deepcopy(classifier.state_dict())
    network = UNet(classifier, num_classes=3)
    kept = network.encoder.state_dict()
    assert len(kept) > 100
    assert all(torch.equal(tensor, state[name]) for name, tensor in kept.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in classifier.state_dict().items())
    assert network.checkpoint is classifier.checkpoint
    assert not any(part.training for part in network.modules())  # as trained() gives it
    assert {id(p) for p in network.encoder.parameters()} < {id(p) for p in classifier.parameters()}


def test_layers_of_the_head_are_left_out() -> None:
    network = on_meta(lambda: UNet(ResNet18()))
    names = network.state_dict()
    assert "encoder.layer4.1.conv2.weight" in names
    assert not any("fc" in name for name in names)


def test_it_is_in_the_encoders_mode_and_follows_its_own() -> None:
    classifier = on_meta(ResNet18)
    assert UNet(classifier).training
    network = UNet(classifier.eval())
    assert not any(part.training for part in network.modules())
    assert all(part.training for part in network.train().modules())


def test_the_way_up_lies_where_the_encoder_does_and_in_its_dtype() -> None:
    network = UNet(on_meta(ResNet18).double())
    assert {(p.device.type, p.dtype) for p in network.parameters()} == {("meta", torch.float64)}


def test_fresh_layers_are_drawn_as_the_paper_says() -> None:
    up = UNet(ResNet18()).decoder[0]
    weight = up.get_submodule("convs.0.0").get_parameter("weight")
    assert weight.std().item() == pytest.approx((2 / weight[0].numel()) ** 0.5, rel=0.02)
    assert not up.get_submodule("reduce").get_parameter("bias").any()


@pytest.mark.parametrize("encoder", ["VGG", "RegNet", "MobileNetV1-same"])
def test_fast_computes_the_same(encoder: str) -> None:
    network = unet(encoder)
    quick = fast(network, "cpu", example=images(network, 64, 64, batch=1), progress=False)
    x = images(network, 64, 64)
    with torch.inference_mode():
        expected = network(x)
        assert relative(quick(x), expected) < 1e-4
    assert plain(quick) is network


def test_a_fast_encoder_is_taken_as_the_plain_network() -> None:
    classifier = alive(on_meta(ThinVGG)).eval()
    network = UNet(fast(classifier, "cpu", example=torch.randn(1, 3, 32, 32), progress=False))  # pyright: ignore[reportArgumentType]
    assert network.encoder.get_submodule("features.0") is classifier.features[0]


def test_it_is_copied_pickled_exported_and_traced() -> None:
    network = unet("RegNet")
    x = images(network, 64, 64)
    with torch.inference_mode():
        expected = network(x)
        for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
            assert torch.equal(other(x), expected)
        assert relative(torch.jit.trace(network, x)(x), expected) < 1e-5
    program = torch.export.export(network, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert relative(program.module()(torch.cat([x, x])), torch.cat([expected, expected])) < 1e-5


@pytest.mark.parametrize(
    ("encoder", "error", "message"),
    [
        (ResNet20, ValueError, "ResNet20 is for small images and has no pyramid of strides 4 to 32"),
        (zoo.GMLP_Ti16_224, ValueError, "GMLP_Ti16_224 has no pyramid of strides 4 to 32"),
        (lambda: ResNet18, TypeError, "takes a network of the zoo as its encoder, .* not the class ResNet18: build it first"),
        (lambda: nn.Linear(2, 2), TypeError, "takes a network of the zoo as its encoder, .* not a Linear"),
        (lambda: "resnet18", TypeError, "takes a network of the zoo as its encoder, .* not a str"),
    ],
)
def test_what_can_be_no_encoder_is_an_error_that_says_why(encoder: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        UNet(on_meta(encoder))


@pytest.mark.parametrize("num_classes", [0, -3])
def test_no_classes_are_an_error(num_classes: int) -> None:
    with pytest.raises(ValueError, match="num_classes"):
        UNet(on_meta(ResNet18), num_classes=num_classes)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 64, 64), r"^UNet takes \(batch, 3, height, width\), got shape \(3, 64, 64\). Add the batch axis"),
        ((1, 4, 64, 64), "^UNet takes 3 channels, got shape"),
        ((1, 3, 20, 64), "^UNet needs images of at least 21x21 pixels, got 20x64"),
    ],
)
def test_images_that_the_encoder_does_not_take_are_an_error(shape: tuple[int, ...], message: str) -> None:
    network = on_meta(lambda: UNet(zoo.SqueezeNet1_0()))
    assert isinstance(network, UNet)
    assert issubclass(zoo.SqueezeNet1_0, Model)
    assert network.min_size == zoo.SqueezeNet1_0.min_size
    with pytest.raises(ValueError, match=message):
        network(torch.empty(shape, device="meta"))
