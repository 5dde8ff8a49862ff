"""Global response normalisation with GELU before it and a product behind it goes back by kernels, in each way that it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kernels.stretches import CPU, count, learnt_or_zeros, like, made_of
from zoo.kernels.differentiable import response_norm as operators
from zoo.kernels.ops import _layout, response_norm_grad, response_sums
from zoo.kernels.training import kernels
from zoo.kernels.training.calls import readers_of
from zoo.kernels.training.record import Call, Recording, Ref, Value, record
from zoo.kernels.training.response_norms import LENGTHS, response_norm
from zoo.kernels.training.segments import inductor

C = 16


class Response(nn.Module):
    """The norm as the zoo writes it, or as `kind` says: as timm's, or as the paper's code, or something else that is near it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight, self.bias = nn.Parameter(torch.rand(C)), nn.Parameter(torch.rand(C))
        if "half" in kind:
            self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        kind, weight, bias = self.kind, self.weight, self.bias
        if "timm" in kind:
            norm = x.norm(p=2, dim=(1, 2), keepdim=True)
        elif "paper" in kind:
            norm = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        else:
            norm = torch.linalg.vector_norm(x, 1 if "of sums" in kind else 2, dim=1 if "one axis" in kind else (1, 2), keepdim=True)
        share = norm / (norm.mean(0 if "wrong mean" in kind else -1, keepdim=True) + 1e-6)
        if "timm" in kind or "more axes" in kind:
            axes = (1,) * (4 if "more axes" in kind else 3)
            weight, bias = weight.view(*axes, -1), bias.view(*axes, -1)
        if "written" in kind:
            bias = bias * 2
        if "each image" in kind:
            bias = torch.stack([bias, 2 * bias, 3 * bias])[:, None, None]
        scaled = (x.tanh() if "of another" in kind else x) * share
        if "paper" in kind:
            made = weight * scaled
            made = made + x + bias if "turned" in kind else made + bias + x
        else:
            made = x + torch.addcmul(bias, weight, scaled, value=0.5 if "halved" in kind else 1)
        if "written" in kind:
            bias.add_(1)
        return made + norm if "twice" in kind else made


