"""The proof that nothing changed: a fast network against the plain one in float32, and what plain eager loses in the same dtype."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

ALLOWED = 1.1
"""How many times plain eager's own error a fast network may have."""

FLOAT32_FLOOR = 1e-5
"""In float32 both errors are the order of summation, and eager's may be anything down to 0; up to here a difference says nothing."""


@dataclass(frozen=True, slots=True)
class Parity:
    """Relative errors of the fast network and of plain eager in the same dtype, against float32 (float64 where the dtype is float32)."""

    fast: float
    eager: float
    images: int

    @property
    def allowed(self) -> float:
        """The largest error with which the fast network passes."""
        return ALLOWED * self.eager

    def passes(self, floor: float = 0.0) -> bool:
        """Tell whether the fast network is as right as plain eager."""
        return self.fast <= max(self.allowed, floor)

    def __str__(self) -> str:
        images = f"{self.images} image{'s' * (self.images != 1)}"
        return f"relative error {self.fast:.2e} on {images}; {ALLOWED} times plain eager's, {self.allowed:.2e}, is allowed"


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
        self.images = sum(_count(batch) for batch in batches)
        model = on_device(network, device, exact)
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False), _matmul_tf32(False):
            self.outputs = [self._run(model, batch, exact) for batch in batches]
        model = model.to(dtype)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=tf32), _matmul_tf32(tf32):
            self.eager = self.error([self._run(model, batch, dtype) for batch in batches])

    def _run(self, model: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]], dtype: torch.dtype) -> list[Tensor]:
        count = _count(batch)
        leaves, spec = pytree.tree_flatten(batch)
        chunked = count > self.CHUNK and all(not isinstance(leaf, Tensor) or leaf.shape[:1] == (count,) for leaf in leaves)
        parts = []
        for start in range(0, count, self.CHUNK) if chunked else (None,):
            piece = [
                _cast(leaf if start is None else leaf[start : start + self.CHUNK] if isinstance(leaf, Tensor) else leaf, dtype)
                for leaf in leaves
            ]
            args, kwargs = pytree.tree_unflatten(piece, spec)
            parts.append([leaf for leaf in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)])
        return parts[0] if len(parts) == 1 else [torch.cat(same) for same in zip(*parts, strict=True)]

    def error(self, outputs: list[list[Tensor]]) -> float:
        """Return the largest relative error of any output over all batches; NaN where there should be a number is infinite."""
        worst = 0.0
        for number in range(len(self.outputs[0])):
            want = torch.cat([batch[number].flatten() for batch in self.outputs])
            got = torch.cat([batch[number].flatten() for batch in outputs]).to(want.dtype)
            if want.is_floating_point():
                error = ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
            else:  # class numbers, say: the share that differs
                error = (got != want).double().mean().item()
            worst = max(worst, error if error == error else float("inf"))
        return worst

    def compare(self, outputs: list[list[Tensor]]) -> Parity:
        """Compare a fast network's outputs for the same batches."""
        return Parity(self.error(outputs), self.eager, self.images)


def on_device(network: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of the network in eval mode on a device, without a second copy on the way."""
    memo: dict[int, Any] = {}
    tensors = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
    for _, tensor in tensors:
        if id(tensor) not in memo:
            wanted = dtype if tensor.is_floating_point() else None
            moved = tensor.detach().to(device, wanted, copy=True)
            memo[id(tensor)] = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
    return copy.deepcopy(network, memo).eval()


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _count(batch: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    return next((leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


class _matmul_tf32:
    """Allow or forbid TF32 in matrix products for a while."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.allowed

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self.before


def natural_images(shape: tuple[int, ...], device: torch.device, seed: int = 0) -> Tensor:
    """Make normalised images whose spectrum falls with the frequency, as photographs' does, crossed by edges.

    White noise would hardly excite the early layers' filters; a network's errors show where its activations are those of pictures.

    Args:
        shape: (N, C, H, W), or any other shape, which is filled with normal numbers.
        device: where to make them.
        seed: other images for another seed, the same for the same.

    Returns:
        float32, mean about 0 and deviation about 1.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    if len(shape) != 4 or min(shape) == 0:
        return torch.randn(shape, generator=generator).to(device)
    n, c, h, w = shape
    distinct = min(n, 16)
    noise = torch.fft.rfft2(torch.randn(distinct, c, h, w, generator=generator))
    frequency = torch.hypot(torch.fft.fftfreq(h).view(-1, 1), torch.fft.rfftfreq(w).view(1, -1)).clamp_min(1 / max(h, w, 2))
    images = torch.fft.irfft2(noise / frequency, s=(h, w))
    position = torch.rand(distinct, 1, 1, 1, generator=generator) * w
    images = images / images.std().clamp_min(1e-6) + (torch.arange(w).view(1, 1, 1, -1) < position).float() - 0.5
    images = images.to(device)
    repeats = -(-n // distinct)
    return torch.cat([images.roll(7 * i, dims=3) for i in range(repeats)])[:n]
