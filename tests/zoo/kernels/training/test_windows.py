"""Attention inside windows: which calls are put together, what goes back through them, and that nothing learns anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tests.zoo.kernels.tensors import noise, off
from zoo.kernels.comparing import op_checks as checking
from zoo.kernels.differentiable.windows import window_attention
from zoo.kernels.ops import window_attention as there
from zoo.kernels.ops import window_attention_grad as back
from zoo.kernels.training import kernels
from zoo.kernels.training import segments as segments_of
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.contest import compiled
from zoo.kernels.training.record import Call, record
from zoo.kernels.training.segments import inductor
from zoo.kernels.training.windows import attended

CPU = torch.device("cpu")
C, HEADS, SIDE, T = 16, 2, 2, 4


@pytest.mark.parametrize("case", back.CASES, ids=lambda case: case["name"].replace(" ", "_"))
def test_the_reference_is_what_autograd_computes(case: dict[str, Any]) -> None:
    drawn = checking.draw(back, case, torch.float32, "cpu")
    args: dict[str, Any] = {name: value.double() if isinstance(value, Tensor) else value for name, value in drawn.items()}
    gradient = args.pop("gradient")
    learning = [args[name].requires_grad_() for name in ("x", "bias") if name in args]
    learns = args.pop("learns")
    wanted = torch.autograd.grad(there.reference(**args), learning, gradient, allow_unused=True)
    wanted, args["learns"] = (wanted if learns else wanted[:1]), learns
    made = back.reference(gradient, **{name: value.detach() if isinstance(value, Tensor) else value for name, value in args.items()})
    for got, right in zip(checking.as_tuple(made), wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("parts", ["", "bias", "mask", "bias mask", "a frozen bias", "a mask that hides much"])
def test_windows_learn_as_by_autograd(parts: str, device: torch.device) -> None:
    tokens = noise(6, 9, 48, device=device).requires_grad_()
    bias = noise(2, 9, 9, seed=1, device=device).requires_grad_("frozen" not in parts) if "bias" in parts else None
    mask = noise(3, 9, 9, seed=2, device=device) if "mask" in parts else None
    if mask is not None and "hides" in parts:
        mask[0, :, 1:], mask[1, 2:, 3] = float("-inf"), float("-inf")
    made = window_attention(tokens, bias, mask, heads=2, factor=0.3)
    q, k, v = tokens.reshape(6, 9, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind()
    logits = (q * 0.3) @ k.transpose(-2, -1)
    logits = logits if bias is None else logits + bias
    logits = logits if mask is None else (logits.unflatten(0, (-1, 3)) + mask[:, None]).flatten(0, 1)
    expected = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
    gradient = noise(6, 9, 16, seed=3, device=device)
    learning = [t for t in (tokens, bias) if t is not None and t.requires_grad]
    pairs = zip(torch.autograd.grad(made, learning, gradient), torch.autograd.grad(expected, learning, gradient), strict=True)
    for got, right in ((made, expected), *pairs):
        assert off(got, right) < 1e-5


def test_a_mask_that_learns_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="a mask without a gradient"):
        window_attention(noise(6, 9, 48), None, noise(3, 9, 9).requires_grad_(), heads=2, factor=0.3)


class Windows(nn.Module):
    """A layer norm and attention in windows of 2 x 2 pixels, written as `kind` says."""

    index: Tensor
    closed: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.qkv, self.out, self.drop = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C), nn.Dropout(0.0)
        self.table = nn.Parameter(torch.randn(9, HEADS))
        self.register_buffer("index", torch.arange(T * T).view(T, T) % 9)
        self.register_buffer("closed", (torch.arange(4 * T * T).view(4, T, T) % 3 - 2).float() * 2)
        self.open = nn.Parameter(self.closed.clone())

    def bias(self) -> Tensor:
        return self.table[self.index].permute(2, 0, 1)

    def mask(self, x: Tensor) -> Tensor:
        if "learns" in self.kind:
            return self.open
        if "drawn" not in self.kind:
            return self.closed
        region = x.new_zeros((4, 4))
        region[:, 3:] = 1
        region[3:] += 2
        region = region.view(2, 2, 2, 2).permute(0, 2, 1, 3).reshape(4, T)
        apart = region.unsqueeze(1) - region.unsqueeze(2)
        return apart.masked_fill(apart != 0, -100.0)

    def shares(self, q: Tensor, k: Tensor, x: Tensor) -> Tensor:
        kind, n = self.kind, len(q)
        before, after = (1.0, 0.25) if "behind" in kind else (0.25, 1.0)
        logits = (q * before) @ k.transpose(-2, -1) * after
        if "scaled with its bias" in kind:
            return ((logits + self.bias()) * 0.5).softmax(-1)
        if "bias" in kind:
            logits = logits + (self.bias().unsqueeze(0) if "four axes" in kind else self.bias())
        if "of all pairs" in kind:  # another number for each window and head
            logits = logits + x.mean() * torch.ones_like(logits)
        if "twice" in kind:
            logits = logits + self.bias()
        if "mask" in kind:
            logits = logits.view(n // 4, 4, HEADS, T, T) + self.mask(x).unsqueeze(1).unsqueeze(0)
            logits = logits.view(-1, HEADS, T, T)
        if "written" in kind:
            logits.mul_(2)
        if "rows" in kind:
            return logits.softmax(-2)
        if "float" in kind:
            return torch.softmax(logits, -1, torch.float32 if "float32" in kind else torch.float64).to(x.dtype)
        return self.drop(F.softmax(logits, dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        kind = self.kind
        x = self.norm(x.permute(0, 2, 3, 1))
        x = x.roll((-1, -1), (1, 2)).view(-1, 2, SIDE, 2, SIDE, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, T, C)
        parts = self.qkv(x)
        if "another order" in kind:
            q, k, v = parts.reshape(-1, T, HEADS, 3, C // HEADS).permute(3, 0, 2, 1, 4).unbind()
        elif "items" in kind:
            parts = parts.reshape(-1, T, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
            q, k, v = parts[0], parts[1], parts[2]
        else:
            q, k, v = parts.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if "exchanged" in kind:
            k, v = v, k
        shares = self.shares(q, k, x)
        y = (shares @ v).transpose(1, 2)
        y = self.out(y.flatten(2) if "items" in kind else y.reshape(-1, T, C))
        y = y.view(-1, 2, 2, SIDE, SIDE, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 4, C)
        if "looked at" in kind:
            y = y + shares.mean()
        if "changed" in kind:
            self.closed.mul_(1.0)
        return F.gelu(y)


def same(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
    """Compile nothing: the graph's functions, one after the other."""
    return graph.forward