class Block(nn.Module):
    """Of ConvNeXt V2, behind a norm that is a chain, so that what follows is one stretch."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.norm, self.response = kind, nn.BatchNorm2d(8), Response(kind)
        self.grow, self.shrink, self.drop = nn.Linear(8, C, bias="bare" not in kind), nn.Linear(C, 8), nn.Dropout(0.0)
        for module in (self.response, self.shrink) if "frozen" in kind else ():
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.grow(self.norm(x).permute(0, 2, 3, 1)), approximate="tanh" if "tanh" in self.kind else "none")
        y = torch.sigmoid(y) if "sigmoid" in self.kind else y
        y = self.response(self.drop(y) if "dropped" in self.kind else y)
        if "read again" in self.kind:
            return self.shrink(y).tanh() + y.mean()
        return self.shrink(self.drop(y)).tanh()


@pytest.mark.parametrize("kind", ["", "timm, dropped", "paper", "paper, turned", "dropped, gelu by tanh", "frozen", "timm, frozen"])
def test_a_response_norm_is_gone_back_through(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network, images = Block(kind).train(), torch.randn(3, 8, 4, 5, requires_grad=True)
    run, calls = made_of(network, images, monkeypatch)
    assert count(calls) == {"response_linear": 1, "linear": 1}
    like(learnt_or_zeros(network, run, images), learnt_or_zeros(network, network, images), 2e-6)


@pytest.mark.parametrize(
    "kind",
    ["one axis", "of sums", "wrong mean", "of another", "norm read twice", "halved", "bare", "sigmoid", "read again", "half", "written to",
     "a bias for each image", "more axes"],
)  # fmt: skip
def test_what_is_something_else_is_the_compilers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network, images = Block(kind).train(), torch.randn(3, 8, 4, 5, requires_grad=True)
    run, calls = made_of(network, images, monkeypatch)
    assert "response_linear" not in count(calls)
    like(learnt_or_zeros(network, run, images), learnt_or_zeros(network, network, images), 2e-6)


def found_of(change: Any = None, wanted: Any = (), written: Any = ()) -> tuple[Recording, Any]:
    """Return the recording of a block, and the norm that is found in it once it was changed."""
    recording = record(Block().train(), (torch.randn(3, 8, 4, 5),), {}, CPU)
    calls, values = [*recording.calls], [*recording.values]
    begins = next(index for index, call in enumerate(calls) if call.name in LENGTHS)
    if change is not None:
        change(calls, values)
    return recording, response_norm(values, calls, readers_of(calls), set(wanted), {values[n].memory for n in written}, begins)


def test_what_is_read_or_written_elsewhere_is_no_response_norm() -> None:
    recording, found = found_of()
    assert found is not None
    inside = [found.y, *(int(recording.calls[place].result) for place in found.places[:-1])]
    for number in inside:
        assert found_of(wanted=[number])[1] is None
    for number in (*inside, found.scale, found.offset):
        assert found_of(written=[number])[1] is None
    assert found_of(wanted=[int(recording.calls[found.places[-1]].result)])[1] == found


def test_calls_with_other_arguments_are_no_response_norm() -> None:
    recording, found = found_of()
    norm, mean, level, _, scaled, weighted, total = found.places

    def changed(place: int, **options: Any) -> Callable[[Any, Any], None]:
        def change(calls: list[Call], values: list[Value]) -> None:
            calls[place] = replace(calls[place], **options)

        return change

    def shaped(number: int, **options: Any) -> Callable[[Any, Any], None]:
        def change(calls: list[Call], values: list[Value]) -> None:
            values[number] = replace(values[number], **options)

        return change

    for place in found.places:
        assert found_of(changed(place, grad=False))[1] is None
        assert found_of(changed(place, writes=frozenset([1])))[1] is None
    sized = {"dim": (1, 2), "keepdim": True}
    for kwargs in (sized | {"dtype": torch.float64}, sized | {"keepdim": False}, sized | {"dim": (0, 1, 2)}, sized | {"dim": ()}):
        assert found_of(changed(norm, kwargs=kwargs))[1] is None
    for kwargs in ({"keepdim": True, "dtype": torch.float64}, {"keepdim": False}):
        assert found_of(changed(mean, kwargs=kwargs))[1] is None
    assert found_of(changed(level, kwargs={"alpha": 2}))[1] is None
    assert found_of(changed(total, kwargs={"alpha": 2}))[1] is None
    inner, scale = Ref(int(recording.calls[scaled].result)), Ref(found.scale)
    assert found_of(changed(weighted, args=(Ref(found.offset), inner, inner)))[1] is None
    assert found_of(changed(weighted, args=(inner, scale, inner)))[1] is None
    for number in (found.scale, found.offset):
        assert found_of(shaped(number, shape=(3, 1, 1, C)))[1] is None
        assert found_of(shaped(number, shape=(1, 1, 1, 1, C)))[1] is None
        assert found_of(shaped(number, dtype=torch.bfloat16))[1] is None
        assert found_of(shaped(number, shape=(1, 1, 1, C)))[1] == found


def test_the_compiler_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network, images = Block().train(), torch.randn(3, 8, 4, 5, requires_grad=True)
    run, calls = made_of(network, images, monkeypatch, inductor)
    assert count(calls)["response_linear"] == 1
    like(learnt_or_zeros(network, run, images), learnt_or_zeros(network, network, images), 2e-6)


def arguments(dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Tensor]:
    """Return what `response_linear` takes, all of it learning."""
    torch.manual_seed(0)
    sizes = [(3, 4, 5, C), (C,), (C,), (C,), (6, C), (6,)]
    return [torch.randn(size, dtype=dtype).to(device).requires_grad_() for size in sizes]


def plainly(before: Tensor, scale: Tensor, offset: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    y = F.gelu(before)
    norm = torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True)
    return F.linear(y + offset + scale * (y * (norm / (norm.mean(-1, keepdim=True) + 1e-6))), weight, shift)


def test_its_gradients_are_those_of_differences() -> None:
    given = arguments(torch.float64)

    def run(*tensors: Tensor) -> Tensor:
        before, *rest = tensors
        bias = torch.zeros(C, dtype=torch.float64)
        return kernels._ours("response_linear")(before, bias, *rest, eps=0.5)

    assert torch.autograd.gradcheck(run, (given[0], *given[2:]))


@pytest.mark.parametrize("learns", [True, False])
def test_nothing_is_kept_but_what_gelu_reads(learns: bool, device: torch.device) -> None:
    given, kept = arguments(torch.float32, device), list[int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        made = kernels._ours("response_linear")(*given, eps=1e-6, learns=learns)
    assert kept == [given[0].numel(), 3 * C, C, C, 6 * C]
    expected, gradient = plainly(given[0], *given[2:]), torch.randn(made.shape, device=device)
    found = torch.autograd.grad(made, given, gradient, allow_unused=True)
    right = torch.autograd.grad(expected, [given[0], *given[2:]], gradient)
    assert (found[-1] is None) != learns
    like([made.detach(), found[0], *found[2:5]], [expected.detach(), *right[:4]], 2e-5)
    like([found[1]], [right[0].sum((0, 1, 2))], 2e-5)


def test_a_channel_without_values_has_no_slope() -> None:
    given = arguments(torch.float32)
    with torch.no_grad():
        given[0][..., 3] = 0.0
    made, expected = kernels._ours("response_linear")(*given, eps=1e-6), plainly(given[0], *given[2:])
    found = torch.autograd.grad(made.square().sum(), [given[0], *given[2:]])
    like([*found], [*torch.autograd.grad(expected.square().sum(), [given[0], *given[2:]])], 2e-5)


def test_maps_beyond_the_kernels_reach_are_gone_back_through_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_layout, "LARGEST", 100)
    for op in (response_norm_grad, response_sums):
        monkeypatch.setattr(op, "launch", None)
    given = arguments(torch.float32)
    made, expected = kernels._ours("response_linear")(*given, eps=1e-6), plainly(given[0], *given[2:])
    found = torch.autograd.grad(made.square().sum(), [given[0], *given[2:]])
    like([*found], [*torch.autograd.grad(expected.square().sum(), [given[0], *given[2:]])], 2e-5)


def test_the_compiler_knows_what_the_operators_make() -> None:
    gradient, before, gate, tilt, shift = torch.randn(2, 3, 2, C), torch.randn(2, 3, 2, C), *torch.randn(2, 2, C), torch.randn(C)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operators._summed, (gradient, before, "gelu"), test_utils=checks)
    for again in (False, True):
        torch.library.opcheck(operators._through_response, (gradient, before, gate, tilt, shift, "gelu", again), test_utils=checks)
