"""Evidence finds the right one of a network and its flipped and transposed twins, the strongest first, and refuses when it is weak."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from convert.conversion import Undecided
from convert.evidence import Decision, batchnorm_mismatch, decide, mismatch_by_layer
from convert.steps import flip
from zoo import MobileNetV1_025, ResNet20, trained


def turned(network: nn.Module, turn: Callable[[Tensor], Tensor]) -> nn.Module:
    twin = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.dim() == 4:
                parameter.copy_(turn(parameter.clone()))
    return twin


def candidates(network: nn.Module) -> dict[str, nn.Module]:
    return {
        "convolution, hw": turned(network, flip),
        "correlation, hw": network,
        "correlation, wh": turned(network, lambda kernel: kernel.transpose(2, 3)),
        "convolution, wh": turned(network, lambda kernel: flip(kernel).transpose(2, 3)),
    }


def textures(count: int, seed: int = 0) -> Tensor:
    """Draw pictures that have an up and a left: sparse dots with tails to the right, and shorter ones downwards."""
    random = np.random.default_rng(seed)
    x = (random.random((count, 3, 24, 24)) < 0.08) * random.random((count, 3, 24, 24)) * 5
    for column in range(1, 24):
        x[..., column] += 0.8 * x[..., column - 1]
    for row in range(1, 24):
        x[..., row, :] += 0.4 * x[..., row - 1, :]
    return torch.from_numpy(x).float()


@pytest.fixture
def calibrated() -> nn.Module:
    """A network whose BatchNorms have seen pictures with an up and a left."""
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for before, after in ((3, 24), (24, 24), (24, 24), (24, 24)):
        layers += [nn.Conv2d(before, after, 3), nn.BatchNorm2d(after, momentum=None), nn.ReLU()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
    with torch.no_grad():
        network.train()(textures(256))
    return network.eval()


def test_statistics_of_the_very_images_agree_and_those_of_a_flipped_network_do_not(calibrated: nn.Module) -> None:
    images = textures(256)
    assert batchnorm_mismatch(calibrated, images) < 1e-6
    by_layer = mismatch_by_layer(turned(calibrated, flip), images)
    assert list(by_layer) == ["1", "4", "7", "10"]
    assert by_layer["10"] > 1e-3


def test_the_mismatch_is_the_formula() -> None:
    norm = nn.BatchNorm2d(2, eps=1e-12)
    norm.running_mean.copy_(torch.tensor([1.0, 2.0]))  # pyright: ignore[reportOptionalMemberAccess]
    norm.running_var.copy_(torch.tensor([4.0, 0.25]))  # pyright: ignore[reportOptionalMemberAccess]
    x = torch.tensor([[[[0.0, 2.0]], [[5.0, 7.0]]]])  # means 1 and 6, variances 1 and 1
    wanted = ((0 / 4 + math.log(1 / 4) ** 2) + (16 / 0.25 + math.log(4) ** 2)) / 2
    assert batchnorm_mismatch(norm, x) == pytest.approx(wanted, rel=1e-6)


def test_channels_that_are_always_zero_do_not_count(calibrated: nn.Module) -> None:
    conv, norm = calibrated[0], calibrated[1]  # pyright: ignore[reportIndexIssue]
    with torch.no_grad():
        conv.weight[0], conv.bias[0] = 0, 0
        norm.running_mean[0], norm.running_var[0] = 0, 1e-25
        norm.weight[0] = 0
    assert mismatch_by_layer(calibrated, textures(256))["1"] < 1e-6


def test_measuring_leaves_the_network_as_it_was(calibrated: nn.Module) -> None:
    before = {name: value.clone() for name, value in calibrated.state_dict().items()}
    calibrated.train()
    batchnorm_mismatch(calibrated, textures(8))
    assert calibrated.training
    assert all(module.training for module in calibrated.modules())
    assert not any(module._forward_pre_hooks for module in calibrated.modules())
    assert all(torch.equal(value, before[name]) for name, value in calibrated.state_dict().items())


@pytest.mark.parametrize("network", [nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3, track_running_stats=False)])
def test_a_network_without_statistics_is_refused(network: nn.Module) -> None:
    with pytest.raises(ValueError, match="no BatchNorm"):
        batchnorm_mismatch(network, textures(2))


def test_statistics_decide_where_there_is_nothing_stronger(calibrated: nn.Module) -> None:
    decision = decide(candidates(calibrated), images=textures(128, seed=1))
    assert decision.winner == "correlation, hw"
    assert "BatchNorm" in decision.measure
    assert decision.margin > 2
    assert "convolution, wh" in str(decision)


def test_reference_outputs_decide_alone(calibrated: nn.Module) -> None:
    images = textures(4)
    with torch.no_grad():
        logits = calibrated(images)
    for outputs in (logits, logits.softmax(1)):
        decision = decide(candidates(calibrated), reference=(images, outputs), images=images)
        assert decision.winner == "correlation, hw"
        assert list(decision.table) == ["relative error against the reference outputs"]


def test_reference_outputs_that_nobody_gives_are_no_choice_of_the_lesser_evil(calibrated: nn.Module) -> None:
    images = textures(4)
    with pytest.raises(Undecided, match="something else is wrong") as caught:
        decide(candidates(calibrated), reference=(images, torch.randn(4, 10)), images=textures(128))
    assert "BatchNorm" not in str(caught.value)
    assert "correlation, wh" in str(caught.value)


def test_reference_outputs_of_another_shape_are_refused(calibrated: nn.Module) -> None:
    with pytest.raises(Undecided, match=r"\(4, 7\).*\(4, 10\)"):
        decide(candidates(calibrated), reference=(textures(4), torch.randn(4, 7)))


def test_labels_decide_before_statistics(calibrated: nn.Module) -> None:
    images = textures(128)
    with torch.no_grad():
        labels = turned(calibrated, flip)(images).argmax(1)
    decision = decide({"right": turned(calibrated, flip), "wrong": turned(calibrated, torch.zeros_like)}, labelled=(images, labels))
    assert (decision.winner, decision.measure) == ("right", "accuracy on the labelled images")
    assert decision.table[decision.measure]["right"] == 1


def test_too_few_labels_leave_the_word_to_statistics(calibrated: nn.Module) -> None:
    images = textures(128)
    with torch.no_grad():
        labels = calibrated(images[:4]).argmax(1)
    decision = decide(candidates(calibrated), labelled=(images[:4], labels), images=images)
    assert decision.winner == "correlation, hw"
    assert "BatchNorm" in decision.measure
    assert "accuracy on the labelled images" in decision.table


def test_candidates_that_compute_the_same_are_refused_with_all_numbers() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with torch.no_grad():
        network.train()(textures(32))
    with pytest.raises(Undecided) as caught:
        decide(candidates(network.eval()), images=textures(32))
    for words in ("BatchNorm", "weakest evidence", "convolution, hw", "correlation, wh", "not 1.25"):
        assert words in str(caught.value)


def test_without_any_evidence_it_says_what_to_give(calibrated: nn.Module) -> None:
    with pytest.raises(Undecided, match=r"reference=outputs\.npz"):
        decide(candidates(calibrated))
    with pytest.raises(ValueError, match="no candidate"):
        decide({})


class Upright(nn.Module):
    """Sure of itself when the upper half is the brighter one."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[2] // 2
        sure = self.sign * (x[:, :, :half].mean((1, 2, 3)) - x[:, :, half:].mean((1, 2, 3)))
        return torch.stack([sure * 5 + 3, torch.zeros_like(sure)], 1)


