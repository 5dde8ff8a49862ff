"""Weights are rounded, and biases keep the means where they were: a plan in half precision is nearer to the network than plain eager."""

from __future__ import annotations

import copy
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import zoo
from tests.zoo.kernels.networks import settled
from zoo.kernels import ops
from zoo.kernels.comparing.parity import ALLOWED
from zoo.kernels.comparing.sample_images import natural_images, noise_like
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans import balance as balancing
from zoo.kernels.plans import build as building
from zoo.kernels.plans.balance import balance, key, mean_inputs, rounded
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights, packed
from zoo.kernels.tuning.steps import Setting

CPU = torch.device("cpu")


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def planned(model: nn.Module, x: Tensor, dtype: torch.dtype, balanced: bool) -> Tensor:
    setting = Setting(CPU, dtype)
    graph, places = understand(model, (x,), {})
    if balanced:
        learnt = natural_images(tuple(x.shape), CPU, seed=5)
        balance(graph, mean_inputs(graph, places, [[[learnt]], [[noise_like(learnt)]]], setting), setting)
    image = x.to(dtype).contiguous(memory_format=torch.channels_last)
    return Program(graph, places, {}, setting, Weights()).run([[image]])[0]


def test_balanced_plans_lose_less_than_eager_and_than_plainly_rounded_ones() -> None:
    lost: dict[tuple[str, bool], list[float]] = {}
    for seed in range(4):
        model = settled(zoo.ResNet20, seed)
        pictures = {"natural": natural_images((8, 3, 32, 32), CPU), "noise": torch.randn(8, 3, 32, 32)}
        for kind, x in pictures.items():
            with torch.no_grad():
                want = copy.deepcopy(model).double()(x.double())
                eager = error(copy.deepcopy(model).bfloat16()(x.bfloat16()), want)
                for way in (True, False):
                    lost.setdefault((kind, way), []).append(error(planned(model, x, torch.bfloat16, way), want) / eager)
    for kind in ("natural", "noise"):  # of other pictures than the means
        assert statistics.geometric_mean(lost[kind, True]) < 0.95
        assert statistics.geometric_mean(lost[kind, True]) < 0.85 * statistics.geometric_mean(lost[kind, False])
    assert max(lost["natural", False]) > ALLOWED  # such a network ran unchanged
    assert max(lost["natural", True]) <= ALLOWED


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1, stride=2)
        self.second = nn.Conv2d(64, 32, 3, bias=False, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize(
    ("kernel", "options"), [(3, {}), (5, {"stride": 2}), ((3, 2), {"padding": (0, 2), "dilation": 2}), (1, {"stride": 3})]
)
def test_means_are_those_of_what_each_tap_reads(kernel: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, kernel, **options).eval()
    x = torch.randn(2, 3, 11, 13)
    graph, places = understand(conv, (x,), {})
    found = mean_inputs(graph, places, [[[x]]], Setting(CPU, torch.bfloat16))[key(next(n for n in graph.nodes if n.op == "conv"))]
    patches = nn.functional.unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride)  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(found[0], patches.mean((0, 2)).view(3, *conv.kernel_size))


def test_depthwise_convolutions_are_given_contiguous_maps_and_others_channels_last() -> None:
    seen: list[tuple[int, bool]] = []  # groups, and whether the map is contiguous

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is nn.functional.conv2d:
                seen.append(((kwargs or {}).get("groups", args[6] if len(args) > 6 else 1), args[0].is_contiguous()))
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 8, 1)).eval()
    x = torch.randn(2, 3, 12, 12)
    graph, places = understand(model, (x,), {})
    with Watching():
        mean_inputs(graph, places, [[[x]]], Setting(CPU, torch.bfloat16))
    assert (16, True) in seen
    assert {contiguous for groups, contiguous in seen if groups == 1} == {False}


def test_convolutions_of_one_shape_are_rounded_together_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(5)), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 3, groups=2)).eval()
    x, setting = torch.randn(2, 8, 9, 9), Setting(CPU, torch.bfloat16)
    weights: list[list[Tensor]] = []
    for piece in (balancing.PIECE, 2 * 8 * 8 * 9, 1):  # all five, two and two and one, each alone
        monkeypatch.setattr(balancing, "PIECE", piece)
        graph, places = understand(model, (x,), {})
        balance(graph, mean_inputs(graph, places, [[[x]], [[noise_like(x)]]], setting), setting)
        weights.append([node.attrs["weight"] for node in graph.nodes if node.op == "conv"])
        assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights[-1])
    for others in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], others, strict=True))
    assert not all(torch.equal(w, n.weight.bfloat16()) for w, n in zip(weights[0], model, strict=True))  # pyright: ignore[reportArgumentType]


def test_rounding_leaves_the_means_of_both_kinds_where_they_were() -> None:
    torch.manual_seed(0)
    model, setting = Two().eval(), Setting(CPU, torch.bfloat16)
    kinds = [3 + torch.randn(4, 3, 13, 12), torch.randn(4, 3, 13, 12)]
    graph, places = understand(model, (kinds[0],), {})
    means = mean_inputs(graph, places, [[[kinds[0][:2]], [kinds[0][2:]]], [[kinds[1]]]], setting)
    first, second = (node for node in graph.nodes if node.op == "conv")
    with torch.no_grad():
        inner = [torch.relu(model.first(x)) for x in kinds]
    balance(graph, means, setting)
    for node, layer, given in ((first, model.first, kinds), (second, model.second, inner)):
        made, exact = node.attrs["weight"], layer.weight.detach()
        assert made.dtype == torch.bfloat16
        assert (made.float() - exact).abs().max() <= 2**-7 * exact.abs().max()  # a neighbour, if not the nearest
        for x in given:
            left, plain = (
                nn.functional.conv2d(x, exact - w.float(), None, layer.stride, layer.padding, 1, layer.groups).mean((0, 2, 3))
                for w in (made, exact.bfloat16())
            )
            assert left.norm() < (0.9 if node is first else 0.6) * plain.norm()  # of 27 weights fewer can turn than of 288


