"""ResNet and its relatives compute what torchvision's and timm's do; v1's strides and the CIFAR networks what their papers say."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import timm
import torch
from parity import assert_equal, assert_same_initialisation
from timm.layers import SEModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models

from zoo import CATALOGUE, ResNet18, ResNet20, ResNet50, ResNet56, ResNet110
from zoo.networks.layers import PaddedShortcut

TORCHVISION = {
    **{f"ResNet{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
    **{name: name.lower() for name in ("ResNeXt50_32x4d", "ResNeXt101_32x8d", "ResNeXt101_64x4d")},
    **{f"WideResNet{depth}_2": f"wide_resnet{depth}_2" for depth in (50, 101)},
}


LARGE = ("ResNet101", "ResNet152", "ResNeXt101_32x8d", "ResNeXt101_64x4d", "WideResNet101_2")
"""More of the blocks that others have too."""


@pytest.mark.reference
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if name in LARGE else name for name in TORCHVISION])
def test_logits_and_gradients_equal_torchvisions(name: str) -> None:
    assert_equal(CATALOGUE[name], getattr(models, TORCHVISION[name]), size=64)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("name", "make_theirs"),
    [
        # timm rounds the gate's width up to a multiple of 8; the paper's reduction of 16 leaves 4 of 64 channels
        ("SEResNet18", partial(timm.create_model, "seresnet18", block_args={"attn_layer": partial(SEModule, rd_divisor=1)})),
        ("SEResNet50", partial(timm.create_model, "seresnet50")),
        pytest.param("SEResNet101", partial(timm.create_model, "seresnet101"), marks=pytest.mark.long),
        pytest.param("SEResNet152", partial(timm.create_model, "seresnet152"), marks=pytest.mark.long),
        ("SEResNeXt50_32x4d", partial(timm.create_model, "seresnext50_32x4d")),
    ],
)
def test_gated_logits_and_gradients_equal_timms(name: str, make_theirs: Any) -> None:
    assert_equal(CATALOGUE[name], make_theirs, size=64)


def options(arch: str) -> dict[str, Any]:
    """The keywords with which ours compute what the first port of SENet does: Caffe's pool, and its stride in ResNet's bottlenecks."""
    bottlenecks = {"stride_on": "1x1"} if arch in ("legacy_seresnet50", "legacy_seresnet101", "legacy_seresnet152") else {}
    return {"ceil_mode": True, **bottlenecks} if arch.startswith("legacy_") else {}


TIMM = {
    **{name.lower(): name for name in CATALOGUE if re.fullmatch(r"(ECA)?ResNet\d+[CDST]|ResNetRS\d+|ResNetAA\d+D?", name)},
    **{name.lower(): name for name in CATALOGUE if re.fullmatch(r"(SE)?ResNeXt(50D|101D?|26D|26T|AA101D|AA201D)_(32|64)x\d+d", name)},
    **{name.lower(): name for name in ("ECAResNetLight", "ResNet26", "SEResNet152D", "SENet154", "Legacy_SEResNet18", "Legacy_SEResNet34")},
    **{f"legacy_seresnet{depth}": f"SEResNet{depth}" for depth in (50, 101, 152)},
    **{f"legacy_seresnext{depth}_32x4d": f"SEResNeXt{depth}_32x4d" for depth in (26, 50, 101)},
    "legacy_senet154": "SENet154",
}
SHOWN = ("resnet10t", "resnet18d", "resnet26d", "ecaresnet26t", "resnetrs50", "resnetaa50d", "legacy_seresnet18", "seresnext26d_32x4d")
"""One of each stem, shortcut, gate and pool."""


@pytest.mark.reference
@pytest.mark.parametrize("size", [64, 97])
@pytest.mark.parametrize("arch", [arch if arch in SHOWN else pytest.param(arch, marks=pytest.mark.long) for arch in sorted(TIMM)])
def test_relatives_compute_what_timms_do(arch: str, size: int) -> None:
    cls = CATALOGUE[TIMM[arch]]
    if size % cls.size_multiple:
        size = 96
    legacy = arch.startswith("legacy_")
    assert_equal(partial(cls, **options(arch)), partial(timm.create_model, arch, drop_rate=0.0), size, by_order=legacy)


def test_a_pool_that_drops_pixels_asks_for_sides_that_divide() -> None:
    with pytest.raises(ValueError, match="multiples of 32 pixels, got 65x64"):
        CATALOGUE["ResNetAA50D"]()(torch.zeros(1, 3, 65, 64))


@pytest.mark.parametrize("name", ["ResNet18", "ResNet18D"])
def test_the_first_layer_is_the_stems(name: str) -> None:
    network = CATALOGUE[name](in_channels=5)
    layer = network.get_submodule(network.first_layer)
    assert isinstance(layer, nn.Conv2d)
    assert layer.in_channels == 5


@pytest.mark.reference
def test_a_fresh_gate_of_channels_is_distributed_as_timms() -> None:
    assert_same_initialisation(CATALOGUE["ECAResNet26T"](), timm.create_model("ecaresnet26t", zero_init_last=False))


@pytest.mark.reference
@pytest.mark.parametrize(("ours", "theirs"), [(ResNet18, models.resnet18), (ResNet50, models.resnet50)], ids=["18", "50"])
def test_fresh_parameters_are_distributed_as_torchvisions(ours: Any, theirs: Any) -> None:
    assert_same_initialisation(ours(), theirs())


def caffes_resnet50() -> nn.Module:
    network = models.resnet50()
    for stage in (network.layer2, network.layer3, network.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    return network


@pytest.mark.reference
def test_stride_on_the_first_1x1_is_the_papers_network() -> None:
    assert_equal(partial(ResNet50, stride_on="1x1"), caffes_resnet50, size=64)


def test_stride_on_changes_numbers_and_nothing_else() -> None:
    ours, other = ResNet50(), ResNet50(stride_on="1x1")
    assert {n: t.shape for n, t in ours.state_dict().items()} == {n: t.shape for n, t in other.state_dict().items()}
    other.load_state_dict(ours.state_dict())
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        maps = [network.eval().forward_body(images) for network in (ours, other)]
    assert maps[0].shape == maps[1].shape
    assert (maps[0] - maps[1]).norm() > 0.1 * maps[0].norm()


def test_stride_on_says_what_it_may_be() -> None:
    with pytest.raises(ValueError, match=r"stride_on is \"3x3\" .* got '2x2'"):
        ResNet50(stride_on="2x2")
    with pytest.raises(ValueError, match="ResNet18 has no bottlenecks"):
        ResNet18(stride_on="1x1")


def test_option_a_takes_every_second_pixel_and_pads_zero_channels_on_both_sides() -> None:
    images = torch.arange(2 * 2 * 5 * 5.0).view(2, 2, 5, 5) + 1
    shortcut = PaddedShortcut(2, 5)(images)
    assert shortcut.shape == (2, 5, 3, 3)
    assert not shortcut[:, [0, 3, 4]].any()
    assert torch.equal(shortcut[:, 1:3], images[:, :, ::2, ::2])


def straight_forward(state: dict[str, Tensor], x: Tensor, n: int) -> Tensor:
    """Compute He et al.'s section 4.2 by functions alone, in eval mode; a shortcut with tensors is option B."""

    def convolve(x: Tensor, conv: str, bn: str, stride: int = 1) -> Tensor:
        weight = state[f"{conv}.weight"]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        return F.batch_norm(x, *(state[f"{bn}.{name}"] for name in ("running_mean", "running_var", "weight", "bias")))

    x = convolve(x, "conv1", "bn1").relu()
    for stage in (1, 2, 3):
        for index in range(n):
            block, stride = f"layer{stage}.{index}", 2 if stage > 1 and index == 0 else 1
            y = convolve(x, f"{block}.conv1", f"{block}.bn1", stride).relu()
            y = convolve(y, f"{block}.conv2", f"{block}.bn2")
            if f"{block}.downsample.0.weight" in state:
                x = convolve(x, f"{block}.downsample.0", f"{block}.downsample.1", stride)
            elif stride == 2:
                zeros = torch.zeros_like(y[:, : x.shape[1] // 2])
                x = torch.cat([zeros, x[:, :, ::2, ::2], zeros], 1)
            x = (x + y).relu()
    return F.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"])


@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_cifar_logits_equal_the_papers_arithmetic(shortcut: Any) -> None:
    torch.manual_seed(0)
    network = ResNet20(shortcut=shortcut)
    images = torch.randn(4, 3, 32, 32)
    network(images)  # moves the running statistics away from 0 and 1
    with torch.inference_mode():
        torch.testing.assert_close(network.eval()(images), straight_forward(network.state_dict(), images, n=3))


def test_option_b_has_a_projection_where_channels_double_and_option_a_no_parameters() -> None:
    projections = [name for name in ResNet20(shortcut="B").state_dict() if name.endswith("downsample.0.weight")]
    assert projections == ["layer2.0.downsample.0.weight", "layer3.0.downsample.0.weight"]
    assert not [name for name in ResNet20().state_dict() if "downsample" in name]
    with pytest.raises(ValueError, match=r"shortcut is \"A\" .* got 'C'"):
        ResNet20(shortcut="C")


@pytest.mark.parametrize(("cls", "depth"), [(ResNet20, 20), (ResNet56, 56), (ResNet110, 110)])
def test_cifar_depth_is_6n_plus_2(cls: Any, depth: int) -> None:
    with torch.device("meta"):
        network = cls()
    assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in network.modules()) == depth
