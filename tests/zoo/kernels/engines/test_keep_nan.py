"""NaN and infinity that arise inside of a network reach its answer, whichever engine computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from zoo import fast, why
from zoo.kernels.engines import choose as engines
from zoo.kernels.engines import onnxruntime, openvino
from zoo.kernels.engines.engine import NotFinite


def norm_of_zeros(x: Tensor) -> Tensor:
    """Normalise by a BatchNorm whose weight is 0."""
    zeros, ones = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    return F.batch_norm(x, zeros, ones, zeros, ones)


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": F.elu,
    "mish": F.mish,
    "softplus": F.softplus,
    "exp": torch.exp,
    "softmax": lambda x: x.flatten(1).softmax(1),
    "max pool": lambda x: F.max_pool2d(x, 2),
    "global max pool": lambda x: F.adaptive_max_pool2d(x, 1),
    "average pool": lambda x: F.avg_pool2d(x, 2),
    "mean": lambda x: x.mean((2, 3)),
    "amax": lambda x: x.amax((2, 3)),
    "clamp": lambda x: x.clamp(-1, 1),
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "padded max pool": lambda x: F.max_pool2d(x, 3, 1, 1),
    "clamp below": lambda x: x.clamp_min(0),
    "hardtanh": F.hardtanh,
    "selu": F.selu,
    "log softmax": lambda x: x.log_softmax(-1),
    "softmax of -inf rows": lambda x: (x.square() * -1e36).softmax(-1),
    "normalised": lambda x: F.normalize(x, dim=1),
    "largest": lambda x: x.topk(2, -1)[0],
    "deviation": lambda x: x.std(-1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "reciprocal": lambda x: 1 / (x.abs() + 1),
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "gate": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
    "layer norm, relu": lambda x: F.relu(F.layer_norm(x, x.shape[-1:])),
    "sigmoid, amax": lambda x: torch.sigmoid(x).amax((2, 3)),
    "softmax, amax": lambda x: x.softmax(-1).amax((2, 3)),
    "what has one bound": lambda x: F.relu(F.hardswish(1 - F.relu(x))),
    "times 0, beside a number": lambda x: torch.cat([norm_of_zeros(x), torch.ones_like(x)], 1).amax(1),
    "two": lambda x: F.relu(F.avg_pool2d(F.relu6(x), 2)) + 1,
}


class Source(nn.Module):
    """An operation behind a division that is 0 / 0 for an image of zeros, and overflows for one of tiny numbers."""

    def __init__(self, op: Callable[[Tensor], Tensor], conv: bool) -> None:
        super().__init__()
        self.op, self.conv = op, nn.Conv2d(3, 8, 3, padding=1) if conv else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.conv(x / x.square().sum((1, 2, 3), keepdim=True)))


CASES = [(engine, op) for engine in ("openvino", "onnxruntime") for op in OPS]


@torch.no_grad()
@pytest.mark.parametrize("conv", [True, pytest.param(False, marks=pytest.mark.long)], ids=["behind a convolution", "alone"])
@pytest.mark.parametrize(("engine", "op"), CASES)
def test_what_an_operation_is_given_is_not_lost(op: str, engine: str, conv: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(engine)
    torch.manual_seed(0)
    network, every = Source(OPS[op], conv).eval(), engines.candidates
    example = torch.randn(3, 3, 8, 8)

    def only(*given: Any, **more: Any) -> list[Any]:
        return [one for one in every(*given, **more) if one.name in (engine, "eager")]

    monkeypatch.setattr(engines, "candidates", only)
    monkeypatch.setattr(engines, "fastest", lambda trial, *_: ({}, engine if engine in trial.calls else "eager"))
    quick = fast(network, "cpu", example=example, tune="quick", progress=False)
    assert why(quick).plans[0].rows[0].kernel == engine
    for scale in (1.0, 0.0, 1e-22, 3e-39):
        images = example.clone()
        images[1] *= scale
        ours, theirs = quick(images), network(images)
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4, equal_nan=True)


class PerImage(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x / x.flatten(1).norm(dim=1)[:, None, None, None] * 100)


@torch.no_grad()
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
@pytest.mark.parametrize(
    "name", ["ResNet20", "MobileNetV2_035", "SqueezeNet1_1", "MobileNetV3Small", "EfficientNetB0", "ShuffleNetV2_x0_5"]
)
def test_a_network_of_nan_answers_nan(name: str, engine: str) -> None:
    pytest.importorskip(engine)
    torch.manual_seed(0)
    network = PerImage(zoo.CATALOGUE[name]()).eval()
    images = torch.randn(2, 3, 64, 64)
    call = next(one for one in engines.candidates(network, (images,)) if one.name == engine).build()
    assert torch.allclose(call(images), network(images), rtol=1e-3, atol=1e-4)
    images[0] = 0
    try:
        found = call(images)
    except NotFinite:
        return
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


class Tokens(nn.Module):
    """A block of attention over the patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.qkv = nn.Conv2d(3, 32, 16, 16), nn.LayerNorm(32), nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.patches(x).flatten(2).transpose(1, 2))
        q, k, v = self.qkv(tokens).reshape(*tokens.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@torch.no_grad()
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("name", ["MobileNetV2_035", "ResNet20", "EfficientNetLite0", "Tokens"])
def test_bounded_activations_cost_no_sum_and_relu_none(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that a graph computes with, for TensorFlow's padding or the scale of attention, widen no bound."""
    pytest.importorskip(engine)
    options = {"padding": "same"} if name == "EfficientNetLite0" else {}
    network, watched = (Tokens() if name == "Tokens" else zoo.CATALOGUE[name](**options)).eval(), []
    module, looks = (openvino, "keep_nan") if engine == "openvino" else (onnxruntime, "watch")
    images, kept = torch.randn(1, 3, 64, 64), getattr(module, looks)
    monkeypatch.setattr(module, looks, lambda *given: watched.append(kept(*given)))
    next(one for one in engines.candidates(network, (images,)) if one.name == engine).build()
    assert watched == [False]


@torch.no_grad()
def test_parts_of_a_batch_are_looked_at_too() -> None:
    pytest.importorskip("openvino")
    network = Source(lambda x: F.max_pool2d(x, 2), True).eval()
    images = torch.randn(4, 3, 16, 16)
    call = next(one for one in engines.candidates(network, (images,), apart=lambda _: True) if one.name.startswith("openvino/")).build()
    assert torch.allclose(call(images), network(images), rtol=1e-3, atol=1e-4)
    images[3] = 0
    with pytest.raises(NotFinite):
        call(images)
