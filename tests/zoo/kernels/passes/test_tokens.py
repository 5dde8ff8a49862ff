"""Transformers: attention stays whole, tokens are maps, and windows' masks, which are written piece by piece, are constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zoo.kernels.mapped import counted, program
from zoo.kernels import fast, why
from zoo.kernels.comparing.parity import Parity
from zoo.kernels.engines.export import EngineError, Form, export
from zoo.kernels.errors import Untraceable
from zoo.kernels.passes.attention import Whole, attention
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans.plan import Plan

ATTENTION = torch.ops.kernelzoo.attention.default


class Heads(nn.Module):
    """timm's block: attention by PyTorch's function, a dense layer to either side, a mask if wanted."""

    def __init__(self, channels: int = 16, heads: int = 2, masked: bool = False) -> None:
        super().__init__()
        self.first, self.heads = nn.Conv2d(3, channels, 2, 2), heads
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.wide, self.narrow = nn.Linear(channels, 24), nn.Linear(24, channels, bias=False)
        self.last = nn.Linear(channels, 5)
        self.register_buffer("mask", torch.rand(9, 9) if masked else None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).flatten(2).transpose(1, 2)
        n, length, channels = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(0), attn_mask=self.mask)
        x = x + self.proj(y.transpose(1, 2).reshape(n, length, channels))
        x = x + self.narrow(F.gelu(self.wide(self.norm2(x))))
        return self.last(x.mean(1))


class Encoder(nn.Module):
    """torchvision's: PyTorch's module of attention, whose dense layers read what no product of two matrices takes."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 2, 2), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).flatten(2).transpose(1, 2)
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Windows(nn.Module):
    """Swin's mask: zeros like the input, written window by window, compared with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mask = x.new_zeros(x.shape[-2:])
        for number, (rows, columns) in enumerate(
            ((slice(0, 2), slice(0, 3)), (slice(2, 4), slice(1, 3)), (slice(-2, None), slice(-1, None)))
        ):
            mask[rows, columns] = number + 1
        steps = torch.arange(x.shape[-1], device=x.device) + torch.ones_like(mask)
        return x.masked_fill(mask == 0, -100.0) + steps


class Shifted(nn.Module):
    """A part of the map is overwritten by another one, in place, and the whole is read after that; views of views too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = x.clone()
        y[:, :2, 1:] = x[:, :2, :-1]
        part = y[:, 4:]
        part[:, 1, :, ::2].mul_(2).add_(1)
        part[:, 3].zero_()
        return self.last(torch.relu(y)) + part


class Normalised(nn.Module):
    """Norms of rows, of tokens and of a sum with a constant for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dense = nn.Conv2d(3, 8, 1), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)
        self.bias = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.first(x)
        rows = self.norm(x.mean((2, 3)))
        last = self.dense(x.permute(0, 2, 3, 1)) + self.bias
        return rows, self.norm(last), self.norm(last.flatten(1, 2)) + self.bias[None, None]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "heads": Heads,
    "masked": lambda: Heads(masked=True),
    "encoder": Encoder,
    "windows": Windows,
    "shifted": Shifted,
    "normalised": Normalised,
}


class Called(TorchDispatchMode):
    """Notes which operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.functions = list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def draw(name: str, device: torch.device, batch: int = 2) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return NETWORKS[name]().eval().to(device), torch.randn(batch, 3, 6, 6, device=device)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_give_what_the_network_does(name: str, batch: int, device: torch.device) -> None:
    network, x = draw(name, device, batch)
    with torch.inference_mode():
        got, want = Plan(program(network, x)).eager([x]), network(x)
    for mine, theirs in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["heads", "masked", "encoder"])
def test_attention_stays_whole(name: str, device: torch.device) -> None:
    network, x = draw(name, device)
    graph, _ = understand(network, (x,), {})
    found = counted(graph)
    assert [node.attrs["func"] for node in graph.steps() if node.op == "aten" and "attention" in str(node.attrs["func"])] == [ATTENTION]
    assert not any("softmax" in word or "mm" in word for word in found)


def test_a_block_of_tokens_is_convolutions_and_norms_of_maps(device: torch.device) -> None:
    network, x = draw("heads", device)
    graph, _ = understand(network, (x,), {})
    found = counted(graph)
    assert (found["conv"], found["layer_norm"]) == (6, 2)
    assert not {"pointwise", "add", "gelu", "native_layer_norm", "addmm", "mm"} & found.keys()
    convolutions = {node.layers[0]: node for node in graph.steps() if node.op == "conv"}
    assert convolutions["wide"].attrs["act"] == "gelu"
    assert "residual" in convolutions["narrow"].roles
    assert "residual" in convolutions["proj"].roles


def test_a_mask_that_is_written_in_place_is_a_constant(device: torch.device) -> None:
    network, x = draw("windows", device)
    graph, _ = understand(network, (x,), {})
    assert counted(graph) == {"conv": 1, "masked_fill": 1, "add": 1}


