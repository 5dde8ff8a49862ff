"""A float64 twin of our network, what passes through its layers, and how two values are compared."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.kinds import is_mapping, is_row
from convert.network import modules_of

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(slots=True)
class Passed:
    """What one pass gave.

    Attributes:
        inputs, outputs: of the layers that were watched, by name, at their first call.
        results: what the network returned, one after another.
        failed: what PyTorch said if the pass broke off; shapes that don't fit each other do that.
    """

    inputs: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    outputs: dict[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    results: list[np.ndarray] = field(default_factory=list[np.ndarray])
    failed: str = ""


def twin(network: nn.Module) -> nn.Module:
    """Copy a network in eval mode, in float64 on the CPU; it is not changed, and its float32 tensors are never copied as such."""
    import torch

    memo: dict[int, Any] = {}
    for parameter in network.parameters():
        memo[id(parameter)] = torch.nn.Parameter(parameter.detach().to("cpu", torch.float64), requires_grad=False)
    for buffer in network.buffers():
        memo[id(buffer)] = buffer.detach().to("cpu", torch.float64 if buffer.is_floating_point() else buffer.dtype, copy=True)
    return copy.deepcopy(network, memo).eval()


def tensor(array: np.ndarray) -> Tensor:
    """Copy an array of any strides to a float64 tensor."""
    import torch

    return torch.from_numpy(np.array(array, np.float64, order="C"))  # pyright: ignore[reportUnknownMemberType]  # torch gives its argument no type


def forward(network: nn.Module, inputs: np.ndarray, watch: Collection[str] = (), *, may_fail: bool = False) -> Passed:
    """Run a twin on (B, C, H, W) and note what the modules named in `watch` read and return.

    Args:
        network: from `twin`.
        inputs: the images.
        watch: names of modules.
        may_fail: keep what came before where the pass breaks off, instead of raising RuntimeError.
    """
    import torch

    passed = Passed()

    def before(name: str, module: Any, arguments: tuple[Any, ...]) -> None:
        del module
        if name not in passed.inputs and arguments and isinstance(arguments[0], torch.Tensor):
            passed.inputs[name] = arguments[0].numpy().copy()  # what follows may work in place

    def after(name: str, module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        del module, arguments
        if name not in passed.outputs and isinstance(output, torch.Tensor):
            passed.outputs[name] = output.numpy().copy()

    modules: Mapping[str, Any] = modules_of(network)
    handles = [modules[name].register_forward_pre_hook(partial(before, name)) for name in watch]
    handles += [modules[name].register_forward_hook(partial(after, name)) for name in watch]
    try:
        with torch.no_grad():
            result = network(tensor(inputs))
    except RuntimeError as error:
        if not may_fail:
            raise
        passed.failed = str(error).splitlines()[0]
        return passed
    finally:
        for handle in handles:
            handle.remove()
    passed.results = [one.numpy() for one in tensors_of(result)]
    return passed


def tensors_of(result: Any) -> list[Any]:
    if hasattr(result, "numpy"):
        return [result]
    values = result.values() if is_mapping(result) else result if is_row(result) else ()
    return [one for value in values for one in tensors_of(value)]


def aligned(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Give ours the shape of theirs where they differ in axes of one element only, (B, N) and (B, N, 1, 1), or where theirs are rows."""
    if ours.shape != theirs.shape and [n for n in ours.shape if n != 1] == [n for n in theirs.shape if n != 1]:
        return ours.reshape(theirs.shape)
    if theirs.ndim == 2 < ours.ndim and len(ours) == len(theirs) and ours.size == theirs.size:
        return ours.reshape(theirs.shape)
    return ours


def errors(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Measure max |ours - theirs|, and the same divided by max |theirs|; infinite where shapes differ or a number isn't finite."""
    ours = aligned(ours, theirs)
    if ours.shape != theirs.shape:
        return float("inf"), float("inf")
    with np.errstate(all="ignore"):
        most = float(np.abs(ours - theirs).max(initial=0.0))
    scale = float(np.abs(theirs).max(initial=0.0))
    if not np.isfinite(most) or not np.isfinite(scale):
        return float("inf"), float("inf")
    return most, most / scale if scale else (0.0 if most == 0 else float("inf"))


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Measure max |ours - theirs| / max |theirs|."""
    return errors(ours, theirs)[1]


def probabilities(values: np.ndarray) -> bool:
    """Tell whether these are what a softmax gives: none negative, and one in sum over the channels."""
    return (
        values.ndim >= 2 and values.shape[1] > 1 and float(values.min(initial=0.0)) >= 0 and bool(np.allclose(values.sum(1), 1, atol=1e-4))
    )
