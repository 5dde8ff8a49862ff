"""The way back through a depthwise convolution: what holds beyond every op's tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.zoo.kernels.tensors import noise, off
from zoo.kernels.differentiable import depthwise_conv, tuning
from zoo.kernels.ops import _tuned, depthwise_input_grad, depthwise_weight_grad
from zoo.kernels.ops._depthwise import pack


@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (3, 5)], ids=str)
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (1, 2)], ids=str)
def test_the_references_are_autograds(kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]) -> None:
    x, weight = noise(2, 3, 7, 6).double().requires_grad_(), noise(3, 1, *kernel).double().requires_grad_()
    y = F.conv2d(x, weight, None, stride, padding, groups=3)
    gradient = noise(*y.shape, seed=7).double()
    of_x, of_weight = torch.autograd.grad(y, [x, weight], gradient)
    window: dict[str, Any] = {"stride": stride, "padding": padding}
    assert off(depthwise_input_grad.reference(gradient, weight.detach(), size=(7, 6), **window), of_x) < 1e-14
    assert off(depthwise_weight_grad.reference(gradient, x.detach(), kernel=kernel, **window), of_weight[:, 0]) < 1e-14


@pytest.mark.parametrize(("kernel", "stride", "size"), [(3, 1, (3, 4)), (3, 2, (5, 6)), (5, 2, (3, 4))], ids=str)
def test_values_and_gradients_are_torchs(kernel: int, stride: int, size: tuple[int, int], device: torch.device) -> None:
    x, weight = noise(2, 6, *size, device=device).requires_grad_(), noise(6, 1, kernel, kernel, device=device).requires_grad_()
    expected = F.conv2d(x, weight, None, stride, kernel // 2, groups=6)
    gradient = noise(*expected.shape, seed=7, device=device)
    wanted = torch.autograd.grad(expected, [x, weight], gradient)
    y = depthwise_conv(x, weight, stride, kernel // 2)
    assert type(y.grad_fn).__name__ == "_DepthwiseBackward"
    found = torch.autograd.grad(y, [x, weight], gradient)
    for mine, theirs in zip((y, *found), (expected, *wanted), strict=True):
        assert off(mine, theirs) < 1e-6
        assert not mine.isnan().any()


def test_a_float32_weight_of_half_maps_gets_its_gradient_unrounded(device: torch.device) -> None:
    """Autocast's cast would round the gradient to bfloat16 on its way back."""
    x, weight = noise(1, 8, 3, 4, dtype=torch.bfloat16, device=device), noise(8, 1, 3, 3, device=device).requires_grad_()
    y = depthwise_conv(x, weight, 1, 1)
    assert y.dtype == torch.bfloat16
    gradient = noise(*y.shape, dtype=torch.bfloat16, seed=7, device=device)
    y.backward(gradient)
    exact = torch.nn.grad.conv2d_weight(x.double(), weight.shape, gradient.double(), 1, 1, groups=8)
    assert weight.grad is not None
    assert weight.grad.is_contiguous()
    assert off(weight.grad, exact) < 1e-6


def test_a_bias_is_added_and_learns_unrounded(device: torch.device) -> None:
    x, weight = noise(2, 16, 5, 6, device=device).requires_grad_(), noise(16, 1, 7, 7, device=device).requires_grad_()
    bias = noise(16, device=device).requires_grad_()
    y, expected = depthwise_conv(x, weight, 1, 3, bias=bias), F.conv2d(x, weight, bias, 1, 3, groups=16)
    assert type(y.grad_fn).__name__ == "_DepthwiseBackward"
    gradient = noise(*y.shape, seed=7, device=device)
    for mine, theirs in zip(*(torch.autograd.grad(of, [x, weight, bias], gradient) for of in (y, expected)), strict=True):
        assert off(mine, theirs) < 1e-6
    assert off(y, expected) < 1e-6


def test_what_the_kernels_refuse_is_computed_by_torch(device: torch.device) -> None:
    x, weight = noise(1, 4, 7, 7, device=device).requires_grad_(), noise(4, 1, 3, 3, device=device).requires_grad_()
    for options in ({"stride": 2, "dilation": 2, "padding": 2}, {"stride": 3}, {"padding": 3}):
        y = depthwise_conv(x, weight, **options)
        assert type(y.grad_fn).__name__ != "_DepthwiseBackward"
        assert off(y, F.conv2d(x, weight, None, **options, groups=4)) < 1e-6