def test_attention_is_pytorchs_own_in_all_its_ways() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    boolean, wanted = torch.rand(5, 7) > 0.3, F.scaled_dot_product_attention
    ways: list[dict[str, Any]] = [
        {"enable_gqa": True},
        {"enable_gqa": True, "is_causal": True},
        {"enable_gqa": True, "attn_mask": boolean, "scale": 0.5},
        {"enable_gqa": True, "attn_mask": torch.rand(5, 7)},
    ]
    for way in ways:
        with Called() as called, Whole():
            found = F.scaled_dot_product_attention(q, k, v, **way)
        assert called.functions.count(ATTENTION) == 1
        assert torch.equal(found, wanted(q, k, v, **way))
        meta = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in way.items()}
        with Whole():
            assert F.scaled_dot_product_attention(*(t.to("meta") for t in (q, k, v)), **meta).shape == found.shape
    with pytest.raises(RuntimeError):
        attention(q.to("meta"), k.to("meta")[..., :3], v.to("meta"), None, False, None, True)


HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sequence first": ({"batch_first": False}, {}),
    "weights wanted": ({}, {"need_weights": True}),
    "weights of each head": ({}, {"need_weights": True, "average_attn_weights": False}),
    "mask": ({}, {"attn_mask": torch.rand(9, 9) > 0.9}),
    "mask of numbers": ({}, {"attn_mask": torch.rand(9, 9)}),
    "causal": ({}, {"attn_mask": nn.Transformer.generate_square_subsequent_mask(9), "is_causal": True}),
    "padding": ({}, {"key_padding_mask": torch.arange(9)[None].repeat(2, 1) > 6}),
    "biases of keys": ({"add_bias_kv": True}, {}),
    "zeros added": ({"add_zero_attn": True}, {}),
    "without biases": ({"bias": False}, {}),
    "other widths": ({"kdim": 16, "vdim": 16}, {}),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("own", [True, False], ids=["of itself", "of others"])
def test_pytorchs_module_is_followed_in_all_its_ways(name: str, own: bool, device: torch.device) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.options = {"need_weights": False, **HEADS[name][1]}
            self.first, self.attention = nn.Conv2d(3, 16, 2, 2), nn.MultiheadAttention(16, 4, **{"batch_first": True, **HEADS[name][0]})
            for i, (option, value) in enumerate(list(self.options.items())):
                if isinstance(value, Tensor):
                    self.register_buffer(f"mask{i}", value)
                    self.options[option] = f"mask{i}"

        def forward(self, x: Tensor) -> Any:
            x = self.first(x).flatten(2).transpose(1, 2)
            if not self.attention.batch_first:
                x = x.transpose(0, 1)
            keys = x if own else x.flip(2)
            options = {option: getattr(self, value) if isinstance(value, str) else value for option, value in self.options.items()}
            return self.attention(x, keys, keys if own else x * 2, **options)

    torch.manual_seed(0)
    network, x = Attending().eval().to(device), torch.randn(2, 3, 6, 6, device=device)
    with torch.no_grad():
        want = [leaf for leaf in network(x) if leaf is not None]
        got = [leaf for leaf in Plan(program(network, x)).eager([x]) if leaf is not None]
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_attention_that_drops_something_is_not_frozen(device: torch.device) -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    with pytest.raises(Untraceable, match="random"):
        understand(Dropping(), (torch.randn(2, 3, 6, 6, device=device),), {})


def test_engines_take_pytorchs_attention_and_not_what_looks_at_its_input() -> None:
    network, x = draw("encoder", torch.device("cpu"))
    exported = export(network, (x,), Form.of(network(x)))
    assert "Softmax" in str(exported.graph)

    class Looking(Encoder):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * 2 if y.sum() > 0 else y

    looking = Looking().eval()
    with pytest.raises(EngineError, match="depends on its input's values"):
        export(looking, (x,), Form.of(looking(x)))


def test_a_branch_on_a_value_is_said_in_words(device: torch.device) -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(Untraceable, match="forward asks for a value") as told:
        understand(Branching(), (torch.randn(2, 3, 4, 4, device=device),), {})
    assert told.value.anyway


def test_an_answer_of_zeros_is_said_to_tell_nothing() -> None:
    assert "tell nothing" in str(Parity(0.0, 0.0, 16))
    assert "tell nothing" in str(Parity(0.0, 0.0, 1, 1e-5))
    assert "tell nothing" not in str(Parity(1e-7, 0.0, 1, 1e-5))
    assert "tell nothing" not in str(Parity(0.0, 1e-3, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NETWORKS)
def test_plans_on_a_gpu_are_as_right_as_eager(name: str) -> None:
    network, x = draw(name, torch.device("cuda"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        quick = fast(network, "cuda", dtype, example=x, tune="none")
        assert why(quick).unchanged == ""
        with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
            got, want = quick(x), network(x)
        for mine, theirs in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True):
            assert (
                float((mine.float() - theirs).norm() / theirs.norm())
                < {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}[dtype]
            )
