"""PoolFormer, its second version, ConvFormer and CAFormer compute what timm's do, at sizes that the strides divide and at others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from parity import assert_equal, assert_same_initialisation
from torch import nn
from torch.nn import functional as F

from zoo import CATALOGUE, Model
from zoo.extraction.features import features, pyramid
from zoo.networks.metaformer import AllPixels, Block, CAFormer, ConvFormer, MetaFormer, PoolFormer, PoolFormerV2, Pooling, StarReLU

NAMES = [name for name, cls in CATALOGUE.items() if issubclass(cls, MetaFormer)]
SHOWN = ("PoolFormer_S12", "PoolFormerV2_S12", "ConvFormer_S18", "CAFormer_S18")


class Thin(PoolFormer, widths=(8, 16, 24, 32), blocks=(1, 1, 2, 1), stochastic_depth=0.0): ...


class ThinV2(PoolFormerV2, widths=(8, 16, 24, 32), blocks=(1, 1, 2, 1), stochastic_depth=0.0): ...


class ThinConv(ConvFormer, widths=(8, 16, 24, 32), blocks=(1, 1, 2, 1), stochastic_depth=0.0): ...


class ThinAttention(CAFormer, widths=(8, 16, 32, 64), blocks=(1, 1, 2, 1), stochastic_depth=0.0): ...


THIN = (Thin, ThinV2, ThinConv, ThinAttention)


def theirs(cls: type[MetaFormer]) -> Callable[..., nn.Module]:
    """Make timm's network of the family of `cls`, as its own variants are made, with the widths and depths of `cls`."""
    from timm.models import metaformer

    first: dict[str, Any] = {"downsample_norm": None, "mlp_act": nn.GELU, "mlp_bias": True}
    first |= {"layer_scale_init_values": 1e-6, "res_scale_init_values": None}
    plain = metaformer.LayerNorm2dNoBias
    options: dict[str, Any] = {
        "PoolFormer": first | {"norm_layers": metaformer.GroupNorm1, "use_mlp_head": False},
        "PoolFormerV2": {"norm_layers": metaformer.GroupNorm1NoBias, "use_mlp_head": False},
        "ConvFormer": {"token_mixers": metaformer.SepConv, "norm_layers": plain},
        "CAFormer": {
            "token_mixers": [metaformer.SepConv] * 2 + [metaformer.Attention] * 2,
            "norm_layers": [plain] * 2 + [metaformer.LayerNormNoBias] * 2,
        },
    }[cls.__mro__[1].__name__]
    return partial(metaformer.MetaFormer, depths=cls.blocks, dims=cls.widths, **options)


@pytest.mark.reference
@pytest.mark.parametrize("size", [64, 75])
@pytest.mark.parametrize("name", [name if name in SHOWN else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_logits_and_gradients_equal_timms(name: str, size: int) -> None:
    import timm

    rate = 0.3
    ours = partial(CATALOGUE[name], stochastic_depth=rate, dropout=0.0)
    assert_equal(ours, partial(timm.create_model, name.lower(), drop_path_rate=rate), size)


@pytest.mark.reference
@pytest.mark.parametrize("size", [3, 32, 50])
@pytest.mark.parametrize("cls", THIN)
def test_narrow_ones_equal_timms_from_the_smallest_image_on(cls: type[MetaFormer], size: int) -> None:
    assert_equal(cls, theirs(cls), size)


@pytest.mark.reference
@pytest.mark.parametrize("name", NAMES)
def test_tensors_norms_and_what_they_add_to_variances_are_timms(name: str) -> None:
    import timm

    with torch.device("meta"):
        made, ours = timm.create_model(name.lower()), CATALOGUE[name]()
    assert [*ours.state_dict()] == [*made.state_dict()]
    assert norms(ours) == norms(made)


def norms(network: nn.Module) -> list[tuple[str, float, bool]]:
    kinds = nn.LayerNorm | nn.GroupNorm
    return [(name, layer.eps, layer.bias is None) for name, layer in network.named_modules() if isinstance(layer, kinds)]


@pytest.mark.reference
def test_all_of_timms_are_there() -> None:
    import timm

    assert sorted(name.lower() for name in NAMES) == sorted(timm.list_models(module="metaformer"))


@pytest.mark.reference
@pytest.mark.parametrize("cls", THIN)
def test_fresh_parameters_are_distributed_as_timms(cls: type[MetaFormer]) -> None:
    assert_same_initialisation(cls(), theirs(cls)())


@pytest.mark.reference
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("PoolFormer_")])
def test_layer_scales_begin_as_timms(name: str) -> None:
    import timm

    start = {"PoolFormer_S12": 1e-5, "PoolFormer_S24": 1e-5}.get(name, 1e-6)
    cls: Any = CATALOGUE[name]
    assert cls.layer_scale == start
    if name in SHOWN:
        assert (cls().stages[3].blocks[1].layer_scale2.scale == start).all()
        made: Any = timm.create_model(name.lower())
        assert (made.stages[3].blocks[1].layer_scale2.scale == start).all()


