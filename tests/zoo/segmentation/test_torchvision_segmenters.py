"""torchvision's segmenters and ours, the same tensors in both: the same names, logits, losses and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from parity import randomised, relative
from torch.nn import functional as F

from zoo.segmentation import SEGMENTERS, catalogue

assert catalogue
THEIRS = {name.lower(): name for name in SEGMENTERS}
SMALL = ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large")
every_segmenter = pytest.mark.parametrize("name", [n if n in SMALL else pytest.param(n, marks=pytest.mark.long) for n in THEIRS])


def pair(name: str, aux: bool, num_classes: int = 21) -> tuple[Any, Any]:
    light = name.startswith("lraspp")
    with torch.device("meta"):
        theirs = torchvision.models.get_model(
            name, weights=None, weights_backbone=None, num_classes=num_classes, **{} if light else {"aux_loss": aux}
        )
        ours = SEGMENTERS[THEIRS[name]](num_classes, **{} if light else {"aux": aux})
    return theirs, ours


def test_there_is_one_of_ours_for_each_of_theirs() -> None:
    assert set(THEIRS) == set(torchvision.models.list_models(torchvision.models.segmentation))


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("aux", [False, True])
def test_names_shapes_order_and_number_of_parameters_are_torchvisions(name: str, aux: bool) -> None:
    theirs, ours = pair(name, aux)
    expected, found = theirs.state_dict(), ours.state_dict()
    assert list(found) == list(expected)
    assert all(found[key].shape == tensor.shape for key, tensor in expected.items())
    if not aux:
        assert sum(p.numel() for p in ours.parameters()) == type(ours).params == sum(p.numel() for p in theirs.parameters())


@every_segmenter
@pytest.mark.reference
def test_logits_losses_and_gradients_are_torchvisions(name: str) -> None:
    theirs, ours = pair(name, aux=True)
    state = randomised(theirs)
    theirs.load_state_dict(state, assign=True)
    ours.load_state_dict({key: tensor.clone() for key, tensor in state.items()}, assign=True)
    x = torch.randn(2, 3, 65, 96)
    with torch.no_grad():
        expected, found = theirs.eval()(x), ours.eval()(x)
    assert expected.keys() == found.keys()
    assert all(relative(found[key], expected[key]) < 1e-5 for key in expected)
    true = torch.randint(21, (2, 65, 96))
    gradients = []
    for network in (theirs.train(), ours.train()):
        torch.manual_seed(3)  # of the dropouts
        sum(F.cross_entropy(logits, true) for logits in network(x).values()).backward()
        gradients.append({key: parameter.grad for key, parameter in network.named_parameters()})
    assert max(relative(gradients[1][key], gradient) for key, gradient in gradients[0].items()) < 1e-4
