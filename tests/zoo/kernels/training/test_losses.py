"""Cross-entropy in one pass: only where it is PyTorch's own of rows, only once it agreed, with PyTorch's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kernels.tensors import noise, off
from zoo import fast_step
from zoo.kernels.training import kernels
from zoo.kernels.training.losses import KEPT_SHAPES, OnePass, is_plain

LABELS = torch.tensor([0, 1, 2, 3])


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
    loss, one_pass = nn.CrossEntropyLoss(label_smoothing=smoothing), OnePass()
    dtype = torch.bfloat16 if autocast else torch.float32
    logits = noise(6, 11, dtype=dtype).requires_grad_()
    target = torch.tensor([0, 10, 3, -100, 5, 5]) if kind == "classes" else noise(6, 11, seed=1).softmax(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        values = [one_pass(loss, logits, target), loss(logits, target)]
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
    assert not is_plain(loss)
    logits = noise(4, 11).log_softmax(1)
    assert torch.equal(OnePass()(loss, logits, LABELS), loss(logits, LABELS))
    assert on_kernels == []


def test_what_changes_about_a_loss_is_heeded(on_kernels: list[Any]) -> None:
    loss, one_pass, logits, seen = nn.CrossEntropyLoss(), OnePass(), noise(4, 7), list[int]()
    one_pass(loss, logits, LABELS)
    assert len(on_kernels) == 2
    loss.ignore_index = 2
    assert torch.equal(one_pass(loss, logits, LABELS), F.cross_entropy(logits, LABELS, ignore_index=2))
    loss = nn.CrossEntropyLoss()
    handle = loss.register_forward_hook(lambda *_: seen.append(1))
    one_pass(loss, logits, LABELS)
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(2))
    one_pass(loss, logits, LABELS)
    handle.remove()
    assert seen == [1, 2]
    assert len(on_kernels) == 2
    one_pass(loss, logits, LABELS)
    assert len(on_kernels) == 3


def test_maps_of_logits_tuples_and_targets_that_learn_go_to_pytorch(on_kernels: list[Any]) -> None:
    loss, one_pass = nn.CrossEntropyLoss(), OnePass()
    maps, labels = noise(2, 5, 3, 3), torch.zeros(2, 3, 3, dtype=torch.int64)
    assert torch.equal(one_pass(loss, maps, labels), F.cross_entropy(maps, labels))
    learns = noise(2, 5).softmax(1).requires_grad_()
    assert torch.equal(one_pass(loss, noise(2, 5), learns), F.cross_entropy(noise(2, 5), learns))
    half = noise(2, 5, dtype=torch.bfloat16)
    assert one_pass(loss, half, labels[:, 0, 0]).dtype == torch.bfloat16  # as PyTorch's without autocast
    strided, every_other = noise(5, 4).t(), (torch.arange(8) % 5)[::2]
    assert torch.equal(one_pass(loss, strided, LABELS), F.cross_entropy(strided, LABELS))
    assert torch.equal(one_pass(loss, noise(4, 5), every_other), F.cross_entropy(noise(4, 5), every_other))
    with pytest.raises((TypeError, AttributeError)):
        one_pass(loss, (maps, maps), labels)
    assert on_kernels == []
    assert not one_pass.agrees


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_of_which_nothing_counts_has_no_gradient(smoothing: float, on_kernels: list[Any]) -> None:
    loss, one_pass = nn.CrossEntropyLoss(label_smoothing=smoothing), OnePass()
    logits, nothing = noise(4, 7).requires_grad_(), torch.full((4,), -100)
    value = one_pass(loss, logits, nothing)
    assert value.isnan()
    assert not one_pass.agrees  # numbers that are none say nothing of a kernel
    one_pass(loss, logits, LABELS)
    value, calls = one_pass(loss, logits, nothing), len(on_kernels)
    assert value.isnan()
    assert not torch.autograd.grad(value, logits)[0].any()
    one_pass(loss, logits, LABELS)
    assert len(on_kernels) == calls + 1


@pytest.mark.parametrize("label", [-1, 7, 255])
def test_a_label_that_is_no_class_leaves_no_number_in_loss_or_gradient(label: int, on_kernels: list[Any]) -> None:
    loss, one_pass, logits = nn.CrossEntropyLoss(), OnePass(), noise(4, 7).requires_grad_()
    one_pass(loss, logits, LABELS)
    value = one_pass(loss, logits, torch.tensor([0, label, 2, 3]))
    assert value.isnan()
    assert torch.autograd.grad(value, logits)[0].isnan().any(1).tolist() == [False, True, False, False]


def _wrong(z: Tensor, t: Tensor, s: float) -> Tensor:
    return F.cross_entropy(z, t) * 1.001


def _missing(z: Tensor, t: Tensor, s: float) -> Tensor:
    raise RuntimeError("Failed to find C compiler")


@pytest.mark.parametrize(("kernel", "said"), [(_wrong, "its first result differed"), (_missing, "RuntimeError: Failed to find C compiler")])
def test_a_kernel_that_disagrees_or_fails_is_said_once_and_not_used(
    kernel: Any, said: str, monkeypatch: pytest.MonkeyPatch, on_kernels: list[Any]
) -> None:
    monkeypatch.setattr(kernels, "cross_entropy", kernel)
    loss, one_pass, logits = nn.CrossEntropyLoss(), OnePass(), noise(4, 7)
    with pytest.warns(UserWarning, match=said):
        assert torch.equal(one_pass(loss, logits, LABELS), F.cross_entropy(logits, LABELS))
    assert torch.equal(one_pass(loss, logits, LABELS), F.cross_entropy(logits, LABELS))


def test_the_losss_own_errors_stay_the_callers_and_say_nothing_of_the_kernel(on_kernels: list[Any]) -> None:
    one_pass = OnePass()
    with pytest.raises(ValueError, match="batch_size"):
        one_pass(nn.CrossEntropyLoss(), noise(4, 7), torch.tensor([0, 1]))
    one_pass(nn.CrossEntropyLoss(), noise(4, 7), LABELS)
    assert list(one_pass.agrees.values()) == [True]


def test_few_shapes_are_remembered(on_kernels: list[Any]) -> None:
    loss, one_pass = nn.CrossEntropyLoss(), OnePass()
    for count in range(1, KEPT_SHAPES + 3):
        one_pass(loss, noise(count, 3), torch.zeros(count, dtype=torch.int64))
    assert len(one_pass.agrees) == KEPT_SHAPES
    assert all(one_pass.agrees.values())


def test_a_step_that_runs_as_it_is_has_pytorchs_loss(on_kernels: list[Any]) -> None:
    network = nn.Linear(3, 7)
    for unchanged, calls in (("asked for", 0), ("", 2)):
        step = fast_step(network, nn.CrossEntropyLoss(), torch.optim.SGD(network.parameters(), 0.1), unchanged=unchanged)
        step(noise(4, 3), LABELS)
        assert len(on_kernels) == calls


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["classes", "shares"])
def test_captured_steps_learn_as_with_pytorchs_loss_on_the_gpu(kind: str) -> None:
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
        assert step._one_pass is not None
        assert list(step._one_pass.agrees.values()) == ([True] if isinstance(loss, nn.Module) else [])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
