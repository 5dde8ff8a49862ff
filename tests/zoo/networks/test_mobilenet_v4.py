"""MobileNetV4 computes what timm's does, under the same names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import timm
import torch
from parity import assert_equal, assert_same_initialisation
from torch import nn

from zoo import CATALOGUE, MobileNetV4_Conv_Small_035, MobileNetV4_Hybrid_Medium
from zoo.networks.layers import StochasticDepth

NAMES = [name for name in CATALOGUE if name.startswith("MobileNetV4")]
SHOWN = ("MobileNetV4_Conv_Small_035", "MobileNetV4_Hybrid_Medium")
"""The least, and one that has attention, with strides and without."""
COMPARED = [(SHOWN[0], 64), (SHOWN[0], 97), (SHOWN[1], 64)]


@pytest.fixture
def double() -> Iterator[None]:
    """A bias of all keys changes no attention: in float32 its gradient is another rounding error in every network."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.reference
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("name", "size"),
    [pytest.param(name, size, marks=() if (name, size) in COMPARED else pytest.mark.long) for name in NAMES for size in (64, 97)],
)
def test_logits_and_gradients_equal_timms(name: str, size: int) -> None:
    def theirs() -> nn.Module:
        return timm.create_model(name.lower())

    with torch.device("meta"):
        shapes, expected = ({key: t.shape for key, t in make().state_dict().items()} for make in (CATALOGUE[name], theirs))
    assert list(shapes.items()) == list(expected.items())
    # Of two images the BatchNorm behind the pool makes +1 and -1, and every gradient before it vanishes
    assert_equal(CATALOGUE[name], theirs, size, batch=5, by_order=True)


@pytest.mark.reference
def test_branches_are_dropped_as_timm_drops_them() -> None:
    assert_equal(
        lambda: MobileNetV4_Conv_Small_035(stochastic_depth=0.5),
        lambda: timm.create_model("mobilenetv4_conv_small_035", drop_path_rate=0.5),
        64,
        batch=5,
    )


@pytest.mark.reference
@pytest.mark.parametrize("name", SHOWN)
def test_fresh_parameters_are_distributed_as_timms(name: str) -> None:
    assert_same_initialisation(CATALOGUE[name](), timm.create_model(name.lower()))


def test_a_narrow_network_keeps_the_width_of_its_ends() -> None:
    with torch.device("meta"):
        network = CATALOGUE["MobileNetV4_Conv_Small_035"]()
    assert network.conv_stem.out_channels == 32
    assert network.classifier.in_features == 1280
    pointwise = [layer for name, layer in network.named_modules() if name.endswith(("1.conv", "pw_proj.conv", "4.0.conv"))]
    assert [layer.out_channels for layer in pointwise] == [16, 24, *[32] * 6, *[48] * 6, 336]


def test_stochastic_depth_grows_linearly_over_all_blocks() -> None:
    with torch.device("meta"):
        network = MobileNetV4_Hybrid_Medium(stochastic_depth=0.1)
    last = [layer.p for layer in network.modules() if isinstance(layer, StochasticDepth)][-1]
    assert last == pytest.approx(0.1 * 30 / 32)
    with pytest.raises(ValueError, match="0 <= p < 1"):
        MobileNetV4_Conv_Small_035(stochastic_depth=20.0)
