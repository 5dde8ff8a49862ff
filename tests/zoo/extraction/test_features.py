"""Features: what the layers give in the network itself, in every mode and wrapping, and nothing computed past the last."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from parity import randomised
from torch import Tensor, nn
from torch.export import Dim, export
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.detection import FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool, LastLevelP6P7

import zoo
from zoo import (
    Fast,
    GoogLeNet,
    InceptionV3,
    MobileNetV1_025,
    MobileNetV3Small,
    Model,
    ResNet18,
    ResNet20,
    SEResNet18,
    fast,
    trained,
)
from zoo.extraction.features import Features, body, features, head, pyramid
from zoo.extraction.taps import PATCHES, Places, trace
from zoo.networks.efficientnet_v2 import BASE, EfficientNetV2
from zoo.networks.mobilenet_v4 import MQA, UIB, Fused, MobileNetV4
from zoo.networks.nasnet import NASNetA


# The families' own code at sizes that take little time
class ThinVGG(zoo.VGG, blocks=(1, 1, 2, 2, 2), channels=(8, 8, 16, 16, 16), batch_norm=True): ...


class ThinDenseNet(zoo.DenseNet, blocks=(2, 1, 2, 1), growth_rate=8, stem_channels=16): ...


class ThinEfficientNet(zoo.EfficientNet, width=0.25, depth=0.4, dropout=0.2): ...


class ThinEfficientNetV2(EfficientNetV2, table=BASE, stem=32, width=0.25, depth=0.4, dropout=0.2): ...


HALVED = UIB(3, 5, 2, 16, 2)


class ThinHybrid(
    MobileNetV4, table=((Fused(4, 16, 2),), (HALVED,), (HALVED, MQA(2, 8, 2)), (HALVED, MQA(2, 8))), stem=16, layer_scale=True
): ...


class ThinRes2Net(zoo.Res2Net50D.family(), blocks=(2, 1, 1, 1), base_width=8, scale=4, v1b=True): ...  # pyright: ignore[reportGeneralTypeIssues]


class ThinRegNet(zoo.RegNet, depth=6, w0=8, wa=8.0, wm=2.0, group_width=8, squeeze_excite=True): ...


class ThinConvNeXt(zoo.ConvNeXt, widths=(8, 12, 16, 24), blocks=(1, 1, 2, 1)): ...


class ThinConvNeXtV2(zoo.ConvNeXtV2, widths=(8, 12, 16, 24), blocks=(1, 1, 2, 1)): ...


class ThinSwin(zoo.Swin, width=8, blocks=(2, 2, 2, 2), heads=(1, 2, 4, 4), stochastic_depth=0.2): ...


class ThinSwinV2(zoo.SwinV2, width=8, blocks=(2, 2, 2, 2), heads=(1, 2, 4, 4), stochastic_depth=0.2): ...


class ThinMaxViT(zoo.MaxViT, stem_channels=8, widths=(8, 8, 16, 16), depths=(1, 2, 1, 1), head_channels=4, stochastic_depth=0.2): ...


class ThinNASNet(NASNetA, repeats=1, penultimate=96, stem_channels=8): ...


class ThinMixer(zoo.Mixer_S32_224.family(), depth=2, width=16, patch_size=8, input_size=32): ...


class ThinResMLP(zoo.ResMLP, depth=2, width=16, patch_size=8, input_size=32): ...


class ThinGMLP(zoo.GMLP, depth=2, width=16, patch_size=8, input_size=32): ...


class ThinConvMixer(zoo.ConvMixer, depth=2, width=16): ...


class ThinPoolFormer(zoo.PoolFormer, widths=(8, 12, 16, 24), blocks=(1, 1, 2, 1), stochastic_depth=0.2): ...


class ThinConvFormer(zoo.ConvFormer, widths=(8, 12, 16, 24), blocks=(1, 1, 2, 1), stochastic_depth=0.2): ...


class ThinPoolFormerV2(zoo.PoolFormerV2, widths=(8, 12, 16, 24), blocks=(1, 1, 2, 1), stochastic_depth=0.2): ...


class ThinCAFormer(zoo.CAFormer, widths=(8, 16, 32, 32), blocks=(1, 1, 2, 1), stochastic_depth=0.2): ...


class ThinViT(zoo.DeiT, patch=8, depth=2, attention_heads=2, width=16, mlp_width=32, input_size=32, layer_scale=1e-1, distilled=True): ...


SUBJECTS: dict[str, Any] = {
    "VGG": partial(ThinVGG, num_classes=7),
    "ResNet18": ResNet18,
    "SEResNet18": SEResNet18,
    "ResNet10T": zoo.ResNet10T,
    "ResNetRS50": zoo.ResNetRS50,
    "ECAResNet26T": zoo.ECAResNet26T,
    "ResNet20": ResNet20,
    "ResNet20-B": partial(ResNet20, shortcut="B"),
    "AlexNet": zoo.AlexNet,
    "SqueezeNet1_1": zoo.SqueezeNet1_1,
    "ShuffleNetV2": zoo.ShuffleNetV2_x0_5,
    "DenseNet": ThinDenseNet,
    "MobileNetV1-same": partial(MobileNetV1_025, padding="same", activation="leaky_relu_0.1"),
    "MobileNetV2_035": zoo.MobileNetV2_035,
    "MobileNetV3Small": MobileNetV3Small,
    "GoogLeNet-transform-aux": partial(GoogLeNet, transform_input=True, aux_logits=True),
    "InceptionV3-transform": partial(InceptionV3, transform_input=True),
    "InceptionV4": zoo.InceptionV4,
    "InceptionResNetV2": zoo.InceptionResNetV2,
    "NASNetA": ThinNASNet,
    "GhostNet_050": zoo.GhostNet_050,
    "Xception": zoo.Xception,
    "EfficientNet": ThinEfficientNet,
    "MobileNetV4": zoo.MobileNetV4_Conv_Small_035,
    "MobileNetV4-hybrid": ThinHybrid,
    "EfficientNetV2": ThinEfficientNetV2,
    "Res2Net": ThinRes2Net,
    "ResNet50V2": zoo.ResNet50V2,
    "BiT": zoo.ResNetV2_50x1_BiT,
    "RegNet": ThinRegNet,
    "MNASNet0_5": zoo.MNASNet0_5,
    "ConvNeXt": ThinConvNeXt,
    "Swin": ThinSwin,
    "SwinV2": ThinSwinV2,
    "MaxViT": ThinMaxViT,
    "ConvNeXtV2": ThinConvNeXtV2,
    "Mixer": ThinMixer,
    "ResMLP": ThinResMLP,
    "GMLP": ThinGMLP,
    "ConvMixer": ThinConvMixer,
    "PoolFormer": ThinPoolFormer,
    "PoolFormerV2": ThinPoolFormerV2,
    "ConvFormer": ThinConvFormer,
    "CAFormer": ThinCAFormer,
    "ViT": ThinViT,
}
every_family = pytest.mark.parametrize("subject", SUBJECTS)
KINDS = (
    "ResNet18 ResNet20-B SqueezeNet1_1 ShuffleNetV2 DenseNet MobileNetV3Small GoogLeNet-transform-aux NASNetA ConvMixer CAFormer Swin ViT"
)
every_kind = pytest.mark.parametrize(
    "subject", [name if name in KINDS.split() else pytest.param(name, marks=pytest.mark.long) for name in SUBJECTS]
)
"""Sums, joins, shuffles, gates, windows and tokens; every family's tensors are compared above, and the rest of each by -m long."""


