"""Dense layers of pixels, as ConvNeXt and Swin have them: convolutions of the map, whose channels go last and come back for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zoo.kernels.mapped import program
from zoo.kernels.passes import understand
from zoo.kernels.plans.plan import Plan
from zoo.kernels.plans.rows import untimed


class Scaled(nn.Module):
    """ConvNeXt's block: norm and dense layers over the last dimension, a factor for each channel, a shortcut."""

    def __init__(self, factors: tuple[int, ...] = (8, 1, 1)) -> None:
        super().__init__()
        self.first, self.depthwise = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.scale = nn.Parameter(torch.rand(factors) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.scale * self.narrow(nn.functional.gelu(self.wide(y))).permute(0, 3, 1, 2)


class Residual(nn.Module):
    """Swin's second half of a block: everything has its channels last, the sum too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.wide, self.narrow = nn.Conv2d(3, 8, 1), nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).permute(0, 2, 3, 1))
        x = x + self.narrow(torch.relu(self.wide(x)))
        return self.norm(x)


class Tokens(nn.Module):
    """What is no map is seen as one, and a kernel reads it: memory in the order of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(5, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        tokens = torch.softmax(x.flatten(2), 2).unflatten(1, (2, 4)).flatten(1, 2).view(x.shape[0], 6, 5, 8)
        return self.last(torch.relu(tokens - 0.02).transpose(1, 2))


class Shown(nn.Module):
    """Gives a map as it is and with its channels last, and a sum with a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.register_buffer("constant", torch.rand(2, 6, 5, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.first(x)
        last = x.permute(0, 2, -1, 1)
        return x, torch.relu(last), last + self.constant


class Single(nn.Module):
    """One row of pixels, and a dense layer of as many values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "scaled": Scaled,
    "scaled by image": lambda: Scaled((1, 8, 1, 1)),
    "scaled by one number": lambda: Scaled((1,)),
    "residual": Residual,
    "tokens": Tokens,
    "shown": Shown,
    "over width": Single,
}


def draw(name: str, device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return NETWORKS[name]().eval().to(device), torch.randn(2, 3, 6, 5, device=device)


@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_give_what_the_network_does(name: str, device: torch.device) -> None:
    network, x = draw(name, device)
    with torch.inference_mode():
        got, want = Plan(program(network, x)).eager([x]), network(x)
    for mine, theirs in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


class Copies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["scaled", "residual"])
def test_nothing_is_copied_and_dense_layers_take_in_what_is_around_them(name: str, device: torch.device) -> None:
    network, x = draw(name, device)
    with torch.inference_mode():
        made = program(network, x, lambda node: True)  # by PyTorch's operators: Triton's interpreter copies for itself
        made.run([[x.contiguous(memory_format=torch.channels_last)]])  # weights are laid out
        with Copies() as copies:
            made.run([[x.contiguous(memory_format=torch.channels_last)]])
    assert [size for size in copies.sizes if size >= 2 * 6 * 5] == []
    convolutions = [node for node in made.steps if node.op == "conv"]
    assert not any(node.op in ("pointwise", "view") for node in made.steps)
    assert "residual" in convolutions[-1].roles
    assert convolutions[-2].attrs["act"] in ("gelu", "relu")


def test_why_names_what_no_row_is_for(device: torch.device) -> None:
    network, x = draw("residual", device)
    graph, _ = understand(network, (x,), {})
    assert untimed(graph) == ["beside these, and not in the sum, PyTorch computes native_layer_norm (2)"]
    assert untimed(understand(nn.Sequential(nn.Conv2d(3, 4, 1)).eval().to(device), (x,), {})[0]) == []
