"""Kernels run on the GPU where there is one, else in Triton's interpreter, small and slow."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.zoo.kernels.engine_networks import Small, varied
from zoo.kernels.comparing.precision import products
from zoo.kernels.compilation import workers as compiling

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreting

    interpreting.install()


if torch.cuda.is_available() and (workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))):
    compiling.MOST = (os.cpu_count() or 1) // workers  # each worker may start so many


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Where kernels run; what they are compared with is computed there without TF32."""
    with products(tf32=False):
        yield torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def small() -> torch.nn.Module:
    """A convolution that is folded, one that is read twice, and a classifier, with statistics that a fold could get wrong."""
    return varied(Small())