def test_what_is_rounded_already_stays() -> None:
    exact = torch.randn(5, 3, 3, 3).bfloat16()
    assert torch.equal(rounded(exact.float(), torch.randn(2, 3, 3, 3), torch.bfloat16), exact)
    tiny = torch.zeros(4, 2, 1, 1)
    assert torch.equal(rounded(tiny, torch.ones(1, 2, 1, 1), torch.float16), tiny.half())


@pytest.mark.parametrize("batch", [1, 20])
def test_every_convolution_of_a_plan_has_its_means_whatever_the_batch(batch: int) -> None:
    model, setting = settled(zoo.ResNet20), Setting(CPU, torch.bfloat16)
    batches = [((natural_images((batch, 3, 32, 32), CPU, seed),), {}) for seed in range(2 if batch == 1 else 1)]
    graph, places = understand(model, *batches[0])
    means = building._means(model, graph, places, batches, setting)  # of a large batch some images only are looked at
    assert means.keys() == {key(node) for node in graph.nodes if node.op == "conv"}
    assert len(means) == 20  # 19 convolutions and the last layer; the shortcuts have no parameters


def test_weights_lie_in_one_piece_of_memory_that_plans_of_all_shapes_share() -> None:
    model, setting = settled(zoo.ResNet20), Setting(CPU, torch.bfloat16)
    kept: dict[tuple[Any, ...], Tensor] = {}
    made: list[list[Tensor]] = []
    for size in (32, 48):
        images = natural_images((2, 3, size, size), CPU)
        graph, places = understand(model, (images,), {})
        means = mean_inputs(graph, places, [[[images]], [[noise_like(images)]]], setting) if not made else {}
        alone, _ = understand(model, (images,), {})
        balance(graph, means, setting, kept)
        balance(alone, means, setting)
        made.append([node.attrs["weight"] for node in graph.nodes if node.op == "conv"])
        if means:
            assert all(
                torch.equal(a, node.attrs["weight"]) for a, node in zip(made[0], (n for n in alone.nodes if n.op == "conv"), strict=True)
            )
    assert all(one is other for one, other in zip(*made, strict=True))
    assert len({weight.untyped_storage().data_ptr() for weight in made[0]}) == 1
    exact = sum(weight.numel() for weight in made[0]) * 2
    assert exact <= made[0][0].untyped_storage().nbytes() < exact + 512 * len(made[0])
    assert all(weight.is_contiguous(memory_format=torch.channels_last) and weight.data_ptr() % 16 == 0 for weight in made[0])


class Halves(nn.Module):
    """Two convolutions with parts of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.chunk(2)
        return nn.functional.conv2d(nn.functional.conv2d(x, first, padding=1), second, padding=1)


class Nameless(nn.Module):
    """Two convolutions with tensors that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.randn(8, 8, 3, 3), torch.randn(8, 8, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(nn.functional.conv2d(x, self.first, padding=1), self.second, padding=1)


class Sized(nn.Module):
    """A convolution whose weight follows the image's size."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight / x.shape[-1], padding=1)


@pytest.mark.parametrize("made", [Halves, Nameless, Sized])
def test_weights_of_one_name_that_differ_are_not_shared(made: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, setting, kept, weights = made().eval(), Setting(CPU, torch.bfloat16), dict[tuple[Any, ...], Tensor](), Weights()
    for size in (12, 20, 12):
        x = torch.randn(2, 8, size, size)
        graph, places = understand(model, (x,), {})
        balance(graph, mean_inputs(graph, places, [[[x]]], setting), setting, kept)
        image = x.bfloat16().contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            assert error(Program(graph, places, {}, setting, weights).run([[image]])[0].double(), model(x).double()) < 0.02
        convolutions = [node for node in graph.nodes if node.op == "conv"]
        for node in convolutions:
            shared = packed(ops.load("conv"), node, {"weight": node.attrs["weight"]}, weights)["weight"]
            assert torch.equal(shared, node.attrs["weight"])


def test_an_interrupted_call_leaves_nothing_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 32, 32)
    model, setting, kept = settled(zoo.ResNet20), Setting(CPU, torch.bfloat16), dict[tuple[Any, ...], Tensor]()
    calls, exact = [0], balancing._rounded

    def failing(*given: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return exact(*given)

    graph, places = understand(model, (x,), {})
    means = mean_inputs(graph, places, [[[x]]], setting)
    monkeypatch.setattr(balancing, "_rounded", failing)
    with pytest.raises(KeyboardInterrupt):
        balance(graph, means, setting, kept)
    assert not kept
    graph, _ = understand(model, (x,), {})
    balance(graph, means, setting, kept)
    alone, _ = understand(model, (x,), {})
    balance(alone, means, setting)
    pairs = zip((n for n in graph.nodes if n.op == "conv"), (n for n in alone.nodes if n.op == "conv"), strict=True)
    assert all(torch.equal(a.attrs["weight"], b.attrs["weight"]) for a, b in pairs)
