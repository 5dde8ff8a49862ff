"""What is special to packed images and to the convolutions that read them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from zoo.kernels.comparing import op_checks as checking
from zoo.kernels.ops import image, stem, stem_pool
from zoo.kernels.ops.pool import pooled_size

KERNELS = [(7, 2, 3), (3, 2, 1), (3, 1, 1), (11, 4, 2), (7, 2, 0), (3, 2, 0), (5, 3, 2), (1, 1, 0)]


def drawn(shape: tuple[int, ...], device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)


@pytest.mark.parametrize(("kernel", "stride", "border"), KERNELS)
def test_every_run_is_aligned_and_lies_within_the_packed_image(kernel: int, stride: int, border: int) -> None:
    for height, width in ((32, 32), (33, 35), (47, 30), (224, 299)):
        padding = (border, border, border, border)
        top, bottom, left, right = stem.packing((8, 3, kernel, kernel), (stride, stride), padding, (1, 3, height, width))["padding"]
        x, weight = torch.empty(1, 3, height, width, device="meta"), torch.empty(8, 3, kernel, kernel, device="meta")
        oh, ow = stem.map_size(x, weight, (stride, stride), padding)
        for outputs in (stem.outputs_of_run((stride, stride)), 1):
            run = stem.run_pixels(kernel, stride, outputs)
            last = stride * outputs * (math.ceil(ow / outputs) - 1)
            assert last + run <= left + width + right
        assert stride * (oh - 1) + kernel <= top + height + bottom
        assert (stride * stem.outputs_of_run((stride, stride))) % 2 == 0
        assert (left + width + right) % 4 == 0
        assert min(top, bottom, left, right) >= 0


def test_a_used_buffer_gets_new_borders_and_channels(device: torch.device) -> None:
    x = drawn((2, 3, 5, 6), device)
    out = torch.full((2, 9, 12, 4), torch.nan, device=device)
    assert image.launch(x, padding=(1, 3, 2, 4), out=out) is out
    assert torch.equal(out[:, 1:6, 2:8, :3], x.permute(0, 2, 3, 1))
    out[:, 1:6, 2:8, :3] = 0
    assert not out.any()


def test_a_cast_rounds_as_pytorch_does(device: torch.device) -> None:
    x = drawn((2, 3, 5, 6), device)
    packed = image.launch(x, padding=(1, 0, 2, 1), dtype=torch.float16)
    assert torch.equal(packed, image.reference(x, padding=(1, 0, 2, 1), dtype=torch.float16))


def test_a_buffer_of_another_shape_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        image.launch(drawn((1, 3, 4, 4), device), padding=(1, 1, 1, 1), out=torch.empty((1, 6, 5, 4), device=device))


def test_five_channels_and_integers_are_refused() -> None:
    assert "at most 4" in image.supports(torch.zeros(1, 5, 4, 4))
    assert "uint8" in image.supports(torch.zeros(1, 3, 4, 4, dtype=torch.uint8))
    assert "at most 4" in stem.supports(torch.zeros(1, 8, 4, 4), torch.zeros(8, 8, 3, 3))
    assert "grouped" in stem.supports(torch.zeros(1, 4, 4, 4), torch.zeros(8, 2, 3, 3))


@pytest.mark.parametrize("op", [stem, stem_pool], ids=["stem", "stem_pool"])
def test_images_in_any_memory_give_the_same_result(op: Any, device: torch.device) -> None:
    args = checking.draw(op, op.CASES[0], torch.float32, device)
    planes = op.launch(**op.prepare(**args))
    pixels = op.launch(**op.prepare(**args | {"x": args["x"].contiguous(memory_format=torch.channels_last)}))
    assert torch.equal(planes, pixels)


def test_what_fills_a_run_up_has_no_weight(device: torch.device) -> None:
    weight = drawn((2, 3, 3, 3), device)
    packed = stem.pack_weight(weight, (1, 1)).reshape(2, 2, 3, 4, 4)
    assert torch.equal(packed[0, :, :, :3, :3], weight.permute(0, 2, 3, 1))
    assert torch.equal(packed[1, :, :, 1:, :3], weight.permute(0, 2, 3, 1))
    assert not packed[0, :, :, 3].any()
    assert not packed[1, :, :, 0].any()
    assert not packed[..., 3].any()


@pytest.mark.parametrize(("pool_padding", "ceil_mode"), [(1, False), (1, True), (0, True), (0, False)])
def test_positions_outside_the_map_take_no_part_in_a_maximum(pool_padding: int, ceil_mode: bool, device: torch.device) -> None:
    for height, width in ((9, 8), (8, 11)):
        args: dict[str, Any] = {
            "x": drawn((1, 3, height, width), device), "weight": 0.01 * drawn((8, 3, 3, 3), device, 1),
            "bias": torch.full((8,), -5.0, device=device), "padding": (1, 1, 1, 1),
            "pool_padding": pool_padding, "ceil_mode": ceil_mode,
        }  # fmt: skip
        result = stem_pool.launch(**stem_pool.prepare(**args))
        assert result.max() < -4
        torch.testing.assert_close(result, stem_pool.reference(**args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_pooled_sizes_are_those_of_pytorch(ceil_mode: bool) -> None:
    for padding in (0, 1):
        for size in range(3, 40):
            expected = F.max_pool2d(torch.zeros(1, 1, size, 3), 3, 2, padding, ceil_mode=ceil_mode).shape[2]
            assert pooled_size(size, 3, 2, padding, padding, ceil_mode) == expected


@pytest.mark.parametrize("act", ["silu", "hardswish", "gelu"])
def test_activations_that_keep_no_order_are_not_pooled(act: str) -> None:
    assert act in stem_pool.supports(torch.zeros(1, 3, 9, 9), torch.zeros(8, 3, 3, 3), act=act)


def test_every_monotone_activation_may_follow_the_maximum(device: torch.device) -> None:
    x = torch.linspace(-9, 9, 2001, device=device)
    for act in stem_pool.MONOTONE:
        assert bool((stem.ACTIVATIONS[act](x).diff() >= 0).all()), act


def test_nan_in_an_image_reaches_the_pooled_map(device: torch.device) -> None:
    args = checking.draw(stem_pool, stem_pool.CASES[0], torch.float32, device)
    args["x"][0, 1, 4, 5] = torch.nan
    expected = stem_pool.reference(**args).isnan()
    assert expected.any()
    assert bool(stem_pool.launch(**stem_pool.prepare(**args)).isnan()[expected].all())
