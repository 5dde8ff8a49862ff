"""MLP-Mixer, ResMLP and gMLP compute what timm's do, and take images of one size."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from parity import assert_equal, assert_same_initialisation
from torch import nn

from zoo import CATALOGUE, GMLP_Ti16_224, Mixer_S32_224, Model, ResMLP_12_224
from zoo.networks.mlp_mixer import GMLP, Affine, GMLPBlock, MLPMixer, ResMLP, SpatialGate

NAMES = [name for name, cls in CATALOGUE.items() if issubclass(cls, MLPMixer)]
SHOWN = ("Mixer_S32_224", "ResMLP_12_224", "GMLP_Ti16_224")
"""The smallest of each paper; the others are deeper, wider, or of smaller patches."""


class Small(MLPMixer, depth=2, width=16, patch_size=8, input_size=32): ...


class SmallResMLP(ResMLP, depth=2, width=16, patch_size=8, input_size=32): ...


class SmallGMLP(GMLP, depth=2, width=16, patch_size=8, input_size=32): ...


@pytest.mark.reference
@pytest.mark.parametrize("name", [name if name in SHOWN else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_logits_and_gradients_equal_timms(name: str) -> None:
    import timm

    assert_equal(CATALOGUE[name], partial(timm.create_model, name.lower()), 224)


@pytest.mark.reference
def test_all_of_timms_are_there_but_its_own_experiments() -> None:
    import timm

    names = sorted(timm.list_models(module="mlp_mixer"))
    assert sorted(name.lower() for name in NAMES) == [name for name in names if not name.startswith("gmixer")]


@pytest.mark.reference
@pytest.mark.parametrize("cls", [Mixer_S32_224, ResMLP_12_224, GMLP_Ti16_224])
def test_fresh_parameters_are_distributed_as_timms(cls: type[Model]) -> None:
    import timm

    assert_same_initialisation(cls(), timm.create_model(cls.__name__.lower()))


@pytest.mark.parametrize("cls", [Small, SmallResMLP, SmallGMLP])
def test_the_body_gives_normalised_tokens_and_the_head_means_them(cls: type[Model]) -> None:
    network = cls(num_classes=3, in_channels=2).eval()
    nn.init.normal_(network.head.weight)
    tokens = network.forward_body(torch.randn(2, 2, 32, 32))
    assert tokens.shape == (2, 16, 16)
    assert torch.equal(network.forward_head(tokens), network.head(tokens.mean(1)))


@pytest.mark.parametrize("size", [(224, 256), (192, 192), (448, 448)])
def test_another_size_is_an_error_that_names_the_one_there_is(size: tuple[int, int]) -> None:
    with torch.device("meta"):
        network = Mixer_S32_224()
    with pytest.raises(ValueError, match=r"Mixer_S32_224 takes images of 224x224 pixels alone, got \d+x\d+; resize them"):
        network(torch.empty(1, 3, *size, device="meta"))


def test_an_affine_scales_and_shifts_each_channel() -> None:
    layer = Affine(3)
    x = torch.randn(2, 5, 3)
    assert torch.equal(layer(x), x)
    with torch.no_grad():
        layer.alpha.copy_(torch.tensor([2.0, 3.0, 4.0]).view(1, 1, 3))
        layer.beta.fill_(1)
    assert torch.allclose(layer(x), x * torch.tensor([2.0, 3.0, 4.0]) + 1)


def test_a_gate_lets_everything_through_at_first() -> None:
    gate = SmallGMLP().get_submodule("blocks.0.mlp_channels.gate")
    assert isinstance(gate, SpatialGate)
    x = torch.randn(2, 16, 96)
    assert torch.allclose(gate(x), x[..., :48], atol=1e-3)


def test_a_gate_multiplies_by_the_normalised_other_half_mixed_over_places() -> None:
    gate = SpatialGate(8, 3)
    u, v = torch.randn(1, 3, 8).chunk(2, -1)
    normalised = (v - v.mean(-1, keepdim=True)) / (v.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    mixed = torch.einsum("pq,bqc->bpc", gate.proj.weight, normalised) + gate.proj.bias[:, None]
    assert torch.allclose(gate(torch.cat([u, v], -1)), u * mixed, atol=1e-6)


def test_deeper_resmlps_start_with_smaller_layer_scales() -> None:
    starts = {name: cls.layer_scale for name, cls in CATALOGUE.items() if issubclass(cls, ResMLP)}
    assert starts == {"ResMLP_12_224": 1e-4, "ResMLP_24_224": 1e-5, "ResMLP_36_224": 1e-6, "ResMLP_Big_24_224": 1e-6}
    assert torch.equal(SmallResMLP().get_parameter("blocks.1.ls2"), torch.full((16,), 1e-6))


def test_epsilons_are_the_references() -> None:
    norms = {name: layer.eps for name, layer in SmallGMLP().named_modules() if isinstance(layer, nn.LayerNorm)}
    assert {eps for name, eps in norms.items() if "gate" in name} == {1e-5}
    assert {eps for name, eps in norms.items() if "gate" not in name} == {1e-6}
    assert isinstance(SmallGMLP().get_submodule("blocks.0"), GMLPBlock)
