"""Vision transformers compute what torchvision's and timm's do, at their own size of images and at others."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from parity import TOLERANCE, assert_equal, assert_same_initialisation, randomised, relative, step
from torch import nn
from torchvision import models
from written import written

from convert import core, names
from recipes import registry_rows
from weights import WeightsMismatch
from zoo import CATALOGUE, DeiT_Ti_16_Distilled, SigLIP_B_16, UNet, ViT_B_16, fast, features, pyramid, trained
from zoo.networks.vit import CLIP, DINOv2, SigLIP, ViT

TORCHVISIONS = ["ViT_B_16", "ViT_B_32", "ViT_L_16", "ViT_L_32", "ViT_H_14"]
NAMES = [name for name, cls in CATALOGUE.items() if issubclass(cls, ViT)]
LARGE = 400_000_000
"""Parameters above which a network is compared with three of its blocks: whole it would take more than 6 GB."""
SHOWN = ("ViT_Ti_16", "DeiT_Ti_16_Distilled", "DINOv2_S_14_Reg4", "CLIP_ViT_B_32_QuickGELU", "SigLIP_B_16")
"""The smallest of each arithmetic; the others are deeper, wider, or have other patches."""


class Thin(ViT, patch=8, depth=2, attention_heads=2, width=16, mlp_width=32, input_size=32): ...


class ThinCLIP(CLIP, patch=8, depth=2, attention_heads=2, width=16, mlp_width=32, input_size=32, activation="quick_gelu"): ...


class ThinSigLIP(SigLIP, patch=8, depth=2, attention_heads=2, width=16, mlp_width=32, input_size=32): ...


class ThinGiant(DINOv2, patch=8, depth=2, attention_heads=2, width=16, mlp_width=32, input_size=32, activation="swiglu", registers=2): ...


def theirs(name: str) -> tuple[str, dict[str, Any]]:
    """timm's name of one of ours, and the options that make ours that."""
    return next(iter(registry_rows.archs(CATALOGUE[name]).items()))


def compared(name: str, side: int, **options: Any) -> None:
    """Give timm's network our random tensors, under its names, and compare logits and gradients in eval and in train mode."""
    import timm

    cls, (arch, own) = CATALOGUE[name], theirs(name)
    options = {**own, **options}
    theirs_options = {"drop_rate": 0.0, "drop_path_rate": options.get("stochastic_depth", 0.0)}
    if cls.params > LARGE:  # their blocks are all alike, and names and shapes of the whole are compared below
        cls = cast("type[ViT]", types.new_class("Shorter", (cls,), {"depth": 3}))
        theirs_options["depth"] = 3
    with torch.device("meta"):
        ours = cls(image_size=side, **options)
        other = timm.create_model(arch, img_size=side, num_classes=1000, **theirs_options)
    state = randomised(ours)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    rows = names.rows("timm", cls, shapes)
    there = {name: torch.from_numpy(stored.array()) for name, stored in written(rows, state).items()}
    assert {name: tensor.shape for name, tensor in there.items()} == {name: tensor.shape for name, tensor in other.state_dict().items()}
    back, report = core.apply(rows, there, shapes)
    assert report.ok, report
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.items())
    assert back.keys() == state.keys()
    ours.load_state_dict(state, assign=True)
    other.load_state_dict({name: tensor.clone() for name, tensor in there.items()}, assign=True)
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected, logits = other.eval()(images), ours.eval()(images)
    assert (expected[0] - expected[1]).norm() > 1e-3 * expected.norm()  # the logits depend on the image
    assert relative(logits, expected) < TOLERANCE
    (output, *_), image_gradient, gradients = step(ours, images)
    (their_output, *_), their_image_gradient, their_gradients = step(other, images)
    assert relative(output, their_output) < TOLERANCE
    assert relative(image_gradient, their_image_gradient) < TOLERANCE
    carried, report = core.apply(rows, their_gradients, shapes)
    assert report.ok, report
    worst = {name: relative(gradient, carried[name]) for name, gradient in gradients.items()}
    assert max(worst.values()) < TOLERANCE, {name: error for name, error in worst.items() if error >= TOLERANCE}


@pytest.mark.reference
@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("name", [name if name == "ViT_B_32" else pytest.param(name, marks=pytest.mark.long) for name in TORCHVISIONS])
def test_logits_and_gradients_equal_torchvisions(name: str, size: int) -> None:
    size = size // 32 * CATALOGUE[name].size_multiple
    assert_equal(lambda: CATALOGUE[name](image_size=size), lambda: getattr(models, name.lower())(image_size=size), size)


@pytest.mark.reference
def test_all_of_torchvisions_are_there() -> None:
    assert sorted(map(str.lower, TORCHVISIONS)) == [name for name in models.list_models(module=models) if name.startswith("vit")]


