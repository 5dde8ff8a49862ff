"""Dense layers of pixels, as ConvNeXt and Swin have them: convolutions of the map, whose channels go last and come back for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zoo.kernels.mapped import program
from zoo.kernels.passes.aten import run_aten
from zoo.kernels.passes.pipeline import understand
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


class Factors(nn.Module):
    """Factors as small as those that ConvNeXt begins with, which float16 weights could not hold; and a group norm of a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(3, 8, 1), nn.Conv2d(4, 8, 1), nn.GroupNorm(2, 4)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.second(self.norm(self.first(x)[:, 4:]))


class Constant(nn.Module):
    """A constant map that a kernel reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.register_buffer("constant", torch.rand(2, 8, 6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + self.constant)


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
    "factors": Factors,
    "constant": Constant,
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


def test_a_small_factor_stays_out_of_weights(device: torch.device) -> None:
    network, x = draw("factors", device)
    with torch.inference_mode():
        graph, _ = understand(network, (x,), {})
        assert [node.op for node in graph.steps()][-2:] == ["conv", "pointwise"]
        (scaled,) = (node.attrs["scale"] for node in graph.steps() if node.op == "pointwise")
    assert torch.equal(scaled, torch.full_like(scaled, 1e-5))


def test_several_dense_layers_read_what_is_laid_out_once(device: torch.device) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).softmax(1).reshape(2, 5, 6, 8).transpose(1, 2).contiguous()
            return self.a(y) + self.b(y) * self.c(y)

    network, x = Several().eval().to(device), torch.randn(2, 3, 6, 5, device=device)
    with torch.inference_mode():
        made = program(network, x, lambda node: True)
        images = [[x.contiguous(memory_format=torch.channels_last)]]
        torch.testing.assert_close(made.run(images)[0], network(x))
        with Copies() as copies:
            made.run(images)
    assert copies.sizes.count(2 * 5 * 6 * 8) <= 2  # for the three layers, and where the softmax is channels_last for its reshape


def test_group_norm_gets_memory_as_a_gpu_needs_it() -> None:
    """On a GPU PyTorch's operator takes no map in channels_last memory; what copies for it is no step of a trace."""
    network, x = draw("factors", torch.device("cpu"))
    with torch.inference_mode():
        graph, _ = understand(network, (x,), {})
        (node,) = (node for node in graph.steps() if node.op == "aten" and "group_norm" in str(node.attrs["func"]))
        map_ = torch.randn(2, 8, 6, 5).contiguous(memory_format=torch.channels_last)[:, 4:]
        given = list[Tensor]()

        class Seen(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is node.attrs["func"]:
                    given.append(args[0])
                return func(*args, **(kwargs or {}))

        with Seen():
            run_aten(node, [map_, *(source.attrs["tensor"] for source in node.inputs[1:])], x.device)
    assert [tensor.is_contiguous() for tensor in given] == [True]


def test_why_names_what_no_row_is_for(device: torch.device) -> None:
    network, x = draw("tokens", device)
    graph, _ = understand(network, (x,), {})
    assert untimed(graph) == ["beside these, and not in the sum, PyTorch computes _softmax, sub"]
    assert untimed(understand(nn.Sequential(nn.Conv2d(3, 4, 1)).eval().to(device), (x,), {})[0]) == []
