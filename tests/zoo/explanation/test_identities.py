"""What must hold whatever the weights are: identities of Grad-CAM's relatives, completeness, conservation, brute force."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from explained import lively
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.catalogue import CATALOGUE
from zoo.explanation import CannotExplain, explain
from zoo.explanation.cams import begins_with_mean, is_mean_and_dense
from zoo.explanation.program import INPUT, Program
from zoo.explanation.relevance import EPSILON, Composite, relevance
from zoo.networks.model import Model

CPU = torch.device("cpu")
SMALL = (
    "ResNet20", "ResNet10T", "SqueezeNet1_1", "MobileNetV1_025", "MobileNetV2_035", "MobileNetV3Small", "ShuffleNetV2_x0_5", "MNASNet0_5",
    "GhostNet_050", "RegNetX_200MF", "ConvNeXt_Atto", "MobileNetV4_Conv_Small_035", "ViT_Ti_16", "GMLP_Ti16_224",
)  # fmt: skip
"""One small variant of families that build in a moment; `long` has all of the catalogue."""


def built(name: str) -> tuple[Model, Tensor]:
    """Build a network with random weights and an image of the least size that it takes well."""
    torch.manual_seed(0)
    kind = CATALOGUE[name]
    options: dict[str, Any] = {"num_classes": 7}
    side = kind.input_size if kind.fixed_size or kind.size_multiple > 32 else max(64, kind.min_size)
    network = kind(**options).eval()
    lively(network)
    for classifier in network.classifiers[:1]:
        for parameter in network.get_submodule(classifier).parameters():
            nn.init.normal_(parameter, std=0.1)
    network.requires_grad_(False)
    x = torch.randn(1, 3, side, side) / 2
    calm(network, x)
    return network, x


def calm(network: Model, x: Tensor) -> None:
    """Make BatchNorms' factors smaller where maps grow from block to block, which makes a deep network's answer one of rounding."""
    norms = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    while norms and network(x).abs().max() > 1e2:
        for norm in norms:
            norm.weight.mul_(0.5)


def holds(name: str) -> None:
    """Check one network; each number is within 1e-5 of the answer's size."""
    network, x = built(name)
    logits = network(x)
    size = max(1.0, float(logits.abs().max()))
    program = Program(network, None, CPU)
    kept = program.body(x)
    assert torch.allclose(program.head(kept), logits, atol=1e-5 * size, rtol=1e-5)
    exact = Program(network, INPUT, CPU, fold=False)
    assert torch.allclose(exact.head(exact.body(x)), logits, atol=1e-5 * size, rtol=1e-5)
    target = int(logits[0].argmax())
    hires, one, other = explain(network, x[0], "hirescam", [target, 0, 1])
    inner = [kept[0].clone().requires_grad_(), *kept[1:]]
    (slope,) = torch.autograd.grad(program.head(inner)[0, target], inner[0])
    terms = program.layout.map_of(slope * kept[0]).abs().sum(1).max()  # what is added for a cell, which may cancel
    near = {"rtol": 0, "atol": 1e-5 * float(terms)}
    if begins_with_mean(program):
        usual = explain(network, x[0], target=target)
        assert usual.method == "Grad-CAM"
        assert np.allclose(usual.raw, hires.raw, **near)
    else:
        assert explain(network, x[0], target=target).method == "HiResCAM"
    if is_mean_and_dense(program):
        cam = explain(network, x[0], "cam", target)
        cells = cam.raw.size
        gradcam = explain(network, x[0], "gradcam", target)
        assert np.allclose(cam.raw.clip(0), cells * gradcam.raw, rtol=1e-4, atol=1e-5 * np.abs(cam.raw).max())
        bias = network.get_submodule(network.classifiers[0]).bias
        rest = float(logits[0, target]) - (0.0 if bias is None else float(bias[target]))
        assert cam.raw.astype(np.float64).sum() / cells == pytest.approx(rest, abs=1e-5 * size)
    assert one.raw.shape == other.raw.shape == hires.raw.shape


OTHERS = ("RegNetX_200MF", "ShuffleNetV2_x0_5", "MobileNetV4_Conv_Small_035", "ResNet10T")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if name in OTHERS else name for name in SMALL])
def test_identities(name: str) -> None:
    holds(name)


@pytest.mark.long
@pytest.mark.parametrize("name", [*CATALOGUE])
def test_identities_on_every_network(name: str) -> None:
    holds(name)


