"""What answers from memory of its own: which inputs are copied, and what happens to those that lie in that memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo import fast
from zoo.kernels.plans.replayed import Replayed
from zoo.kernels.reports.built_plan import Built

CPU = torch.device("cpu")


class Stub(Replayed):
    """Computes as a replay does: inputs are copied to where it reads, and answers lie where the next ones will."""

    captured = True

    def __init__(self, rooms: list[Tensor], function: Callable[..., Tensor], keeps: bool = True) -> None:
        super().__init__(CPU)
        self.buffers, self.function, self.keeps_rooms, self.static = rooms, function, keeps, True
        self.copies, self.out = 0, function(*rooms).clone()
        self._raw_stream = 0

    def _rooms(self) -> list[Tensor | None]:
        return [*self.buffers]

    def _own_memory(self) -> list[Tensor]:
        return self.buffers

    def _constants(self) -> list[Tensor]:
        return []

    def _replay(self, tensors: list[Tensor]) -> list[Any]:
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            if tensor is not buffer:
                buffer.copy_(tensor)
                self.copies += 1
        self.out.copy_(self.function(*self.buffers))
        if not self.keeps_rooms:
            for buffer in self.buffers:
                buffer.fill_(1000.0)
        return [self.out]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)


def difference(a: Tensor, b: Tensor) -> Tensor:
    return a - 2 * b


def test_rooms_in_their_places_are_not_copied_and_in_others_they_are() -> None:
    plan = Stub([torch.zeros(3), torch.zeros(3)], difference)
    a, b = plan.rooms()
    assert a is not None
    assert b is not None
    cases = (((a, b), -19.0, 0), ((b, a), 8.0, 2), ((b, b), -10.0, 1), ((torch.ones(3), b), -19.0, 1), ((b[:], a[:]), 8.0, 2))
    for given, expected, copies in cases:
        a.fill_(1.0)
        b.fill_(10.0)
        plan.copies = 0
        assert plan(list(given))[0].eq(expected).all()
        assert plan.copies == copies


def test_an_answer_that_is_given_back_is_copied_first() -> None:
    plan = Stub([torch.zeros(3), torch.zeros(3)], difference)
    (answer,) = plan([torch.full((3,), 5.0), torch.ones(3)])
    assert plan.overwrites([answer])
    assert not plan.overwrites([torch.zeros(3)])
    assert plan([torch.full((3,), 4.0), answer])[0].eq(4.0 - 2 * 3.0).all()


@pytest.mark.parametrize("keeps", [True, False])
def test_after_weights_changed_the_network_answers_what_was_written(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = nn.Linear(4, 4).eval()
    model: Any = fast(own, CPU, torch.float32, example=torch.zeros(2, 4), progress=False)
    ((key, built),) = model._plans.items()
    plan = Stub([torch.zeros(2, 4)], lambda x: own(x).detach(), keeps)
    model._plans[key], model.static = Built(plan, built.spec, built.report), True
    (room,) = plan.rooms()
    assert room is not None
    for _ in range(2):
        image = torch.randn(2, 4)
        with torch.no_grad():
            torch.testing.assert_close(model(room.copy_(image)), own(image))
            assert not plan.copies
            own.weight.mul_(2.0)
            torch.testing.assert_close(model(room.copy_(image)), own(image))
            torch.testing.assert_close(model(image), own(image))
            own.weight.mul_(0.5)
        model = fast(own, CPU, torch.float32, example=torch.zeros(2, 4), progress=False)
        model._plans[key], model.static = Built(plan, built.spec, built.report), True
        plan.copies = 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_calls_that_only_the_network_can_answer_go_to_it() -> None:
    own = nn.Linear(4, 4).eval()
    model: Any = fast(own, CPU, torch.float32, example=torch.zeros(2, 4), progress=False)
    ((key, built),) = model._plans.items()
    plan = Stub([torch.zeros(2, 4)], lambda x: own(x).detach())
    plan.static = False
    model._plans[key] = Built(plan, built.spec, built.report)
    x = torch.randn(2, 4)
    torch.testing.assert_close(model(x), own(x))
    assert plan.copies == 1
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    with torch.no_grad():
        for found, right in zip(model(nested).unbind(), own(nested).unbind(), strict=True):
            torch.testing.assert_close(found, right)
        torch.testing.assert_close(torch.func.vmap(model)(x[None]), own(x[None]))
        torch.testing.assert_close(model(torch.imag(torch.complex(x, x).conj())), own(-x))
    assert plan.copies == 2  # the last, of what the bit stands for
    with pytest.raises(RuntimeError, match="no gradients"):
        model(x.clone().requires_grad_())
