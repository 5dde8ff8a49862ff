"""Convolutions with bias, activation and pool: values and gradients are PyTorch's, chains are found where nobody notices, and checked."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from tests.zoo.kernels.tensors import learning, noise, off
from zoo import VGG11, fast, why
from zoo.kernels.differentiable import conv_bias_act, convs, stem_conv
from zoo.kernels.differentiable.convs import refused
from zoo.kernels.differentiable.stem import refused as stem_refused
from zoo.kernels.ops import bias_act_grad
from zoo.kernels.ops._activation import ACTIVATIONS, BY_OUTPUT, SLOPES
from zoo.kernels.training import choosing, kernels
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.checking import Check
from zoo.kernels.training.record import record
from zoo.kernels.training.replay import Chain


@pytest.mark.parametrize("act", SLOPES)
def test_the_reference_of_the_way_back_is_autograds(act: str) -> None:
    x, bias = learning(noise(2, 5, 3, 4).double(), noise(5).double())
    y = ACTIVATIONS[act](x + bias[:, None, None])
    gradient = noise(2, 5, 3, 4, seed=5).double()
    of_x, of_bias = torch.autograd.grad(y, [x, bias], gradient)
    kept = None if act == "none" else y if act in BY_OUTPUT else x
    sums, *found = bias_act_grad.reference(
        gradient, None if kept is None else kept.detach(), None if act in BY_OUTPUT else bias.detach(), act=act
    )
    assert off(sums, of_bias) < 1e-14
    assert off(found[0] if found else gradient, of_x) < 1e-14


POOL = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "ceil_mode": False}
WINDOWS: list[dict[str, Any]] = [
    {"act": "relu", "padding": 1},
    {"act": "none", "stride": 2, "padding": (1, 0)},
    {"act": "relu6", "groups": 2},
    {"act": "hardswish", "padding": 2, "dilation": 2},
    {"act": "silu", "stride": (2, 1)},
    {"act": "leaky_relu_0.1", "padding": 1, "pool": POOL},
    {"act": "relu", "padding": 1, "pool": POOL | {"kernel": (2, 2), "padding": (0, 0), "ceil_mode": True}},
    {"act": "none", "padding": 1, "pool": POOL},
]


def eagerly(x: Tensor, weight: Tensor, bias: Tensor | None, *, act: str, pool: dict[str, Any] | None = None, **window: Any) -> Tensor:
    y = ACTIVATIONS[act](F.conv2d(x, weight, bias, **window))
    return y if pool is None else F.max_pool2d(y, pool["kernel"], pool["stride"], pool["padding"], ceil_mode=pool["ceil_mode"])


@pytest.mark.parametrize(
    "options", WINDOWS, ids=lambda o: "-".join(f"{k}{v}" for k, v in o.items() if k != "pool") + "-pool" * ("pool" in o)
)
@pytest.mark.parametrize("last", [True, False])
def test_values_and_gradients_are_torchs(options: dict[str, Any], last: bool, device: torch.device) -> None:
    x, weight, bias = learning(
        noise(2, 6, 7, 6, device=device), noise(10, 6 // options.get("groups", 1), 3, 3, device=device) / 7, noise(10, device=device)
    )
    x = x if last else x.detach().contiguous().requires_grad_()
    y, expected = (run(x, weight, bias, **options) for run in (conv_bias_act, eagerly))
    assert off(y, expected) < 1e-6
    gradient = noise(*y.shape, seed=3, device=device)
    for mine, theirs in zip(*(torch.autograd.grad(out, [x, weight, bias], gradient) for out in (y, expected)), strict=True):
        assert mine.dtype == theirs.dtype
        assert off(mine, theirs) < 2e-6


@pytest.mark.parametrize(
    "asked", [(True, False, False), (False, True, False), (False, False, True), (True, True, False), (False, True, True)]
)
@pytest.mark.parametrize("act", ["relu", "silu", "none"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_is_right(asked: tuple[bool, ...], act: str, device: torch.device) -> None:
    leaves = [noise(2, 4, 5, 5, device=device), noise(6, 4, 3, 3, device=device), noise(6, device=device)]
    found = []
    for run in (conv_bias_act, eagerly):
        given = [leaf.detach().requires_grad_(learns) for leaf, learns in zip(leaves, asked, strict=True)]
        run(*given, act=act).square().mean().backward()
        found.append([leaf.grad for leaf in given])
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or off(mine, theirs) < 2e-6


def twice_rounded(x: Tensor, weight: Tensor, bias: Tensor, *, act: str) -> Tensor:
    """What PyTorch does on a GPU: the bias is added to a map that was rounded."""
    return ACTIVATIONS[act](F.conv2d(x, weight) + bias[:, None, None])


@pytest.mark.parametrize("act", ["relu", "hardswish", "none"])
def test_half_precision_rounds_no_more_than_torch_and_the_gradient_of_the_bias_not_at_all(act: str, device: torch.device) -> None:
    half = torch.float16  # the interpreter cuts bfloat16
    x, weight, bias = noise(4, 8, 9, 9, dtype=half, device=device), noise(16, 8, 3, 3, device=device) / 8, noise(16, device=device)
    gradient, results = noise(4, 16, 7, 7, dtype=half, device=device), []
    for dtypes, run in (((half, torch.float32), conv_bias_act), ((half, half), twice_rounded), ((torch.float64,) * 2, twice_rounded)):
        leaves = learning(x.to(dtypes[0]), weight.to(half).to(dtypes[1]), bias.to(half).to(dtypes[1]))
        y = run(*leaves, act=act)
        results.append([y, *torch.autograd.grad(y, leaves, gradient.to(y.dtype))])
    for name, ours, plain, exact in zip(("y", "x", "weight", "bias"), *results, strict=True):
        assert off(ours, exact) <= 1.1 * off(plain, exact) + 1e-6, name
    assert results[0][3].dtype == torch.float32
    assert not torch.equal(results[0][3], results[0][3].to(half).float())


def test_without_a_bias_and_without_images_it_is_torchs(device: torch.device) -> None:
    x, weight = learning(noise(2, 4, 5, 5, device=device), noise(6, 4, 3, 3, device=device))
    y, expected = conv_bias_act(x, weight, None, act="relu"), F.relu(F.conv2d(x, weight))
    assert off(y, expected) < 1e-6
    for mine, theirs in zip(*(torch.autograd.grad(out.square().sum(), [x, weight]) for out in (y, expected)), strict=True):
        assert off(mine, theirs) < 2e-6
    empty = x.detach()[:0].requires_grad_()
    y = conv_bias_act(empty, weight, noise(6, device=device), act="relu")
    assert y.shape == (0, 6, 3, 3)
    assert torch.autograd.grad(y.sum(), weight)[0].count_nonzero() == 0


REAL_SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "vgg": ((16, 64, 56, 56), (128, 64, 3, 3), {"act": "relu", "padding": 1}),
    "vgg with a pool": (
        (16, 64, 56, 56),
        (64, 64, 3, 3),
        {"act": "relu", "padding": 1, "pool": POOL | {"kernel": (2, 2), "padding": (0, 0)}},
    ),
    "squeezenet": ((16, 128, 27, 27), (96, 128, 1, 1), {"act": "relu"}),
    "grouped": ((16, 64, 28, 28), (64, 16, 3, 3), {"act": "relu", "padding": 1, "groups": 4}),
    "hardswish": ((16, 40, 28, 28), (120, 40, 1, 1), {"act": "hardswish"}),
    "nothing behind": ((16, 64, 28, 28), (100, 64, 3, 3), {"act": "none", "stride": 2, "padding": 1}),
    "stem of resnet": ((16, 3, 112, 112), (64, 3, 7, 7), {"act": "none", "stride": 2, "padding": 3}),
    "stem of vgg": ((8, 3, 112, 112), (64, 3, 3, 3), {"act": "relu", "padding": 1}),
    "stem of alexnet": ((16, 3, 112, 112), (64, 3, 11, 11), {"act": "relu", "stride": 4, "padding": 2, "pool": POOL | {"padding": (0, 0)}}),
    "stem of mobilenet": ((16, 3, 112, 112), (32, 3, 3, 3), {"act": "relu6", "stride": 2, "padding": 1}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", REAL_SHAPES)
def test_real_shapes_agree_with_float64_on_the_gpu(name: str, dtype: torch.dtype) -> None:
    """Memory that the allocator hands out again is full of NaN: nothing of it may be read, not even times zero."""
    shape, taken, options = REAL_SHAPES[name]
    x = noise(*shape, dtype=dtype, device="cuda")
    weight = (noise(*taken, device="cuda") / taken[1:][0] ** 0.5 / taken[2]).to(dtype).float()
    weight, bias = weight.contiguous(memory_format=torch.channels_last), noise(taken[0], device="cuda").to(dtype).float()
    window = {key: value for key, value in options.items() if key not in ("act", "pool")}
    z = F.conv2d(x.double(), weight.double(), bias.double(), **window)
    torch.full((4 * z.numel(),), math.nan, dtype=dtype, device="cuda")
    run = stem_conv if name.startswith("stem") else conv_bias_act
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=False):
        leaves = learning(x, weight, bias)
        y = run(*leaves, **options)
        wide = [t.detach().double().requires_grad_() for t in leaves]
        expected = eagerly(*wide, **options)
        # cuDNN may choose Winograd's or a Fourier transform for float32.
        allowed = {torch.float32: 1e-4, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
        assert off(y, expected) < allowed
        # Where a pixel is so near a border, or two of a window so near each other, that rounding decides, the slope is anybody's.
        decided = (expected.abs() > 0.05) & ((expected - 6).abs() > 0.05) & ((expected + 3).abs() > 0.05) & ((expected - 3).abs() > 0.05)
        if pool := options.get("pool"):
            (top, left), act = pool["padding"], ACTIVATIONS[options["act"]](z)
            padded = F.pad(act, (left, left, top, top), value=-math.inf).flatten(0, 1)[:, None]
            best = F.unfold(padded, pool["kernel"], stride=pool["stride"]).topk(2, dim=1).values
            decided &= (best[:, 0] - best[:, 1] > 0.05).view(expected.shape)
        gradient = noise(*y.shape, dtype=dtype, seed=5, device="cuda") * decided
        found = torch.autograd.grad(y, leaves, gradient)
        wanted = torch.autograd.grad(expected, wide, gradient.double())
    for mine, exact in zip(found, wanted, strict=True):
        assert off(mine, exact) < allowed


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"x": noise(4, 5, 5)}, "fit each other"),
        ({"bias": noise(5)}, "one for each channel"),
        ({"bias": None, "act": "none"}, "alone"),
        ({"x": noise(2, 4, 2, 2)}, "larger than the image"),
        ({"act": "sigmoid"}, "activation sigmoid"),
        ({"act": "silu", "pool": POOL}, "pool behind silu"),
        ({"pool": POOL | {"kernel": (9, 9)}}, "64 taps"),
    ],
)
def test_what_is_refused_is_said(changed: dict[str, Any], reason: str) -> None:
    window = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": (1,)}
    given = {"x": noise(2, 4, 5, 5), "weight": noise(6, 4, 3, 3), "bias": noise(6), "act": "relu", "window": window}
    assert refused(**given) == ""
    assert reason in refused(**given | changed)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"gradient": noise(2, 4, 5, 5).double()}, "float32"),
        ({"act": "sigmoid"}, "activation sigmoid"),
        ({"kept": None}, "nothing kept"),
        ({"kept": noise(2, 4, 5, 4)}, "another shape"),
        ({"bias": noise(4)}, "beside an output"),
        ({"gradient": noise(2, 4, 5, 5).contiguous()}, "channels_last"),
    ],
)
def test_what_the_way_back_refuses_is_said(args: dict[str, Any], reason: str) -> None:
    given: dict[str, Any] = {"gradient": noise(2, 4, 5, 5), "kept": noise(2, 4, 5, 5), "act": "relu"}
    assert bias_act_grad.supports(**given) == ""
    assert reason in bias_act_grad.supports(**given | args)


STEMS: list[dict[str, Any]] = [
    {"act": "none", "stride": 2, "padding": 3},
    {"act": "relu", "padding": 1, "pool": POOL},
    {"act": "leaky_relu_0.1", "stride": (2, 1), "padding": (0, 2)},
]


@pytest.mark.parametrize("options", STEMS, ids=["resnet", "vgg", "uneven"])
@pytest.mark.parametrize("biased", [True, False])
def test_a_stems_values_and_gradients_are_torchs(options: dict[str, Any], biased: bool, device: torch.device) -> None:
    side = 7 if options["padding"] == 3 else 3
    leaves = learning(noise(2, 3, 11, 8, device=device), noise(10, 3, side, side, device=device) / 5, noise(10, device=device))
    leaves = leaves if biased else leaves[:2]
    y, expected = stem_conv(*leaves, **options), eagerly(*leaves, *([] if biased else [None]), **options)
    assert off(y, expected) < 1e-6
    gradient = noise(*y.shape, seed=3, device=device)
    for mine, theirs in zip(*(torch.autograd.grad(out, leaves, gradient) for out in (y, expected)), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert off(mine, theirs) < 2e-6


@pytest.mark.parametrize("frozen", [(), (1,), (2,)], ids=["all learn", "the weight doesn't", "the bias doesn't"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("act", ["none", "relu", "relu6", "leaky_relu_0.1"])
def test_a_stem_of_images_that_learn_nothing_has_torchs_gradients(
    act: str, again: bool, frozen: tuple[int, ...], device: torch.device
) -> None:
    """By one product for weight and bias, where the activation's slope is a step."""
    given = [noise(2, 3, 11, 8, device=device), noise(10, 3, 3, 3, device=device) / 5, noise(10, device=device)]
    learnt = [place for place in (1, 2) if place not in frozen]
    found = []
    for run in (stem_conv, eagerly):
        leaves = [leaf.clone().requires_grad_(place in learnt) for place, leaf in enumerate(given)]
        y = run(*leaves, act=act, padding=1, **({"again": again} if run is stem_conv else {}))
        asked = [leaves[place] for place in learnt]
        gradient = noise(*y.shape, seed=3, device=device)
        first = torch.autograd.grad(y, asked, gradient, retain_graph=True)
        second = torch.autograd.grad(y, asked, gradient)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        found.append(first)
    for mine, theirs in zip(*found, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert off(mine, theirs) < 2e-6


@pytest.mark.parametrize("batch", [2, 0])
@pytest.mark.parametrize("pool", [None, POOL], ids=["bare", "pooled"])
@pytest.mark.parametrize("learns", [(0,), (1,), (2,), (0, 1), (0, 1, 2)], ids=str)
def test_what_learns_gets_torchs_gradients_as_often_as_it_asks(
    learns: tuple[int, ...], pool: dict[str, Any] | None, batch: int, device: torch.device
) -> None:
    given = [noise(batch, 4, 8, 7, device=device), noise(6, 4, 3, 3, device=device) / 6, noise(6, device=device)]
    found = []
    for run in (conv_bias_act, eagerly):
        leaves = [leaf.clone().requires_grad_(place in learns) for place, leaf in enumerate(given)]
        y = run(*leaves, act="relu", stride=2, padding=1, pool=pool)
        asked, gradient = [leaves[place] for place in learns], noise(*y.shape, seed=3, device=device)
        first = torch.autograd.grad(y, asked, gradient, retain_graph=True)
        second = torch.autograd.grad(y, asked, gradient)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        found.append(first)
    for mine, theirs in zip(*found, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert not mine.numel() or not theirs.any() or off(mine, theirs) < 2e-6


@pytest.mark.parametrize("shape", [(8, 7), (9, 9), (10, 6)], ids=str)
@pytest.mark.parametrize(
    "window",
    [{"stride": 2}, {"stride": (3, 2), "padding": (0, 2)}, {"dilation": 2, "padding": 2}, {"stride": 2, "groups": 2, "padding": 1}, {}],
    ids=str,
)
def test_the_gradient_of_a_map_is_that_maps_size(shape: tuple[int, int], window: dict[str, Any], device: torch.device) -> None:
    """A transposed convolution has to be told how many pixels no window reached."""
    groups = window.get("groups", 1)
    given = learning(noise(2, 4, *shape, device=device), noise(6, 4 // groups, 3, 3, device=device) / 6, noise(6, device=device))
    y, expected = conv_bias_act(*given, act="relu", **window), eagerly(*given, act="relu", **window)
    gradient = noise(*y.shape, seed=3, device=device)
    for mine, theirs in zip(*(torch.autograd.grad(out, given, gradient) for out in (y, expected)), strict=True):
        assert off(mine, theirs) < 2e-6


def test_what_was_kept_is_gone_before_a_maps_gradient_is_made(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The map that was read, once the weight has its gradient; and what the pool behind kept, once that is done."""
    there: list[tuple[StorageWeakRef, tuple[int, ...]]] = []

    def handed(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        there.append((StorageWeakRef(copy.untyped_storage()), tuple(copy.shape)))
        return copy

    seen: list[list[tuple[int, ...]]] = []
    of_map = convs._of_map

    def watched(gradient: Tensor, *rest: Any) -> Tensor:
        gc.collect()  # Triton's interpreter leaves what it was given in a circle of its own
        seen.append([shape for storage, shape in there if not storage.expired()])
        return of_map(gradient, *rest)

    monkeypatch.setattr(convs, "_of_map", watched)
    given = learning(noise(2, 4, 8, 8, device=device), noise(6, 4, 3, 3, device=device), noise(6, device=device))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), handed):
        y = conv_bias_act(*given, act="relu", padding=1, pool=POOL)
    y.sum().backward()
    assert seen == [[(6, 4, 3, 3)]]  # the weight


@pytest.mark.parametrize("which", ["stem", "stem again", "conv", "conv silu", "pooled"])
def test_maps_that_a_hook_lays_out_anew_are_read_as_they_lie(which: str, device: torch.device) -> None:
    channels = 3 if "stem" in which else 4
    given = [noise(2, channels, 8, 7, device=device), noise(6, channels, 3, 3, device=device) / 6, noise(6, device=device)]
    options: dict[str, Any] = {"act": "silu" if "silu" in which else "relu", "padding": 1}
    options |= {"again": True} if which == "stem again" else {"pool": POOL} if which == "pooled" else {}
    found = []
    for hooked in (False, True):
        leaves = [leaf.clone().requires_grad_(place > 0 or "stem" not in which) for place, leaf in enumerate(given)]
        anew = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t)
        with anew if hooked else contextlib.nullcontext():
            y = (stem_conv if "stem" in which else conv_bias_act)(*leaves, **options)
        found.append(torch.autograd.grad(y, [leaf for leaf in leaves if leaf.requires_grad], noise(*y.shape, seed=3, device=device)))
    for mine, theirs in zip(*found, strict=True):
        assert off(mine, theirs) < 1e-6


def test_a_stem_casts_images_of_any_layout_once_and_keeps_neither_them_nor_its_weight(device: torch.device) -> None:
    x, weight = noise(2, 3, 9, 8, device=device), noise(8, 3, 3, 3, device=device).requires_grad_()
    results = []
    for images in (x, x.contiguous(), x.double().transpose(2, 3).contiguous().transpose(2, 3).float()):
        y = stem_conv(images, weight, stride=2, padding=1, dtype=torch.float16)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), weight)])
    exact = F.conv2d(x.double(), weight.double(), None, 2, 1)
    wanted = [exact, *torch.autograd.grad(exact.square().sum(), weight)]
    for found in results:
        assert found[0].dtype == torch.float16
        assert [off(mine, theirs) < 1e-3 for mine, theirs in zip(found, wanted, strict=True)] == [True, True]
    y = stem_conv(x, weight, stride=2, padding=1)
    kept = y.grad_fn.saved_tensors  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    assert [None if t is None else t.shape[-1] for t in kept] == [4, None, None, None, None]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"x": noise(2, 5, 9, 9), "weight": noise(8, 5, 3, 3)}, "at most 4 channels"),
        ({"act": "silu"}, "activation silu"),
        ({"bias": noise(7)}, "one for each channel"),
        ({"x": noise(2, 3, 2, 2)}, "no output"),
        ({"pool": POOL | {"kernel": (9, 9)}}, "64 taps"),
        ({"dtype": torch.float64}, "float64"),
        ({"x": torch.zeros(2, 3, 9, 9, dtype=torch.uint8)}, "floating"),
    ],
)
def test_what_a_stem_refuses_is_said(changed: dict[str, Any], reason: str) -> None:
    given = {"x": noise(2, 3, 9, 9), "weight": noise(8, 3, 3, 3), "bias": noise(8), "act": "relu", "stride": (1, 1), "padding": (0, 0)}
    given |= {"dtype": torch.float32}
    assert stem_refused(**given) == ""
    assert reason in stem_refused(**given | changed)


class Convolutions(nn.Module):
    """Every kind of convolution with a bias, and some that no chain may take."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding="same", groups=2)
        self.mirrored = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.dilated = nn.Conv2d(8, 12, 3, dilation=2, groups=4)
        self.leaky = nn.Conv2d(12, 12, 1)
        self.kept = nn.Conv2d(12, 8, 1)
        self.gate = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu_(self.first(x)), 2)
        x = F.silu(self.second(x))
        x = torch.relu(self.grouped(x))
        x = F.relu6(self.mirrored(x))
        x = self.dilated(x)
        x = x + F.leaky_relu(self.leaky(x), 0.1, inplace=True)
        y = F.leaky_relu(self.kept(x))
        y += 1.0  # what was kept of it would be another
        y = F.hardswish(y)
        return self.head((y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))).mean((2, 3)))


CHAINS = [
    "conv 3x3 + bias + relu + max_pool 2x2", "conv 3x3 + bias + silu", "conv 3x3 + bias + relu6", "conv 3x3 + bias",
    "conv 1x1 + bias + leaky_relu_0.1", "scale_channels",
]  # fmt: skip


def images(seed: int = 0, size: int = 24) -> Tensor:
    return torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(seed))


def pair() -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    eager = Convolutions().train()
    quick = copy.deepcopy(eager)
    return eager, quick, fast(quick, train=True, example=images())


def step(called: nn.Module, network: nn.Module, seed: int, casts: bool = False, size: int = 24) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, casts):
        loss = called(images(seed, size)).float().square().mean()
    network.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in network.parameters():
            if p.grad is not None:
                p -= 0.05 * p.grad
    return loss.detach()


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chains of convolutions call what they call on a GPU: the kernels, interpreted."""
    from zoo.kernels.differentiable import convs as ops

    monkeypatch.setattr(kernels, "conv_bias_act", lambda x, w, b, **options: ops.conv_bias_act(x, w, b, **options))


@pytest.mark.parametrize("frozen", ["", "first.weight second.bias", "dilated.weight dilated.bias leaky.bias"])
def test_a_network_of_convolutions_learns_as_eager_does(frozen: str, on_kernels: None) -> None:
    eager, quick, model = pair()
    assert [row.kernel for row in why(model).rows] == CHAINS
    for network in (eager, quick):
        for name in frozen.split():
            network.get_parameter(name).requires_grad_(False)
    for seed in range(2):
        losses = [step(called, network, seed) for called, network in ((eager, eager), (model, quick))]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(quick.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-5)
    assert not model.unchanged


def test_under_autocast_it_learns_as_eager_does_within_its_rounding(on_kernels: None) -> None:
    eager, quick, model = pair()
    exact = copy.deepcopy(eager)
    for called, network in ((exact, exact), (eager, eager), (model, quick)):
        for seed in range(3):
            step(called, network, seed, casts=network is not exact)
    assert not model.unchanged
    names = dict(exact.named_parameters())
    errors = [sum(off(p.detach(), names[name].detach()) for name, p in network.named_parameters()) for network in (quick, eager)]
    assert errors[0] <= 1.5 * errors[1]


class _Half(torch.autograd.Function):
    """Half the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient / 2


