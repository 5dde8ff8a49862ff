"""Kernels run on the GPU where there is one, else in Triton's interpreter, small and slow."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreting

    interpreting.install()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
