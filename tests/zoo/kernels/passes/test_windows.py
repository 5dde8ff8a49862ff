"""Attention inside windows: the same numbers, and no pixel moved."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.maxvit import MaxVit
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

from zoo.kernels.ops import window_attention
from zoo.kernels.passes import windows as passes
from zoo.kernels.passes.graph import Graph
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.steps import Setting

CPU = torch.device("cpu")
EXACT = Setting(CPU, torch.float64)


def swin(**options: Any) -> nn.Module:
    sizes: dict[str, Any] = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    return SwinTransformer(**sizes, num_classes=5, **options)


def swin_v2() -> nn.Module:
    return swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)


def maxvit() -> nn.Module:
    return MaxVit((32, 32), 8, 4, [16, 32], [1, 1], 8, 0.0, num_classes=5)


def drawn(network: nn.Module) -> nn.Module:
    """Draw every number, so that biases, scales and tables of positions count."""
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1))
    return network.double().eval()


def run(graph: Graph, places: Any, x: Tensor) -> Tensor:
    program = Program(graph, places, {}, EXACT, Weights(), compiled=False)
    return program.run([[x.contiguous(memory_format=torch.channels_last)] * len(program.forms[graph.inputs[0]])])[0]


@pytest.mark.parametrize(("make", "side", "attentions"), [(swin, 64, 4), (swin_v2, 64, 4), (maxvit, 32, 4), (swin, 32, 4)])
def test_windows_are_read_and_written_where_they_lie(make: Any, side: int, attentions: int) -> None:
    network, x = drawn(make()), torch.rand(3, 3, side, side, dtype=torch.float64)
    graph, places = understand(network, (x,), {}, CPU)
    steps = Counter(str(step.attrs.get("func", step.op)) for step in graph.steps())
    assert steps["window_attention"] == attentions
    assert not {"aten.bmm.default", "aten.roll.default", "aten._softmax.default"} & steps.keys()
    torch.testing.assert_close(run(graph, places, x), network(x))


def test_windows_that_do_not_divide_the_map_stay_what_they_were() -> None:
    network, x = drawn(swin()), torch.rand(1, 3, 40, 40, dtype=torch.float64)  # 10 patches a side: padded to 12
    graph, places = understand(network, (x,), {}, CPU)
    assert any(step.attrs.get("func") is torch.ops.aten.bmm.default for step in graph.steps())
    torch.testing.assert_close(run(graph, places, x), network(x))


class Attends(nn.Module):
    """Windows of 2 x 2 pixels; `mask` is added to their logits, and `reads` decides what is returned."""

    def __init__(self, mask: Tensor | None = None, *, both: bool = False, sharp: bool = False) -> None:
        super().__init__()
        self.qkv, self.proj, self.both, self.sharp = nn.Linear(8, 24), nn.Linear(8, 8), both, sharp
        self.mask = None if mask is None else nn.Buffer(mask)

    def forward(self, x: Tensor) -> Any:
        n, _, h, w = x.shape
        tokens = x.view(n, 8, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, 8)
        q, k, v = self.qkv(tokens).view(-1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-2, -1) * 0.5
        if self.mask is not None:
            logits = (logits.view(n, -1, 2, 4, 4) + self.mask[:, None]).view(-1, 2, 4, 4)
        if self.sharp:
            logits = logits * 2
        y = self.proj((logits.softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, 8))
        y = y.view(n, h // 2, w // 2, 2, 2, 8).permute(0, 5, 1, 3, 2, 4).reshape(n, 8, h, w)
        return (y, tokens) if self.both else y


REGIONS = -100.0 * (torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [2, 1, 1, 0]])[:, :, None]
                    != torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0], [2, 1, 1, 0]])[:, None, :])  # fmt: skip


@pytest.mark.parametrize(
    ("network", "found"),
    [
        (Attends(), 1),
        (Attends(REGIONS), 1),
        (Attends(torch.randn(4, 4, 4)), 0),  # no mask of regions
        (Attends(REGIONS, sharp=True), 0),  # a factor behind the mask
        (Attends(both=True), 1),  # what it returns besides is a move alone
    ],
)
def test_only_what_the_step_means_is_taken(network: nn.Module, found: int) -> None:
    network, x = drawn(network), torch.rand(2, 8, 4, 4, dtype=torch.float64)
    if getattr(network, "mask", None) is not None:
        network.mask = network.mask.double()
    graph, places = understand(network, (x,), {}, CPU)
    assert sum(step.op == "window_attention" for step in graph.steps()) == found
    expected = network(x)
    torch.testing.assert_close(run(graph, places, x), expected[0] if isinstance(expected, tuple) else expected)


class Twice(Attends):
    """Its tokens are read by something that follows no pixel."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y + self.qkv(y.flatten(2).transpose(1, 2).flip(1)).sum()


