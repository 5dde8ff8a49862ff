"""One pass on the meta device tells what a network is: its layers, who feeds whom, and what a dense layer flattens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from convert.network import Layer, layers


def by_name(network: nn.Module, shape: tuple[int, int, int]) -> dict[str, Layer]:
    return {layer.name: layer for layer in layers(network, shape)}


class Residual(nn.Module):
    """Declared in another order than it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4 * 3 * 2, 5)
        self.stem = nn.Conv2d(3, 4, 1, bias=False)
        self.norm = nn.BatchNorm2d(4, eps=1e-3)
        self.deep = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(4, 4, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.stem(x)).relu()
        y = y + self.deep(y)
        y = torch.cat([y, y], 1)[:, :4]
        return self.fc(torch.flatten(self.up(y), 1))


def test_layers_come_in_the_order_in_which_they_compute() -> None:
    assert list(by_name(Residual(), (3, 3, 2))) == ["stem", "norm", "deep", "up", "fc"]


def test_each_layer_knows_its_kind_groups_eps_and_inputs() -> None:
    found = by_name(Residual(), (3, 3, 2))
    assert found["stem"] == Layer("stem", "conv", ("",), 1)
    assert found["norm"] == Layer("norm", "norm", ("stem",), eps=1e-3)
    assert found["deep"] == Layer("deep", "depthwise", ("norm",), 4)
    assert found["up"] == Layer("up", "transposed", ("norm", "deep"), 2)


def test_a_dense_layer_behind_a_flattened_map_knows_the_map() -> None:
    assert by_name(Residual(), (3, 3, 2))["fc"].grid == (4, 3, 2)


def grid(*between: nn.Module, size: int = 24) -> Any:
    return by_name(nn.Sequential(nn.Conv2d(3, 4, 1), *between, nn.Linear(size, 2)), (3, 3, 2))[str(len(between) + 1)].grid


def test_the_map_is_followed_through_what_keeps_the_shape() -> None:
    assert grid(nn.Flatten(), nn.ReLU(), nn.Dropout()) == (4, 3, 2)


def test_one_pixel_has_no_order() -> None:
    assert grid(nn.AdaptiveAvgPool2d(1), nn.Flatten(), size=4) is None


def test_a_dense_layer_behind_another_reads_no_map() -> None:
    assert grid(nn.Flatten(), nn.Linear(24, 24), nn.ReLU()) is None


def test_a_layer_that_is_called_twice_is_listed_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.conv(x))

    assert layers(Twice(), (3, 2, 2)) == [Layer("conv", "conv", ("",))]


def test_a_module_with_a_parameter_of_its_own_is_of_another_kind() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    assert by_name(nn.Sequential(nn.Conv2d(3, 3, 1), Scaled()), (3, 2, 2))["1"] == Layer("1", "other", ("0",))


def test_the_network_is_not_changed() -> None:
    network = Residual().train()
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    layers(network, (3, 3, 2))
    assert network.training
    assert all(module.training for module in network.modules())
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
    assert not network.stem._forward_hooks
    assert all(parameter.device.type == "cpu" for parameter in network.parameters())


def test_a_network_in_float64_is_followed_too() -> None:
    assert list(by_name(Residual().double(), (3, 3, 2))) == ["stem", "norm", "deep", "up", "fc"]


def test_a_norm_behind_an_activation_is_not_direct_and_one_behind_a_dropout_is() -> None:
    between = (nn.ReLU(), nn.ReLU(inplace=True), nn.Dropout2d(), nn.Identity(), nn.AvgPool2d(1))
    found = [layers(nn.Sequential(nn.Conv2d(3, 4, 1), each, nn.BatchNorm2d(4)), (3, 8, 8))[1].direct for each in between]
    assert found == [False, False, True, True, False]
