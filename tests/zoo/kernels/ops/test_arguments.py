"""What an op's functions are bound to: the arguments of its reference, said once."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.kernels.comparing import op_checks as checking
from zoo.kernels.ops import _tuned, discover
from zoo.kernels.ops._arguments import launches, of

OPS = discover()


def reference(x: Tensor, weight: Tensor | None = None, *, act: str = "none", eps: float) -> Tensor:
    return x


@of(reference)
def cost(x: Any, weight: Any, act: Any, **_: Any) -> tuple[Any, ...]:
    return x, weight, act


@of(reference)
def configs(x: Any, **_: Any) -> list[dict[str, int]]:
    return [{"block": 1}, {"block": 2}]


@launches(reference, configs, tuned=True, by=("x", "act"))
def launch(x: Any, act: Any, config: Any, out: Any = None, **_: Any) -> tuple[Any, ...]:
    return act, config, out


def test_a_bound_function_has_the_defaults_of_the_reference() -> None:
    assert cost(torch.ones(1), eps=0.5)[1:] == (None, "none")
    assert cost(torch.ones(1), None, eps=0.5, act="relu")[1:] == (None, "relu")
    assert launch(torch.ones(1), eps=0.5, out=3) == ("none", {"block": 1}, 3)
    assert launch(torch.ones(1), eps=0.5, config={"block": 7})[1] == {"block": 7}


def test_an_argument_that_nobody_names_is_an_error() -> None:
    with pytest.raises(TypeError, match="cost has no argument acr"):
        cost(torch.ones(1), eps=0.5, acr="relu")
    with pytest.raises(TypeError, match="cost got x by place and by name"):
        cost(torch.ones(1), x=torch.ones(1), eps=0.5)
    with pytest.raises(TypeError, match="takes 2 arguments by place, not 3"):
        cost(torch.ones(1), None, "relu", eps=0.5)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        cost(eps=0.5)


def test_a_tuned_launch_takes_the_config_by_which_it_was_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(_tuned, "_found", {})
    monkeypatch.setattr(_tuned, "_time", lambda run: tried.append(run()) or -len(tried))
    with _tuned.tuning():
        assert launch(torch.ones(1), eps=0.5, out=3) == ("none", {"block": 2}, 3)
    assert tried == [("none", {"block": 1}, None), ("none", {"block": 2}, None)]  # into memory of its own
    assert launch(torch.ones(1), eps=0.25)[1] == {"block": 2}  # eps is not among what a time depends on
    assert launch(torch.ones(2), eps=0.5)[1] == {"block": 1}


def test_what_is_empty_gets_no_config_of_a_tuned_launch() -> None:
    assert launch(torch.ones(0), eps=0.5)[1] is None


@pytest.mark.parametrize("op", list(OPS.values()), ids=list(OPS))
def test_defaults_are_said_by_the_reference_alone(op: ModuleType) -> None:
    names = inspect.signature(op.reference).parameters
    for function in (getattr(op, name) for name in ("rival", "supports", "configs", "launch", "cost", "prepare") if hasattr(op, name)):
        said = inspect.signature(function).parameters
        assert [name for name in said if name in names and said[name].default is not inspect.Parameter.empty] == []


def test_passes_of_one_launch_are_tuned_each_for_itself(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    op, found = OPS["pointwise_norm"], {}
    monkeypatch.setattr(_tuned, "_found", found)
    monkeypatch.setattr(_tuned, "_time", lambda run: 1.0)
    args = checking.packed(op, checking.draw(op, op.CASES[0], torch.float32, device))
    with _tuned.tuning():
        op.launch(**args)
    assert [key[0] for key in found] == ["moments", "pointwise_norm"]
