"""Swin and Swin V2 compute what torchvision's do at any size, and what timm's do with its larger windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import assert_equal, assert_same_initialisation, randomised, relative
from torch import nn
from torchvision import models
from written import written

import zoo
from convert import core, names
from convert.names import COMPUTED, to_ours
from zoo import CATALOGUE, Swin_T, Swin_V2_T
from zoo.extraction.features import pyramid
from zoo.networks.swin import Swin, SwinV2

NAMES = [name for name in CATALOGUE if name.startswith("Swin") and not name.endswith("_L")]
SHOWN = ("Swin_T", "Swin_V2_T")


class Thin(Swin, width=16, blocks=(2, 2, 2, 2), heads=(1, 2, 4, 8), stochastic_depth=0.2): ...


class ThinV2(SwinV2, width=16, blocks=(2, 2, 2, 2), heads=(1, 2, 4, 8), stochastic_depth=0.2): ...


def theirs(name: str, **options: Any) -> nn.Module:
    """Build torchvision's, and leave the buffers out of its state that follow from the window's size, which ours computes."""
    with torch.device("cpu"):
        made = getattr(models, name.lower())(**options)
    for module in made.modules():
        module._non_persistent_buffers_set |= {name for name in module._buffers if name.endswith(COMPUTED)}
    return made


@pytest.mark.reference
@pytest.mark.parametrize("size", [64, 97, 224])
@pytest.mark.parametrize("name", [name if name in SHOWN else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_logits_and_gradients_equal_torchvisions(name: str, size: int) -> None:
    assert_equal(CATALOGUE[name], lambda: theirs(name), size)


@pytest.mark.reference
def test_all_of_torchvisions_are_there() -> None:
    there = [name for name in models.list_models(module=models) if name.startswith("swin")]
    assert sorted(name.lower() for name in NAMES) == there


@pytest.mark.reference
@pytest.mark.parametrize("name", SHOWN)
def test_fresh_parameters_are_distributed_as_torchvisions(name: str) -> None:
    assert_same_initialisation(CATALOGUE[name](), theirs(name))


@pytest.mark.reference
@pytest.mark.parametrize("name", NAMES)
def test_branches_are_dropped_as_often_as_in_torchvisions(name: str) -> None:
    with torch.device("meta"):
        ours: Any = CATALOGUE[name]()
    made: Any = theirs(name)
    for index in range(1, 8, 2):
        for block, other in zip(ours.features[index], made.features[index], strict=True):
            assert block.stochastic_depth1.p == block.stochastic_depth2.p == other.stochastic_depth.p


@pytest.mark.reference
@pytest.mark.parametrize("name", SHOWN)
def test_a_file_of_torchvisions_loads_in_spite_of_its_buffers(name: str) -> None:
    made = getattr(models, name.lower())().state_dict()
    state = to_ours(made, CATALOGUE[name]().state_dict(), naming="torchvision", family=CATALOGUE[name])
    assert state.keys() == {tensor for tensor in made if not tensor.endswith(COMPUTED)}
    CATALOGUE[name]().load_state_dict(state)


V2_256 = {"window": 16, "last_window": 8, "trained_window": 12}
V2_384 = {"window": 24, "last_window": 12, "trained_window": 12}
TIMMS = [
    ("swin_tiny_patch4_window7_224", "Swin_T", {}, 224),
    ("swinv2_tiny_window8_256", "Swin_V2_T", {}, 256),
    ("swinv2_tiny_window16_256", "Swin_V2_T", {"window": 16, "last_window": 8}, 256),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            ("swin_small_patch4_window7_224", "Swin_S", {}, 224),
            ("swin_base_patch4_window12_384", "Swin_B", {"window": 12}, 384),
            ("swin_large_patch4_window7_224", "Swin_L", {}, 224),
            ("swinv2_base_window12_192", "Swin_V2_B", {"window": 12, "last_window": 6, "num_classes": 21841}, 192),
            ("swinv2_base_window12to16_192to256", "Swin_V2_B", V2_256, 256),
            ("swinv2_base_window12to24_192to384", "Swin_V2_B", V2_384, 384),
            ("swinv2_large_window12to16_192to256", "Swin_V2_L", V2_256, 256),
        )
    ),
]


@pytest.mark.reference
@pytest.mark.parametrize(("arch", "name", "options", "size"), TIMMS)
def test_timms_tensors_compute_the_same(arch: str, name: str, options: dict[str, Any], size: int) -> None:
    import timm

    made = timm.create_model(arch).eval()
    with torch.device("meta"):
        ours = CATALOGUE[name](**options).eval()
    drawn = randomised(made)
    made.load_state_dict(drawn)
    shapes = {tensor: tuple(value.shape) for tensor, value in ours.state_dict().items()}
    rows = names.rows("timm", CATALOGUE[name], shapes)
    state, report = core.apply(rows, drawn, shapes)
    assert report.ok, report
    ours.load_state_dict(state, assign=True)
    back = {tensor: stored.array() for tensor, stored in written(rows, state).items()}
    assert back.keys() == drawn.keys()
    assert all((value == drawn[tensor].numpy()).all() for tensor, value in back.items())
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = made(images)
        assert relative(ours(images), expected) < 1e-4
    assert (expected[0] - expected[1]).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("cls", [Swin_T, Swin_V2_T])
def test_a_pyramid_has_four_maps(cls: type[zoo.Model]) -> None:
    with torch.device("meta"):
        taken = pyramid(cls().eval())
        maps = list(taken(torch.empty(2, 3, 224, 160, device="meta")).values())
    assert [tuple(x.shape) for x in maps[-4:]] == [(2, 96 << n, 56 >> n, 40 >> n) for n in range(4)]
    assert list(taken.strides.values())[-4:] == [4, 8, 16, 32]


def test_a_key_bias_has_no_part_in_version_2() -> None:
    network: Any = ThinV2().eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = network(images)
        network.features[1][0].attn.qkv.bias[16:32] = 5
        assert torch.equal(network(images), expected)


def test_a_shift_never_joins_both_ends_of_a_map() -> None:
    network: Any = Thin().eval()
    attention = network.features[1][1].attn
    x = torch.randn(1, 14, 14, 16)
    other = x.clone()
    other[:, 11:] += 1  # the last shifted rows share their windows with the first ones
    with torch.inference_mode():
        torch.testing.assert_close(attention(other)[:, :3], attention(x)[:, :3])


@pytest.mark.parametrize("cls", [Thin, ThinV2])
def test_a_window_without_pixels_is_an_error(cls: type[Swin]) -> None:
    with pytest.raises(ValueError, match="window is a whole number of at least 1"):
        cls(window=0)
