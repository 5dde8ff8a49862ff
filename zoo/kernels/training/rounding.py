"""Round a network's weights for autocast in a few launches, and widen their gradients likewise.

Autocast rounds each convolution's weights by a kernel of its own, and the gradient comes back by another: a hundred launches of two
microseconds, which a small batch waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.training.calls import CONV2D, arguments, plainly
from zoo.kernels.training.record import Call, Recording, Ref

TOGETHER = 16
"""Weights of a launch: the gradients of so many are there at once, and whoever exchanges them between processes needn't wait for all."""

LINEAR = {"input": None, "weight": None, "bias": None}
_CALLS = {"conv2d": CONV2D, "linear": LINEAR}
ONE_PIXEL = "1x1 of one pixel"
_CHAINS = {"1x1 + shortcut", ONE_PIXEL}
"""Chains that round what they read behind the map as autocast does; others keep the gradient's digits."""


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.dtypes = [weight.dtype for weight in weights]
        ctx.set_materialize_grads(False)
        return tuple(_copied(weights, [dtype] * len(weights)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        there = [(g, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True) if g is not None]
        wide = iter(_copied([g for g, _ in there], [dtype for _, dtype in there]))
        return None, *(None if g is None else next(wide) for g in gradients)


def _copied(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    if copies:
        torch._foreach_copy_(copies, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
    return copies


def rounded(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the weights in another dtype, differentiably; those that don't learn stay so."""
    found = list(weights)
    for learns in (True, False):
        places = [place for place, weight in enumerate(weights) if weight.requires_grad == learns]
        for first in range(0, len(places), TOGETHER):
            some = places[first : first + TOGETHER]
            made = _Rounded.apply(dtype, *(weights[place] for place in some))
            for place, copy in zip(some, made, strict=True):  # pyright: ignore[reportArgumentType]
                found[place] = copy
    return found


def to_round(recording: Recording, steps: Sequence[Any]) -> tuple[list[int], torch.dtype | None]:
    """Return the float32 parameters that nobody reads but convolutions and linear layers, which round them, in order; and to what."""
    readers: dict[int, set[bool]] = {}
    dtypes: dict[int, torch.dtype] = {}
    for step in steps:
        taken = _taken(recording, step)
        for number in dict.fromkeys(step.reads):
            readers.setdefault(number, set()).add(number in taken)
            if number in taken:
                dtypes[number] = recording.values[step.result if isinstance(step, Call) else step.makes].dtype
    seen = {int(leaf) for leaf in recording.outputs if isinstance(leaf, Ref)}
    learnt = [n for n in dtypes if recording.values[n].place is not None and readers[n] == {True} and n not in seen]
    learnt = [n for n in learnt if recording.values[n].dtype == torch.float32 and dtypes[n] in (torch.bfloat16, torch.float16)]
    kinds = {dtypes[number] for number in learnt}
    return (learnt, kinds.pop()) if len(kinds) == 1 else ([], None)


def _taken(recording: Recording, step: Any) -> set[int]:
    """Return what of a step's reads it would round."""
    if not isinstance(step, Call):
        return set(step.reads[1:]) if step.op in _CHAINS else set()
    names = _CALLS.get(step.name)
    given = arguments(step, names) if names is not None and plainly(step) and isinstance(step.result, Ref) else None
    if given is None:
        return set()
    return {int(given[name]) for name in ("weight", "bias") if isinstance(given[name], Ref)} - {int(given["input"])}
