"""What may compete for a step."""

from __future__ import annotations

import pytest
import torch

from zoo.kernels.tuning.contest import _unseen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_error_that_doesnt_matter_is_smaller_than_what_rounding_one_output_makes(dtype: torch.dtype) -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    rounding = float((x.to(dtype).float() - x).norm() / x.norm())
    assert 0 < _unseen(dtype) < rounding / 2
