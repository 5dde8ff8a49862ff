"""What has no plan runs unchanged, is tried once, and says why."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.kernels.answers import close, eager
from tests.zoo.kernels.mapped import program
from zoo import ResNet20, fast, why
from zoo.kernels.api import network as answering
from zoo.kernels.api.network import KEPT_PLANS
from zoo.kernels.engines import build as building
from zoo.kernels.errors import Untraceable
from zoo.kernels.passes.trace import trace
from zoo.kernels.plans.plan import Plan
from zoo.kernels.tuning.request import Request


class DependsOnValues(nn.Module):
    """Images of at least so many pixels' width can't be traced."""

    def __init__(self, width: int = 0) -> None:
        super().__init__()
        self.conv, self.width = nn.Conv2d(3, 4, 3), width

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y if x.shape[-1] < self.width or y.sum() > 0 else -y


def test_a_network_that_depends_on_values_runs_unchanged_and_says_why() -> None:
    model = DependsOnValues()
    with pytest.warns(UserWarning, match="runs unchanged"):
        quick = fast(model, "cpu")
    x = torch.randn(2, 3, 12, 12)
    close(quick(x), eager(model, x))
    close(copy.deepcopy(quick)(x), eager(model, x))
    assert "runs unchanged" in str(why(quick))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each plan that is begun."""
    found, build = list[Any](), building.build_cpu

    def counting(request: Request) -> Any:
        found.append(request.args)
        return build(request)

    monkeypatch.setattr(building, "build_cpu", counting)
    return found


UNPLANNED = "runs unchanged for this shape"


def test_a_shape_that_has_no_plan_is_tried_once(planned: list[Any]) -> None:
    model = DependsOnValues(16).eval()
    quick = fast(model, "cpu", example=torch.randn(2, 3, 12, 12))
    large = torch.randn(2, 3, 18, 18)
    with pytest.warns(UserWarning, match=UNPLANNED) as warned:
        first = quick(large)
    assert warned[0].filename == __file__
    close(first, eager(model, large))
    close(quick(large + 1), eager(model, large + 1))  # a second warning would fail this test
    assert len(planned) == 2
    assert "2x3x18x18 runs unchanged: " in str(why(quick))
    assert len(why(quick).plans) == 1
    assert why(quick).parity is not None
    small = torch.randn(2, 3, 12, 12)
    close(quick(small), eager(model, small))
    with pytest.raises(Untraceable):
        quick.prepare((large,))
    quick.load_state_dict(model.state_dict())
    with pytest.warns(UserWarning, match=UNPLANNED):
        quick(large)
    assert len(planned) == 4
    with pytest.warns(UserWarning, match=UNPLANNED):
        copy.deepcopy(quick)(large)


def test_threads_that_bring_a_shape_without_a_plan_try_it_once(planned: list[Any]) -> None:
    model = DependsOnValues(16).eval()
    quick = fast(model, "cpu", example=torch.randn(2, 3, 12, 12))
    large, answers, together = torch.randn(2, 3, 18, 18), list[Tensor](), threading.Barrier(4)

    def call() -> None:
        together.wait()
        answers.append(quick(large))

    def run() -> None:
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with pytest.warns(UserWarning, match=UNPLANNED) as warned:
        run()
    assert len(planned) == 2
    assert len([one for one in warned if UNPLANNED in str(one.message)]) == 1
    assert len(answers) == 4
    for answer in answers:
        close(answer, eager(model, large))


