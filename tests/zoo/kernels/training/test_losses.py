"""Cross-entropy in one pass: only where it is PyTorch's own of rows, only once it agreed, with PyTorch's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kernels.tensors import noise, off
from zoo.kernels.training import kernels
from zoo.kernels.training.losses import OnePass, in_one_pass

CPU = torch.device("cpu")


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let kernels be used as on a GPU, and note when."""
    seen: list[Any] = []
    right = kernels.cross_entropy

    def noted(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
        seen.append(logits.requires_grad)
        return right(logits, target, smoothing)

    monkeypatch.setattr(kernels, "on_kernels", lambda device: True)
    monkeypatch.setattr(kernels, "cross_entropy", noted)
    return seen


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["classes", "shares"])
@pytest.mark.parametrize("autocast", [False, True])
def test_numbers_are_pytorchs(kind: str, smoothing: float, autocast: bool, on_kernels: list[Any]) -> None:
    loss = in_one_pass(nn.CrossEntropyLoss(label_smoothing=smoothing), CPU)
    dtype = torch.bfloat16 if autocast else torch.float32
    logits = noise(6, 11, dtype=dtype).requires_grad_()
    target = torch.tensor([0, 10, 3, -100, 5, 5]) if kind == "classes" else noise(6, 11, seed=1).softmax(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        values = [compute(logits, target) for compute in (loss, nn.CrossEntropyLoss(label_smoothing=smoothing))]
    assert values[0].dtype == values[1].dtype == torch.float32
    assert off(values[0], values[1]) < 1e-6
    got, right = (torch.autograd.grad(value, logits)[0] for value in values)
    assert off(got, right) < (1e-2 if autocast else 1e-6)
    assert on_kernels == [True, True]  # compared once, then computed


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.ones(11)), nn.CrossEntropyLoss(ignore_index=3), nn.CrossEntropyLoss(reduction="sum"),
        nn.NLLLoss(), F.cross_entropy, type("Mine", (nn.CrossEntropyLoss,), {})(),
    ],
    ids=["weight", "ignore_index", "sum", "another", "a function", "a subclass"],
)  # fmt: skip
def test_other_losses_stay_what_they_are(loss: Any, on_kernels: list[Any]) -> None:
    assert in_one_pass(loss, CPU) is loss


def test_a_loss_with_a_hook_stays_what_it_is(on_kernels: list[Any]) -> None:
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda *_: None)
    assert in_one_pass(loss, CPU) is loss


def test_maps_of_logits_tuples_and_targets_that_learn_go_to_pytorch(on_kernels: list[Any]) -> None:
    loss = in_one_pass(nn.CrossEntropyLoss(), CPU)
    assert isinstance(loss, OnePass)
    maps, labels = noise(2, 5, 3, 3), torch.zeros(2, 3, 3, dtype=torch.int64)
    assert torch.equal(loss(maps, labels), F.cross_entropy(maps, labels))
    learns = noise(2, 5).softmax(1).requires_grad_()
    assert torch.equal(loss(noise(2, 5), learns), F.cross_entropy(noise(2, 5), learns))
    half = noise(2, 5, dtype=torch.bfloat16)
    assert loss(half, labels[:, 0, 0]).dtype == torch.bfloat16  # as PyTorch's without autocast
    with pytest.raises((TypeError, AttributeError)):
        loss((maps, maps), labels)
    assert on_kernels == []


def test_a_kernel_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch, on_kernels: list[Any]) -> None:
    monkeypatch.setattr(kernels, "cross_entropy", lambda z, t, s: F.cross_entropy(z, t) * 1.001)
    loss, logits, target = in_one_pass(nn.CrossEntropyLoss(), CPU), noise(4, 7), torch.tensor([0, 1, 2, 3])
    assert torch.equal(loss(logits, target), F.cross_entropy(logits, target))
    assert torch.equal(loss(logits, target), F.cross_entropy(logits, target))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["classes", "shares"])
def test_captured_steps_learn_as_with_pytorchs_loss_on_the_gpu(kind: str) -> None:
    from zoo import fast_step

    found = []
    for loss in (nn.CrossEntropyLoss(label_smoothing=0.1), lambda z, t: F.cross_entropy(z, t, label_smoothing=0.1)):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Flatten(), nn.Linear(192, 1000)).cuda()
        step = fast_step(network, loss, torch.optim.SGD(network.parameters(), 0.1))
        images = noise(64, 3, 8, 8, device="cuda")
        labels = torch.arange(64, device="cuda")
        target = labels if kind == "classes" else 0.7 * F.one_hot(labels, 1000).float() + 0.3 * F.one_hot(labels.flip(0), 1000).float()
        found.append([float(step(images, target)) for _ in range(8)])
        assert step.replayed > 0
    assert found[0] == pytest.approx(found[1], rel=1e-3)
