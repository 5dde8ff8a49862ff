"""torchvision's detectors and ours, the same tensors in both: the same names, detections, losses, gradients and statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor
from torchvision_pairs import THEIRS, pair, photographs, targets

from zoo.detection import DETECTORS

SMALL = ("fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large")
every_detector = pytest.mark.parametrize("name", [n if n in SMALL else pytest.param(n, marks=pytest.mark.long) for n in THEIRS])


def test_there_is_one_of_ours_for_each_of_theirs() -> None:
    assert set(THEIRS) == set(torchvision.models.list_models(torchvision.models.detection))


@pytest.mark.parametrize("name", THEIRS)
def test_names_shapes_order_and_number_of_parameters_are_torchvisions(name: str) -> None:
    with torch.device("meta"):
        theirs = getattr(torchvision.models.detection, name)(weights=None, weights_backbone=None)
        ours = DETECTORS[THEIRS[name]]()
    expected, found = theirs.state_dict(), ours.state_dict()
    assert list(found) == list(expected)
    assert all(found[key].shape == tensor.shape for key, tensor in expected.items())
    assert sum(p.numel() for p in ours.parameters()) == type(ours).params == sum(p.numel() for p in theirs.parameters())
    theirs.load_state_dict(found)
    ours.load_state_dict(expected)


def settled(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put what has the very same score, whose order nobody promises, into the order of its boxes."""
    keys = [found["boxes"][:, 1], found["boxes"][:, 0], found["labels"], -found["scores"]]
    order = np.lexsort([key.numpy() for key in keys])
    return {name: tensor[torch.from_numpy(order)] for name, tensor in found.items()}


@every_detector
@pytest.mark.reference
def test_detections_losses_gradients_and_statistics_are_torchvisions(name: str) -> None:
    classes = 2 if name.startswith("keypoint") else 11
    theirs, ours = pair(name, classes)
    with torch.no_grad():
        expected, found = theirs(photographs()), ours(photographs())
    for one, other in zip(expected, found, strict=True):
        assert len(one["boxes"]) > 20
        assert one.keys() == other.keys()
        torch.testing.assert_close(other["scores"], one["scores"], rtol=0, atol=1e-5)
        one, other = settled(one), settled(other)
        assert torch.equal(one["labels"], other["labels"])
        torch.testing.assert_close(other["boxes"], one["boxes"], rtol=0, atol=1e-3)
        for key in ("masks", "keypoints", "keypoints_scores"):
            if key in one:
                torch.testing.assert_close(other[key], one[key], rtol=0, atol=1e-3)
    learnt = []
    for network in (theirs.train(), ours.train()):
        torch.manual_seed(3)
        losses = network(photographs(), targets(classes))
        sum(losses.values()).backward()
        learnt.append({key: loss.detach() for key, loss in losses.items()})
    assert learnt[0].keys() == learnt[1].keys()
    for key, loss in learnt[0].items():
        torch.testing.assert_close(learnt[1][key], loss, rtol=1e-5, atol=1e-6)
    gradients = {key: parameter.grad for key, parameter in ours.named_parameters()}
    for key, parameter in theirs.named_parameters():
        assert (parameter.grad is None) == (gradients[key] is None)
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-3, atol=1e-5 * max(1.0, float(parameter.grad.abs().max())))
    state = ours.state_dict()
    for key, tensor in theirs.state_dict().items():
        if "running" in key or "batches" in key:
            torch.testing.assert_close(state[key], tensor, rtol=1e-5, atol=1e-6)