def test_a_step_that_needs_the_old_order_keeps_it() -> None:
    network, x = drawn(Twice()), torch.rand(2, 8, 4, 4, dtype=torch.float64)
    graph, places = understand(network, (x,), {}, CPU)
    torch.testing.assert_close(run(graph, places, x), network(x))


class Odd(Attends):
    """Windows whose heads, norms or maps are not what they seem."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.wide = kind, nn.Linear(8, 48)

    def forward(self, x: Tensor) -> Any:
        if self.kind == "rolled as one row":
            x = torch.roll(x, 1)
        n, _, h, w = x.shape
        tokens = x.view(n, 8, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, 8)
        if self.kind == "gaps between":
            wide = self.wide(tokens)
            parts = [wide[..., first : first + 8] for first in (0, 16, 32)]
        else:
            q, k, v = self.qkv(tokens).split(8, -1)
            parts = [q, q if self.kind == "keys are queries" else k, v]
        if self.kind == "normed before the heads":
            parts[:2] = [nn.functional.normalize(part, dim=-1) for part in parts[:2]]
        q, k, v = (part.view(-1, 4, 2, 4).transpose(1, 2) for part in parts)
        y = self.proj(((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, 8))
        return y.view(n, h // 2, w // 2, 2, 2, 8).permute(0, 5, 1, 3, 2, 4).reshape(n, 8, h, w)


@pytest.mark.parametrize("kind", ["rolled as one row", "gaps between", "keys are queries", "normed before the heads"])
def test_what_only_looks_like_heads_of_windows_is_computed_as_it_is(kind: str) -> None:
    network, x = drawn(Odd(kind)), torch.rand(2, 8, 4, 4, dtype=torch.float64)
    graph, places = understand(network, (x,), {}, CPU)
    torch.testing.assert_close(run(graph, places, x), network(x))


class Corner(nn.Module):
    """The same windows of a map and of the corner of a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.attends = nn.Conv2d(8, 8, 1), Attends()

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)

        def cut(z: Tensor) -> Tensor:
            return z.view(z.shape[0], 8, 2, 2, 2, 2).permute(0, 1, 2, 4, 3, 5).reshape(z.shape[0], 8, 4, 4)

        return self.attends(cut(y[:, :, :4, :4]) + cut(self.attends(y)[:, :, 4:, 4:]))


def test_maps_of_two_sizes_are_not_mistaken_for_one() -> None:
    network, x = drawn(Corner()), torch.rand(1, 8, 8, 8, dtype=torch.float64)
    graph, places = understand(network, (x,), {}, CPU)
    torch.testing.assert_close(run(graph, places, x), network(x))


class Tokens(nn.Module):
    """Attention of all tokens by PyTorch's one function; `kind` names the one thing that is special."""

    def __init__(self, kind: str, tokens: int = 6) -> None:
        super().__init__()
        self.kind, self.qkv, self.proj = kind, nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.zeros(1 if kind == "the same of all heads" else 2, tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        made = self.qkv(tokens)
        if self.kind == "a head's beside each other":
            q, k, v = made.view(n, -1, 2, 12).transpose(1, 2).split(4, -1)
        else:
            q, k, v = made.view(n, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        bias: Tensor | None = self.bias
        if self.kind == "of each image":
            bias = self.bias + x.mean((1, 2, 3))[:, None, None, None]
        if self.kind == "which may be seen":
            bias = self.bias > 0
        if self.kind == "nothing":
            bias = None
        scale = 0.3 if self.kind == "another scale" else None
        y = nn.functional.scaled_dot_product_attention(q, k, v, bias, is_causal=False, scale=scale)
        return self.proj(y.transpose(1, 2).reshape(n, -1, 8)).transpose(1, 2).view(n, 8, h, w)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("of each head", 1),
        ("the same of all heads", 1),
        ("a head's beside each other", 1),
        ("another scale", 1),
        ("nothing", 0),  # PyTorch's own kernels are the faster ones
        ("of each image", 0),
        ("which may be seen", 0),
    ],
)
def test_attention_with_a_constant_is_one_window(kind: str, found: int) -> None:
    network, x = drawn(Tokens(kind)), torch.rand(2, 8, 2, 3, dtype=torch.float64)
    graph, places = understand(network, (x,), {}, CPU)
    assert sum(step.op == "window_attention" for step in graph.steps()) == found
    torch.testing.assert_close(run(graph, places, x), network(x))


def test_more_tokens_than_a_program_holds_stay_with_pytorch() -> None:
    assert (passes.MOST_TOKENS, passes.MOST_CHANNELS) == (window_attention.MOST_TOKENS, window_attention.MOST_CHANNELS)
    network, x = drawn(Tokens("of each head", 289)), torch.rand(1, 8, 17, 17, dtype=torch.float64)
    graph, places = understand(network, (x,), {}, CPU)
    assert not any(step.op == "window_attention" for step in graph.steps())
    torch.testing.assert_close(run(graph, places, x), network(x))