def test_without_batchnorm_the_confidence_upright_decides() -> None:
    images = torch.rand(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    images[:, :, :4] += 0.2
    decision = decide({"wrong": Upright(-1), "right": Upright(1)}, images=images)
    assert decision.winner == "right"
    assert "weakest" in decision.measure
    with pytest.raises(Undecided, match="standard errors"):
        decide({"wrong": Upright(-1), "right": Upright(1)}, images=torch.rand(64, 3, 8, 8))


# What is measured on real networks; recipes/evidence_table.py prints the whole table.


@pytest.mark.real
def test_real_photographs_find_the_orientation_of_a_real_mobilenet(real: Path) -> None:
    network = trained(MobileNetV1_025, real / "real" / "pytorch" / "mobilenetV1X0.25_pretrain.tar")
    images = network.preprocess(sorted((real / "real" / "images" / "imagenet").glob("*.JPEG"))[::2])
    decision: Decision = decide(candidates(network), images=images)
    assert decision.winner == "correlation, hw"
    distance = decision.table["distance of the BatchNorm statistics"]
    assert distance["convolution, hw"] > 5 * distance["correlation, hw"]
    assert distance["correlation, wh"] > 1.25 * distance["correlation, hw"]
    assert distance["correlation, hw"] < 0.02


@pytest.mark.real
def test_jpeg_copies_of_the_training_images_are_no_evidence_by_statistics_and_labels_are(real: Path) -> None:
    network = trained(ResNet20, real / "real" / "pytorch" / "cifar_resnet20-12fca82f.th")
    packed = np.load(real / "data" / "cifar10_test.npz")
    raw, offset = packed["jpeg"].tobytes(), packed["offset"]
    images = network.preprocess([Image.open(io.BytesIO(raw[a:b])) for a, b in pairwise(offset[:65])])
    with pytest.raises(Undecided, match="not images like those of the training"):
        decide(candidates(network), images=images)
    labels = torch.from_numpy(packed["label"][:64].astype(np.int64))
    decision = decide(candidates(network), labelled=(images, labels))
    assert (decision.winner, decision.measure) == ("correlation, hw", "accuracy on the labelled images")
