"""Products between BatchNorms whose programs walk down many tiles, whole ones and one that is cut off."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.zoo.kernels.tensors import off
from zoo.kernels.comparing import op_checks as checking
from zoo.kernels.ops import pointwise_stats, pointwise_stats_input_add, pointwise_stats_input_grad

OPS = (pointwise_stats, pointwise_stats_input_grad, pointwise_stats_input_add)
SMALL = {"BM": 16, "BN": 16, "BK": 16, "warps": 4, "stages": 2, "blocks": 0, "registers": None}
"""One program walks down all the pixels, in two or three steps a tile; in one where BK is 64."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(8, 8), (7, 9)], ids=["whole", "ragged"])
@pytest.mark.parametrize("act", ["relu", "silu"])
@pytest.mark.parametrize("deep", [16, 64])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__.split(".")[-1])
def test_programs_walk_down_tiles(
    op: ModuleType, deep: int, act: str, size: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    args = checking.draw(op, {"shape": (1, 24, *size), "outputs": 40, "act": act, "wide": 32}, dtype, device)
    found = op.launch(**checking.packed(op, args), config=SMALL | {"BK": deep})
    for mine, wanted in zip(found, checking.expected(op, args), strict=True):
        assert off(mine, wanted) < op.TOLERANCE[dtype]


@pytest.mark.parametrize("deep", [16, 64])
def test_what_is_added_to_may_be_what_is_written(deep: int, device: torch.device) -> None:
    args = checking.draw(pointwise_stats_input_add, {"shape": (1, 24, 7, 9), "outputs": 40, "act": "relu"}, torch.float32, device)
    wanted, sums = checking.expected(pointwise_stats_input_add, args)
    out = args["total"], torch.empty_like(sums)
    pointwise_stats_input_add.launch(**checking.packed(pointwise_stats_input_add, args), out=out, config=SMALL | {"BK": deep})
    assert off(args["total"], wanted) < 1e-5
    assert off(out[1], sums) < 1e-5


@pytest.mark.parametrize("pixels", [56, 28, 14, 7])
def test_the_best_guess_leaves_few_multiprocessors_without_work(pixels: int) -> None:
    x = torch.empty((256, 256, pixels, pixels), dtype=torch.bfloat16, device="meta")
    heights = [config["BM"] for config in pointwise_stats.configs(x, x.new_empty((128, 256)))[:2]]
    assert heights == ([128, 64] if pixels > 14 else [64, 128])