def test_branches_are_dropped_ever_more_often_and_as_often_as_the_authors_trained() -> None:
    def rates(network: Model) -> list[float]:
        blocks = [block for block in network.modules() if isinstance(block, Block)]
        assert all(block.drop_path1.p == block.drop_path2.p for block in blocks)
        return [block.drop_path1.p for block in blocks]

    assert rates(Thin(stochastic_depth=0.4)) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    with torch.device("meta"):
        found = {name: round(rates(CATALOGUE[name]())[-1], 6) for name in NAMES}
    pools = dict(zip(("S12", "S24", "S36", "M36", "M48"), (0.1, 0.1, 0.2, 0.3, 0.4), strict=True))
    others = dict(zip(("S36", "M36", "B36"), (0.3, 0.4, 0.6), strict=True))
    expected = {f"PoolFormer{version}_{size}": rate for version in ("", "V2") for size, rate in pools.items()}
    expected |= {f"{kind}_{size}": rate for kind in ("ConvFormer", "CAFormer") for size, rate in others.items()}
    assert found == expected | {"ConvFormer_S18": 0.2, "CAFormer_S18": 0.15}
    with pytest.raises(ValueError, match="probability 0 <= p < 1, got 1"):
        Thin(stochastic_depth=1.0)


@pytest.mark.parametrize("cls", THIN)
def test_the_dropout_is_before_the_last_layer_and_is_what_was_said(cls: type[MetaFormer]) -> None:
    def dropouts(network: nn.Module) -> list[float]:
        return [layer.p for layer in network.modules() if isinstance(layer, nn.Dropout)]

    assert dropouts(cls(dropout=0.3)) == [0.3]
    assert dropouts(cls()) == [0.0]
    with torch.device("meta"):
        assert dropouts(CATALOGUE["CAFormer_B36"]()) == [0.5]
    network = cls(dropout=1.0)
    assert torch.equal(network(torch.randn(2, 3, 32, 32)), network.get_submodule(cls.classifiers[0]).get_parameter("bias").expand(2, -1))


def test_a_pixel_alone_pools_to_nothing_and_the_border_is_not_counted() -> None:
    assert torch.equal(Pooling(2)(torch.randn(1, 2, 1, 1)), torch.zeros(1, 2, 1, 1))
    corner = Pooling(1)(torch.arange(9.0).view(1, 1, 3, 3))[0, 0, 0, 0]
    assert corner == (0 + 1 + 3 + 4) / 4


def test_star_relu_is_a_scaled_and_shifted_square() -> None:
    layer = StarReLU()
    nn.init.constant_(layer.scale, 0.5)
    nn.init.constant_(layer.bias, -1.0)
    assert layer(torch.tensor([-3.0, 0.0, 2.0])).tolist() == [-1.0, -1.0, 1.0]


def test_attention_is_that_of_its_formula_and_gives_a_map_for_a_map() -> None:
    x = torch.randn(2, 3, 5, 3 * 64, dtype=torch.float64)
    got = AllPixels()(x)
    assert got.shape == (2, 3, 5, 64)
    query, key, value = x.flatten(1, 2).chunk(3, -1)
    for head in (slice(0, 32), slice(32, 64)):
        weights = F.softmax(query[..., head] @ key[..., head].transpose(1, 2) / 32**0.5, -1)
        torch.testing.assert_close(got.flatten(1, 2)[..., head], weights @ value[..., head])


@pytest.mark.parametrize("cls", THIN)
def test_a_pyramid_has_the_four_stages(cls: type[MetaFormer]) -> None:
    network = cls().eval()
    taken = pyramid(network)
    found = taken(torch.randn(2, 3, 64, 96))
    assert [tuple(x.shape) for x in found.values()] == [(2, width, 16 >> n, 24 >> n) for n, width in enumerate(cls.widths)]
    assert list(taken.strides.values()) == [4, 8, 16, 32]
    assert [tap.module for tap in taken.taps.values()] == ["stages.0", "stages.1", "stages.2", "stages"]


@pytest.mark.parametrize("cls", THIN)
def test_what_is_dilated_gives_a_map_of_the_stride_that_was_asked_for(cls: type[MetaFormer]) -> None:
    taken = pyramid(cls().eval(), output_stride=8)
    assert list(taken.strides.values())[-1] == 8
    with pytest.raises(ValueError, match=r"output_stride=64 is more than there is: the last map of .* has stride 32 already"):
        features(cls(), "body", output_stride=64)


def test_an_image_that_vanishes_in_the_stem_is_an_error() -> None:
    with pytest.raises(ValueError, match="Thin needs images of at least 3x3 pixels, got 2x9"):
        Thin()(torch.zeros(1, 3, 2, 9))
