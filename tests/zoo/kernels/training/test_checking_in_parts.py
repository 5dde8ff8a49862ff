"""Exact gradients of large batches are computed some images at a time, where a network mixes none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.kernels.training import checking
from zoo.kernels.training.checking import PART, Check
from zoo.kernels.training.record import record

COUNT = 2 * PART + 3


class Tokens(nn.Module):
    """Patches and two layers, and what `kind` says: something that mixes images, that keeps something, or that isn't read."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.patches = kind, nn.Conv2d(3, 8, 4, 4)
        self.norm = nn.BatchNorm2d(8) if "BatchNorm" in kind else nn.Identity()
        self.grow, self.shrink, self.idle = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))
        if "eval" in kind:
            self.norm.eval()

    def forward(self, x: Tensor) -> Any:
        y = self.norm(self.patches(x)).flatten(2).transpose(1, 2)
        y = y + self.shrink(torch.tanh(self.grow(y)))
        if self.kind == "mixes":
            y = y - y.mean(0)
        if self.kind == "a sum":
            return y.sum()
        if self.kind == "counts":
            self.seen.add_(y.detach().mean())
        return (y, y.mean(1).argmax(1)) if self.kind == "several" else y


def check_of(network: nn.Module, images: Tensor) -> tuple[Check, Any]:
    return Check(network, record(network, (images,), {}, images.device), (images,), {}, images.device, learning=False), network


def both(check: Check, network: nn.Module) -> tuple[Any, Any]:
    twin = check.twin(torch.float64)
    leaves = check.leaves(torch.float64, 0)
    parts = check._in_parts(twin, lambda leaves: twin(*leaves), leaves, 3)
    return parts, check._results(twin, lambda leaves: twin(*leaves), leaves, 3)


@pytest.mark.parametrize("kind", ["", "several", "BatchNorm, eval", "frozen", "of images"])
def test_parts_add_up_to_the_whole(kind: str) -> None:
    torch.manual_seed(0)
    network, images = Tokens(kind).train(), torch.randn(COUNT, 3, 8, 8, requires_grad=kind == "of images")
    network.norm.eval()
    network.grow.requires_grad_(kind != "frozen")
    parts, whole = both(*check_of(network, images))
    assert [len(group) for group in parts] == [len(group) for group in whole]
    for group, other in zip(parts, whole, strict=True):
        for one, right in zip(group, other, strict=True):
            assert one.shape == right.shape
            torch.testing.assert_close(one, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["mixes", "a sum", "counts", "BatchNorm"])
def test_what_mixes_images_or_keeps_something_is_computed_whole(kind: str) -> None:
    torch.manual_seed(0)
    network = Tokens(kind).train()
    check, _ = check_of(network, torch.randn(COUNT, 3, 8, 8))
    twin = check.twin()
    before = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    assert check._in_parts(twin, lambda leaves: twin(*leaves), check.leaves(None, 0), 3) is None
    assert all(torch.equal(before[name], tensor) for name, tensor in twin.state_dict().items())


def test_few_images_are_computed_whole() -> None:
    check, network = check_of(Tokens("").train(), torch.randn(PART, 3, 8, 8))
    assert check._in_parts(network, lambda leaves: network(*leaves), check.leaves(None, 0), 3) is None


def test_no_more_images_than_a_part_has_are_gone_back_through_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    check, _ = check_of(Tokens("").train(), torch.randn(COUNT, 3, 8, 8))
    seen, found = list[tuple[int, torch.dtype]](), torch.autograd.grad

    def grad(outputs: Any, *given: Any, **options: Any) -> Any:
        seen.extend((len(out), out.dtype) for out in outputs)
        return found(outputs, *given, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    steps, _, counted = checking.steps_of(check.recording, {})
    errors, wrong = check.compared(checking.replay_of(check.recording, steps, counted, None, True))
    assert errors
    assert wrong == ""
    assert sorted({count for count, dtype in seen if dtype == torch.float64}) == [3, PART]
    assert {count for count, dtype in seen if dtype == torch.float32} == {COUNT}
