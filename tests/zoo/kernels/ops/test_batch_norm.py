"""BatchNorm in train mode with its activation: what holds beyond every op's tests, and the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.zoo.kernels.tensors import learning, noise, off
from zoo.kernels.differentiable import batch_norm_act, conv_stats, norm_act_conv, tuning
from zoo.kernels.ops import _tuned
from zoo.kernels.ops import batch_norm_act as forward
from zoo.kernels.ops import batch_norm_act_grad as backward
from zoo.kernels.ops._activation import ACTIVATIONS, BY_OUTPUT, SLOPES, slope

OPTIONS: dict[str, Any] = {"momentum": 0.1, "eps": 1e-5}


def layer(channels: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weight, bias and running statistics, none of them what a new layer has."""
    return {
        "weight": (noise(channels, seed=1) * 0.3 + 1).to(device, dtype),
        "bias": noise(channels, seed=2).to(device, dtype),
        "running_mean": noise(channels, seed=3).to(device, dtype),
        "running_var": noise(channels, seed=4).abs().to(device, dtype),
    }


@pytest.mark.parametrize("act", SLOPES)
def test_slopes_are_autograds_even_at_the_borders_and_of_nan(act: str) -> None:
    z = torch.tensor([-4.0, -3.0, -1.5, -0.0, 0.0, 0.5, 3.0, 5.0, 6.0, 7.0, torch.nan], dtype=torch.float64, requires_grad=True)
    for behind in (1.0, torch.inf, torch.nan):
        gradient = torch.full_like(z, behind)
        (expected,) = torch.autograd.grad(ACTIVATIONS[act](z), z, gradient)
        assert torch.allclose(SLOPES[act](gradient, z.detach()), expected, atol=1e-12, equal_nan=True)
        if act in BY_OUTPUT:
            assert torch.allclose(SLOPES[act](gradient, ACTIVATIONS[act](z.detach())), expected, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("act", SLOPES)
@pytest.mark.parametrize(("training", "added"), [(True, True), (True, False), (False, True)])
def test_the_reference_is_torchs_and_passes_gradcheck(act: str, training: bool, added: bool) -> None:
    given = {key: value.double() for key, value in layer(3, "cpu").items()}
    x, residual = noise(2, 3, 2, 3).double(), noise(2, 3, 2, 3, seed=9).double() if added else None
    running = [given["running_mean"].clone(), given["running_var"].clone()]
    wanted = F.batch_norm(x, *running, given["weight"], given["bias"], training, 0.1, 1e-5)
    y, _, *moved = forward.reference(x, **given, residual=residual, act=act, training=training)
    assert off(y, ACTIVATIONS[act](wanted if residual is None else wanted + residual)) < 1e-14
    for mine, theirs in zip(moved, running, strict=True):
        assert off(mine, theirs) < 1e-14
    leaves = learning(x, given["weight"], given["bias"], *([] if residual is None else [residual]))

    def run(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
        return forward.reference(x, weight, bias, *running, residual, act=act, training=training)[0]

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("act", SLOPES)
@pytest.mark.parametrize(("training", "added"), [(True, True), (True, False), (False, True)])
def test_the_reference_of_the_way_back_is_autograd_through_the_reference(act: str, training: bool, added: bool) -> None:
    given = {key: value.double() for key, value in layer(5, "cpu").items()}
    x, weight, bias, residual = learning(noise(2, 5, 3, 4).double(), given["weight"], given["bias"], noise(2, 5, 3, 4, seed=9).double())
    rest = (given["running_mean"], given["running_var"], residual if added else None)
    gradient = noise(2, 5, 3, 4, seed=5).double()
    y, stats, *_ = forward.reference(x, weight, bias, *rest, act=act, training=training)
    of_x, of_weight, of_bias, *more = torch.autograd.grad(y, [x, weight, bias, *([residual] if added else [])], gradient)
    kept = None if not added or act == "none" else (y if act in BY_OUTPUT else residual).detach()
    result = backward.reference(gradient, x.detach(), weight.detach(), bias.detach(), stats.detach(), kept, act=act)
    assert off(result[0], of_x) < 1e-12
    assert off(result[1], torch.stack([of_bias, of_weight])) < 1e-12
    if kept is not None:
        assert off(result[2], more[0]) < 1e-12


@pytest.mark.parametrize("act", ["none", "relu", "hardswish"])
@pytest.mark.parametrize(("training", "added"), [(True, True), (True, False), (False, True)])
def test_values_gradients_and_running_statistics_are_torchs(act: str, added: bool, training: bool, device: torch.device) -> None:
    given = layer(12, device)
    maps = [noise(3, 12, 5, 3, device=device), noise(3, 12, 5, 3, seed=9, device=device)]
    gradient = noise(3, 12, 5, 3, seed=5, device=device)
    found: list[list[Tensor]] = []
    for ours in (True, False):
        mean, var = given["running_mean"].clone(), given["running_var"].clone()
        x, residual, weight, bias = leaves = learning(*maps, given["weight"], given["bias"])
        if ours:
            y = batch_norm_act(x, weight, bias, mean, var, residual if added else None, act=act, training=training, **OPTIONS)
        else:
            y = F.batch_norm(x, mean, var, weight, bias, training, 0.1, 1e-5)
            y = ACTIVATIONS[act](y + residual if added else y)
        y.backward(gradient)
        found.append([y.detach(), mean, var, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(found[0]) == len(found[1]) == 6 + added
    for mine, theirs in zip(*found, strict=True):
        assert off(mine, theirs) < 2e-6


def test_running_statistics_change_in_place_and_say_so(device: torch.device) -> None:
    given = layer(8, device)
    before = {key: value.clone() for key, value in given.items()}
    versions = [given["running_mean"]._version, given["running_var"]._version]
    x = noise(2, 8, 3, 3, device=device)
    batch_norm_act(x, **given, act="relu", **OPTIONS)
    F.batch_norm(x, before["running_mean"], before["running_var"], None, None, True, 0.1, 1e-5)
    assert all(off(given[key], before[key]) < 1e-6 for key in given)
    assert all(now > then for now, then in zip((given["running_mean"]._version, given["running_var"]._version), versions, strict=True))


@pytest.mark.parametrize("mean", [1e3, -3e4])
def test_a_mean_far_larger_than_the_deviation_cancels_nothing(mean: float, device: torch.device) -> None:
    """float32 holds x itself to 1e-7 of the mean; squares of x, which are wrong by more than the whole variance, must not appear."""
    x = (noise(4, 6, 15, 17) + mean).to(device)
    _, stats = forward.launch(x, None, None, None, None)
    count = x.numel() // 6
    var, level = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    assert off(stats[0], level) < 1e-6
    assert off(stats[1], var.rsqrt()) < 1e-4
    assert off(stats[2], torch.full_like(level, 1 / count)) < 1e-6
    naive = x.square().mean((0, 2, 3)) - x.mean((0, 2, 3)).square()
    assert off(naive, var) > 1e-2


@pytest.mark.parametrize(("columns", "programs"), [(16, 1), (64, 3)])
def test_results_repeat_bit_for_bit_and_any_division_agrees(columns: int, programs: int, device: torch.device) -> None:
    x, gradient = noise(2, 10, 5, 4, device=device), noise(2, 10, 5, 4, seed=5, device=device)
    given = layer(10, device)
    config = {
        "columns": columns,
        "warps": 1,
        "unroll": 2,
        "programs": programs,
        "apply_columns": 16,
        "apply_warps": 2,
        "apply_unroll": 3 - programs % 2,
    }
    there = [forward.launch(x, **given, act="relu", config=config) for _ in range(2)]
    back = [backward.launch(gradient, x, given["weight"], given["bias"], there[0][1], act="relu", config=config) for _ in range(2)]
    assert all(torch.equal(one, other) for pair in (there, back) for one, other in zip(*pair, strict=True))
    for result, expected in zip(there[0], forward.reference(x, **given, act="relu"), strict=True):
        assert off(result, expected) < 1e-6
    wanted = backward.reference(gradient, x, given["weight"], given["bias"], there[0][1], act="relu")
    for result, expected in zip(back[0], wanted, strict=True):
        assert off(result, expected) < 2e-6


def test_maps_in_other_orders_are_taken_as_they_come(device: torch.device) -> None:
    given = layer(6, device)
    x = noise(2, 6, 4, 5, device=device).contiguous()
    weight = given["weight"].clone().requires_grad_()
    y = batch_norm_act(x.clone().requires_grad_(), weight, given["bias"], None, None, act="relu", **OPTIONS)
    y.mean().backward()  # its gradient has no strides at all
    assert y.is_contiguous(memory_format=torch.channels_last)
    other = given["weight"].clone().requires_grad_()
    F.relu(F.batch_norm(x, None, None, other, given["bias"], True, 0.1, 1e-5)).mean().backward()
    assert weight.grad is not None
    assert other.grad is not None
    assert off(weight.grad, other.grad) < 2e-6


def test_only_the_gradients_that_are_asked_for_are_returned(device: torch.device) -> None:
    given = layer(8, device)
    weight = given["weight"].clone().requires_grad_()
    batch_norm_act(noise(2, 8, 3, 3, device=device), weight, given["bias"], None, None, act="relu", **OPTIONS).sum().backward()
    assert weight.grad is not None
    x = noise(2, 8, 3, 3, device=device).requires_grad_()
    batch_norm_act(x, given["weight"], given["bias"], None, None, act="relu", **OPTIONS).square().sum().backward()
    assert x.grad is not None


def test_half_parameters_get_half_gradients(device: torch.device) -> None:
    given = layer(8, device, torch.bfloat16)
    x, weight, bias = learning(noise(2, 8, 4, 4, dtype=torch.bfloat16, device=device), given["weight"], given["bias"])
    y = batch_norm_act(x, weight, bias, given["running_mean"], given["running_var"], act="relu", **OPTIONS)
    y.float().square().sum().backward()
    assert {t.grad.dtype for t in (x, weight, bias) if t.grad is not None} == {y.dtype} == {torch.bfloat16}


def test_one_value_a_channel_is_refused_as_torch_does(device: torch.device) -> None:
    x = noise(1, 8, 1, 1, device=device)
    messages = []
    for call in (
        lambda: batch_norm_act(x, None, None, None, None, **OPTIONS),
        lambda: F.batch_norm(x, None, None, None, None, True),
    ):
        with pytest.raises(ValueError, match="more than 1 value per channel") as error:
            call()
        messages.append(str(error.value).replace("torch.Size([1, 8, 1, 1])", "(1, 8, 1, 1)"))
    assert messages[0] == messages[1]
    assert "variance" in forward.supports(x, None, None, None, None)
    given = layer(8, device)
    assert batch_norm_act(x, **given, training=False, **OPTIONS).isfinite().all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"act": "sigmoid"}, "activation"),
        ({"weight": torch.ones(7)}, "one for each channel"),
        ({"running_var": None}, "missing"),
        ({"residual": torch.zeros(2, 8, 3, 4)}, "same shape"),
        ({"x": torch.zeros(2, 8, 3, 3, dtype=torch.float64)}, "float32, bfloat16"),
        ({"x": torch.zeros(2, 8, 3, 3)}, "channels_last"),
    ],
)
def test_what_is_refused_is_said(change: dict[str, Any], reason: str) -> None:
    args: dict[str, Any] = {"x": noise(2, 8, 3, 3), **layer(8, "cpu"), "act": "relu"}
    assert forward.supports(**args) == ""
    assert reason in forward.supports(**args | change)