def learnt(network: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor) -> list[Tensor]:
    out = run(images)
    learning = list(network.parameters())
    summed = (out * torch.arange(out.numel()).sin().view(out.shape)).sum()
    return [out.detach(), *torch.autograd.grad(summed, [images, *learning], allow_unused=True)]


def made_of(kind: str, monkeypatch: pytest.MonkeyPatch, compiler: Any = same) -> tuple[nn.Module, Callable[[Tensor], Tensor], list[Call]]:
    """Return a network, its replay with attention put together as on a GPU, and what its stretches' calls are then."""
    torch.manual_seed(0)
    network = Windows(kind).train()
    seen: list[Call] = []

    def noted(*stretch: Any) -> list[Call]:
        made = attended(*stretch)
        seen.extend(made)
        return made

    monkeypatch.setattr(kernels, "HALF", (torch.float32,))  # so that nothing is rounded: the interpreter cuts bfloat16
    monkeypatch.setattr(kernels, "window_attention_refuses", lambda device, *shape: "")
    monkeypatch.setattr(segments_of, "on_kernels", lambda device: True)
    monkeypatch.setattr(segments_of, "attended", noted)
    recording = record(network, (images(),), {}, CPU)
    steps, _, counted = steps_of(recording, {})
    replay = compiled(recording, steps, counted, compiler, None, beside=True)
    assert replay is not None
    places = replay.at(network)
    learnt(network, lambda x: replay(places, [x]), images())
    return network, (lambda x: replay(places, [x])), seen


