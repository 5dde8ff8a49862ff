"""Tensors into a network that exists: all of them, or an error and a network that is bit for bit what it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from weights.errors import WeightsMismatch

N = TypeVar("N", bound=nn.Module)
SHOWN = 10


def assign(network: N, tensors: Mapping[str, Tensor]) -> N:
    """Make the tensors the network's own, in its dtypes and without a copy where they have them already.

    PyTorch's own way puts in what fits and complains afterwards, so that a network whose file was another's is half of each.

    Args:
        network: on any device, the meta device too; the tensors stay on theirs.
        tensors: by the names of its state dict.

    Returns:
        The same network.

    Raises:
        WeightsMismatch: names or shapes differ; its attributes list all. The network is unchanged, as after any other error.
    """
    wanted = network.state_dict()
    check(tensors, wanted, type(network).__name__)
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


def check(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], network: str) -> None:
    """Compare names and shapes before anything is touched.

    Raises:
        WeightsMismatch: they differ.
    """
    missing, unexpected = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    both = [(name, tuple(tensor.shape), tuple(wanted[name].shape)) for name, tensor in tensors.items() if name in wanted]
    misshaped = [(name, theirs, ours) for name, theirs, ours in both if theirs != ours]
    if not (missing or unexpected or misshaped):
        return
    lines = [f"missing {name}" for name in missing] + [f"unexpected {name}" for name in unexpected]
    lines += [f"{name}: the file has {theirs}, the network {ours}" for name, theirs, ours in misshaped]
    more = f"\n  … and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    shown = "".join(f"\n  {line}" for line in lines[:SHOWN]) + more
    error = WeightsMismatch(f"these are not the weights of {network}:{shown}\nNothing was loaded; the network is what it was.")
    error.missing, error.unexpected, error.misshaped = missing, unexpected, misshaped
    raise error