@pytest.mark.parametrize("act", ["relu", "hardswish"])
def test_a_chain_that_never_writes_its_activations_is_torchs(act: str, device: torch.device) -> None:
    """1x1, BN, act, 1x1, BN, act with the statistics of each map taken by the convolution that writes it."""
    first, second = layer(8, device), layer(6, device)
    maps = [noise(2, 5, 4, 3, device=device), noise(8, 5, 1, 1, device=device), noise(6, 8, 1, 1, device=device)]
    gradient = noise(2, 6, 4, 3, seed=5, device=device)
    found: list[list[Tensor]] = []
    for ours in (True, False):
        one, two = ({key: value.clone() for key, value in given.items()} for given in (first, second))
        parameters = learning(*maps, *(given.pop(key) for given in (one, two) for key in ("weight", "bias")))
        x, wide, narrow, weight1, bias1, weight2, bias2 = parameters
        if ours:
            y, row = conv_stats(x, wide)
            y, row = norm_act_conv(y, weight1, bias1, **one, kernel=narrow, act=act, **OPTIONS, row=row)
            assert row is not None
            assert not row.requires_grad
            y = batch_norm_act(y, weight2, bias2, **two, act=act, **OPTIONS, row=row)
        else:
            y = ACTIVATIONS[act](F.batch_norm(F.conv2d(x, wide), *one.values(), weight1, bias1, True, 0.1, 1e-5))
            y = ACTIVATIONS[act](F.batch_norm(F.conv2d(y, narrow), *two.values(), weight2, bias2, True, 0.1, 1e-5))
        y.backward(gradient)
        found.append([y.detach(), *one.values(), *two.values(), *(p.grad for p in parameters if p.grad is not None)])
    assert len(found[0]) == 12
    for mine, theirs in zip(*found, strict=True):
        assert off(mine, theirs) < 5e-6


