"""A network of every family learns the same with `fast(train=True)` as without."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zoo
from zoo import CATALOGUE, Model, fast, plain, why
from zoo.networks.densenet import CIFARDenseNet

SIZES = {
    "AlexNet": 67,
    "InceptionV3": 75,
    "InceptionV4": 75,
    "InceptionResNetV2": 75,
    "Xception": 71,
    "MobileNetV1": 64,
    "MobileNetV2": 64,
    "MobileNetV3": 64,
    "EfficientNet": 64,
    "RegNet": 64,  # of 32 pixels the last maps have one, whose statistics are of two numbers: the plain network's loss is no number then
}


def smallest_of_each_family() -> list[type[Model]]:
    smallest: dict[type[Model], type[Model]] = {}
    for cls in sorted(CATALOGUE.values(), key=lambda cls: cls.params):
        smallest.setdefault(cls.family(), cls)
    return list(smallest.values())


class SmallDenseNet(CIFARDenseNet, blocks=(2, 2, 2), growth_rate=8, stem_channels=16):
    pass


QUICK = ("ResNet20", "ResNet18", "MobileNetV1_025", "MobileNetV2_035", "MobileNetV3Small", "SqueezeNet1_1")
"""The others take seconds; what is special in them is in these, and in networks of few layers."""
NETWORKS = [cls if cls.__name__ in QUICK else pytest.param(cls, marks=pytest.mark.long) for cls in smallest_of_each_family()]


@pytest.mark.parametrize("cls", [*NETWORKS, SmallDenseNet], ids=lambda cls: cls.__name__)
def test_two_steps_leave_the_same_parameters_statistics_and_losses(cls: type[Model]) -> None:
    torch.manual_seed(0)
    eager = cls(num_classes=10).train()
    quick = copy.deepcopy(eager)
    size = cls.input_size if cls.fixed_size else SIZES.get(cls.family().__name__, max(32, cls.min_size))
    model = fast(quick, train=True, example=torch.randn(2, 3, size, size))
    assert not model.unchanged
    assert why(model).parity is not None
    losses = []
    for network, called in ((eager, eager), (quick, model)):
        optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)
        for step in range(2):
            torch.manual_seed(step)
            images, labels = torch.randn(2, 3, size, size), torch.randint(10, (2,))
            outputs = called(images)
            loss = F.cross_entropy(outputs[0] if isinstance(outputs, tuple) else outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    torch.testing.assert_close(losses[2:], losses[:2])
    torch.testing.assert_close(quick.state_dict(), eager.state_dict())
    assert plain(model) is quick


def test_a_chain_is_one_call_and_why_names_its_layers() -> None:
    model = fast(zoo.MobileNetV2_035().train(), train=True, example=torch.randn(2, 3, 64, 64))
    kernels = {row.kernel for row in why(model).rows}
    assert {"batch_norm + relu6", "batch_norm + residual", "batch_norm", "depthwise 3x3"} <= kernels
    row = next(row for row in why(model).rows if row.kernel == "batch_norm + residual")
    assert row.layers.startswith("features.3.conv")
    assert isinstance(model, nn.Module)
