"""Which networks answer for each image by itself: read off their operators, and never where it is not certain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tests.zoo.kernels.networks import Op, Random, ops
from zoo.catalogue import CATALOGUE
from zoo.kernels.passes.apart import _POINTWISE, _RULES, alike, apart
from zoo.kernels.passes.graph import Graph
from zoo.kernels.passes.lower import lower
from zoo.kernels.passes.trace import trace
from zoo.networks.model import Model

FAMILIES = {cls.family(): cls for cls in sorted(CATALOGUE.values(), key=lambda cls: -cls.params)}  # of each the smallest
UNCERTAIN = {"Swin", "SwinV2", "MaxViT", "BiT", "ConvNeXtV2", "PoolFormer", "PoolFormerV2", "CAFormer"}
"""Windows of all images stand in one dimension there, kernels are computed, or the operator of a norm or of attention is not known.

Batches stay whole there, and so they do in networks of tokens, whose operators are not known either, and which take images of one size.
"""
N, C = 4, 4  # as many channels as images: what confuses the two would not show in shapes


class Does(nn.Module):
    """A convolution, and what `act` makes of its maps."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.act = nn.Conv2d(3, C, 3), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.first(x))


class With(nn.Module):
    """What `act` makes of maps and of a constant."""

    def __init__(self, constant: Tensor, act: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.register_buffer("constant", constant)

    def forward(self, y: Tensor) -> Tensor:
        return self.act(y, self.get_buffer("constant"))


def lowered(network: nn.Module, *given: Tensor) -> Graph:
    graph = trace(network, given, {})
    lower(graph)
    return graph


def is_apart(network: nn.Module, *given: Tensor) -> bool:
    return apart(lowered(network, *given))


def images(size: int = 6) -> Tensor:
    return torch.randn(N, 3, size, size, generator=torch.Generator().manual_seed(0))


MIXING = {
    "mean": lambda y: y - y.mean(0, keepdim=True),
    "mean of all": lambda y: y - y.mean(),
    "max of all": lambda y: y / y.max(),
    "softmax": lambda y: F.softmax(y, 0),
    "rows": lambda y: y.mean((2, 3)).T @ y.mean((2, 3)),
    "product": lambda y: y.mean((2, 3)) @ y.mean((2, 3)),
    "broadcast": lambda y: y.mean((2, 3)) + y.mean((1, 2, 3)),
    "turned": lambda y: y.flip(0),
    "rolled": lambda y: y.roll(1, 0),
    "transposed": lambda y: y.mean((2, 3)).transpose(0, 1),
    "permuted": lambda y: y.permute(1, 0, 2, 3),
    "sorted": lambda y: y.sort(0)[0],
    "summed": lambda y: y.cumsum(0),
    "paired": lambda y: y.reshape(N // 2, 2, *y.shape[1:]).sum(1, keepdim=True).expand(-1, 2, -1, -1, -1).reshape(y.shape),
    "moved": lambda y: torch.cat([y[1:], y[:1]]),
    "norm": lambda y: F.batch_norm(y, None, None, training=True),
    "constant": With(torch.arange(float(N)).view(N, 1, 1, 1), lambda y, c: y + c),
    "constant, added": With(torch.randn(N, C, 4, 4), lambda y, c: y + c),
    "constant, concatenated": With(torch.randn(N, 1, 4, 4), lambda y, c: torch.cat([y, c], 1)),
    "constant, beside vectors": With(torch.randn(N, 1), lambda y, c: torch.cat([y.mean((2, 3)), c], 1)),
    "made": lambda y: y + torch.arange(float(N), device=y.device).view(N, 1, 1, 1),
    "one": lambda y: y[:1],
    "a branch": lambda y: torch.where(y.amax((0, 1, 2, 3), keepdim=True) > 0, y, -y),
    "along channels of all": lambda y: F.conv1d(y.mean(3).transpose(0, 1), torch.ones(N, N, 1)).transpose(0, 1),
}  # fmt: skip

MIXING |= {
    "a batch as one image": With(torch.randn(16, 16, 1, 1), lambda y, c: F.conv2d(y.reshape(1, 16, 4, 4), c).reshape(y.shape)),
    "padded": lambda y: F.pad(y, (0, 0, 0, 0, 0, 0, 1, -1)),
    "constant of channels that are last": With(torch.randn(N, 4, 4, C), lambda y, c: y.permute(0, 2, 3, 1) + c),
    "weights of the batch": lambda y: F.conv2d(y, y[:, :, :1, :1]),
    "turned weights": lambda y: F.conv2d(y, y.mean((2, 3)).view(N, C, 1, 1)),
    "channels as images": lambda y: F.max_pool2d(y.reshape(1, N * C, 4, 4), 2).reshape(N, C, 2, 2).flip(0),
}  # fmt: skip

UNSHOWN = {"a branch", "one", "made", *(name for name in MIXING if name.startswith("constant"))}
"""Of which an example doesn't show it: it mixes rarely, returns another shape, or knows an image by its place."""

APART = {
    "shuffled": lambda y: y.view(N, 2, C // 2, *y.shape[2:]).transpose(1, 2).reshape(y.shape),
    "halves": lambda y: torch.cat(list(y.chunk(2, 1)), 1),
    "uneven": lambda y: torch.cat(y.split([1, 3], 1)[::-1], 1),
    "sliced": lambda y: y[:, 1:, ::2],
    "all": lambda y: y[0:N],
    "one channel": lambda y: y[:, 0],
    "summed": lambda y: y.sum((1, 3)),
    "mean of channels": lambda y: y.mean(1, keepdim=True),
    "softmax": lambda y: F.softmax(y.mean((2, 3)), 1),
    "log": lambda y: F.log_softmax(y.mean((2, 3)), -1),
    "by the largest": lambda y: y / y.amax(1, keepdim=True),
    "scaled": With(torch.linspace(0, 1, C).view(1, C, 1, 1), lambda y, c: y * c),
    "row": With(torch.randn(4), lambda y, c: y + c),
    "slopes": nn.PReLU(C),
    "nearest": lambda y: F.interpolate(y, scale_factor=2),
    "bilinear": lambda y: F.interpolate(y, scale_factor=2, mode="bilinear"),
    "turned": lambda y: y.flatten(2).permute(0, 2, 1),
    "padded": lambda y: F.pad(y, (1, 1, 1, 1, 0, 2)),
    "vectors": lambda y: torch.cat([y.mean((2, 3)), y.amax((2, 3))], 1),
    "winner": lambda y: y.mean((2, 3)).argmax(1),
    "cast": lambda y: y.double(),
    "transposed convolution": nn.ConvTranspose2d(C, 2, 2),
    "dilated pool": lambda y: F.max_pool2d(y, 2, dilation=2),
    "where": lambda y: F.max_pool2d(y, 2, return_indices=True)[1],
    "pool": lambda y: F.avg_pool2d(y, 2, divisor_override=3),
    "uneven pool": lambda y: F.adaptive_avg_pool2d(y, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_images_is_not_apart(name: str) -> None:
    network = Does(MIXING[name]).eval()
    assert not is_apart(network, images())


def beside_itself(network: nn.Module, x: Tensor) -> Tensor:
    """Answer for each image with nothing but copies of it in the batch."""
    with torch.no_grad():
        return torch.cat([network(x[i : i + 1].expand(N, -1, -1, -1))[i : i + 1] for i in range(N)])


@pytest.mark.parametrize("name", sorted(MIXING.keys() - UNSHOWN))
def test_what_is_to_mix_images_does(name: str) -> None:
    network, x = Does(MIXING[name]).eval(), images()
    assert not torch.allclose(network(x), beside_itself(network, x), atol=1e-3)


@pytest.mark.parametrize("name", APART)
def test_what_keeps_images_apart_is_known(name: str) -> None:
    network, x = Does(APART[name]).eval(), images()
    assert is_apart(network, x)
    torch.testing.assert_close(network(x).detach(), beside_itself(network, x))


def test_tokens_that_attend_to_nothing_keep_images_apart() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(2), nn.LayerNorm(16), nn.Linear(16, 8), nn.GELU(), nn.LayerNorm(8)).eval()
    assert any(node.op == "layer_norm" for node in lowered(network, images()).nodes)
    assert is_apart(network, images())


def test_every_rule_is_tested() -> None:
    graphs = [lowered(Does(act).eval(), images()) for act in APART.values()]
    used = {node.attrs["func"] for graph in graphs for node in graph.nodes if node.op == "aten"}
    assert _RULES.keys() | _POINTWISE <= used


@pytest.mark.parametrize("cls", FAMILIES.values(), ids=lambda cls: cls.__name__)
def test_every_family_keeps_images_apart(cls: type[Model]) -> None:
    options = {"image_size": 2 * cls.size_multiple} if cls.resizable else {}
    network = cls(**options).eval()
    size = network.input_size if cls.fixed_size else max(cls.min_size, 64)
    assert is_apart(network, torch.zeros(2, 3, size, size)) == (not cls.fixed_size and cls.family().__name__ not in UNCERTAIN)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ops(), st.integers(5, 12), st.sampled_from(["mean", "flat", "map"]), st.integers(0, 99))
def test_random_networks_give_in_parts_what_they_give_together(drawn: list[Op], size: int, head: str, seed: int) -> None:
    network = Random(drawn, 3, size, head, seed).double()
    x = torch.randn(N, 3, size, size, generator=torch.Generator().manual_seed(seed)).double()
    assert is_apart(network, x)
    with torch.no_grad():
        whole, parts = pytree.tree_leaves(network(x)), [pytree.tree_leaves(network(part)) for part in x.split(2)]
    for wanted, *found in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.cat(found), wanted)


class Asks(nn.Module):
    """Does something else with more than two images, which no example need show."""

    def __init__(self, how: Callable[[Tensor, int], Any]) -> None:
        super().__init__()
        self.first, self.how = nn.Conv2d(3, C, 3), how

    def forward(self, x: Tensor) -> Any:
        return self.how(self.first(x), x.shape[0])


@pytest.mark.parametrize(
    ("how", "same"),
    [
        (lambda y, n: y.mean((2, 3)), True),
        (lambda y, n: (y.flatten(1), y.view(n, 2, 2, *y.shape[2:]).transpose(1, 2).reshape(y.shape), 3), True),
        (lambda y, n: y.clamp(-50, 50) if n > 2 else y, False),
        (lambda y, n: y.clamp(-n, n), False),
        (lambda y, n: y * n, False),
        (lambda y, n: F.max_pool2d(y, 2 if n > 2 else 3), False),
        (lambda y, n: F.relu(y) if n > 2 else F.silu(y), False),
        (lambda y, n: torch.cat([y, y] if n > 2 else [y, y * 1], 1), False),
        (lambda y, n: (y, n), False),
        (lambda y, n: {"a": y} if n > 2 else {"b": y}, False),
        (lambda y, n: (y, y * 2) if n > 2 else (y * 2, y), False),
        (lambda y, n: y.double() if n > 2 else y, False),
    ],
)
def test_a_part_has_to_have_the_same_graph(how: Callable[[Tensor, int], Any], same: bool) -> None:
    network = Asks(how).eval()
    whole, part = lowered(network, images()), lowered(network, images()[:2])
    assert apart(whole)
    assert alike(whole, part) == same


def test_other_weights_are_not_the_same_graph() -> None:
    first, second = Does(nn.BatchNorm2d(C)).eval(), Does(nn.BatchNorm2d(C)).eval()
    assert not alike(lowered(first, images()), lowered(second, images()))
    second.load_state_dict(first.state_dict())
    assert alike(lowered(first, images()), lowered(second, images()))


@pytest.mark.parametrize("act", [lambda y, c: (y, c), lambda y, c: c, lambda y, c: c * 2], ids=["beside", "alone", "computed"])
def test_a_constant_answer_is_no_batch(act: Callable[[Tensor, Tensor], Any]) -> None:
    for shape in ((7,), (N, 2), (1, 2)):
        assert not is_apart(Does(With(torch.randn(shape), act)).eval(), images())


def test_one_image_or_inputs_of_other_lengths_are_no_batch() -> None:
    network = Does(lambda y: y).eval()
    assert not is_apart(network, images()[:1])

    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * y

    assert is_apart(Two(), torch.zeros(N, 3), torch.zeros(N, 3))
    assert not is_apart(Two(), torch.zeros(N, 3), torch.zeros(1, 3))
    assert not is_apart(Two(), torch.zeros(N, 3), torch.zeros(3))
    assert not is_apart(Two(), torch.zeros(N, 3), torch.tensor(2.0))