def on_meta(make: Any, **options: Any) -> Model:
    with torch.device("meta"):
        return make(**options)


def alive(subject: Any, **options: Any) -> Model:
    network = on_meta(SUBJECTS.get(subject, subject) if isinstance(subject, str) else subject, **options)
    network.load_state_dict(randomised(network), assign=True)
    return network.eval()


def images(network: Model, batch: int = 2) -> Tensor:
    more = 3 if network.size_multiple == 1 else network.size_multiple
    side = network.input_size if network.fixed_size else max(network.min_size, 32)
    width = side if network.fixed_size else side + more
    return torch.randn(batch, network.in_channels, side, width, generator=torch.Generator().manual_seed(0))


def inner(network: Model, x: Tensor) -> dict[str, Tensor]:
    """Every module's output, by hooks on the network itself."""
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(layer: nn.Module, args: Any, output: Any) -> None:
            seen[name] = output

        return hook

    handles = [layer.register_forward_hook(note(name)) for name, layer in network.named_modules() if name]
    result = network(x)
    for handle in handles:
        handle.remove()
    return seen | {"logits": result if isinstance(result, Tensor) else result[0]}


def some_taps(network: Model) -> list[str]:
    """The paper's, the strides', the virtual and a handful of inner modules spread over the depth."""
    places = Places(network, trace(network))
    names = list(places.trace.outputs)
    return list(
        dict.fromkeys([*names[:: max(1, len(names) // 6)], *(f"stride/{s}" for s in places.strides), "body", "embedding", "logits"])
    )


@pytest.mark.parametrize("subject", [s for s in SUBJECTS if s != "AlexNet"])  # its dense layers take seconds, and VGG's are the same
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_features_are_the_networks_own_tensors_and_gradients(subject: str, training: bool) -> None:
    network = alive(subject).train(training)
    if subject.startswith("InceptionV3") and training:
        assert network.AuxLogits is None
    twin = copy.deepcopy(network)
    taken = features(network, some_taps(network))
    x, y = images(network).requires_grad_(), images(network).requires_grad_()
    torch.manual_seed(7)
    got = taken(x)
    torch.manual_seed(7)
    if training and "aux" in subject:  # the heads draw dropout in between
        twin.aux1 = twin.aux2 = None
    expected = inner(twin, y)
    for key, tensor in got.items():
        place = taken.taps[key].module
        if place in expected:
            assert torch.equal(tensor, expected[place]), key
    last = dict(twin.named_parameters())
    got["logits"].sum().backward()
    expected["logits"].sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for name, parameter in taken.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, last[name].grad)
    statistics = {name: value for name, value in taken.state_dict().items() if "running" in name}
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in statistics.items())


@every_kind
def test_nothing_past_the_last_tap_runs_or_is_kept(subject: str) -> None:
    network = alive(subject)
    calls: Counter[str] = Counter()
    for name, layer in network.named_modules():
        if next(layer.children(), None) is None:
            layer.register_forward_hook(lambda *_, name=name: calls.update([name]))
    places = Places(network, trace(network))
    strides = sorted(places.strides)
    tap = f"stride/{strides[len(strides) // 2]}" if strides else "blocks.0"
    last = next(iter(places.find(tap).values()))
    last = "encoder" if last == PATCHES else last
    order = [name for name in places.trace.outputs if name in dict(network.named_modules())]
    leaves = [name for name in order if next(network.get_submodule(name).children(), None) is None]
    taken = features(network, tap)
    taken(images(network))
    assert set(calls) == {name for name, layer in taken.named_modules() if next(layer.children(), None) is None}
    assert set(calls.values()) == {1}
    inside = tuple(f"{name}." for name in places.trace.closed)  # layers that are no places
    places_called = {name for name in calls if not name.startswith(inside)}
    assert places_called < set(leaves)
    assert all(order.index(name) <= order.index(last) for name in places_called)
    calls.clear()
    network(images(network))
    assert set(calls) >= set(leaves)


def test_stopping_early_saves_the_rest_of_the_work() -> None:
    """ResNet50 up to stride 8 is less than half of its arithmetic; counted, for clocks of a busy machine say nothing."""
    network, x = alive(zoo.ResNet50), torch.randn(1, 3, 128, 128)
    counts = []
    for run in (network, features(network, "stride/8")):
        with torch.no_grad(), FlopCounterMode(display=False) as counted:
            run(x)
        counts.append(counted.get_total_flops())
    assert 0.2 * counts[0] < counts[1] < 0.5 * counts[0]


def test_layers_are_the_networks_own_under_their_own_names() -> None:
    network = alive(ResNet18)
    taken = features(network, "layer2")
    assert taken.layer1[0].conv1 is network.layer1[0].conv1
    assert type(taken.layer1[0]) is type(network.layer1[0])
    state = network.state_dict()
    assert taken.state_dict().keys() == {name for name in state if not name.startswith(("layer3", "layer4", "fc"))}
    assert all(value.data_ptr() == state[name].data_ptr() for name, value in taken.state_dict().items())
    taken.train()
    assert network.layer1[0].bn1.training
    assert not network.layer4[0].bn1.training
    assert set(dict(network.named_children())) == {"conv1", "bn1", "relu", "maxpool", *(f"layer{i}" for i in (1, 2, 3, 4)), "avgpool", "fc"}


def test_keys_are_the_taps_or_the_users() -> None:
    network = alive(ResNet20)
    x = images(network)
    assert list(features(network, ["embedding", "layer1", "layer3.*"])(x)) == ["embedding", "layer1", "layer3.0", "layer3.1", "layer3.2"]
    renamed = features(network, {"low": "stride/1", "vector": "embedding", "same": "layer1"})
    got = renamed(x)
    assert list(got) == ["low", "vector", "same"]
    assert torch.equal(got["low"], got["same"])
    assert renamed.channels == {"low": 16, "vector": 64, "same": 16}
    assert renamed.strides == {"low": 1, "vector": None, "same": 1}
    assert renamed.receptive_fields == {"low": 15, "vector": None, "same": 15}
    assert list(features(network, {"first": "layer1.0*"})(x)) == ["first"]


@pytest.mark.parametrize("subject", ["ResNet20", "MobileNetV1-same", "GoogLeNet-transform-aux"])
def test_copies_and_pickles_compute_the_same(subject: str) -> None:
    network = alive(subject)
    taken = features(network, ["body", "embedding"])
    x = images(network)
    with torch.inference_mode():
        expected = taken(x)
        for other in (copy.deepcopy(taken), pickle.loads(pickle.dumps(taken))):
            assert isinstance(other, Features)
            assert other.taps == taken.taps
            got = other(x)
            assert all(torch.equal(got[key], value) for key, value in expected.items())
            assert {p.data_ptr() for p in other.parameters()}.isdisjoint(p.data_ptr() for p in taken.parameters())


# What a compiler may trip over: shortcuts, shapes in Python, a gate, a function of the zoo's own, a mean that no module computes
@pytest.mark.parametrize("subject", ["ResNet20-B", "MobileNetV1-same", "SqueezeNet1_1"])
def test_compiles_whole_with_gradients(subject: str) -> None:
    network = alive(subject)
    taken = features(network, ["body", "stride/4", "embedding"])
    compiled = torch.compile(taken, fullgraph=True, backend="eager")
    x, y = images(network).requires_grad_(), images(network).requires_grad_()
    got, expected = compiled(x), taken(y)
    assert list(got) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value)
    got["embedding"].sum().backward()
    expected["embedding"].sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch._dynamo.reset()


EXPORTED = ["ResNet20-B", "SqueezeNet1_1"]


@pytest.mark.parametrize(
    "subject",
    [
        *EXPORTED,
        *(pytest.param(name, marks=pytest.mark.long) for name in ("MobileNetV1-same", "MobileNetV3Small", "GoogLeNet-transform-aux")),
    ],
)
def test_exports_for_any_batch(subject: str) -> None:
    network = alive(subject)
    taken = features(network, {"map": "body", "vector": "embedding"})
    program = export(taken, (images(network),), dynamic_shapes={"x": {0: Dim("batch", min=1, max=64)}}).module()
    x = images(network, batch=3)
    with torch.inference_mode():
        got, expected = program(x), taken(x)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value)


