"""BiT computes what timm's does, and ResNetV2 what keras.applications' does."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import timm
import torch
from parity import assert_equal, assert_same_initialisation, randomised
from torch.nn import functional as F

from convert import names
from zoo import CATALOGUE
from zoo.networks.layers import StandardisedConv2d
from zoo.networks.resnetv2 import BiT, ResNetV2

BITS = [name for name, cls in CATALOGUE.items() if issubclass(cls, BiT)]
KERAS = [name for name, cls in CATALOGUE.items() if issubclass(cls, ResNetV2)]


@pytest.mark.reference
@pytest.mark.parametrize("size", [64, 97])
@pytest.mark.parametrize(
    "name",
    [name if name == "ResNetV2_50x1_BiT" else pytest.param(name, marks=pytest.mark.long) for name in BITS if name != "ResNetV2_152x4_BiT"],
)
def test_logits_and_gradients_equal_timms(name: str, size: int) -> None:
    assert_equal(CATALOGUE[name], partial(timm.create_model, name.lower()), size)


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_timms() -> None:
    assert_same_initialisation(CATALOGUE["ResNetV2_50x1_BiT"](), timm.create_model("resnetv2_50x1_bit"))


def test_standardised_weights_have_mean_0_and_deviation_1() -> None:
    layer = StandardisedConv2d(3, 4, 3, bias=False)
    image = torch.randn(1, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    flat = layer.weight.detach().flatten(1)
    kernels = (flat - flat.mean(1, keepdim=True)) / flat.std(1, unbiased=False, keepdim=True)
    torch.testing.assert_close(layer(image).detach(), F.conv2d(image, kernels.view_as(layer.weight)), rtol=1e-4, atol=1e-4)


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
@pytest.mark.parametrize("side", [64, 97])
@pytest.mark.parametrize("name", [name if name == "ResNet50V2" else pytest.param(name, marks=pytest.mark.long) for name in KERAS])
def test_logits_equal_kerass(name: str, side: int) -> None:
    keras: Any = pytest.importorskip("keras")
    theirs = getattr(keras.applications, name)(weights=None, input_shape=(side, side, 3), classifier_activation=None)
    with torch.device("meta"):
        ours = CATALOGUE[name]().eval()
    state = randomised(ours)
    ours.load_state_dict(state, assign=True)
    assert ours.params == sum(int(np.prod(weight.shape)) for weight in theirs.trainable_weights)
    rows = names.rows("keras", CATALOGUE[name], {key: tuple(tensor.shape) for key, tensor in state.items()})
    assert [row.theirs for row in rows] == [layer.name for layer in theirs.layers if layer.weights]
    for row in rows:
        layer = theirs.get_layer(row.theirs)
        own = [state[f"{row.ours}.{part}"].numpy() for part in PARTS[row.kind] if f"{row.ours}.{part}" in state]
        kernel = {"conv": (2, 3, 1, 0), "linear": (1, 0)}.get(row.kind)
        layer.set_weights([own[0].transpose(kernel) if kernel else own[0], *own[1:]])
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # Keras computes with torch here
        expected, logits = theirs(images.permute(0, 2, 3, 1), training=False), ours(images)
    assert (expected[0] - expected[1]).norm() > 1e-3 * expected.norm()
    assert (logits - expected).norm() < 1e-4 * expected.norm()


PARTS = {
    "conv": ("weight", "bias"),
    "linear": ("weight", "bias"),
    "norm": ("weight", "bias", "running_mean", "running_var"),
}
