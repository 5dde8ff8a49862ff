"""Small photographs and a small network for the tests of finetuning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small import draw


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes of 16 pictures that differ in brightness."""
    return draw(tmp_path / "photos", {"cat": 16, "dog": 16, "eel": 16})
