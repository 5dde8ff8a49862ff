"""pytorchcv itself is the oracle: with its tensors our networks compute what its do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from written import written

import zoo
from convert import conversion, core, names, network
from convert.source import Source, in_memory
from zoo.networks.model import Model

pytestmark = [pytest.mark.reference]

# theirs, ours, what its name says more than its tensors, side of the images
PAIRS: list[tuple[str, type[Model], dict[str, object], int]] = [
    ("alexnetb", zoo.AlexNet, {}, 224),
    ("vgg11", zoo.VGG11, {}, 224),
    ("bn_vgg11b", zoo.VGG11_BN, {}, 224),
    ("bn_vgg11", zoo.VGG11_BN, {"bias": False}, 224),
    ("resnet18", zoo.ResNet18, {}, 64),
    ("resnet50", zoo.ResNet50, {"stride_on": "1x1"}, 64),
    ("resnet50b", zoo.ResNet50, {}, 64),
    ("resnext50_32x4d", zoo.ResNeXt50_32x4d, {}, 64),
    ("seresnet18", zoo.SEResNet18, {}, 64),
    ("seresnet50b", zoo.SEResNet50, {}, 64),
    ("resnet20_cifar10", zoo.ResNet20, {}, 32),
    ("densenet121", zoo.DenseNet121, {}, 64),
    ("densenet100_k12_bc_cifar10", zoo.DenseNet_BC_100_12, {}, 32),
    ("mobilenet_wd4", zoo.MobileNetV1_025, {}, 64),
    ("mobilenetv2b_w1", zoo.MobileNetV2, {}, 64),
    ("mobilenetv3_large_w1", zoo.MobileNetV3Large, {}, 64),
    ("squeezenet_v1_0", zoo.SqueezeNet1_0, {}, 64),
    ("squeezenet_v1_1", zoo.SqueezeNet1_1, {}, 64),
    ("inceptionv3", zoo.InceptionV3, {}, 107),
    ("xception", zoo.Xception, {}, 75),
    ("efficientnet_b0", zoo.EfficientNetB0, {}, 64),
    ("efficientnet_b0b", zoo.EfficientNetB0, {"padding": "same", "norm_eps": 1e-3}, 64),
]
# the rest of the zoo, whose rules are the same and whose tables are longer
LONGER: list[tuple[str, type[Model]]] = [
    ("vgg13", zoo.VGG13), ("vgg16", zoo.VGG16), ("vgg19", zoo.VGG19),
    ("bn_vgg13b", zoo.VGG13_BN), ("bn_vgg16b", zoo.VGG16_BN), ("bn_vgg19b", zoo.VGG19_BN),
    ("resnet34", zoo.ResNet34), ("resnet101b", zoo.ResNet101), ("resnet152b", zoo.ResNet152),
    ("resnext101_64x4d", zoo.ResNeXt101_64x4d), ("seresnet101b", zoo.SEResNet101), ("seresnet152b", zoo.SEResNet152),
    ("resnet56_cifar10", zoo.ResNet56), ("resnet110_cifar10", zoo.ResNet110),
    ("densenet161", zoo.DenseNet161), ("densenet169", zoo.DenseNet169), ("densenet201", zoo.DenseNet201),
    ("mobilenet_w3d4", zoo.MobileNetV1_075), ("mobilenet_wd2", zoo.MobileNetV1_050), ("mobilenet_w1", zoo.MobileNetV1),
    ("efficientnet_b1", zoo.EfficientNetB1), ("efficientnet_b2", zoo.EfficientNetB2), ("efficientnet_b3", zoo.EfficientNetB3),
    ("inceptionv4", zoo.InceptionV4), ("inceptionresnetv2", zoo.InceptionResNetV2), ("senet154", zoo.SENet154),
    ("efficientnet_b4", zoo.EfficientNetB4), ("efficientnet_b5b", zoo.EfficientNetB5), ("efficientnet_b7b", zoo.EfficientNetB7),
]  # fmt: skip


def theirs(name: str) -> nn.Module:
    from pytorchcv.model_provider import get_model

    return get_model(name)


def lively(model: nn.Module) -> nn.Module:
    """Statistics as training leaves them: at their initial values many mistakes can't be seen."""
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor, low, high in (
                (layer.weight, 0.5, 1.5),
                (layer.bias, -0.2, 0.2),
                (layer.running_mean, -0.2, 0.2),
                (layer.running_var, 0.2, 1),
            ):
                assert tensor is not None
                nn.init.uniform_(tensor, low, high)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.AvgPool2d) and layer.kernel_size in (7, 8, 10, 13):  # made for one size of image
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, nn.AdaptiveAvgPool2d(1))
    return model.eval()


