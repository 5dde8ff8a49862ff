"""Static channels, strides and receptive fields, against where a NaN gets to."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from deeper import every_size
from parity import randomised
from torch import nn

import zoo
from zoo import CATALOGUE, Model
from zoo.extraction.features import features
from zoo.extraction.taps import Places, UnknownTap, trace
from zoo.networks.convnext import ResponseNorm
from zoo.networks.efficientnet_v2 import BASE, EfficientNetV2
from zoo.networks.layers import SqueezeExcitation
from zoo.networks.nasnet import NASNetA
from zoo.networks.swin import WindowAttention

WIDEST = 320  # pixels; what is wider takes long, and is made of the same layers


def alive(make: Any, **options: Any) -> Model:
    with torch.device("meta"):
        network = make(**options)
    network.load_state_dict(randomised(network), assign=True)
    return network.eval()


class ThinVGG(zoo.VGG, blocks=(1, 1, 2, 2, 2), channels=(4, 4, 4, 4, 4)): ...


class ThinDenseNet(zoo.DenseNet, blocks=(3, 3, 2, 2), growth_rate=8, stem_channels=16): ...


class ThinEfficientNet(zoo.EfficientNet, width=0.25, depth=0.4, dropout=0.2): ...


class ThinEfficientNetV2(EfficientNetV2, table=BASE, stem=32, width=0.25, depth=0.4, dropout=0.2): ...


class ThinRes2Net(zoo.Res2Net50D.family(), blocks=(2, 1, 1, 1), base_width=8, scale=4, v1b=True): ...  # pyright: ignore[reportGeneralTypeIssues]


class ThinRegNet(zoo.RegNet, depth=6, w0=8, wa=8.0, wm=2.0, group_width=8, squeeze_excite=True): ...


class ThinConvNeXt(zoo.ConvNeXt, widths=(8, 12, 16, 24), blocks=(1, 1, 2, 1)): ...


class ThinConvNeXtV2(zoo.ConvNeXtV2, widths=(8, 12, 16, 24), blocks=(1, 1, 2, 1)): ...


class ThinSwin(zoo.Swin, width=8, blocks=(2, 2, 2, 2), heads=(1, 2, 4, 4), stochastic_depth=0.2): ...


class ThinNASNet(NASNetA, repeats=1, penultimate=96, stem_channels=8): ...


class ThinConvMixer(zoo.ConvMixer, depth=2, width=16): ...


class ThinPoolFormer(zoo.PoolFormer, widths=(8, 12, 16, 24), blocks=(1, 1, 2, 1), stochastic_depth=0.2): ...


class ThinConvFormer(zoo.ConvFormer, widths=(8, 12, 16, 24), blocks=(1, 1, 2, 1), stochastic_depth=0.2): ...


SUBJECTS = {
    "VGG": ThinVGG,
    "ResNet18": zoo.ResNet18,
    "ResNet50-caffe": partial(zoo.ResNet50, stride_on="1x1", ceil_mode=True),
    "SEResNet18": zoo.SEResNet18,
    "ResNet10T": zoo.ResNet10T,
    "ResNet20": zoo.ResNet20,
    "AlexNet": zoo.AlexNet,
    "SqueezeNet1_0": zoo.SqueezeNet1_0,
    "ShuffleNetV2": zoo.ShuffleNetV2_x0_5,
    "DenseNet": ThinDenseNet,
    "MobileNetV1-same": partial(zoo.MobileNetV1_025, padding="same"),
    "MobileNetV1-even": partial(zoo.MobileNetV1_025, padding="even"),
    "MobileNetV3Small": zoo.MobileNetV3Small,
    "GoogLeNet": partial(zoo.GoogLeNet, transform_input=True),
    "InceptionV3": zoo.InceptionV3,
    "InceptionV4": zoo.InceptionV4,
    "InceptionResNetV2": zoo.InceptionResNetV2,
    "NASNetA": ThinNASNet,
    "GhostNet_050": zoo.GhostNet_050,
    "Xception": zoo.Xception,
    "Xception-same": partial(zoo.Xception, padding="same"),
    "EfficientNet": ThinEfficientNet,
    "MobileNetV4": zoo.MobileNetV4_Conv_Small_035,
    "EfficientNetV2": ThinEfficientNetV2,
    "Res2Net": ThinRes2Net,
    "ResNet50V2": zoo.ResNet50V2,
    "RegNet": ThinRegNet,
    "MNASNet0_5": zoo.MNASNet0_5,
    "ConvNeXt": ThinConvNeXt,
    "Swin": ThinSwin,
    "ConvNeXtV2": ThinConvNeXtV2,
    "ConvMixer": ThinConvMixer,
    "PoolFormer": ThinPoolFormer,
    "ConvFormer": ThinConvFormer,
}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_receptive_field_is_where_a_nan_comes_from(subject: str) -> None:
    """NaN spreads through every layer, and only where a layer reads: rows just inside and just outside tell the exact edges."""
    network = alive(SUBJECTS[subject])
    for name, layer in list(network.named_modules()):
        if isinstance(layer, SqueezeExcitation | ResponseNorm | WindowAttention | nn.GroupNorm):  # left out of the field
            network.set_submodule(name, nn.Identity())
    places = Places(network, trace(network))
    checked = 0
    for stride, place in places.strides.items():
        field = places.facts[places.names[place]]
        assert field.reach is not None
        if (field.receptive_field or 0) > WIDEST:
            continue
        taken = features(network, {"map": place})
        # SAME is taken as for maps of even size, and the first layers of these two drop pixels
        past = {"Xception-same": 5, "NASNetA": 1}.get(subject, 0)
        for axis, reach in enumerate(field.reach):
            row = max(0, -(-(1 - reach.first) // stride))
            first, last = reach.first + row * stride, reach.last + row * stride
            sides = [-(-max(network.min_size, 32) // 32) * 32 + past] * 2
            sides[axis] = -(-(max(last, network.min_size) + 2 * stride + 40) // 32) * 32 + past
            x = torch.randn(4, 3, *sides)
            for image, pixel in enumerate((first - 1, first, last, last + 1)):
                x[image].select(axis + 1, pixel).fill_(float("nan"))
            with torch.inference_mode():
                spread = taken(x)["map"].select(axis + 2, row).isnan().flatten(1).any(1)
            assert spread.tolist() == [False, True, True, False], (place, axis, reach)
        checked += 1
    # the fields of two grow fast, and ConvMixer has one stride
    assert checked >= {"NASNetA": 2, "InceptionResNetV2": 2, "ConvMixer": 1}.get(subject, 3)


@every_size
def test_channels_and_strides_are_those_of_the_tensors(cls: type[Model]) -> None:
    with torch.device("meta"):
        network = cls().eval()
    places = Places(network, trace(network))
    if cls.first_layer.startswith("stem") and (patch := getattr(cls, "patch_size", 0)):  # one stride throughout, or tokens
        assert places.strides.keys() <= {patch}
    else:
        assert places.strides.keys() >= ({4, 8, 16} if cls.input_size > 32 else {1, 2, 4})
    smallest = cls is min((other for other in CATALOGUE.values() if other.family() is cls.family()), key=lambda other: other.params)
    if cls.params > 6_000_000 and not smallest:
        head = places.tap("embedding", "embedding"), places.tap("logits", "logits")
        assert [tap.channels for tap in head] == [network.get_submodule(cls.classifiers[0]).weight.shape[1], 1000]
        return  # running them on the meta device takes seconds each, and they are of the same layers
    taken = features(network, ["embedding", "body", "logits", *(f"stride/{s}" for s in places.strides)])
    large = -(-512 // cls.size_multiple) * cls.size_multiple
    side = cls.input_size if cls.fixed_size else large if cls.input_size > 32 else 32
    for key, tensor in taken(torch.empty(2, 3, side, side, device="meta")).items():
        assert tensor.shape[-1 if tensor.dim() == 3 else 1] == taken.channels[key], key
        stride = taken.strides[key]
        if stride is None:
            assert taken.receptive_fields[key] is None
            assert tensor.dim() == 2 or (cls.fixed_size and tensor.dim() == 3)
        else:
            assert side / stride - 5 <= tensor.shape[2] <= side / stride + 1, key


def test_fields_known_from_the_literature() -> None:
    """Araujo et al. 2019, Table 1, where their networks are ours."""
    known = {"VGG16": 212, "MobileNetV1": 315, "InceptionV3": 1311, "AlexNet": 195}
    for name, side in known.items():
        with torch.device("meta"):
            assert features(CATALOGUE[name](), "body").receptive_fields == {"body": side}


class Strange(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unfold(2, 2, 1).sum(-1)


def test_what_lies_behind_a_layer_that_moves_pixels_has_no_stride_and_the_error_names_the_layer() -> None:
    network = zoo.ResNet20().eval()
    network.layer2.append(Strange())
    taken = features(network, ["layer1", "layer2", "embedding"])
    assert taken.channels == {"layer1": 16, "layer2": 32, "embedding": 64}
    assert (taken.taps["layer1"].stride, taken.taps["layer1"].unknown) == (1, "")
    assert "layer2.3" in taken.taps["layer2"].unknown or "sum()" in taken.taps["layer2"].unknown
    with pytest.raises(ValueError, match="of 'layer2' no stride and no receptive field are known, behind"):
        _ = taken.strides
    with pytest.raises(UnknownTap, match="No stride is known behind"):
        features(network, "stride/4")
    with pytest.raises(ValueError, match="no stride is known behind"):
        features(network, "layer3", output_stride=2)


POINTWISE = [
    nn.GELU(),
    nn.Hardtanh(),
    nn.Mish(),
    nn.ELU(),
    nn.PReLU(32),
    nn.GroupNorm(4, 32),
    nn.InstanceNorm2d(32),
    nn.LocalResponseNorm(2),
    nn.Dropout2d(),
    nn.Softplus(),
]


@pytest.mark.parametrize("layer", POINTWISE, ids=lambda layer: type(layer).__name__)
def test_a_layer_that_keeps_height_and_width_leaves_pixels_where_they_are(layer: nn.Module) -> None:
    network = zoo.ResNet20().eval()
    network.layer2.append(layer)
    taken = features(network, ["stride/2", "stride/4"])
    assert taken.strides == {"stride/2": 2, "stride/4": 4}
    assert taken.taps["stride/2"].module == "layer2"


class Permuted(nn.Module):
    """LayerNorm of pixels, as ConvNeXt has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_a_map_whose_channels_went_last_and_came_back_keeps_its_stride() -> None:
    network = zoo.ResNet20().eval()
    network.layer2.append(Permuted(32))
    taken = features(network, ["layer2.3.norm", "layer2", "stride/4"])
    assert taken.strides == {"layer2.3.norm": 2, "layer2": 2, "stride/4": 4}
    assert taken.channels == {"layer2.3.norm": 32, "layer2": 32, "stride/4": 64}
    assert taken(torch.zeros(1, 3, 32, 32))["layer2.3.norm"].shape == (1, 16, 16, 32)


def test_looking_for_shapes_runs_no_hook_and_changes_no_state() -> None:
    class Counting(nn.ReLU):
        calls = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(input)

    network = zoo.ResNet20()
    network.layer1[0].relu1 = Counting()
    network.layer1[0].conv1.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    features(network, ["layer1", "stride/4"])
    assert network.layer1[0].relu1.calls == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
