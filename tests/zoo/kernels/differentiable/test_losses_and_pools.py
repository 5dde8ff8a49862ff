"""Max pooling with one-byte indices, factors for channels and cross-entropy: values and gradients are PyTorch's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.zoo.kernels.tensors import learning, noise, off
from zoo.kernels.comparing import op_checks as checking
from zoo.kernels.differentiable import (
    avg_pool,
    batch_norm_act,
    cross_entropy,
    depthwise_conv,
    grouped_conv,
    max_pool,
    scale_channels,
    shortcut_conv,
)
from zoo.kernels.ops import avg_pool_grad, max_pool_grad, scale_channels_grad
from zoo.kernels.ops import cross_entropy as entropy_op
from zoo.kernels.ops import max_pool as pool_op


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    padding = (draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2)))
    size = (draw(st.integers(kernel[0], 9)), draw(st.integers(kernel[1], 9)))
    stride = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    return {"size": size, "kernel": kernel, "stride": stride, "padding": padding, "ceil_mode": draw(st.booleans())}


@given(window=windows(), levels=st.integers(1, 4))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_references_of_pooling_are_torchs_with_its_autograd(window: dict[str, Any], levels: int) -> None:
    size = window.pop("size")
    x = (noise(2, 3, *size).double() * levels).round().requires_grad_()
    y = F.max_pool2d(x, window["kernel"], window["stride"], window["padding"], ceil_mode=window["ceil_mode"])
    gradient = noise(*y.shape).double()
    value, index = pool_op.reference(x.detach(), **window)
    assert torch.equal(value, y)
    window.pop("ceil_mode")
    found = max_pool_grad.reference(gradient, index, size=size, **window)
    assert torch.allclose(found, torch.autograd.grad(y, x, gradient)[0], rtol=1e-14, atol=0)


@pytest.mark.parametrize(("kernel", "stride", "padding", "ceil_mode"), [(3, 2, 1, False), (2, 2, 0, True), (3, 1, 1, False)], ids=str)
def test_pooling_and_its_gradient_are_torchs(kernel: int, stride: int, padding: int, ceil_mode: bool, device: torch.device) -> None:
    x = (noise(2, 6, 5, 7, device=device) * 2).round().requires_grad_()  # many equal ones
    y = max_pool(x, kernel, stride, padding, ceil_mode)
    expected = F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode)
    assert torch.equal(y, expected)
    assert [kept.dtype for kept in getattr(y.grad_fn, "saved_tensors", ())] == [torch.uint8]
    gradient = noise(*y.shape, device=device)
    (found,) = torch.autograd.grad(y, x, gradient)
    assert off(found, torch.autograd.grad(expected, x, gradient)[0]) < 1e-6


@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)), more=st.tuples(st.integers(0, 9), st.integers(0, 9)), ceil_mode=st.booleans()
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_reference_of_averages_is_autograd_through_torchs(kernel: tuple[int, int], more: tuple[int, int], ceil_mode: bool) -> None:
    size = (kernel[0] + more[0], kernel[1] + more[1])
    x = noise(2, 3, *size).double().requires_grad_()
    y = F.avg_pool2d(x, kernel, kernel, ceil_mode=ceil_mode)
    gradient = noise(*y.shape).double()
    found = avg_pool_grad.reference(gradient, size=size, kernel=kernel)
    assert torch.allclose(found, torch.autograd.grad(y, x, gradient)[0], rtol=1e-14, atol=0)


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(("shape", "kernel"), [((2, 6, 5, 7), 2), ((1, 8, 6, 4), 2), ((2, 3, 7, 8), (3, 2))], ids=str)
def test_averages_and_their_gradient_are_torchs(shape: tuple[int, ...], kernel: Any, ceil_mode: bool, device: torch.device) -> None:
    x = noise(*shape, device=device).requires_grad_()
    y, expected = avg_pool(x, kernel, ceil_mode), F.avg_pool2d(x, kernel, ceil_mode=ceil_mode)
    assert off(y, expected) < 1e-6
    assert not getattr(y.grad_fn, "saved_tensors", ())
    gradient = noise(*y.shape, device=device)
    assert off(*(torch.autograd.grad(out, x, gradient)[0] for out in (y, expected))) < 1e-6
    wide = x.detach().double().requires_grad_()
    assert avg_pool(wide, kernel, ceil_mode).dtype == torch.float64


def test_nan_and_minus_infinity_win_where_they_do_in_torch(device: torch.device) -> None:
    x = noise(1, 4, 6, 6, device=device)
    x[0, 0, 2, 3] = x[0, 0, 1, 1] = math.nan
    x[0, 1] = -math.inf
    y, index = pool_op.launch(x, kernel=(3, 3), stride=(2, 2), padding=(1, 1))
    value, where = pool_op.reference(x, kernel=(3, 3), stride=(2, 2), padding=(1, 1))
    assert torch.equal(y.nan_to_num(99), value.nan_to_num(99))
    assert torch.equal(index, where)


@pytest.mark.parametrize("flat", [True, False])
def test_scaled_channels_and_both_gradients_are_torchs(flat: bool, device: torch.device) -> None:
    x, gate = noise(2, 12, 3, 5, device=device).requires_grad_(), noise(2, 12, 1, 1, device=device)
    gate = (gate.flatten(1) if flat else gate).requires_grad_()
    gradient = noise(2, 12, 3, 5, seed=4, device=device)
    y = scale_channels(x, gate)
    expected = x * gate.view(2, 12, 1, 1)
    assert off(y, expected) < 1e-7
    for mine, theirs in zip(torch.autograd.grad(y, [x, gate], gradient), torch.autograd.grad(expected, [x, gate], gradient), strict=True):
        assert off(mine, theirs) < 1e-6


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignored", [0, 2])
def test_the_reference_of_cross_entropy_is_torchs_and_its_gradient_autograds(smoothing: float, ignored: int) -> None:
    logits, target = noise(5, 7).double().requires_grad_(), torch.arange(5)
    target[:ignored] = -100
    expected = F.cross_entropy(logits, target, label_smoothing=smoothing)
    loss, gradient, share = entropy_op.reference(logits, target, smoothing=smoothing)
    assert off(loss, expected) < 1e-14
    assert off(gradient * share, torch.autograd.grad(expected, logits)[0]) < 1e-14
    assert torch.autograd.gradcheck(lambda z: entropy_op.reference(z, target, smoothing=smoothing)[0], logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cross_entropy_and_its_gradient_are_torchs(dtype: torch.dtype, device: torch.device) -> None:
    logits, target = noise(6, 11, dtype=dtype, device=device).requires_grad_(), torch.tensor([0, 10, 3, -100, 5, 5], device=device)
    loss = cross_entropy(logits, target, 0.1)
    expected = F.cross_entropy(logits.float(), target, label_smoothing=0.1)
    assert loss.dtype == torch.float32
    assert off(loss, expected) < 1e-6
    (found,) = torch.autograd.grad(loss, logits)
    (wanted,) = torch.autograd.grad(expected, logits)
    assert found.dtype == dtype
    assert off(found, wanted) < {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}[dtype]


def test_small_gradients_survive_float16_behind_a_scaled_loss(device: torch.device) -> None:
    logits, target = noise(2, 1000, dtype=torch.float16, device=device).requires_grad_(), torch.tensor([1, 2], device=device)
    (found,) = torch.autograd.grad(cross_entropy(logits, target, 0.1) * 2.0**14 / 256, logits)
    (exact,) = torch.autograd.grad(F.cross_entropy(logits.double(), target, label_smoothing=0.1) * 2.0**14 / 256, logits)
    assert (found == 0).sum() <= (exact.half() == 0).sum()
    assert off(found, exact) < 1e-3


def test_a_label_that_is_no_class_makes_the_loss_nan_and_one_that_is_masked_doesnt(device: torch.device) -> None:
    logits = noise(2, 4, device=device)
    assert cross_entropy(logits, torch.tensor([1, 4], device=device)).isnan()
    logits[0, 2] = -math.inf
    target = torch.tensor([1, 3], device=device)
    assert off(cross_entropy(logits, target), F.cross_entropy(logits, target)) < 1e-6


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shares_of_all_classes_are_torchs_and_so_are_those_that_learn(learns: bool, dtype: torch.dtype, device: torch.device) -> None:
    logits = noise(3, 5, dtype=dtype, device=device).requires_grad_()
    shares = (noise(3, 5, seed=3, device=device).softmax(1) * 1.5).requires_grad_(learns)  # a row needn't add up to one
    loss, expected = cross_entropy(logits, shares, 0.1), F.cross_entropy(logits.float(), shares, label_smoothing=0.1)
    assert off(loss, expected) < 1e-6
    asked = [logits, shares] if learns else [logits]
    for got, right in zip(torch.autograd.grad(loss, asked), torch.autograd.grad(expected, asked), strict=True):
        assert off(got, right) < {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_the_reference_of_shares_is_torchs(smoothing: float) -> None:
    logits, shares = noise(5, 7).double().requires_grad_(), noise(5, 7, seed=3).double().softmax(1) * 1.5
    expected = F.cross_entropy(logits, shares, label_smoothing=smoothing)
    loss, gradient, share = entropy_op.reference(logits, shares, smoothing=smoothing)
    assert off(loss, expected) < 1e-14
    assert off(gradient * share, torch.autograd.grad(expected, logits)[0]) < 1e-14


OPS: dict[str, Callable[..., Tensor]] = {
    "depthwise_conv": lambda x, kernel, *_: depthwise_conv(x, kernel[:, None], 2, 1),
    "grouped_conv": lambda x, kernel, *_: grouped_conv(x, kernel[:, None].expand(8, 4, 3, 3), 1, 1, groups=2),
    "scale_channels": lambda x, _, gate, *__: scale_channels(x, gate),
    "max_pool": lambda x, *_: max_pool(x, 3, 2, 1),
    "avg_pool": lambda x, *_: avg_pool(x, 2),
    "batch_norm_act": lambda x, _, __, scale, *___: batch_norm_act(x, scale, None, None, None, act="silu"),
    "batch_norm_act of a sum": lambda x, _, __, scale, other: batch_norm_act(x, scale, None, None, None, other, act="relu"),
    "batch_norm_act, silu of a sum": lambda x, _, __, scale, other: batch_norm_act(x, scale, None, None, None, other, act="silu"),
    "shortcut_conv": lambda x, *_: shortcut_conv(x, x.new_ones(6, 8, 1, 1))[0],
}


@pytest.mark.parametrize("op", OPS)
def test_maps_that_a_hook_lays_out_anew_are_read_as_they_lie(op: str, device: torch.device) -> None:
    given = [noise(2, 8, 6, 5, device=device), noise(8, 3, 3, device=device), noise(2, 8, device=device), noise(8, seed=1, device=device)]
    given.append(noise(2, 8, 6, 5, seed=2, device=device))
    found = []
    for hooked in (False, True):
        leaves = learning(*given)
        anew = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t)
        with anew if hooked else contextlib.nullcontext():
            y = OPS[op](*leaves)
        found.append(torch.autograd.grad(y, leaves, noise(*y.shape, seed=3, device=device), allow_unused=True))
    assert found[0][0] is not None
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or off(mine, theirs) < 1e-6


@pytest.mark.parametrize(
    ("op", "args", "reason"),
    [
        (pool_op, {"x": noise(1, 8, 5, 5), "kernel": (9, 9), "stride": (1, 1)}, "64 taps"),
        (pool_op, {"x": noise(1, 8, 5, 5), "kernel": (3, 3), "stride": (1, 1), "padding": (2, 2)}, "half the kernel"),
        (pool_op, {"x": noise(1, 8, 5, 5), "kernel": (6, 6), "stride": (1, 1)}, "larger than the image"),
        (avg_pool_grad, {"gradient": noise(1, 8, 2, 2), "size": (6, 4), "kernel": (2, 2)}, "side by side"),
        (avg_pool_grad, {"gradient": noise(1, 8, 2, 2), "size": (18, 18), "kernel": (9, 9)}, "64 taps"),
        (scale_channels_grad, {"gradient": noise(1, 8, 5, 5), "x": noise(1, 8, 5, 5), "gate": noise(1, 7)}, "belong together"),
        (entropy_op, {"logits": noise(2, 3), "target": torch.zeros(2, dtype=torch.int64), "smoothing": 1.5}, "smoothing of 1.5"),
    ],
)
def test_what_is_refused_is_said(op: Any, args: dict[str, Any], reason: str) -> None:
    assert reason in op.supports(**args)


def test_infinities_and_nan_count_as_right_only_where_the_reference_has_the_same() -> None:
    wanted = torch.tensor([math.nan, math.inf, 2.0])
    assert checking.relative_error(wanted, wanted) == 0
    for wrong in ([0.0, math.inf, 2.0], [math.nan, -math.inf, 2.0], [math.nan, math.inf, math.nan]):
        assert checking.relative_error(torch.tensor(wrong), wanted) == math.inf


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_real_shapes_agree_with_torch_on_the_gpu(dtype: torch.dtype) -> None:
    x = noise(32, 64, 112, 112, dtype=dtype, device="cuda").requires_grad_()
    y, expected = max_pool(x, 3, 2, 1), F.max_pool2d(x, 3, 2, 1)
    assert torch.equal(y, expected)
    gradient = noise(*y.shape, dtype=dtype, device="cuda")
    allowed = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    exact = torch.autograd.grad(F.max_pool2d(x.double(), 3, 2, 1), x, gradient.double())[0]
    assert off(torch.autograd.grad(y, x, gradient)[0], exact) < allowed
    gate = noise(32, 64, device="cuda").requires_grad_()
    found = torch.autograd.grad(scale_channels(x, gate), [x, gate], x.detach())
    wide = [t.detach().double().requires_grad_() for t in (x, gate)]
    wanted = torch.autograd.grad(wide[0] * wide[1][:, :, None, None], wide, x.detach().double())
    assert all(off(mine, theirs) < allowed for mine, theirs in zip(found, wanted, strict=True))
    logits, target = noise(256, 21843, dtype=dtype, device="cuda").requires_grad_(), torch.arange(256, device="cuda")
    loss, exactly = cross_entropy(logits, target, 0.1), F.cross_entropy(logits.double(), target, label_smoothing=0.1)
    assert off(loss, exactly) < 1e-6
    assert off(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(exactly, logits)[0]) < allowed