def test_features_can_be_fast() -> None:
    network = alive(MobileNetV3Small)
    taken = features(network, ["stride/2", "embedding"])
    x = torch.randn(2, 3, 32, 32)
    quick = fast(taken, "cpu", tune="none", progress=False)
    assert not quick.unchanged
    with torch.inference_mode():
        got, expected = quick(x), taken(x)
    assert list(got) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-3, atol=1e-3)
    assert quick.state_dict().keys() == taken.state_dict().keys()


def test_features_of_a_fast_network_are_fast() -> None:
    model = fast(alive(ResNet20), "cpu", tune="none", progress=False)
    taken = features(model, "embedding")
    assert isinstance(taken, Fast)
    assert (taken.device, taken.dtype, taken.tune) == (model.device, model.dtype, "none")
    assert taken(torch.randn(2, 3, 32, 32))["embedding"].shape == (2, 64)
    assert isinstance(body(model), Fast)


def test_features_know_the_checkpoint_and_its_preprocessing() -> None:
    import numpy as np

    taken = features(trained(ResNet20), "embedding")
    assert taken.checkpoint is not None
    assert not taken.training
    assert taken.preprocess(np.zeros((40, 40, 3), np.uint8)).shape == (1, 3, 32, 32)
    with pytest.raises(ValueError, match=r"the ResNet20 that these layers come from is untrained.*trained\(ResNet20\)"):
        features(ResNet20(), "embedding").preprocess(np.zeros((40, 40, 3), np.uint8))