def images() -> Tensor:
    return torch.randn(3, C, 4, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize(
    "kind",
    ["bias", "bias float32", "bias four axes items", "bias mask", "bias mask drawn", "mask", "", "bias behind", "bias mask items"],
)
def test_attention_in_windows_is_put_together_and_learns_what_it_did(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, run, calls = made_of(kind, monkeypatch)
    names = [call.name for call in calls]
    assert "softmax" not in names
    assert "matmul" not in names
    assert "unbind" not in names
    for got, right in zip(learnt(network, run, images()), learnt(network, network, images()), strict=True):
        assert (got is None) == (right is None)
        assert got is None or off(got, right) < 3e-6


@pytest.mark.parametrize(
    "kind",
    [
        "scaled with its bias",
        "of all pairs",
        "bias twice",
        "bias written",
        "rows",
        "another order",
        "exchanged",
        "looked at bias",
        "mask learns",
        "mask changed",
        "bias float64",
    ],
)
def test_what_is_something_else_stays_and_learns_what_it_did(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, run, calls = made_of(kind, monkeypatch)
    assert "softmax" in [call.name for call in calls]
    for got, right in zip(learnt(network, run, images()), learnt(network, network, images()), strict=True):
        assert (got is None) == (right is None)
        assert got is None or off(got, right) < 3e-6


def test_the_compiler_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    network, run, calls = made_of("bias mask drawn", monkeypatch, inductor)
    assert "softmax" not in [call.name for call in calls]
    for got, right in zip(learnt(network, run, images()), learnt(network, network, images()), strict=True):
        assert (got is None) == (right is None)
        assert got is None or off(got, right) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", ["", "bias", "mask", "bias mask"])
def test_its_operators_are_what_the_compiler_takes_them_for(parts: str, dtype: torch.dtype) -> None:
    """Shapes, dtypes and memory of what they make, without data and with."""
    tokens, gradient = torch.randn(6, 9, 48).to(dtype), torch.randn(6, 9, 16).to(dtype)
    bias = torch.randn(9, 9, 2).permute(2, 0, 1) if "bias" in parts else None
    mask = torch.randn(3, 9, 9) if "mask" in parts else None
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.kernelzoo.window_attention, (tokens, bias, mask, 2, 0.3), test_utils=checks)
    for learns in (False, True):
        given = (gradient, tokens, bias, mask, 2, 0.3, learns)
        torch.library.opcheck(torch.ops.kernelzoo.window_attention_grad, given, test_utils=checks)


@pytest.mark.parametrize("frozen", [(), ("table",), ("qkv.weight", "qkv.bias", "norm.weight", "norm.bias")])
def test_half_precision_is_put_together_and_float32_stays(frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "window_attention_refuses", lambda device, *shape: "")
    torch.manual_seed(0)
    network = Windows("bias mask").train()
    for name in frozen:
        network.get_parameter(name).requires_grad_(False)
    recording = record(network, (images(),), {}, CPU)
    assert "softmax" in [call.name for call in attended(recording, recording.calls, [int(recording.outputs[0])])]
    monkeypatch.setattr(segments_of, "on_kernels", lambda device: True)
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    factors = torch.arange(images().numel()).sin().view(3, 4, 4, C)
    right = torch.autograd.grad((network(images()) * factors).sum(), learning, allow_unused=True)
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(network, (images(),), {}, CPU)
        assert "softmax" not in [call.name for call in attended(recording, recording.calls, [int(recording.outputs[0])])]
        steps, _, counted = steps_of(recording, {})
        replay = compiled(recording, steps, counted, inductor, None, beside=True)
        assert replay is not None
        made = replay(replay.at(network), [images()])
        found = torch.autograd.grad((made.float() * factors).sum(), learning, allow_unused=True)
    for got, exact in zip(found, right, strict=True):
        assert (got is None) == (exact is None)
        if got is not None:
            assert got.dtype == torch.float32
            assert off(got, exact) < 3e-2  # the interpreter cuts bfloat16


def test_wide_windows_stay_with_pytorch() -> None:
    wide = torch.empty(4, 144, 96, dtype=torch.bfloat16, device="meta")
    assert "more than 64 pixels" in kernels._ours("window_attention_refused")(wide, 2, 1)
    assert not kernels._ours("window_attention_refused")(wide[:, :49], 2, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_real_windows_agree_with_float64_on_the_gpu(dtype: torch.dtype, masked: bool) -> None:
    tokens = noise(2048, 49, 288, device="cuda").to(dtype).requires_grad_()
    bias = noise(3, 49, 49, seed=1, device="cuda").requires_grad_()
    mask = (noise(64, 49, 49, seed=2, device="cuda") > 0).float() * -100 if masked else None
    made = window_attention(tokens, bias, mask, heads=3, factor=32**-0.5)
    wide, wide_bias = tokens.detach().double().requires_grad_(), bias.detach().double().requires_grad_()
    q, k, v = wide.reshape(-1, 49, 3, 3, 32).permute(2, 0, 3, 1, 4).unbind()
    logits = (q * 32**-0.5) @ k.transpose(-2, -1) + wide_bias
    logits = logits if mask is None else (logits.unflatten(0, (-1, 64)) + mask.double()[:, None]).flatten(0, 1)
    expected = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
    gradient = noise(*made.shape, seed=3, device="cuda").to(dtype)
    found = torch.autograd.grad(made, [tokens, bias], gradient)
    wanted = torch.autograd.grad(expected, [wide, wide_bias], gradient.double())
    allowed = {torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for got, right in zip((made, *found), (expected, *wanted), strict=True):
        assert off(got, right) < allowed