@pytest.mark.reference
@pytest.mark.parametrize("patches", [2, 3])
@pytest.mark.parametrize("name", [name if name in SHOWN else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_logits_and_gradients_equal_timms(name: str, patches: int) -> None:
    compared(name, patches * CATALOGUE[name].size_multiple, stochastic_depth=0.3)


@pytest.mark.reference
@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_of_whole_networks_are_timms(name: str) -> None:
    import timm

    cls, (arch, options) = CATALOGUE[name], theirs(name)
    with torch.device("meta"):
        other = timm.create_model(arch, num_classes=1000).state_dict()
        ours = {name: tuple(tensor.shape) for name, tensor in cls(**options).state_dict().items()}
    _, report = core.apply(names.rows("timm", cls, ours), other, ours)
    assert report.ok, report
    assert options or sum(tensor.numel() for tensor in other.values()) == cls.params


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_torchvisions() -> None:
    assert_same_initialisation(ViT_B_16(), models.vit_b_16())


def test_another_size_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="takes images of 32x32 pixels alone, got 40x40; resize them, or build it with image_size=…"):
        Thin()(torch.zeros(1, 3, 40, 40))
    with pytest.raises(ValueError, match="Thin's image_size is a multiple of its patch of 8 pixels, got 36; nearest: 32 or 40"):
        Thin(image_size=36)
    assert Thin(image_size=40).eval()(torch.zeros(1, 3, 40, 40)).shape == (1, 1000)
    assert Thin.input_size == 32


@pytest.mark.parametrize("side", [24, 48])
def test_position_embeddings_are_resized_where_it_is_asked_for_alone(side: int, tmp_path: Path) -> None:
    timm_layers = pytest.importorskip("timm.layers")
    network = Thin(num_classes=10)
    torch.save(network.state_dict(), tmp_path / "thin.pt")
    loaded = trained(Thin, tmp_path / "thin.pt", image_size=side)
    expected = timm_layers.resample_abs_pos_embed(network.encoder.pos_embedding.detach(), [side // 8] * 2, num_prefix_tokens=1)
    torch.testing.assert_close(loaded.encoder.pos_embedding.detach(), expected)
    assert loaded(torch.zeros(1, 3, side, side)).shape == (1, 10)
    assert torch.equal(loaded.encoder.ln.weight, network.encoder.ln.weight)
    assert loaded.preprocess(np.zeros((100, 90, 3), np.uint8)).shape == (1, 3, side, side)


def test_a_checkpoint_of_another_grid_is_refused_where_nothing_was_asked_for(tmp_path: Path) -> None:
    torch.save(Thin(num_classes=10, image_size=48).state_dict(), tmp_path / "wide.pt")
    with pytest.raises(WeightsMismatch, match="pos_embedding"):
        trained(Thin, tmp_path / "wide.pt")


def test_torchvisions_older_names_of_dense_layers_are_read(tmp_path: Path) -> None:
    network = Thin(num_classes=10)
    old = {name.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): one for name, one in network.state_dict().items()}
    torch.save(old, tmp_path / "old.pt")
    loaded = trained(Thin, tmp_path / "old.pt").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in network.state_dict().items())


def test_fast_computes_the_same_on_the_cpu() -> None:
    images = torch.randn(2, 3, 32, 32)
    for network in (Thin(), ThinCLIP(), ThinSigLIP(), ThinGiant()):
        network.load_state_dict(randomised(network))
        network.eval()
        with torch.inference_mode():
            expected = network(images)
            assert relative(fast(network, "cpu")(images), expected) < TOLERANCE


def test_the_embedding_is_the_class_token() -> None:
    network = Thin().eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        found = features(network, ["embedding", "body", "encoder.layers.encoder_layer_0"])(images)
        assert found["body"].shape == (2, 17, 16)
        assert torch.equal(found["embedding"], found["body"][:, 0])
        assert torch.equal(network.heads(found["embedding"]), network(images))


def test_a_stride_gives_the_map_of_patches() -> None:
    network = ThinGiant().eval()
    images = torch.randn(2, 3, 32, 32)
    taken = features(network, {"map": "stride/8", "body": "body"})
    assert (taken.channels["map"], taken.strides["map"], taken.receptive_fields["map"]) == (16, 8, 32)
    with torch.inference_mode():
        found = taken(images)
    assert found["map"].shape == (2, 16, 4, 4)
    assert torch.equal(found["map"][:, :, 1, 2], found["body"][:, 3 + 4 + 2])


def test_both_heads_of_a_distilled_network_are_classifiers() -> None:
    with torch.device("meta"):
        network = DeiT_Ti_16_Distilled(num_classes=7)
    assert DeiT_Ti_16_Distilled.classifiers == ("heads.head", "heads.head_dist")
    assert isinstance(teachers := network.get_submodule("heads.head_dist"), nn.Linear)
    assert teachers.out_features == 7
    assert network(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 7)


@pytest.mark.reference
def test_siglip_can_give_the_mean_of_its_tokens_as_the_towers_of_language_models_do() -> None:
    import timm

    network = SigLIP_B_16(pool="mean", num_classes=10, image_size=32)
    other = timm.create_model("vit_base_patch16_siglip_gap_224", img_size=32, num_classes=10)
    state = names.to_ours(other.state_dict(), network.state_dict(), naming="timm", family=SigLIP_B_16)
    network.load_state_dict(state)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(network.eval()(images), other.eval()(images))
    assert features(network, at="embedding")(images)["embedding"].shape == (2, 768)
    with pytest.raises(ValueError, match=r"SigLIP_B_16.s pool is one of attention, mean, got 'max'"):
        SigLIP_B_16(pool="max")


def test_a_pyramid_is_the_map_of_patches_at_four_sizes() -> None:
    class Flat(ViT, patch=16, depth=1, attention_heads=2, width=16, mlp_width=32, input_size=64): ...

    network = Flat().eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        levels, own = pyramid(network)(images), features(network, "stride/16")(images)["stride/16"]
        fast_levels = fast(pyramid(network))(images)
    assert pyramid(network).strides == {"C2": 4, "C3": 8, "C4": 16, "C5": 32}
    assert [tuple(level.shape) for level in levels.values()] == [(2, 16, side, side) for side in (16, 8, 4, 2)]
    assert torch.equal(levels["C4"], own)
    torch.testing.assert_close(levels["C2"].mean((2, 3)), own.mean((2, 3)), rtol=0.1, atol=0.1)
    assert all(torch.equal(level, fast_levels[key]) for key, level in levels.items())
    with pytest.raises(ValueError, match="output"):
        pyramid(network, 8)
    with pytest.raises(ValueError, match="Flat has one map alone, and a U-Net joins maps of several strides"):
        UNet(network)
