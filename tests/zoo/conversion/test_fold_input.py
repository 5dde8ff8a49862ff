"""What a checkpoint's images need, folded into its first convolution: RGB pixels, 0..1, in, and the same logits out."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from roundtrips import built
from torch import Tensor

import weights
from convert.formats._torch import as_tensor, stored
from convert.network import layers
from convert.source import Stored
from weights import Preprocessing
from zoo.conversion.fold_input import fold_input
from zoo.conversion.proof_images import prepared
from zoo.networks.model import Model

CAFFE = {"mean": (0.41, 0.46, 0.49), "std": (0.25, 0.125, 1 / 255), "channel_order": "bgr"}
SIGNED = {"mean": (0.5, 0.4, 0.3), "std": (0.5, 0.5, 0.25), "channel_order": "rgb"}


def steps(**told: Any) -> Preprocessing:
    return replace(weights.adhoc("ResNet20", "file:///none").preprocessing, **told)


def folded(network: Model, wanted: Preprocessing) -> tuple[Model, Preprocessing, dict[str, Stored]]:
    structure = layers(network, (network.in_channels, network.input_size, network.input_size))
    found, left = fold_input(network, structure, {n: stored(n, t) for n, t in network.state_dict().items()}, wanted)
    twin = copy.deepcopy(network)
    twin.load_state_dict({name: as_tensor(np.array(one.array())) for name, one in found.items()})
    return twin, left, found


def logits(network: Model, images: Tensor) -> Tensor:
    with torch.no_grad():
        return network(images.float())


def far(network: Model, twin: Model, before: Preprocessing, after: Preprocessing, side: int) -> float:
    unit = torch.rand(2, network.in_channels, side, side, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    wanted, got = logits(network, prepared(unit, before)), logits(twin, prepared(unit, after))
    return float((wanted - got).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("told", [CAFFE, SIGNED])
@pytest.mark.parametrize(("name", "side"), [("ResNet20", 32), ("MobileNetV1_025", 64)])
def test_a_padded_stem_keeps_the_mean_and_computes_the_same(name: str, side: int, told: dict[str, Any]) -> None:
    network, before = built(name), steps(**told)
    twin, after, _ = folded(network, before)
    assert (after.channel_order, after.std) == ("rgb", (1, 1, 1))
    assert after.mean == (before.mean if before.channel_order == "rgb" else before.mean[::-1])
    assert far(network, twin, before, after, side) < 1e-5
    assert far(network, network, before, after, side) > 1e-2  # nothing would have come of it without the fold


@pytest.mark.parametrize("told", [CAFFE, SIGNED])
@pytest.mark.parametrize(("name", "side"), [("SqueezeNet1_1", 64), ("InceptionV3", 75)])
def test_an_unpadded_stem_takes_the_mean_too(name: str, side: int, told: dict[str, Any]) -> None:
    """SqueezeNet's has a bias, Inception's a BatchNorm."""
    network, before = built(name), steps(**told)
    twin, after, found = folded(network, before)
    assert (after.channel_order, after.mean, after.std) == ("rgb", (0, 0, 0), (1, 1, 1))
    assert far(network, twin, before, after, side) < 1e-5
    assert far(network, network, before, after, side) > 1e-2
    shifted = [name for name, one in found.items() if any(str(step).startswith("minus the mean") for step in one.steps)]
    assert shifted == ["features.0.bias" if name == "SqueezeNet1_1" else shifted[0]]
    assert shifted[0].endswith("bias" if name == "SqueezeNet1_1" else "running_mean")


def test_only_the_stem_is_changed() -> None:
    network = built("ResNet20")
    _, _, found = folded(network, steps(**CAFFE))
    assert [name for name, one in found.items() if one.steps] == ["conv1.weight"]
    assert [str(step) for step in found["conv1.weight"].steps] == ["swap channels(1)", "times 255, 8, 4 by input channel"]


def test_nothing_to_fold_changes_nothing() -> None:
    network, plain = built("ResNet20"), steps(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), channel_order="rgb")
    _, after, found = folded(network, plain)
    assert after == plain
    assert not any(one.steps for one in found.values())


def test_a_grey_network_is_folded_too() -> None:
    network, before = built("ResNet20", in_channels=1), steps(mean=(0.3,), std=(0.2,))
    twin, after, _ = folded(network, before)
    assert (after.mean, after.std) == ((0.3,), (1,))
    assert far(network, twin, before, after, 32) < 1e-5
