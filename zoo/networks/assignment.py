"""Tensors into a network that exists: all of them, or an error and a network that is bit for bit what it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor, nn

from weights.errors import WeightsMismatch

N = TypeVar("N", bound=nn.Module)
SHOWN = 10
"""Tensors of each kind that a message lists; the error's attributes have all."""


def assign(network: N, tensors: Mapping[str, Tensor], *, file: str = "the file", todo: Callable[[], str] | None = None) -> N:
    """Make the tensors the network's own, in its dtypes and without a copy where they have them already.

    PyTorch's own way puts in what fits and complains afterwards, so that a network whose file was another's is half of each.

    Args:
        network: on any device, the meta device too; the tensors stay on theirs.
        tensors: by the names of its state dict.
        file: how an error calls where the tensors come from.
        todo: says what to do about tensors that don't fit; asked only then.

    Returns:
        The same network.

    Raises:
        WeightsMismatch: names or shapes differ, or there are whole numbers where the network computes with fractions; the message lists
            the first of each kind, the attributes all. The network is unchanged, as after any other error.
    """
    wanted = network.state_dict()
    _check(tensors, wanted, f"{file} does not hold the weights of {type(network).__name__}", todo)
    ready = {name: tensor.to(wanted[name].dtype) for name, tensor in tensors.items()}
    before = [(module, dict(module._parameters), dict(module._buffers)) for module in network.modules()]
    try:
        network.load_state_dict(ready, assign=True)
    except BaseException:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        raise
    return network


def _check(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], said: str, todo: Callable[[], str] | None) -> None:
    """Compare everything before anything is touched."""
    missing, unexpected = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    both = [(name, tensor, wanted[name]) for name, tensor in tensors.items() if name in wanted]
    misshaped = [(name, tuple(theirs.shape), tuple(ours.shape)) for name, theirs, ours in both if theirs.shape != ours.shape]
    whole = [name for name, theirs, ours in both if ours.is_floating_point() and not theirs.is_floating_point()]
    if not (missing or unexpected or misshaped or whole):
        return
    error = WeightsMismatch(
        f"{said}:"
        + _listed("missing", missing)
        + _listed("unexpected", unexpected)
        + _listed("of another shape", [f"{name}: the file has {theirs}, the network {ours}" for name, theirs, ours in misshaped])
        + _listed("of whole numbers where the network computes with fractions", whole)
        + f"\n{todo() if todo else 'Nothing was loaded; the network is what it was.'}"
    )
    error.missing, error.unexpected, error.misshaped = missing, unexpected, misshaped
    raise error


def _listed(what: str, lines: list[str]) -> str:
    if not lines:
        return ""
    more = f"\n    … and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return f"\n  {len(lines)} {what}:" + "".join(f"\n    {line}" for line in lines[:SHOWN]) + more