AGAIN = ("vgg11", "bn_vgg11b", "seresnet50b", "densenet100_k12_bc_cifar10", "squeezenet_v1_0")
"""Whose logits another one of the family stands for; names and shapes are compared of these too."""


@pytest.mark.parametrize(
    ("name", "cls", "says", "side"),
    [pytest.param(*pair, marks=pytest.mark.long) if pair[0] in AGAIN else pair for pair in PAIRS],
    ids=[pair[0] for pair in PAIRS],
)
def test_logits_are_pytorchcvs(name: str, cls: type[Model], says: dict[str, object], side: int) -> None:
    other = lively(theirs(name)).double()  # in which two orders of the same sums differ by nothing that counts
    options = {**names.fact("pytorchcv", "options", cls), **says}
    with torch.device("meta"):
        model = cls(**options)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    tensors = {key: in_memory(key, tensor.numpy()) for key, tensor in other.state_dict().items() if core.COUNTER not in key}
    source = Source(__file__, "pytorch", "PyTorch", tensors)  # pyright: ignore[reportArgumentType]
    result = conversion.adopt(source, network.layers(model, (3, side, side)), shapes, family=cls, naming="pytorchcv")
    assert result.report.ok, conversion.explain(result, shapes)
    state = {key: torch.from_numpy(stored.array()) for key, stored in result.tensors.items()}
    for key, shape in shapes.items():
        if key.endswith(core.COUNTER):
            state[key] = torch.zeros(shape, dtype=torch.long)
    model.load_state_dict(state, assign=True)
    images = torch.randn(1, 3, side, side, dtype=torch.float64)
    with torch.inference_mode():
        expected = other(images)
        scale = expected.abs().max()
        found = model.eval()(images)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-4 * scale


REST = [*LONGER, *((name, cls) for name, cls, _, _ in PAIRS if name in AGAIN)]


FAMILIES = ("bn_vgg11b", "inceptionv4", "inceptionresnetv2", "senet154", "densenet161")


@pytest.mark.parametrize(
    ("name", "cls"),
    [pair if pair[0] in FAMILIES else pytest.param(*pair, marks=pytest.mark.long) for pair in REST],
    ids=[pair[0] for pair in REST],
)
def test_names_and_shapes_are_pytorchcvs(name: str, cls: type[Model]) -> None:
    with torch.device("meta"):
        other, built = theirs(name).state_dict(), cls(**names.fact("pytorchcv", "options", cls))
    model, structure = built.state_dict(), network.layers(built, (3, built.input_size, built.input_size))
    shapes = {key: tuple(tensor.shape) for key, tensor in model.items()}
    rows = names.rows("pytorchcv", cls, shapes)
    _, report = core.apply(rows, other, shapes)
    assert report.ok, report
    their_shapes = {key: tuple(tensor.shape) for key, tensor in other.items() if not key.endswith(core.COUNTER)}
    assert {key: stored.shape for key, stored in written(rows, model, structure).items()} == their_shapes


@pytest.mark.parametrize("cls", [zoo.MobileNetV3Small, zoo.GoogLeNet])
def test_networks_that_are_others_there_have_no_rows(cls: type[Model]) -> None:
    with torch.device("meta"):
        shapes = {key: tuple(tensor.shape) for key, tensor in cls().state_dict().items()}
    assert names.rows("pytorchcv", cls, shapes) == []