def test_wrong_images_get_the_networks_own_errors() -> None:
    taken = features(alive(ResNet18), "layer1")
    with pytest.raises(ValueError, match=r"ResNet18 takes \(batch, 3, height, width\), got shape \(3, 64, 64\)"):
        taken(torch.randn(3, 64, 64))
    with pytest.raises(ValueError, match="ResNet18 takes 3 channels"):
        body(alive(ResNet18))(torch.randn(1, 1, 64, 64))


def test_wrong_arguments_say_what_is_taken() -> None:
    network = alive(ResNet20)
    with pytest.raises(TypeError, match=r"features\(\) takes a network of the zoo, such as trained\(ResNet50\), not the class ResNet20"):
        features(ResNet20, "layer1")  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(TypeError, match=r"not 'ResNet20'; trained\('ResNet20'\) builds a network"):
        features("ResNet20", "embedding")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"pyramid\(\) takes a network of the zoo, .*, not a Linear"):
        pyramid(nn.Linear(3, 3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"not a Linear; of a module of your own, module.get_submodule\(NAME\).register_forward_hook"):
        features(nn.Linear(3, 3), "layer1")  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(ValueError, match='at names no taps; "embedding" is one'):
        features(network, [])
    with pytest.raises(TypeError, match="at is taps"):
        features(network, 3)  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(TypeError, match="a tap and its key are strings, not 3"):
        features(network, ["layer1", 3])  # pyright: ignore[reportCallIssue, reportArgumentType]
    with pytest.raises(
        ValueError, match=r"'layer1\.\*' means 3 tensors, layer1\.0, layer1\.1, layer1\.2, …; one key, 'low', can't hold them"
    ):
        features(network, {"low": "layer1.*"})


@every_kind
def test_head_after_body_is_the_network(subject: str) -> None:
    network = alive(subject)
    x = images(network)
    lower, upper = body(network), head(network)
    with torch.inference_mode():
        middle = lower(x)
        assert torch.equal(upper(middle), network(x))
    assert middle.shape[1 if middle.dim() == 4 else 2] == lower.out_channels
    own = {name for name in network.state_dict() if not name.startswith("aux")}
    assert lower.state_dict().keys() | upper.state_dict().keys() == own
    assert lower.state_dict().keys().isdisjoint(upper.state_dict().keys())
    assert {id(p) for p in lower.parameters()} <= {id(p) for p in network.parameters()}


@every_kind
def test_every_large_network_has_a_pyramid(subject: str) -> None:
    network = on_meta(SUBJECTS[subject]).eval()
    if network.input_size <= 32 and network.first_patch is None:
        with pytest.raises(ValueError, match="is for small images and has no pyramid"):
            pyramid(network)
        return
    if subject == "ConvMixer":
        with pytest.raises(ValueError, match=r"^ThinConvMixer has no pyramid of strides 4 to 32; features.* has stride/7"):
            pyramid(network)
        return
    levels = pyramid(network)
    assert isinstance(levels, Features)
    expected = {"C2": 4, "C3": 8, "C4": 16, "C5": 32}
    if "SqueezeNet" in subject:
        del expected["C5"]
    assert levels.strides == expected
    side = network.input_size if network.fixed_size else 224
    got = levels(torch.empty(1, 3, side, side, device="meta"))
    assert {key: tensor.shape[1] for key, tensor in got.items()} == levels.channels
    assert list(got) == list(expected)


def test_networks_for_small_images_have_no_pyramid() -> None:
    with pytest.raises(ValueError, match=r"ResNet20 is for small images and has no pyramid.*has stride/1, stride/2, stride/4"):
        pyramid(on_meta(ResNet20))


class WithFPN(nn.Module):
    """A pyramid under torchvision's feature pyramid network, as its detectors take one."""

    def __init__(self, levels: Features, drop: tuple[str, ...], extra: Any) -> None:
        super().__init__()
        self.levels, self.drop, self.out_channels = levels, drop, 16
        widths = [width for level, width in levels.channels.items() if level not in drop]
        self.fpn = FeaturePyramidNetwork(widths, self.out_channels, extra_blocks=extra)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.fpn({level: found for level, found in self.levels(x).items() if level not in self.drop})


def detected(model: nn.Module, network: Model) -> None:
    targets = [{"boxes": torch.tensor([[4.0, 4.0, 40.0, 50.0]]), "labels": torch.tensor([1])}]
    losses = model.train()([torch.rand(3, 64, 64)], targets)
    sum(losses.values()).backward()
    used = [name for name, parameter in network.named_parameters() if parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)]
    assert network.first_layer + ".weight" in used
    with torch.inference_mode():
        assert set(model.eval()([torch.rand(3, 64, 64)])[0]) == {"boxes", "labels", "scores"}


