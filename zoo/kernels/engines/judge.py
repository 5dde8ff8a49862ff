"""Whether an engine computes what the network computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.parity import ALLOWED, FLOAT32_FLOOR
from zoo.kernels.comparing.sample_images import natural_images
from zoo.kernels.engines.export import recast

CHECKED_IMAGES = 16
"""Of types narrower than float32 at least so many images are compared: the error of one image's logits scatters."""


class Judge:
    """Measures engines against the network's own output, and allows them what plain eager loses in the same type.

    In float32 the right answer is the network's in float64, for one input, and eager's own error is the order in which it adds up. No
    engine can be held to that: eager was seen between 3e-7 (DenseNet121) and 2.7e-6 (VGG19), OpenVINO between 5e-7 and 3.1e-6,
    onnxruntime between 3e-7 and 7e-7. A wrong padding, epsilon or activation is off by 1e-3 and more, and weights rounded to bfloat16 by
    4e-3, so that up to `FLOAT32_FLOOR` nothing is said. In other types the right answer is float32's, for so many images that the
    error no longer depends on which. Eager's results are rounded as the network's own are, to float16 say, which may be most of the error.

    Args:
        network: in eval mode, on the CPU; not changed.
        example: its inputs.
        output: what it returns for these, if that is known already.
    """

    def __init__(self, network: nn.Module, example: tuple[Tensor, ...], output: Any = None) -> None:
        self._network, self._example, self._output = network, example, output
        self._known: dict[torch.dtype, tuple[list[tuple[Tensor, ...]], list[Any], float]] = {}
        self._lost: dict[torch.dtype, float] = {}

    def __call__(self, call: Callable[..., Any], dtype: torch.dtype) -> tuple[float, float]:
        """Return an engine's relative error, and the largest that is allowed to what computes in `dtype`."""
        if dtype not in self._known:
            self._known[dtype] = self._measure(dtype)
        inputs, right, allowed = self._known[dtype]
        return error([call(*each) for each in inputs], right), allowed

    def eager(self, dtype: torch.dtype) -> float:
        """Return plain eager's own error in a type that something was compared in."""
        return self._lost.get(dtype, 0.0)

    def _measure(self, dtype: torch.dtype) -> tuple[list[tuple[Tensor, ...]], list[Any], float]:
        single = dtype in (torch.float32, torch.float64)
        inputs = [self._example] if single else [self._example, *self._others()]
        eager = self._run(dtype, inputs)
        try:
            right = self._run(torch.float64 if single else torch.float32, inputs)
        except Exception:  # a network that makes tensors in a type of its own runs in no other
            right = eager
        lost = self._lost[dtype] = error([self._rounded(each) for each in eager], right)
        return inputs, right, max(ALLOWED * lost, FLOAT32_FLOOR) if math.isfinite(lost) else FLOAT32_FLOOR

    def _rounded(self, output: Any) -> Any:
        """Return an output in the types of the network's own."""
        if self._output is None:
            return output
        own = iter(pytree.tree_leaves(self._output))
        return pytree.tree_map(lambda leaf: leaf.to(mine.dtype) if isinstance(mine := next(own), Tensor) else leaf, output)

    def _others(self) -> list[tuple[Tensor, ...]]:
        batch = max(1, self._example[0].shape[0]) if self._example[0].dim() else 1
        return [
            tuple(natural_images(tuple(t.shape), t.device, seed).to(t.dtype) if t.is_floating_point() else t for t in self._example)
            for seed in range(1, -(-CHECKED_IMAGES // batch))
        ]

    def _run(self, dtype: torch.dtype, inputs: list[tuple[Tensor, ...]]) -> list[Any]:
        tensors = (*self._network.parameters(), *self._network.buffers())
        own = all(tensor.dtype == dtype for tensor in tensors if tensor.is_floating_point())
        if own and self._output is not None and len(inputs) == 1:
            return [self._output]
        twin = self._network if own else recast(self._network, dtype)
        with torch.no_grad():
            return [twin(*(t.to(dtype) if t.is_floating_point() else t for t in each)) for each in inputs]


def error(outputs: list[Any], references: list[Any]) -> float:
    """Compare outputs for several inputs: per tensor ||output - reference|| / ||reference|| over all inputs, and of these the largest.

    Infinite where the structures or shapes differ, and where a value should be finite and is not. Of integers it is the share that
    differs.
    """
    flat = [(pytree.tree_flatten(ours), pytree.tree_flatten(theirs)) for ours, theirs in zip(outputs, references, strict=True)]
    if any(spec != wanted for (_, spec), (_, wanted) in flat):
        return float("inf")
    columns = zip(*(zip(ours, theirs, strict=True) for (ours, _), (theirs, _) in flat), strict=True)
    return max((_error(list(column)) for column in columns), default=0.0)


def _error(pairs: list[tuple[Any, Any]]) -> float:
    off = size = 0.0
    for ours, theirs in pairs:
        if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
            if type(ours) is not type(theirs) or ours != theirs:
                return float("inf")
        elif ours.shape != theirs.shape or _kind(ours) != _kind(theirs):
            return float("inf")
        elif not _scales(theirs):
            off, size = off + (ours != theirs).sum().item(), size + theirs.numel()
        else:
            ours, theirs = (
                torch.view_as_real(t.to(torch.complex128).resolve_conj()) if t.is_complex() else t.double() for t in (ours, theirs)
            )
            alike = (ours == theirs) | (ours.isnan() & theirs.isnan())  # infinities too
            off += torch.where(alike, 0.0, ours - theirs).square().sum().item()
            size += theirs[theirs.isfinite()].square().sum().item()
    ratio = off / size if size else off
    found = ratio**0.5 if isinstance(pairs[0][1], Tensor) and _scales(pairs[0][1]) else ratio
    return found if found == found else float("inf")


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _scales(tensor: Tensor) -> bool:
    """Tell whether how far a number is off says something, and not only whether it is."""
    return tensor.is_floating_point() or tensor.is_complex()
