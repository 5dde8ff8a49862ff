"""Flags of the process that say how exactly, and by which plans, PyTorch multiplies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def products(tf32: bool, benchmark: bool = False) -> Iterator[None]:
    """Allow or forbid TF32 in convolutions and products of matrices for a while, and let cuDNN choose by timing or not."""
    before = torch.backends.cuda.matmul.allow_tf32
    with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark, deterministic=False, allow_tf32=tf32):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


def uncast(kind: str) -> contextlib.AbstractContextManager[object]:
    """Turn autocast off for a kind of device; where nothing lies, as in processes that only compile, there is none."""
    return contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def casts_of(device: torch.device) -> torch.autocast:
    """Return the autocast as it is, but without its memory, which would keep copies of the copies."""
    kind = device.type
    return torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False)