class Linear(Model):
    """A linear model of 8x8 pixels."""

    paper = "https://example.org"
    first_layer = "map"
    classifiers = ("fc",)

    def __init__(self) -> None:
        super().__init__()
        self.num_classes, self.in_channels = 2, 1
        self.map = nn.Identity()
        self.fc = nn.Linear(64, 2)

    def forward_body(self, x: Tensor) -> Tensor:
        return self.map(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


@pytest.fixture
def linear() -> tuple[Model, Tensor, np.ndarray]:
    torch.manual_seed(0)
    network, x = Linear().eval(), torch.rand(1, 1, 8, 8) + 0.5
    return network, x, (network.fc.weight[0].detach().view(8, 8) * x[0, 0]).numpy()


def test_a_linear_model_is_explained_exactly(linear: tuple[Model, Tensor, np.ndarray]) -> None:
    network, x, product = linear
    for method in ("input-x-gradient", "lrp-epsilon"):
        assert np.allclose(explain(network, x[0], method, 0).raw, product, atol=1e-5)
    complete = explain(network, x[0], "integrated-gradients", 0, options={"steps": 1, "fixed": True})
    assert np.allclose(complete.raw, product, atol=1e-6)
    assert complete.error == pytest.approx(0, abs=1e-5)
    assert np.allclose(explain(network, x[0], "hirescam", 0).raw, product.clip(0), atol=1e-6)
    windows = explain(network, x[0], "occlusion", 0, options={"window": 2, "stride": 2}).raw
    sums = product.reshape(4, 2, 4, 2).sum((1, 3))
    assert np.allclose(windows, sums.repeat(2, 0).repeat(2, 1), atol=1e-5)
    assert np.corrcoef(explain(network, x[0], "rise", 0, options={"masks": 4000, "cells": 4}).raw.ravel(), _smooth(product))[0, 1] > 0.8


def _smooth(product: np.ndarray) -> np.ndarray:
    return F.avg_pool2d(F.pad(torch.from_numpy(product)[None, None], (1, 1, 1, 1)), 3, 1).numpy().ravel()


@pytest.mark.parametrize("name", ["ConvNeXt_Atto", "EfficientNetLite0", "ViT_Ti_16"])
def test_integrated_gradients_are_a_loop_over_points(name: str) -> None:
    """In float64, point by point; with a first convolution that is run at the line's ends only, a BatchNorm that is folded, and neither."""
    network, x = built(name)
    exact, total, steps = copy.deepcopy(network).double(), torch.zeros_like(x, dtype=torch.float64), 20
    for place, weight in zip(*np.polynomial.legendre.leggauss(steps), strict=True):
        point = ((place + 1) / 2 * x.double()).requires_grad_()
        total += weight / 2 * torch.autograd.grad(exact(point)[0, 2], point)[0]
    right = (total * x.double()).sum(1)[0].numpy()
    found = explain(network, x[0], "integrated-gradients", 2, options={"steps": steps, "fixed": True}).raw
    assert np.abs(found - right).max() <= 1e-4 * np.abs(right).max()


def test_smoothgrad_without_noise_is_the_gradient(small: Model, images: Tensor) -> None:
    plain = explain(small, images, "gradient", 1)
    smooth = explain(small, images, "smoothgrad", 1, options={"noise": 0.0, "samples": 2})
    for one, other in zip(plain, smooth, strict=True):
        assert np.allclose(one.raw, other.raw, atol=1e-4 * np.abs(one.raw).max())
    noisy = [explain(small, images, "smoothgrad", 1, options={"samples": 2}, seed=seed)[0].raw for seed in (0, 0, 1)]
    assert np.array_equal(noisy[0], noisy[1])
    assert not np.array_equal(noisy[0], noisy[2])


def test_ablation_is_a_loop_over_channels(small: Model, images: Tensor) -> None:
    maps = small.forward_body(images[:1]).detach()
    whole = small.forward_head(maps)[0, 4].item()
    weights = []
    for channel in range(maps.shape[1]):
        without = maps.clone()
        without[:, channel] = 0
        weights.append((whole - small.forward_head(without)[0, 4].item()) / abs(whole))
    expected = (torch.tensor(weights)[:, None, None] * maps[0]).sum(0).relu()
    assert np.allclose(explain(small, images[0], "ablationcam", 4).raw, expected.numpy(), atol=1e-4)


def rectified(*layers: nn.Module) -> nn.Module:
    """Make layers, a mean over places and a sum of what channels give."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).flatten(1)

    return Net().eval()


def test_the_order_of_channels_changes_no_map(images: Tensor) -> None:
    one = rectified(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    other, order = copy.deepcopy(one), torch.tensor([3, 0, 5, 1, 4, 2])
    for parameter in other.layers[0].parameters():
        parameter.data = parameter.data[order]
    other.layers[4].weight.data = other.layers[4].weight.data[:, order]
    for name in ("cam", "gradcam", "gradcam++", "xgradcam", "layercam", "eigencam", "scorecam", "ablationcam"):
        found = [explain(net, images[0], name, 2, at="layers.1").raw for net in (one, other)]
        assert found[0].any()
        assert np.allclose(*found, atol=1e-5 * np.abs(found[0]).max())


def test_deconvnet_of_a_convolution_is_its_transpose_and_of_a_pool_its_switches() -> None:
    layer, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(1, 3, 6, 6)
    network = rectified(layer, nn.ReLU(), nn.MaxPool2d(2))
    program = Program(network, INPUT, CPU, fold=False)
    from zoo.explanation.rectifiers import _Deconv, rewriting

    x.requires_grad_()
    out = program.head([x], rewriting(program, "DeconvNet", _Deconv))
    given = torch.randn(out.shape)
    (found,) = torch.autograd.grad(out, x, given)
    with torch.no_grad():
        pooled, switches = F.max_pool2d(layer(x).relu(), 2, return_indices=True)
        back = F.max_unpool2d(given.view_as(pooled), switches, 2)
        expected = F.conv_transpose2d(back.relu(), layer.weight, padding=1)
    assert torch.allclose(found, expected, atol=1e-6)


def test_functions_are_rectified_as_modules_are() -> None:
    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.fc = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.one(x), inplace=True)
            x = self.two(x).relu_()
            return self.fc(torch.clamp(x, min=0).mean((2, 3)))

    class Modules(Functions):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.act(self.two(self.act(self.one(x)))).mean((2, 3)))

    one, other, x = Functions(), Modules(), torch.randn(1, 3, 9, 9)
    other.load_state_dict(one.state_dict())
    for method in ("guided-backprop", "deconvnet"):
        found = explain(one, x, method, 0)[0].raw
        assert np.allclose(found, explain(other, x, method, 0)[0].raw, atol=1e-7)
        assert not np.allclose(found, explain(one, x, "gradient", 0)[0].raw)


def test_guided_is_the_gradient_where_all_is_positive(images: Tensor) -> None:
    network = rectified(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    for parameter in network.parameters():
        parameter.data.abs_()
    x = images.abs()
    for one, other in zip(explain(network, x, "guided-backprop", 0), explain(network, x, "gradient", 0), strict=True):
        assert np.allclose(one.raw, other.raw, atol=1e-6)


def test_relevance_without_biases_is_input_times_gradient_and_conserved() -> None:
    torch.manual_seed(0)
    network = rectified(
        nn.Conv2d(3, 6, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 4, bias=False),
    )  # fmt: skip
    x = torch.randn(2, 3, 14, 14)
    products = explain(network, x, "input-x-gradient", 1)
    for one, other in zip(explain(network, x, "lrp-epsilon", 1, options={"epsilon": 1e-9}), products, strict=True):
        assert np.allclose(one.raw, other.raw, atol=1e-5 * np.abs(other.raw).max())
    for method in ("lrp", "lrp-epsilon", "lrp-gamma", "lrp-alpha-beta"):
        for one in explain(network, x, method, 1):
            assert one.error is not None
            assert one.error < 1e-3
            assert one.raw.sum() == pytest.approx(one.score, rel=2e-3, abs=1e-6)


def test_folding_batchnorm_or_not_is_the_same_relevance(small: Model, images: Tensor) -> None:
    """The first convolution's BatchNorm folded by hand gives the same map as a network where `Program` folds it."""
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    expected = [one.raw for one in explain(small, images, "lrp", 2)]
    small.conv1 = fuse_conv_bn_eval(small.conv1, small.bn1)
    small.bn1 = nn.BatchNorm2d(16, eps=0.0).eval()
    for one, raw in zip(explain(small, images, "lrp", 2), expected, strict=True):
        assert np.allclose(one.raw, raw, atol=1e-3 * np.abs(raw).max())


@pytest.mark.parametrize(("method", "name"), [("guided-backprop", "Hardswish"), ("lrp", "Hardswish"), ("deconvnet", "another activation")])
def test_activations_without_a_rule_are_refused_by_name(method: str, name: str) -> None:
    network, x = built("MobileNetV3Small")
    with pytest.raises(CannotExplain, match=name):
        explain(network, x, method)
    smooth = rectified(nn.Conv2d(3, 2, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1))
    with pytest.raises(CannotExplain, match=r"no rule of it is defined for layers\.1, a Tanh|it has no ReLU"):
        explain(smooth, x, method)


def test_a_rule_that_loses_relevance_is_refused() -> None:
    """Alpha 2, beta 1 loses what it would take where nothing subtracted."""
    network = rectified(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    for parameter in network.parameters():
        parameter.data.abs_()
    x = torch.rand(1, 3, 8, 8)
    explain(network, x, "lrp-alpha-beta", 0)
    with pytest.raises(CannotExplain, match="does not conserve relevance there"):
        explain(network, x, "lrp-alpha-beta", 0, options={"alpha": 2.0})
    program = Program(network, INPUT, CPU)
    found, lost = relevance(program, x, torch.eye(4)[:1], Composite(EPSILON))
    assert found.sum() == pytest.approx(float(network(x)[0, 0].detach()), rel=1e-4)
    assert lost.max() < 1e-3
