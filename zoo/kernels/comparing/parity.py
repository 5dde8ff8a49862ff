"""The proof that nothing changed: a fast network against the plain one in float32, and what plain eager loses in the same dtype."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.copies import channels_last, compacted, on_device
from zoo.kernels.comparing.precision import products

ALLOWED = 1.1
"""How many times plain eager's own error a fast network may have."""

FLOAT32_FLOOR = 1e-5
"""In float32 both errors are the order of summation, and eager's may be anything down to 0; up to here a difference says nothing."""


@dataclass(frozen=True, slots=True)
class Parity:
    """Relative errors of the fast network and of plain eager in the same dtype, against float32 (float64 where the dtype is float32).

    Attributes:
        fast: the fast network's.
        eager: plain eager's.
        images: that were compared.
        floor: up to which an error says nothing.
    """

    fast: float
    eager: float
    images: int
    floor: float = 0.0

    @property
    def allowed(self) -> float:
        """The largest error with which the fast network passes."""
        return max(ALLOWED * self.eager, self.floor)

    def passes(self) -> bool:
        """Tell whether the fast network is as right as plain eager; where that one overflows, nothing can be said."""
        return math.isfinite(self.eager) and self.fast <= self.allowed

    def __str__(self) -> str:
        images = f"{self.images} image{'s' * (self.images != 1)}"
        if not math.isfinite(self.eager):
            return f"plain eager itself gives infinity or NaN in this dtype on {images}; a dtype with a larger range is needed"
        if self.fast == self.eager == 0:
            return f"the answers to {images} are right to the bit, as if all were zero: they tell nothing of layers that round"
        found = f"relative error {self.fast:.2e} on {images}"
        if self.allowed > ALLOWED * self.eager:
            return f"{found}, plain eager's is {self.eager:.2e}; up to {self.floor:.0e}, which sums in another order make, is allowed"
        return f"{found}; {ALLOWED} times plain eager's, {self.allowed:.2e}, is allowed"


APART = 1e-3
"""Relative difference of an image's outputs beside other images, float32, up to which it is the order of summation."""


class Reference:
    """A network's right outputs for some inputs, and plain eager's error on them; the copies that computed them are gone again.

    Args:
        network: the network; it is not touched.
        device: where to compute.
        dtype: the fast network's dtype.
        tf32: whether eager may use TF32 too.
        batches: argument lists (args, kwargs), tensors in any floating dtype.
    """

    CHUNK = 32
    """Images of a batch that are computed at a time: float32 needs more memory than the fast network."""

    def __init__(
        self,
        network: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        tf32: bool,
        batches: list[tuple[tuple[Any, ...], dict[str, Any]]],
    ) -> None:
        exact = torch.float64 if dtype == torch.float32 else torch.float32
        self._floor = FLOAT32_FLOOR if dtype == torch.float32 else 0.0
        self.images = sum(_count(batch) for batch in batches)
        model = on_device(network, device, exact)
        with products(tf32=False):
            self.chunk = self.CHUNK if all(self._keeps_images_apart(model, batch, exact) for batch in batches) else sys.maxsize
            self.outputs = [self._run(model, batch, exact) for batch in batches]
        model = compacted(channels_last(model.to(dtype)))
        with products(tf32):
            self.eager = self.error([self._run(model, batch, dtype) for batch in batches])

    def _run(self, model: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]], dtype: torch.dtype) -> list[Tensor]:
        count = _count(batch)
        if count <= self.chunk:
            return self._part(model, batch, dtype, slice(None))
        parts = [self._part(model, batch, dtype, slice(start, start + self.chunk)) for start in range(0, count, self.chunk)]
        return [torch.cat(same) for same in zip(*parts, strict=True)]

    def _part(self, model: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]], dtype: torch.dtype, images: slice) -> list[Tensor]:
        whole = images == slice(None)
        args, kwargs = pytree.tree_map(lambda x: _cast(x if whole or not isinstance(x, Tensor) else x[images], dtype), batch)
        return [leaf for leaf in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)]

    def _keeps_images_apart(self, model: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]], exact: torch.dtype) -> bool:
        """Tell whether the first images of a batch have the same outputs beside others; what mixes images can't be computed in parts."""
        count = _count(batch)
        if count <= self.CHUNK:
            return True
        if any(isinstance(leaf, Tensor) and leaf.shape[:1] != (count,) for leaf in pytree.tree_leaves(batch)):
            return False
        few, more = self.CHUNK // 4, self.CHUNK // 2
        alone, beside = (self._part(model, batch, exact, slice(n)) for n in (few, more))
        if any(a.shape[:1] != (few,) or b.shape[:1] != (more,) for a, b in zip(alone, beside, strict=True)):
            return False
        return all(_distance(b[:few], a) < APART for a, b in zip(alone, beside, strict=True))

    def error(self, outputs: list[list[Tensor]]) -> float:
        """Return the largest relative error of any output over all batches; NaN where there should be a number is infinite."""
        return max(
            _distance(torch.cat([batch[i].flatten() for batch in outputs]), torch.cat([batch[i].flatten() for batch in self.outputs]))
            for i in range(len(self.outputs[0]))
        )

    def compare(self, outputs: list[list[Tensor]]) -> Parity:
        """Compare a fast network's outputs for the same batches."""
        return Parity(self.error(outputs), self.eager, self.images, self._floor)


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    """Copy a tensor, for a network may write into its input; floats in a type."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(dtype, copy=True) if leaf.is_floating_point() else leaf.clone()


def _count(batch: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    return next((leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def _distance(got: Tensor, want: Tensor) -> float:
    """Return ||got - want|| / ||want||, of numbers that are no floats the share that differs; infinite where a number is missing.

    Infinities and NaN that belong there, of masks for example, have to be the same.
    """
    if not (want.is_floating_point() or want.is_complex()):
        return (got != want).double().mean().item() if want.numel() else 0.0
    got, finite = got.to(want.dtype), want.isfinite()
    if not finite.all():
        a, b = got[~finite], want[~finite]
        if not ((a == b) | (a.isnan() & b.isnan())).all():
            return math.inf
        got, want = got[finite], want[finite]
    error = ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
    return error if error == error else math.inf
