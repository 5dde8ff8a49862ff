"""ConvNeXt computes what torchvision's and timm's do, and its parts what the papers' formulas say."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from parity import assert_equal, assert_same_initialisation
from torch import nn
from torchvision import models

from convert import core, names
from zoo import CATALOGUE, ConvNeXt_Atto, Model
from zoo.networks.convnext import Block, ConvNeXt, ConvNeXtV2, ResponseNorm

TORCHVISIONS = ("ConvNeXt_Tiny", "ConvNeXt_Small", "ConvNeXt_Base", "ConvNeXt_Large")
TIMMS = [name for name in CATALOGUE if name.startswith("ConvNeXt") and name not in TORCHVISIONS]
SHOWN = ("ConvNeXt_Tiny", "ConvNeXt_Atto", "ConvNeXtV2_Atto")
HUGE = ("ConvNeXtV2_Huge", "ConvNeXt_XXLarge")
"""Their tensors are too large for most machines' memory, three times over; narrower siblings compute the same."""


class Narrow(ConvNeXt, widths=(8, 16, 24, 32), blocks=(1, 1, 2, 1)): ...


class NarrowV2(ConvNeXtV2, widths=(8, 16, 24, 32), blocks=(1, 1, 2, 1)): ...


def some_long(names: list[str] | tuple[str, ...]) -> list[object]:
    return [name if name in SHOWN else pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.reference
@pytest.mark.parametrize("size", [32, 75])
@pytest.mark.parametrize("name", some_long(TORCHVISIONS))
def test_logits_and_gradients_equal_torchvisions(name: str, size: int) -> None:
    assert_equal(CATALOGUE[name], getattr(models, name.lower()), size)


@pytest.mark.reference
@pytest.mark.parametrize("size", [32, 75])
@pytest.mark.parametrize("name", some_long([name for name in TIMMS if name not in HUGE]))
def test_logits_and_gradients_equal_timms(name: str, size: int) -> None:
    import timm

    rate = 0.3
    theirs = partial(timm.create_model, name.lower(), drop_path_rate=rate)
    assert_equal(partial(CATALOGUE[name], stochastic_depth=rate), theirs, size, by_order=True)


class Overlapping(Narrow, widths=(12, 16, 24, 32), stem_width=8): ...


class NormFirst(Narrow, norm_first=True): ...


class Hidden(Narrow, head_width=20, norm_eps=1e-2): ...


@pytest.mark.reference
@pytest.mark.parametrize(
    ("ours", "options"),
    [
        (Overlapping, {"stem_type": "overlap_tiered"}),
        (NormFirst, {"head_norm_first": True}),
        (Hidden, {"head_hidden_size": 20, "norm_eps": 1e-2}),
    ],
)
def test_other_stems_and_heads_equal_timms(ours: type[ConvNeXt], options: dict[str, Any]) -> None:
    from timm.models.convnext import ConvNeXt as Theirs

    assert_equal(ours, partial(Theirs, dims=ours.widths, depths=Narrow.blocks, **options), 75, by_order=True)


@pytest.mark.reference
@pytest.mark.parametrize("name", TIMMS)
def test_tensors_and_what_norms_add_to_variances_are_timms(name: str) -> None:
    import timm

    with torch.device("meta"):
        theirs, ours = timm.create_model(name.lower()), CATALOGUE[name]()
    shapes = {key: tuple(tensor.shape) for key, tensor in ours.state_dict().items()}
    _, report = core.apply(names.rows("timm", type(ours), shapes), theirs.state_dict(), shapes)
    assert report.ok, report
    assert eps(ours) == eps(theirs)


def eps(network: nn.Module) -> list[float]:
    return [layer.eps for layer in network.modules() if isinstance(layer, nn.LayerNorm)]


@pytest.mark.reference
def test_all_of_torchvisions_are_there() -> None:
    assert sorted(name.lower() for name in TORCHVISIONS) == [name for name in models.list_models(module=models) if "convnext" in name]


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_torchvisions() -> None:
    theirs = models.convnext.ConvNeXt(
        [models.convnext.CNBlockConfig(a, b, n) for a, b, n in zip((8, 16, 24, 32), (16, 24, 32, None), (1, 1, 2, 1), strict=True)]
    )
    assert_same_initialisation(Narrow(), theirs)


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_timms() -> None:
    from timm.models.convnext import ConvNeXt as Theirs

    theirs = Theirs(dims=(8, 16, 24, 32), depths=(1, 1, 2, 1), use_grn=True, ls_init_value=None, conv_mlp=True)
    carried = NarrowV2()
    carried.load_state_dict(names.to_ours(theirs.state_dict(), carried.state_dict(), naming="timm", family=NarrowV2))
    assert_same_initialisation(NarrowV2(), carried)


def test_a_response_is_a_channels_norm_in_units_of_the_mean_of_all() -> None:
    """Algorithm 1 of the paper, channel by channel."""
    layer = ResponseNorm(5).double()
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for image, normalised in zip(x, layer(x), strict=True):
        norms = [image[:, :, c].square().sum().sqrt() for c in range(5)]
        for c in range(5):
            expected = layer.weight[c] * image[:, :, c] * norms[c] / (sum(norms) / 5 + 1e-6) + layer.bias[c] + image[:, :, c]
            torch.testing.assert_close(normalised[:, :, c], expected)


def test_fresh_responses_are_not_normalised_and_zeros_have_gradients() -> None:
    layer, x = ResponseNorm(4), torch.randn(2, 3, 3, 4)
    assert torch.equal(layer(x), x)
    nn.init.ones_(layer.weight)
    zeros = torch.zeros(1, 2, 2, 4, requires_grad=True)
    layer(zeros).sum().backward()
    assert zeros.grad is not None
    assert zeros.grad.isfinite().all()


def test_branches_are_dropped_ever_more_often_and_as_often_as_was_said() -> None:
    def rates(network: Model) -> list[float]:
        return [block.stochastic_depth.p for block in network.features.modules() if isinstance(block, Block)]

    assert rates(Narrow(stochastic_depth=0.4)) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert set(rates(Narrow())) == {0}
    with torch.device("meta"):
        assert {name: rates(CATALOGUE[name]())[-1] for name in TORCHVISIONS} == dict(zip(TORCHVISIONS, (0.1, 0.4, 0.5, 0.5), strict=True))
    with pytest.raises(ValueError, match="probability 0 <= p < 1, got 1"):
        Narrow(stochastic_depth=1.0)


def test_an_image_that_vanishes_in_the_strides_is_an_error() -> None:
    with pytest.raises(ValueError, match="ConvNeXt_Atto needs images of at least 32x32 pixels, got 31x40"):
        ConvNeXt_Atto()(torch.zeros(1, 3, 31, 40))