@pytest.mark.parametrize(
    ("stride", "config"), [(1, {"cols": 1, "rows": 2, "programs": 2}), (2, {"cols": 3, "rows": 3, "programs": 99})], ids=str
)
def test_any_division_agrees_and_repeats_bit_for_bit(config: dict[str, int], stride: int, device: torch.device) -> None:
    shared: dict[str, Any] = {"stride": (stride, stride), "padding": (1, 1)}
    x = noise(2, 5, 5, 4, device=device)
    gradient = noise(2, 5, *((5, 4), (3, 2))[stride - 1], device=device)
    config = config | {"channels": 16, "warps": 1, "vector": 2}
    found = [depthwise_weight_grad.launch(gradient, x, kernel=(3, 3), **shared, config=config) for _ in range(2)]
    assert torch.equal(*found)
    assert off(found[0], depthwise_weight_grad.reference(gradient, x, kernel=(3, 3), **shared)) < 1e-6
    if stride == 2:
        weight = noise(5, 1, 3, 3, device=device)
        of_x = depthwise_input_grad.launch(gradient, pack(weight), size=(5, 4), **shared, config=config)
        assert off(of_x, depthwise_input_grad.reference(gradient, weight, size=(5, 4), **shared)) < 1e-6


@pytest.mark.parametrize(
    ("op", "change", "reason"),
    [
        (depthwise_weight_grad, {"dilation": (2, 2)}, "beside each other"),
        (depthwise_weight_grad, {"stride": (3, 3)}, "share no rows"),
        (depthwise_weight_grad, {"kernel": (9, 9)}, "49 taps"),
        (depthwise_weight_grad, {"kernel": (5, 5)}, "of an output"),
        (depthwise_input_grad, {"dilation": (2, 2), "stride": (2, 2)}, "together"),
        (depthwise_input_grad, {"padding": (3, 0)}, "padding"),
        (depthwise_input_grad, {"weight": torch.zeros(4, 8, 3, 3)}, "no depthwise"),
    ],
)
def test_what_is_refused_is_said(op: Any, change: dict[str, Any], reason: str) -> None:
    args: dict[str, Any] = {"gradient": noise(2, 8, 5, 5), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    args |= {"weight": noise(8, 1, 3, 3), "size": (5, 5)} if op is depthwise_input_grad else {"x": noise(2, 8, 5, 5), "kernel": (3, 3)}
    assert op.supports(**args) == ""
    assert reason in op.supports(**args | change)


@pytest.mark.gpu
def test_tuning_on_the_gpu_and_capture_afterwards_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tuned, "_found", {})
    x, weight = noise(8, 96, 28, 28, dtype=torch.bfloat16, device="cuda"), noise(96, 1, 3, 3, device="cuda")
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    gradient = noise(8, 96, 14, 14, dtype=torch.bfloat16, device="cuda")

    def step() -> list[Tensor]:
        y = depthwise_conv(leaves[0], leaves[1], 2, 1)
        return [y.detach(), *torch.autograd.grad(y, leaves, gradient)]

    plain = step()
    with tuning(3):
        tuned = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for one, two, three in zip(plain, tuned, captured, strict=True):
        assert off(two, one) < 8e-3
        assert torch.equal(two, three)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "kernel", "stride"),
    [((64, 96, 112, 112), 3, 2), ((32, 144, 56, 56), 3, 1), ((32, 72, 57, 55), 5, 2), ((32, 960, 7, 7), 5, 1), ((8, 576, 15, 14), 3, 2)],
    ids=str,
)
def test_real_shapes_agree_with_float64_on_the_gpu(shape: tuple[int, ...], kernel: int, stride: int, dtype: torch.dtype) -> None:
    x = noise(*shape, dtype=dtype, device="cuda").requires_grad_()
    weight = noise(shape[1], 1, kernel, kernel, device="cuda").to(dtype).float().requires_grad_()
    y = depthwise_conv(x, weight, stride, kernel // 2)
    gradient = noise(*y.shape, dtype=dtype, device="cuda")
    of_x, of_weight = torch.autograd.grad(y, [x, weight], gradient)
    window: dict[str, Any] = {"stride": (stride, stride), "padding": (kernel // 2, kernel // 2)}
    allowed = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    assert off(y, F.conv2d(x.double(), weight.double(), None, stride, kernel // 2, groups=shape[1])) < allowed
    exact = depthwise_input_grad.reference(gradient.double(), weight.double(), size=shape[2:], **window)  # pyright: ignore[reportArgumentType]
    assert off(of_x, exact) < allowed
    exact = depthwise_weight_grad.reference(gradient.double(), x.detach().double(), kernel=(kernel, kernel), **window)
    assert off(of_weight[:, 0], exact) < 1e-5