DETECTING = [partial(zoo.ResNet50), partial(zoo.MobileNetV3Large)]


@pytest.mark.parametrize("make", DETECTING, ids=["ResNet50", "MobileNetV3Large"])
def test_a_pyramid_is_faster_rcnns_backbone(make: Any) -> None:
    network = alive(make)
    backbone = WithFPN(pyramid(network), (), LastLevelMaxPool())
    anchors = AnchorGenerator(((8,), (16,), (32,), (64,), (128,)), ((0.5, 1.0, 2.0),) * 5)
    pool = roi_pool(("C2", "C3", "C4", "C5"))
    detected(FasterRCNN(backbone, 3, min_size=64, max_size=64, rpn_anchor_generator=anchors, box_roi_pool=pool), network)


def roi_pool(levels: tuple[str, ...]) -> nn.Module:
    return MultiScaleRoIAlign(list(levels), output_size=3, sampling_ratio=2)


@pytest.mark.parametrize("make", DETECTING, ids=["ResNet50", "MobileNetV3Large"])
def test_a_pyramid_is_retinanets_backbone(make: Any) -> None:
    network = alive(make)
    detected(RetinaNet(WithFPN(pyramid(network), ("C2",), LastLevelP6P7(16, 16)), 3, min_size=64, max_size=64), network)


@pytest.mark.parametrize(("make", "output_stride"), [(DETECTING[0], 8), (DETECTING[1], 16)], ids=["ResNet50-8", "MobileNetV3Large-16"])
def test_a_dilated_body_is_deeplabs_backbone(make: Any, output_stride: int) -> None:
    network = alive(make)
    backbone = features(network, {"out": "body"}, output_stride=output_stride)
    width = backbone.channels["out"]
    assert width is not None
    model = DeepLabV3(backbone, DeepLabHead(width, 5)).train()
    x = torch.randn(2, 3, 64, 64)
    assert backbone(x)["out"].shape == (2, width, 64 // output_stride, 64 // output_stride)
    out = model(x)["out"]
    assert out.shape == (2, 5, 64, 64)
    out.sum().backward()
    assert network.get_parameter(network.first_layer + ".weight").grad is not None
