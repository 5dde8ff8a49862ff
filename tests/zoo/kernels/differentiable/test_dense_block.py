"""A block of dense layers as one op: values, gradients and running statistics are those of its layers, memory is linear in their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.zoo.kernels.tensors import off
from zoo.kernels.differentiable.dense import TENSORS, DenseLayer, Norm, dense_block, refuses
from zoo.kernels.ops._activation import ACTIVATIONS

RUNNING = (2, 3, 7, 8)
NAMES = ("weight", "bias", "mean", "var", "kernel", "weight2", "bias2", "mean2", "var2", "last")


def layers(count: int, act: str = "relu") -> list[DenseLayer]:
    return [DenseLayer(Norm(0.1, 1e-5, act), Norm(0.3, 1e-3 / (index + 1), "relu")) for index in range(count)]


def block(count: int, device: Any = "cpu", dtype: torch.dtype = torch.float32, size: int = 4) -> tuple[Tensor, list[Tensor]]:
    """A map of 10 channels and the tensors of layers that append 4 by way of 8."""
    generator = torch.Generator().manual_seed(count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors: list[Tensor] = []
    for index in range(count):
        read = 10 + 4 * index
        tensors += [1 + 0.3 * draw(read), 0.3 * draw(read), draw(read), draw(read).abs() + 0.5, draw(8, read, 1, 1) / read**0.5]
        tensors += [1 + 0.3 * draw(8), 0.3 * draw(8), draw(8), draw(8).abs() + 0.5, draw(4, 8, 3, 3) / 72**0.5]
    x = (draw(3, 10, size, size + 1) + draw(10)[:, None, None]).to(device, dtype)
    return x, [t.to(device, torch.promote_types(dtype, torch.float32)) for t in tensors]


def plain(x: Tensor, *tensors: Any, layers: list[DenseLayer]) -> Tensor:
    for index, layer in enumerate(layers):
        weight, bias, mean, var, kernel, weight2, bias2, mean2, var2, last = tensors[TENSORS * index : TENSORS * (index + 1)]
        y = ACTIVATIONS[layer.first.act](F.batch_norm(x, mean, var, weight, bias, True, layer.first.momentum, layer.first.eps))
        y = F.conv2d(y, kernel.to(x.dtype))
        y = ACTIVATIONS[layer.second.act](F.batch_norm(y, mean2, var2, weight2, bias2, True, layer.second.momentum, layer.second.eps))
        x = torch.cat([x, F.conv2d(y, last.to(x.dtype), None, 1, layer.padding, layer.dilation)], 1)
    return x


def ours(x: Tensor, *tensors: Any, layers: list[DenseLayer]) -> Tensor:
    return dense_block(x, *tensors, layers=layers)[0]


def results(
    run: Callable[..., Tensor], x: Tensor, tensors: list[Tensor], made: list[DenseLayer], frozen: set[int] | None = None, of_x: bool = True
) -> dict[str, Tensor]:
    """The map, running statistics and gradients by name; `frozen` are places in `tensors`."""
    x = x.clone().requires_grad_(of_x)
    given = [t.clone().requires_grad_(place % TENSORS not in RUNNING and place not in (frozen or set())) for place, t in enumerate(tensors)]
    y = run(x, *given, layers=made)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.device, y.dtype))
    found = {"y": y.detach()} | ({"of x": x.grad} if x.grad is not None else {})
    for place, t in enumerate(given):
        name = f"{NAMES[place % TENSORS]} of {place // TENSORS}"
        found |= {name: t.detach()} if place % TENSORS in RUNNING else {f"of {name}": t.grad} if t.grad is not None else {}
    return found


@pytest.mark.parametrize("act", ["relu", "silu"])
def test_values_gradients_and_running_statistics_are_torchs(act: str, device: torch.device) -> None:
    x, tensors = block(3, device)
    with torch.backends.cudnn.flags(allow_tf32=False):
        mine, theirs = (results(run, x, tensors, layers(3, act)) for run in (ours, plain))
    assert mine.keys() == theirs.keys()
    assert len(mine) == 2 + 3 * TENSORS
    for name in mine:
        assert off(mine[name], theirs[name]) < 5e-6, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_as_near_to_float64_as_torch_is(dtype: torch.dtype, device: torch.device) -> None:
    x, tensors = block(2, device, dtype)
    exact = results(plain, x.double(), [t.double() for t in tensors], layers(2))
    mine, theirs = (results(run, x, tensors, layers(2)) for run in (ours, plain))
    assert mine["y"].dtype == dtype
    assert mine["of kernel of 0"].dtype == torch.float32
    # Triton's interpreter cuts float32 to bfloat16 where a GPU rounds: twice the error of each activation.
    factor = 1.25 if device.type == "cuda" or dtype == torch.float16 else 3.0
    for name in exact:
        spread = max(off(theirs[name], exact[name]), torch.finfo(dtype).eps)
        assert off(mine[name], exact[name]) < factor * spread + 0.05 * torch.finfo(dtype).eps, name


def test_what_no_kernel_takes_has_the_gradient_of_its_values() -> None:
    x, tensors = block(2, dtype=torch.float64, size=3)
    learnt: list[Any] = [t.requires_grad_() if place % TENSORS not in RUNNING else None for place, t in enumerate(tensors)]
    assert torch.autograd.gradcheck(lambda *given: ours(*given, layers=layers(2, "silu")), [x.requires_grad_(), *learnt], fast_mode=True)


@pytest.fixture(scope="module")
def every() -> dict[str, Tensor]:
    """All results of three layers, on the device of the tests."""
    x, tensors = block(3, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return results(ours, x, tensors, layers(3))


ASKED = [((), True), ((5, 6, 24), True), *((which, False) for which in ((0,), (4,), (9,), (15, 16), (20,), (24,), (29,)))]


@pytest.mark.parametrize(("learning", "of_x"), ASKED, ids=str)
def test_only_the_gradients_that_are_asked_for_are_returned(
    learning: tuple[int, ...], of_x: bool, every: dict[str, Tensor], device: torch.device
) -> None:
    x, tensors = block(3, device)
    some = results(ours, x, tensors, layers(3), set(range(len(tensors))) - set(learning), of_x)
    asked = {f"of {NAMES[place % TENSORS]} of {place // TENSORS}" for place in learning} | ({"of x"} if of_x else set())
    assert {name for name in some if name.startswith("of ")} == asked
    assert all(off(some[name], every[name]) < 1e-6 for name in some)


def kept(count: int, device: torch.device) -> int:
    """Bytes of the maps that the way back needs."""
    x, tensors = block(count, device)
    saved: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        if t.dim() == 4 and t.shape[2:] == x.shape[2:]:
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        given = [t.requires_grad_(place % TENSORS not in RUNNING) for place, t in enumerate(tensors)]
        y = ours(x.requires_grad_(), *given, layers=layers(count))
    assert y.data_ptr() in saved
    return sum(saved.values())


def test_memory_is_linear_in_the_number_of_layers(device: torch.device) -> None:
    pixels = 3 * 4 * 5 * 4
    assert [kept(count, device) for count in (1, 2, 4)] == [pixels * (10 + (4 + 8) * count) for count in (1, 2, 4)]


def test_the_statistics_of_the_whole_come_with_it(device: torch.device) -> None:
    x, tensors = block(2, device)
    y, row = dense_block(x.requires_grad_(), *tensors, layers=layers(2))
    var, mean = torch.var_mean(y.detach(), (0, 2, 3), correction=0)
    assert not row.requires_grad
    for mine, theirs in zip(row, (torch.full_like(mean, 60), mean, 60 * var), strict=True):
        assert off(mine, theirs) < 1e-6


def test_a_mean_far_larger_than_the_deviation_cancels_nothing(device: torch.device) -> None:
    x, tensors = block(1, device)
    x = x + 3e4
    _, row = dense_block(x, *tensors, layers=layers(1))
    var, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    assert off(row[1, :10], mean) < 1e-6
    assert off(row[2, :10] / 60, var) < 1e-3


def test_running_statistics_say_that_they_changed_and_may_be_absent(device: torch.device) -> None:
    x, tensors = block(1, device)
    before = [tensors[place]._version for place in RUNNING]
    y = ours(x, *tensors, layers=layers(1))
    assert all(tensors[place]._version > version for place, version in zip(RUNNING, before, strict=True))
    absent = [None if place in RUNNING else t for place, t in enumerate(tensors)]
    assert torch.equal(ours(x, *absent, layers=layers(1)), y)


def test_maps_and_gradients_in_other_orders_are_taken_as_they_come(device: torch.device) -> None:
    x, tensors = block(2, device)
    found = []
    for run in (ours, plain):
        leaf = x.contiguous().requires_grad_()
        run(leaf, *tensors, layers=layers(2)).square().mean((2, 3)).sum().backward()
        found.append(leaf.grad)
    assert off(*found) < 5e-6


def test_the_gradient_that_comes_in_is_left_as_it_was(device: torch.device) -> None:
    x, tensors = block(2, device)
    y = ours(x.requires_grad_(), *tensors, layers=layers(2))
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(device).contiguous(memory_format=torch.channels_last)
    before = gradient.clone()
    torch.autograd.grad(y, x, gradient)
    assert torch.equal(gradient, before)


def test_one_value_a_channel_is_refused_as_torch_does() -> None:
    _, tensors = block(1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        ours(torch.zeros(1, 10, 1, 1), *tensors, layers=layers(1))


@pytest.mark.parametrize(
    ("shape", "dtype", "act", "reason"),
    [
        ((3, 10, 4, 5), torch.float64, "relu", "float32, bfloat16"),
        ((0, 10, 4, 5), torch.float32, "relu", "no pixels"),
        ((3, 10, 4, 5), torch.float32, "sigmoid", "activation sigmoid"),
        ((4096, 10, 170, 170), torch.bfloat16, "relu", "32-bit indices"),
    ],
)
def test_what_is_refused_is_said(shape: tuple[int, ...], dtype: torch.dtype, act: str, reason: str) -> None:
    x = torch.empty(shape, dtype=dtype, device="meta").contiguous(memory_format=torch.channels_last)
    tensors = [t.to("meta") for t in block(2)[1]]
    assert reason in refuses(x, tensors, layers(2, act))
    assert refuses(torch.empty((3, 10, 4, 5), device="meta"), tensors, layers(2)) == ""
