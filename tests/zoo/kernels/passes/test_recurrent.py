"""Recurrent layers as one operator of the trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo import fast, why
from zoo.kernels.comparing.copies import compacted, fits
from zoo.kernels.passes.recurrent import recurrent
from zoo.kernels.passes.trace import trace
from zoo.kernels.training.record import record

KINDS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.RNN, {"nonlinearity": "relu", "bias": False}),
    (nn.RNN, {"batch_first": True}),
    (nn.LSTM, {"batch_first": True}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.5}),
]


class Tagger(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase], options: dict[str, Any]) -> None:
        super().__init__()
        self.body = kind(7, 6, **options)
        self.head = nn.Linear(12 if options.get("bidirectional") else 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0])


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_layer_is_one_step_of_the_shape_that_it_has(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    network, x = Tagger(kind, options).eval(), torch.randn(4, 5, 7)
    graph = trace(network, (x,), {})
    found = [node for node in graph.nodes if "recurrent" in str(node.attrs.get("func", ""))]
    assert len(found) == 1
    assert next(iter(graph.outputs)).shape == network(x).shape
    ways = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    first = torch.zeros(ways, 4 if options.get("batch_first") else 5, 6)
    states = [first, first] if kind is nn.LSTM else [first]
    name = {nn.RNN: f"rnn_{options.get('nonlinearity', 'tanh')}", nn.LSTM: "lstm", nn.GRU: "gru"}[kind]
    options = {"num_layers": 1, "bidirectional": False, "batch_first": False, "bias": True} | options
    told = options["bias"], options["num_layers"], options["bidirectional"], options["batch_first"]
    weights = [weight.detach() for weight in network.body.parameters()]
    out = recurrent(name, x, states, weights, *told)
    with torch.no_grad():
        torch.testing.assert_close(out[0], network.body(x)[0])
    torch.library.opcheck(recurrent, (name, x, states, weights, *told), test_utils="test_faketensor")


def test_a_fast_lstm_answers_as_the_network_does() -> None:
    torch.manual_seed(0)
    network, x = Tagger(nn.LSTM, {"batch_first": True}).eval(), torch.randn(4, 5, 7)
    quick = fast(network, "cpu", example=x, tune="none", progress=False)
    assert not why(quick).unchanged
    with torch.no_grad():
        torch.testing.assert_close(quick(x), network(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_on_a_gpu_the_weights_lie_in_one_piece(kind: type[nn.RNNBase], options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    network, x = Tagger(kind, options).eval(), torch.randn(4, 5, 7)
    quick = fast(network, "cuda", dtype, example=x, tune="none", progress=False)  # which fails here where cuDNN warns
    assert not why(quick).unchanged
    with torch.no_grad():
        near = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 2e-2}
        torch.testing.assert_close(quick(x.cuda()).cpu().float(), network(x), **near)


def test_weights_in_one_piece_are_those_of_nobody_else() -> None:
    weights = [torch.zeros(3), torch.zeros(3)]
    assert fits(weights) == torch.backends.cudnn.is_available()
    assert not fits([weights[0], weights[0]])
    layer = nn.GRU(3, 4)
    assert compacted(layer) is layer


def test_a_warning_of_pytorch_about_tensors_without_data_is_not_shown() -> None:
    class Warning(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("Accessing the data pointer of FakeTensor is deprecated and will error in PyTorch 2.5", UserWarning, stacklevel=2)
            return x.tanh()

    assert [call.name for call in record(Warning(), (torch.zeros(2),), {}, torch.device("cpu")).calls] == ["tanh"]
