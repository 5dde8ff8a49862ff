"""What a network's one stretch becomes where kernels go back through parts of it, and whether it learns the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from zoo.kernels.training import kernels
from zoo.kernels.training import residual_streams as streams
from zoo.kernels.training import segments as segments_of
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.contest import compiled
from zoo.kernels.training.record import Call, Recording, record

CPU = torch.device("cpu")


def same(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
    """Compile nothing: the graph's functions, one after the other."""
    return graph.forward


def learnt(network: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    out = run(images)
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return [out.detach(), *torch.autograd.grad(loss(out), [images, *learning], allow_unused=True)]


def learnt_or_zeros(network: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor) -> list[Tensor]:
    """Return what `learnt` does, of parameters that have no part in it nothing."""
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    out = run(images)
    found = torch.autograd.grad(loss(out), [images, *learning], allow_unused=True, materialize_grads=True)
    return [out.detach(), *found]


def loss(out: Tensor) -> Tensor:
    """Weigh what comes out: the squares of a norm's result add up to the same, whatever it was of."""
    return (out.float() * torch.arange(out.numel()).sin().view(out.shape)).sum()


def made_of(network: nn.Module, images: Tensor, monkeypatch: pytest.MonkeyPatch, compiler: Any = same) -> tuple[Any, list[Call]]:
    """Return a network's replay with its streams put together as on a GPU, and what its one stretch's calls are then."""
    recording = record(network, (images,), {}, CPU)
    seen: list[Call] = []

    def noted(recording: Recording, calls: Any, wanted: Any) -> list[Call]:
        assert not seen, "there is one stretch"
        seen[:] = streams.fused(recording, calls, wanted)
        return [*seen]

    monkeypatch.setattr(segments_of, "on_kernels", lambda device: True)
    monkeypatch.setattr(segments_of, "fused", noted)
    steps, _, counted = steps_of(recording, {})
    replay = compiled(recording, steps, counted, compiler, None, beside=True)
    assert replay is not None
    places = replay.at(network)
    learnt(network, lambda x: replay(places, [x]), images)
    return (lambda x: replay(places, [x])), seen


_OURS = (
    kernels.gelu, kernels.gelu_linear, kernels.glu, kernels.glu_linear, kernels.response_linear, streams._linear, streams._attention,
)  # fmt: skip


def count(calls: list[Call]) -> dict[str, int]:
    """Count what is put together, by what it is made of."""
    found: dict[str, int] = {}
    for call in calls:
        func = getattr(call.func, "func", call.func)
        if func is kernels.add_layer_norm:
            given = [name for name, arg in zip(("branch", "bias", "scale", "share"), call.args[1:5], strict=True) if arg is not None]
            name = " ".join(["norm", *given])
        elif func in _OURS:
            name = func.__name__.removeprefix("_")
        elif call.name in ("layer_norm", "gelu", "add", "mul"):
            name = f"PyTorch's {call.name}"
        else:
            continue
        found[name] = found.get(name, 0) + 1
    return found


def like(got: list[Tensor], expected: list[Tensor], most: float) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert float((one - other).norm() / other.norm().clamp_min(1e-6)) < most
