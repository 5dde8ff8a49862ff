"""What a step should compute, to compare results with: its values in float32, of as many images at a time as memory has room for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.comparing.precision import products
from zoo.kernels.passes.graph import Node
from zoo.kernels.tuning.binding import bind
from zoo.kernels.tuning.steps import ATEN, Candidate, Setting

MOST = 1 << 25
"""Elements of a step's largest map that are compared at a time, about: 128 MiB in float32. The largest of an EfficientNetB6 with 256 images
has a hundred times as many, and several of those in float32 are more than a GPU of 80 GB has."""

Part = slice | EllipsisType
"""Images, or all of a value, whatever its axes are."""
Norms = list[tuple[float, float]]


class Expected:
    """A step's right values for some inputs; where they are many, of the first and the last images, where an index has come too far.

    Whether the images between are right too shows when a plan is compared as a whole; which step is wrong there, `errors` tells.

    Args:
        node: the step; each image's value follows from that image alone.
        inputs: in the plan's dtype.
        setting: device, dtype.
    """

    def __init__(self, node: Node, inputs: list[Tensor], setting: Setting) -> None:
        images, few = _number(node), _fitting(node, inputs)
        self._parts: list[Part] = [...] if few is None else [slice(0, few // 2), slice(images - few // 2, images)]
        self._values = [_right(node, inputs, part, setting) for part in self._parts]

    def errors(self, value: Any) -> list[float]:
        """Return the relative error ||value - expected|| / ||expected|| of each of the step's values; NaN counts as infinite."""
        return _relative([_norms(value, part, wants) for part, wants in zip(self._parts, self._values, strict=True)])


def errors(node: Node, inputs: list[Tensor], setting: Setting, values: Sequence[Any]) -> list[float]:
    """Return the largest relative error of each of several results of a step, over all images; arguments as of `Expected`."""
    few = _fitting(node, inputs)
    parts: list[Part] = [...] if few is None else [slice(first, first + few) for first in range(0, _number(node), few)]
    norms: list[list[Norms]] = [[] for _ in values]
    for part in parts:
        wants = _right(node, inputs, part, setting)
        for found, value in zip(norms, values, strict=True):
            found.append(_norms(value, part, wants))
    return [max(_relative(found)) for found in norms]


def _right(node: Node, inputs: list[Tensor], part: Part, setting: Setting) -> tuple[Tensor, ...]:
    """Compute a step's values in float32, in float64 where the plan's own dtype is float32, from the same inputs."""
    dtype = torch.float64 if setting.dtype == torch.float32 else torch.float32
    with products(tf32=False):
        value = bind(node, Candidate(ATEN), Setting(setting.device, dtype))([x[part].to(dtype) for x in inputs], None)
    values = value if isinstance(value, tuple) else (value,)
    return tuple(one.to(dtype) if one.dtype.itemsize == 1 else one for one in values)  # 8 bits, of which PyTorch computes nothing


def _norms(value: Any, part: Part, wants: tuple[Tensor, ...]) -> Norms:
    """Return the norms of the difference and of what is right, for each of a step's values."""
    values = value if isinstance(value, tuple) else (value,)
    pairs = [(got[part].to(want.dtype).reshape(want.shape), want) for got, want in zip(values, wants, strict=True)]
    return [((got - want).norm().item(), want.norm().item()) for got, want in pairs]


def _relative(parts: list[Norms]) -> list[float]:
    """Return the relative error of each value, from the norms of its parts."""
    found = []
    for norms in zip(*parts, strict=True):
        error = math.hypot(*(off for off, _ in norms)) / max(math.hypot(*(size for _, size in norms)), 1e-30)
        found.append(error if error == error else math.inf)
    return found


def _number(node: Node) -> int:
    return node.shape[0] if node.shape else 0


def _fitting(node: Node, inputs: list[Tensor]) -> int | None:
    """Return how many images are compared at a time; None for all, of few ones and where an input has no images."""
    images = _number(node)
    if not images or any(not x.dim() or x.shape[0] != images for x in inputs):
        return None
    largest = max(torch.Size(node.shape).numel(), *(x.numel() for x in inputs))
    few = max(2, MOST * images // max(1, largest))
    return few if few < images else None