@pytest.mark.parametrize("training", [True, False])
def test_a_convolution_behind_a_norm_of_a_slice_leaves_its_neighbours_alone(training: bool, device: torch.device) -> None:
    """DenseNet's layers read the first channels of a buffer that the next ones write behind them."""
    buffer = torch.full((2, 16, 3, 4), torch.nan, device=device).contiguous(memory_format=torch.channels_last)
    buffer[:, :10] = noise(2, 10, 3, 4, device=device)
    given, kernel = layer(10, device), noise(4, 10, 1, 1, device=device)
    x = buffer[:, :10].detach().requires_grad_()
    y, _ = norm_act_conv(x, **given, kernel=kernel, act="relu", training=training, **OPTIONS)
    (of_x,) = torch.autograd.grad(y.square().sum(), x)
    other, given = noise(2, 10, 3, 4, device=device).requires_grad_(), layer(10, device)
    wanted = F.conv2d(F.relu(F.batch_norm(other, **given, training=training)), kernel)
    assert off(y, wanted) < 2e-6
    assert off(of_x, torch.autograd.grad(wanted.square().sum(), other)[0]) < 5e-6


def test_a_step_inside_tuning_computes_the_same_and_later_launches_take_what_was_fastest(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    found: dict[Any, Any] = {}
    monkeypatch.setattr(_tuned, "_found", found)
    timed: list[int] = []

    def time(run: Any) -> float:  # pretends that the second config of each launch is the fastest
        run()
        timed.append(len(timed))
        return float(timed[-1] % 2 == 0)

    monkeypatch.setattr(_tuned, "_time", time)
    x, gradient, results = noise(2, 6, 3, 4, device=device), noise(2, 6, 3, 4, seed=5, device=device), []
    for inside in (True, False):
        given, leaf = layer(6, device), x.clone().requires_grad_()
        with tuning(2 if inside else 0):
            y = batch_norm_act(leaf, **given, act="relu", **OPTIONS)
            y.backward(gradient)
        results.append([y.detach(), leaf.grad, given["running_mean"], given["running_var"]])
    assert len(timed) == 4
    assert list(found.values()) == [forward.configs(x)[1], backward.configs(gradient, x)[1]]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_doubles_are_computed_by_the_reference_with_its_gradient(device: torch.device) -> None:
    given = {key: value.double() for key, value in layer(4, device).items()}
    (x,) = learning(noise(2, 4, 3, 2, device=device).double())
    batch_norm_act(x, **given, act="silu", **OPTIONS).square().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float64


def test_the_kernels_know_the_same_slopes() -> None:
    assert set(BY_OUTPUT) < set(SLOPES) < set(ACTIVATIONS)
    assert callable(slope)


@pytest.mark.gpu
def test_more_tiles_than_a_second_axis_of_a_grid_holds_are_all_written() -> None:
    x = torch.randn(40, 16, 420, 420, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = batch_norm_act(x, None, None, None, None, act="relu", **OPTIONS)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert off(y[-1], F.relu(F.batch_norm(x.float(), None, None, training=True))[-1]) < 8e-3
    assert bool(x.grad.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(32, 64, 112, 112), (10, 100, 224, 224), (32, 2048, 7, 7), (7, 144, 55, 57)], ids=str)
@pytest.mark.parametrize("added", [True, False])
def test_real_shapes_agree_with_float64_on_the_gpu(shape: tuple[int, int, int, int], dtype: torch.dtype, added: bool) -> None:
    given = layer(shape[1], "cuda")
    device = torch.device("cuda")
    maps = [torch.randn(shape, device=device).to(dtype).contiguous(memory_format=torch.channels_last) for _ in range(3)]
    given64 = [given[key].double() for key in ("weight", "bias")]
    before = F.batch_norm(maps[0].double(), None, None, *given64, training=True) + maps[1].double() * added
    decided = before.abs() > 1e-5  # of millions of pixels one or two are so near zero that float32 and float64 differ about their sign
    results = []
    for wide in (False, True):
        x, residual, weight, bias = leaves = learning(
            *(m.double() if wide else m for m in maps[:2]), *(given[key].double() if wide else given[key] for key in ("weight", "bias"))
        )
        y = batch_norm_act(x, weight, bias, None, None, residual if added else None, act="relu", **OPTIONS)
        y.backward((maps[2] * decided).to(y.dtype))
        results.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for mine, exact in zip(*results, strict=True):
        assert off(mine, exact) < {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
