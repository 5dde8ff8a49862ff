"""What a step should compute, to compare candidates with: its values in float32, of its first and last images where they are many."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.passes.graph import Node
from zoo.kernels.precision import products
from zoo.kernels.tuning.binding import bind
from zoo.kernels.tuning.steps import ATEN, Candidate, Setting

MOST = 1 << 25
"""Elements of a step's largest map that are compared, about: 128 MiB in float32. The largest of an EfficientNetB6 with 256 images has a
hundred times as many, and several of those in float32 are more than a GPU of 80 GB has; a wrong kernel is wrong in fewer."""


class Expected:
    """A step's right values for some inputs.

    Compared are whole images, the first ones and the last ones, which lie where an index has come too far; that the others are right
    too the check of the whole plan shows.

    Args:
        node: the step; each image's value follows from that image alone.
        inputs: in the plan's dtype.
        setting: device, dtype.
    """

    def __init__(self, node: Node, inputs: list[Tensor], setting: Setting) -> None:
        self._images, self._few = _number(node), _few(node, inputs)
        dtype = torch.float64 if setting.dtype == torch.float32 else torch.float32
        with products(tf32=False):
            value = bind(node, Candidate(ATEN), Setting(setting.device, dtype))([self._some(x).to(dtype) for x in inputs], None)
        self._values: tuple[Tensor, ...] = value if isinstance(value, tuple) else (value,)

    def errors(self, value: Any) -> list[float]:
        """Return the relative error ||value - expected|| / ||expected|| of each of the step's values; NaN counts as infinite."""
        values = value if isinstance(value, tuple) else (value,)
        found = []
        for got, want in zip(values, self._values, strict=True):
            got = self._some(got).to(want.dtype).reshape(want.shape)
            error = ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
            found.append(error if error == error else float("inf"))
        return found

    def _some(self, x: Tensor) -> Tensor:
        """Return the images that are compared, in the layout of all."""
        return x if self._few is None else torch.cat([x[: self._few], x[self._images - self._few :]])


def _number(node: Node) -> int:
    return node.shape[0] if node.shape else 0


def _few(node: Node, inputs: list[Tensor]) -> int | None:
    """Return how many images are compared at either end; None for all, of few ones and where an input has no images."""
    images = _number(node)
    if not images or any(not x.dim() or x.shape[0] != images for x in inputs):
        return None
    largest = max(torch.Size(node.shape).numel(), *(x.numel() for x in inputs))
    few = max(1, MOST * images // (2 * max(1, largest)))
    return few if 2 * few < images else None