def without_its_bias(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return REAL(x, weight, 0.9 * bias, **options)


def half_the_weights_gradient(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return REAL(x, _Half.apply(weight), bias, **options)  # pyright: ignore[reportArgumentType]


def half_the_biass_gradient(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return REAL(x, weight, _Half.apply(bias), **options)  # pyright: ignore[reportArgumentType]


REAL = kernels.conv_bias_act


@pytest.mark.parametrize(
    ("fault", "said"),
    [(without_its_bias, "output"), (half_the_weights_gradient, "gradient of weight"), (half_the_biass_gradient, "gradient of bias")],
)
def test_a_planted_fault_is_found_and_everything_falls_back(fault: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "conv_bias_act", fault)
    eager, quick, model = pair()
    rows = why(model).rows
    assert [row.kernel for row in rows if row.kernel != "aten"] == ["max_pool 2x2", "scale_channels"]
    assert sum(said in row.note for row in rows) == 5
    for called, network in ((eager, eager), (model, quick)):
        step(called, network, 0)
    torch.testing.assert_close(quick.state_dict(), eager.state_dict())


def test_a_chain_with_a_pool_that_is_wrong_falls_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, weight: Tensor, bias: Tensor, *, pool: Any = None, **options: Any) -> Tensor:
        y = REAL(x, weight, bias, pool=pool, **options)
        return y if pool is None else 1.1 * y

    monkeypatch.setattr(kernels, "conv_bias_act", wrong)
    rows = [row.kernel for row in why(pair()[2]).rows]
    assert rows == ["aten", "conv 3x3 + bias + relu", "max_pool 2x2", *CHAINS[1:]]


def test_vgg_is_a_column_of_chains() -> None:
    recording = record(VGG11(num_classes=4).train(), (torch.randn(1, 3, 32, 32),), {}, torch.device("cpu"))
    steps, found, _ = steps_of(recording, {})
    plain, pools = ["conv 3x3 + bias + relu"], ["conv 3x3 + bias + relu + max_pool 2x2"]
    assert [chain.op for chain in found] == pools + pools + (plain + pools) * 3
    assert [step for step in steps if isinstance(step, Chain)] == found


@pytest.mark.parametrize(("pieces", "calls"), [(9.0, 12.0), (12.0, 9.0)])
def test_a_chain_with_a_pool_competes_with_its_pieces_and_with_pytorch(pieces: float, calls: float) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1, bias=False)).train()
    recording = record(network, (torch.randn(2, 3, 8, 8),), {}, torch.device("cpu"))
    left = [10.0, pieces, calls, 5.0, 9.0, 3.0, 4.0]

    def clock(call: Any) -> float:
        call()
        return left.pop(0)

    found = choosing.slower(recording, {}, choosing.Times(), clock)
    assert list(found.values()) == ["no faster: 10 us, without it 9 us"]
    assert [(chain.op, bool(chain.note)) for chain in steps_of(recording, found)[1]] == [
        ("conv 3x3 + bias + relu + max_pool 2x2", True), ("conv 3x3 + bias + relu", False), ("max_pool 2x2", False),
    ]  # fmt: skip
    assert not left


