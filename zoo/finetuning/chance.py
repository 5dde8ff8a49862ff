"""Random numbers as a function of what they are for.

A run's numbers come from no stream whose place would have to be saved: each seed is made of the run's seed and the step or image
that it is for. So a resumed run, another number of workers and another number of processes see the same images.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor


def seed_of(*what: int | str) -> int:
    """Make a seed of 63 bits out of names and numbers."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little") >> 1


def order_of(count: int, *what: int | str) -> Tensor:
    """Return 0..count-1 in the random order that belongs to `what`, int64."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed_of(*what)))


def uniform(rows: int, columns: int, *what: int | str) -> Tensor:
    """Return (rows, columns) numbers of 0..1, float32, that belong to `what`."""
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed_of(*what)))


def numpy_of(*what: int | str) -> np.random.Generator:
    """Return NumPy's generator that belongs to `what`; torch has no Beta distribution with a seed of its own."""
    return np.random.default_rng(seed_of(*what))