def test_shapes_without_a_plan_cost_no_plan_its_place(planned: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = DependsOnValues(16).eval()
    small = torch.randn(2, 3, 12, 12)
    quick = fast(model, "cpu", example=small)
    monkeypatch.setattr(answering, "KEPT_REASONS", 2)
    for count in range(1, KEPT_PLANS + 2):
        with pytest.warns(UserWarning, match=UNPLANNED):
            quick(torch.randn(count, 3, 18, 18))
    assert len(planned) == KEPT_PLANS + 2
    quick(small)
    quick(torch.randn(KEPT_PLANS + 1, 3, 18, 18))
    assert len(planned) == KEPT_PLANS + 2
    with pytest.warns(UserWarning, match=UNPLANNED):
        quick(torch.randn(1, 3, 18, 18))  # forgotten meanwhile
    assert len(planned) == KEPT_PLANS + 3


def test_a_warning_that_is_an_error_is_one_once(planned: list[Any]) -> None:
    model = DependsOnValues(16).eval()
    quick = fast(model, "cpu", example=torch.randn(2, 3, 12, 12))
    large = torch.randn(2, 3, 18, 18)
    with pytest.raises(UserWarning, match=UNPLANNED):  # as this project's tests have warnings
        quick(large)
    close(quick(large), eager(model, large))
    assert len(planned) == 2


def test_what_may_pass_is_tried_again(planned: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = ResNet20().eval()
    quick = fast(model, "cpu", example=torch.randn(2, 3, 32, 32))
    build, x = building.build_cpu, torch.randn(3, 3, 32, 32)

    def failing(*given: Any) -> Any:
        monkeypatch.setattr(building, "build_cpu", build)
        raise Untraceable("the device has no room just now", lasting=False)

    monkeypatch.setattr(building, "build_cpu", failing)
    with pytest.warns(UserWarning, match="no room just now"):
        quick(x)
    assert "no room" not in str(why(quick))
    close(quick(x), eager(model, x))
    assert len(planned) == 2
    assert len(why(quick).plans) == 2


def test_what_fails_twice_fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tried = ResNet20().eval(), list[Any]()
    quick = fast(model, "cpu", example=torch.randn(2, 3, 32, 32))

    def failing(*given: Any) -> Any:
        tried.append(given)
        raise Untraceable("a step fails", lasting=False)

    monkeypatch.setattr(building, "build_cpu", failing)
    x, other = torch.randn(3, 3, 32, 32), torch.randn(4, 3, 32, 32)
    for images in (x, other, x):  # another's failure between
        with pytest.warns(UserWarning, match="a step fails"):
            quick(images)
    close(quick(x), eager(model, x))
    assert len(tried) == 3
    assert "3x3x32x32 runs unchanged: a step fails" in str(why(quick))


def test_a_call_that_is_refused_in_any_dtype_changes_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    x = torch.randn(2, 3, 8, 8)
    quick = fast(model, "cpu", torch.bfloat16, example=x)
    with pytest.raises(RuntimeError, match="type"):
        quick(torch.ones(2, 3, 8, 8, dtype=torch.int64))
    assert not quick.unchanged
    assert quick.dtype == torch.bfloat16
    assert quick(x).shape == (2, 4, 6, 6)
    assert len(why(quick).plans) == 1


def test_what_the_network_itself_refuses_is_not_announced_as_unchanged(planned: list[Any]) -> None:
    quick = fast(nn.Linear(4, 4).eval(), "cpu", example=torch.randn(2, 4))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            quick(torch.randn(2, 5))
    assert "2x5" not in str(why(quick))
    assert len(planned) == 3


def test_writing_into_a_viewed_tensor_is_not_traced_wrongly() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            part = x[:, :1]
            x = x.mul_(2)
            return part + x[:, 1:2]

    x = torch.randn(1, 3, 4, 4)
    with torch.inference_mode():
        (found,) = Plan(program(Views(), x)).eager([x.clone()])
        torch.testing.assert_close(found, Views()(x.clone()))


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand_like,
        lambda x: torch.empty_like(x).geometric_(0.5),
        lambda x: torch.empty_like(x).cauchy_(),
        lambda x: torch.empty_like(x).log_normal_(),
        lambda x: torch.native_dropout(x, 0.5, True)[0],
    ],
)
def test_random_layers_are_not_traced(draw: Callable[[Tensor], Tensor]) -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + draw(x)

    with pytest.raises(Untraceable, match="random"):
        trace(Noise(), (torch.randn(1, 3, 4, 4),), {})