@pytest.fixture
def on_stems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stems be found as on a GPU; the kernels are interpreted."""
    monkeypatch.setattr(kernels, "stem_conv_refuses", lambda device, x, weight, bias, **options: stem_refused(x, weight, bias, **options))


class Stem(nn.Module):
    """Images into a convolution with nothing behind it but BatchNorm, and into one with everything."""

    def __init__(self) -> None:
        super().__init__()
        self.bare, self.norm = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.whole = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped, self.dilated = nn.Conv2d(3, 6, 3, groups=3), nn.Conv2d(3, 8, 3, dilation=2)
        self.head = nn.Linear(30, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.bare(x)))
        z = F.max_pool2d(F.relu(self.whole(x)), 2)
        maps = y, z, F.silu(self.grouped(x)), F.relu(self.dilated(x))
        return self.head(torch.cat([m.mean((2, 3)) for m in maps], 1))


STEM_CHAINS = [
    "stem conv 7x7", "batch_norm + relu", "stem conv 3x3 + bias + relu + max_pool 2x2", "conv 3x3 + bias + silu", "conv 3x3 + bias + relu",
]  # fmt: skip


def test_a_network_of_stems_learns_as_eager_does(on_stems: None) -> None:
    torch.manual_seed(0)
    eager = Stem().train()
    quick = copy.deepcopy(eager)
    model = fast(quick, train=True, example=images(0, 12))
    assert [row.kernel for row in why(model).rows] == STEM_CHAINS
    for seed in range(2):
        losses = [step(called, network, seed, size=12) for called, network in ((eager, eager), (model, quick))]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(quick.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-5)
    for called, network in ((eager, eager), (model, quick)):
        network.bare.requires_grad_(False)
        x = images(5, 12).requires_grad_()
        called(x).square().mean().backward()
        called.zero_grad()
        called.__dict__["seen"] = x.grad
    torch.testing.assert_close(model.__dict__["seen"], eager.__dict__["seen"], rtol=1e-4, atol=1e-6)


def test_a_wrong_stem_falls_apart_into_the_chain_in_it(on_stems: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.stem_conv
    monkeypatch.setattr(kernels, "stem_conv", lambda *parts, **options: 1.2 * real(*parts, **options))
    torch.manual_seed(0)
    rows = why(fast(Stem().train(), train=True, example=images(0, 12))).rows
    assert sorted(row.kernel for row in rows) == sorted(["aten", "aten", CHAINS[0], *(k for k in STEM_CHAINS if "stem" not in k)])
    assert all("output" in row.note for row in rows if row.kernel == "aten")


def test_images_need_no_gradient_where_chains_are_timed(on_stems: None) -> None:
    recording = record(Stem().train(), (images(0, 12),), {}, torch.device("cpu"))
    chain = next(chain for chain in steps_of(recording, {})[1] if chain.op == "stem conv 7x7")
    asked = choosing._there_and_back(recording, [chain], chain.reads, chain.makes)()
    assert isinstance(asked, tuple)
    assert [tuple(gradient.shape) for gradient in asked] == [(8, 3, 7, 7)]


def test_what_is_wrong_only_where_images_do_not_learn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in most steps: a kernel may go another way back there than where they do."""
    torch.manual_seed(0)
    network, images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).train(), torch.randn(2, 3, 8, 8)
    right = kernels.conv_bias_act

    def wrong(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
        y = right(x, weight, bias, **options)
        return y if x.requires_grad else y.detach() + 1.1 * (y - y.detach())

    recording = record(network, (images,), {}, torch.device("cpu"))
    monkeypatch.setattr(kernels, "conv_bias_act", wrong)
    verdict = Check(network, recording, (images,), {}, torch.device("cpu")).verdict()
    assert ["gradient of weight" in reason for reason in verdict.without.values()] == [True]
