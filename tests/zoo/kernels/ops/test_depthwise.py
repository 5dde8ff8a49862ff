"""Depthwise convolution, alone and with the 1x1 convolution behind it: what the harness over all ops doesn't ask."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zoo.kernels.tensors import off
from zoo.kernels.ops import depthwise

PATCHES = [
    {"vector": 4, "cols": 1, "rows": 1, "steps": 1, "ahead": 1, "warps": 1},
    {"vector": 2, "cols": 3, "rows": 4, "steps": 4, "ahead": 2, "warps": 1},
    {"vector": 4, "cols": 2, "rows": 4, "steps": 1, "ahead": 1, "warps": 1},
    {"vector": 8, "cols": 4, "rows": 4, "steps": 2, "ahead": 2, "warps": 2},
    {"vector": 2, "cols": 8, "rows": 8, "steps": 8, "ahead": 1, "warps": 1},
]
"""Single pixels, unrolled, looped, looped and unrolled, as large as the image or larger."""


def label(config: dict[str, int]) -> str:
    return "-".join(f"{key}{value}" for key, value in config.items())


def each_patch_at(names: str, cases: list[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Every patch at every case on the GPU and in a long run; the interpreter, half a second for one, has each patch and each case."""
    step = 1 if torch.cuda.is_available() else len(cases) // 2 + 1
    kept = [
        pytest.param(config, *case, id=f"{label(config)}-{'-'.join(map(str, case))}", marks=pytest.mark.long if (i + j) % step else ())
        for i, config in enumerate(PATCHES)
        for j, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(f"config, {names}", kept)


each_patch = pytest.mark.parametrize("config", PATCHES, ids=label)


def arguments(shape: tuple[int, int, int, int], device: torch.device, *, dtype: torch.dtype = torch.float32, **case: Any) -> dict[str, Any]:
    return depthwise.make({"shape": shape, **case}, dtype, device, torch.Generator(device).manual_seed(0))


def packed(args: dict[str, Any]) -> dict[str, Any]:
    return {key: depthwise.PACK[key](value) if key in depthwise.PACK else value for key, value in args.items()}


@each_patch_at("stride, size", [(1, (8, 7)), (2, (8, 7)), (1, (1, 5)), (2, (1, 5))])
def test_borders_are_zeros_whatever_the_patch(config: dict[str, int], stride: int, size: tuple[int, int], device: torch.device) -> None:
    args = arguments((2, 8, *size), device, stride=(stride, stride))
    assert off(depthwise.launch(**packed(args), config=config), depthwise.reference(**args)) < 1e-6


@each_patch_at("padding", [((2, 0, 3, 1),), ((0, 1, 0, 4),)])
def test_uneven_padding_is_put_where_it_belongs(config: dict[str, int], padding: tuple[int, int, int, int], device: torch.device) -> None:
    args = arguments((1, 8, 6, 7), device, padding=padding)
    assert off(depthwise.launch(**packed(args), config=config), depthwise.reference(**args)) < 1e-6


@each_patch_at("stride, dilation", [((1, 1), (2, 2)), ((2, 2), (3, 2)), ((2, 3), (2, 2))])
def test_dilated_patches_take_every_so_many_pixels(
    config: dict[str, int], stride: tuple[int, int], dilation: tuple[int, int], device: torch.device
) -> None:
    args = arguments((1, 4, 9, 10), device, stride=stride, dilation=dilation)
    assert off(depthwise.launch(**packed(args), config=config), depthwise.reference(**args)) < 1e-6


@each_patch
def test_neighbouring_channels_of_a_slice_are_neither_read_nor_written(config: dict[str, int], device: torch.device) -> None:
    args = arguments((2, 8, 5, 6), device)
    n, c, h, w = args["x"].shape
    wide = torch.full((n, h, w, c + 16), math.nan, device=device).permute(0, 3, 1, 2)
    wide[:, 8 : 8 + c] = args["x"]
    target = torch.full((n, h, w, c + 8), 7.0, device=device).permute(0, 3, 1, 2)
    out = target[:, 8:]
    assert depthwise.launch(**packed(args | {"x": wide[:, 8 : 8 + c]}), out=out, config=config) is out
    assert off(out, depthwise.reference(**args)) < 1e-6
    assert (target[:, :8] == 7.0).all()


@each_patch
def test_rows_of_one_image_never_leak_into_the_next(config: dict[str, int], device: torch.device) -> None:
    args = arguments((3, 8, 3, 3), device)
    args["x"][1] = math.nan
    y = depthwise.launch(**packed(args), config=config)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@each_patch
def test_sums_add_up_to_the_pixels_and_repeat_exactly(config: dict[str, int], device: torch.device) -> None:
    args: dict[str, Any] = packed(arguments((2, 8, 9, 7), device, kernel=(5, 5), stride=(2, 2), act="hardswish")) | {"sums": True}
    y, partial = depthwise.launch(**args, config=config)
    again = depthwise.launch(**args, config=config)[1]
    assert partial.dtype == torch.float32
    assert off(partial.sum(1), y.sum((2, 3))) < 1e-6
    assert torch.equal(partial, again)


def test_the_reference_returns_one_row_of_sums(device: torch.device) -> None:
    y, sums = depthwise.reference(**arguments((2, 8, 4, 5), device), sums=True)
    assert sums.shape == (2, 1, 8)
    assert off(sums[:, 0], y.sum((2, 3))) < 1e-6


def test_sums_are_of_what_was_not_rounded_yet(device: torch.device) -> None:
    args = arguments((1, 8, 12, 12), device, dtype=torch.bfloat16)
    _, partial = depthwise.launch(**packed(args), sums=True)
    single: dict[str, Any] = {key: value.float() if isinstance(value, Tensor) else value for key, value in args.items()}
    assert off(partial.sum(1), depthwise.reference(**single).sum((2, 3))) < 1e-5


@pytest.mark.parametrize("first", [1, 2])
def test_bfloat16_pairs_that_are_no_words_are_loaded_alone(first: int, device: torch.device) -> None:
    """Two channels are one 32-bit load, but not from an odd channel on."""
    args = arguments((1, 4, 5, 5), device, dtype=torch.bfloat16)
    wide = torch.full((1, 5, 5, 8), math.nan, dtype=torch.bfloat16, device=device).permute(0, 3, 1, 2)
    wide[:, first : first + 4] = args["x"]
    y = depthwise.launch(**packed(args | {"x": wide[:, first : first + 4]}))
    assert off(y, depthwise.reference(**args)) < 8e-3


def test_nan_and_infinity_of_bfloat16_pass_through(device: torch.device) -> None:
    args = arguments((1, 4, 1, 3), device, dtype=torch.bfloat16, kernel=(1, 1), bias=False, act="none")
    args["weight"].fill_(1.0)
    args["x"][0, :, 0] = torch.tensor([math.nan, math.inf, -math.inf], device=device)
    y = depthwise.launch(**packed(args))[0, :, 0]
    assert torch.equal(y, args["x"][0, :, 0]) or (y[:, 0].isnan().all() and torch.equal(y[:, 1:], args["x"][0, :, 0, 1:]))


def test_configs_fit_the_size_of_the_work() -> None:
    """Small batches need many small patches, large ones the reuse of large ones."""
    weight = torch.empty((3, 3, 144), device="meta")
    first = {n: depthwise.configs(torch.empty((n, 14, 14, 144), device="meta").permute(0, 3, 1, 2), weight, None)[0] for n in (1, 4096)}
    assert first[1]["cols"] * first[1]["rows"] < first[4096]["cols"] * first[4096]["rows"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"act": "swish2"}, "activation"),
        ({"padding": (0, 0, 0, 0), "dilation": (9, 9)}, "larger than"),
        ({"weight": torch.zeros(8, 1, 3, 3, dtype=torch.float64)}, "float64"),
        ({"weight": torch.zeros(16, 1, 3, 3)}, "no depthwise"),
        ({"weight": torch.zeros(8, 1, 9, 9)}, "taps"),
        ({"x": torch.zeros(2, 8, 6, 6)}, "beside each other"),
    ],
)
def test_what_it_refuses_is_said(change: dict[str, Any], reason: str) -> None:
    args = arguments((2, 8, 6, 6), torch.device("cpu"))
    assert depthwise.supports(**args) == ""
    assert reason in depthwise.supports(**args | change)
