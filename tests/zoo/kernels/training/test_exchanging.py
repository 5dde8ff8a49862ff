"""`fast_step` of a DistributedDataParallel network learns what the wrapper itself would: here with one process, elsewhere with two."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zoo import fast
from zoo.kernels.training import fast_step


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.register_buffer("place", torch.randn(1, 4, 6, 6).contiguous(memory_format=torch.channels_last))
        self.place: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.head((torch.relu(self.norm(self.conv(x))) + self.place).mean((2, 3)))


Loss = Callable[[nn.Module], Callable[[Any, Tensor], Tensor]]


def squares(network: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    del network
    return lambda outputs, target: (outputs - target).square().mean()


def penalised(network: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    weights = list(network.parameters())
    return lambda outputs, target: (outputs - target).square().mean() + 0.1 * sum(w.square().sum() for w in weights)


def both(change: Callable[[nn.Module], object] = lambda network: None, loss: Loss = squares) -> tuple[nn.Module, nn.Module, Any]:
    """Train a network two steps under the wrapper, and a copy by `fast_step` of the wrapper; return both, and the step."""
    torch.manual_seed(0)
    eager = Net().train()
    quick, images, target = copy.deepcopy(eager), torch.randn(4, 3, 8, 8), torch.randn(4, 2)
    model = fast(quick, train=True, example=images)
    wrapped, ours = DistributedDataParallel(eager), DistributedDataParallel(model)
    change(eager)
    change(quick)
    optimizer, same = (torch.optim.SGD(n.parameters(), 0.1, momentum=0.9) for n in (eager, quick))
    step, plain = fast_step(ours, loss(quick), same, dtype=None), loss(eager)
    for _ in range(2):
        optimizer.zero_grad()
        plain(wrapped(images), target).backward()
        optimizer.step()
        step(images, target)
    return eager, quick, step


def same(eager: nn.Module, quick: nn.Module) -> None:
    torch.testing.assert_close(quick.state_dict(), eager.state_dict())


@pytest.mark.usefixtures("alone")
def test_buffers_keep_their_values_in_whichever_order_they_lie() -> None:
    same(*both()[:2])


@pytest.mark.usefixtures("alone")
def test_a_penalty_in_the_loss_counts() -> None:
    same(*both(loss=penalised)[:2])


@pytest.mark.usefixtures("alone")
def test_hooks_of_parameters_are_called() -> None:
    eager, quick, step = both(lambda network: network.get_parameter("conv.weight").register_hook(torch.zeros_like))
    same(eager, quick)
    assert "a parameter has hooks" in step.unchanged


@pytest.mark.usefixtures("alone")
def test_buffers_that_were_exchanged_are_followed() -> None:
    same(*both(lambda network: network.load_state_dict(copy.deepcopy(network.state_dict()), assign=True))[:2])


@pytest.mark.usefixtures("alone")
def test_a_shape_that_comes_first_inside_of_a_step_is_planned_there() -> None:
    network = Net().train()
    network.place.zero_()
    model = fast(network, train=True, example=torch.randn(4, 3, 8, 8))
    step = fast_step(DistributedDataParallel(model), squares(network), torch.optim.SGD(network.parameters(), 0.1), dtype=torch.bfloat16)
    step(torch.randn(4, 3, 8, 8), torch.randn(4, 2))
    assert model.unchanged == ""


@pytest.mark.usefixtures("alone")
def test_after_an_error_the_parameters_are_back() -> None:
    network = Net().train()
    before = dict(network.named_parameters())
    step = fast_step(DistributedDataParallel(network), lambda *_: 1 / 0, torch.optim.SGD(network.parameters(), 0.1), dtype=None)
    with pytest.raises(ZeroDivisionError):
        step(torch.randn(2, 3, 8, 8), torch.randn(2, 2))
    assert all(parameter is before[name] for name, parameter in network.named_parameters())


@pytest.mark.parametrize(("name", "asked"), [("find_unused_parameters", {"find_unused_parameters": True}), ("nothing", {})])
@pytest.mark.usefixtures("alone")
def test_parameters_that_may_not_learn_are_left_to_the_wrapper(name: str, asked: dict[str, bool]) -> None:
    network = Net().train()
    wrapped = DistributedDataParallel(network, **asked)  # pyright: ignore[reportArgumentType]
    step = fast_step(wrapped, squares(network), torch.optim.SGD(network.parameters(), 0.1), dtype=None)
    assert ("not all parameters learn" in step.unchanged) == (name == "find_unused_parameters")
