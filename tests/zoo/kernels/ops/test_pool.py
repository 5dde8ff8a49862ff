"""What pooling, squeeze-and-excitation and the pointwise op mean, beyond what holds for every op."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RELATIVE = 1e-5


def op(name: str) -> ModuleType:
    return importlib.import_module(f"zoo.kernels.ops.{name}")


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def rows(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def near(found: Tensor, wanted: Tensor, relative: float = RELATIVE) -> bool:
    return bool((found.double() - wanted.double()).norm() <= relative * wanted.double().norm())


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    padding = (draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2)))
    size = (draw(st.integers(kernel[0], 9)), draw(st.integers(kernel[1], 9)))
    stride = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    return {"size": size, "kernel": kernel, "stride": stride, "pad": padding, "ceil_mode": draw(st.booleans())}


def pytorch_pool(x: Tensor, window: dict[str, Any], kind: str, count: bool) -> Tensor:
    kernel, stride, pad, ceil_mode = window["kernel"], window["stride"], window["pad"], window["ceil_mode"]
    if kind == "max":
        return F.max_pool2d(x, kernel, stride, pad, ceil_mode=ceil_mode)
    return F.avg_pool2d(x, kernel, stride, pad, ceil_mode=ceil_mode, count_include_pad=count)


def ours(window: dict[str, Any], kind: str, count: bool) -> dict[str, Any]:
    (top, left), keys = window["pad"], ("kernel", "stride", "ceil_mode")
    return {key: window[key] for key in keys} | {"padding": (top, top, left, left), "kind": kind, "count_include_pad": count}


@given(window=windows(), kind=st.sampled_from(["max", "avg"]), count=st.booleans())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_reference_pools_as_pytorch_does(window: dict[str, Any], kind: str, count: bool) -> None:
    x = noise(2, 3, *window["size"])
    wanted = pytorch_pool(x, window, kind, count)
    found = op("pool").reference(x, **ours(window, kind, count))
    assert found.shape == wanted.shape
    assert near(found, wanted)


@given(window=windows(), kind=st.sampled_from(["max", "avg"]), count=st.booleans(), config=st.integers(0, 5))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_the_kernel_pools_as_pytorch_does(window: dict[str, Any], kind: str, count: bool, config: int) -> None:
    x = rows(noise(1, 4, *window["size"]))
    options = ours(window, kind, count)
    assert op("pool").supports(x, **options) == ""
    found = op("pool").configs(x, **options)
    assert near(op("pool").launch(x, **options, config=found[config % len(found)]), pytorch_pool(x, window, kind, count))


@pytest.mark.parametrize("rows_a_lane", [1, 2, 4])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (2, 1), (2, 2), (3, 3)])
def test_carried_rows_change_no_bit(kernel: int, stride: int, rows_a_lane: int) -> None:
    x = rows(noise(1, 8, 10, 5)).bfloat16()
    options: dict[str, Any] = {"kind": "avg", "kernel": (kernel, kernel), "stride": (stride, stride), "padding": (1, 1, 1, 1)}
    once = op("pool").launch(x, **options, config={"block": 64, "rows": 1, "warps": 4})
    again = op("pool").launch(x, **options, config={"block": 64, "rows": rows_a_lane, "warps": 4})
    assert torch.equal(once, again)


def test_a_nan_under_the_window_wins_the_maximum() -> None:
    x = rows(noise(1, 8, 6, 6))
    x[0, 3, 2, 2] = float("nan")
    options: dict[str, Any] = {"kind": "max", "kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)}
    found = op("pool").launch(x, **options)
    assert torch.equal(found.isnan(), F.max_pool2d(x, 3, 2, 1).isnan())
    assert found.isnan().sum() == 1


def test_padding_is_not_seen_by_affine_and_activation() -> None:
    x, one = rows(noise(1, 8, 4, 4)), torch.ones(8, device=DEVICE)
    options: dict[str, Any] = {"kind": "avg", "kernel": (3, 3), "stride": (1, 1), "padding": (1, 1, 1, 1), "pre_act": "relu"}
    wanted = F.avg_pool2d(torch.relu(x + 5), 3, 1, 1)
    assert near(op("pool").launch(x, one, 5 * one, **options), wanted)


def test_channels_beside_a_slice_are_neither_read_nor_written() -> None:
    whole = torch.full((2, 6, 6, 40), float("nan"), device=DEVICE).permute(0, 3, 1, 2)
    x = whole[:, 8:32].copy_(noise(2, 24, 6, 6))
    target = torch.full((2, 3, 3, 40), float("nan"), device=DEVICE).permute(0, 3, 1, 2)
    op("pool").launch(x, kind="avg", kernel=(2, 2), stride=(2, 2), out=target[:, 8:32])
    assert near(target[:, 8:32], F.avg_pool2d(x, 2, 2))
    assert target[:, :8].isnan().all()
    assert target[:, 32:].isnan().all()
    assert near(op("global_pool").launch(x), x.mean((2, 3), keepdim=True))
    assert torch.equal(op("pointwise").launch(x), x)


def test_windows_that_lie_in_the_padding_alone_are_refused() -> None:
    x = rows(noise(1, 8, 5, 5))
    reason = op("pool").supports(x, kind="max", kernel=(2, 2), stride=(1, 1), padding=(2, 0, 0, 0))
    assert "padding" in reason


def test_maps_in_nchw_memory_are_refused_by_every_op() -> None:
    x = noise(2, 8, 5, 5)
    assert "channels_last" in op("pointwise").supports(x)
    assert "channels_last" in op("pool").supports(x, kind="max", kernel=(2, 2), stride=(2, 2))
    assert "channels_last" in op("global_pool").supports(x)


def test_the_pooled_parts_feed_squeeze_excite() -> None:
    x = rows(noise(2, 16, 9, 8))
    parts = op("global_pool").partial_sums(x, None, None, "relu", {"pixels": 16, "block": 16, "parts": 3, "warps": 4})
    assert parts.shape == (2, 3, 16)
    assert near(parts.sum(1), torch.relu(x).sum((2, 3)))
    weights = (noise(4, 16), noise(4), noise(16, 4), noise(16))
    pack = op("squeeze_excite").PACK
    packed = [pack.get(name, lambda t: t)(t) for name, t in zip(("weight1", "bias1", "weight2", "bias2"), weights, strict=True)]
    options: dict[str, Any] = {"act": "silu", "gate_act": "sigmoid"}
    found = op("squeeze_excite").launch(parts, *packed, **options, scale=1 / 72)
    assert near(found, op("squeeze_excite").reference(torch.relu(x).mean((2, 3))[:, None], *weights, **options))


def test_parts_are_added_the_same_way_every_time() -> None:
    x = rows(noise(1, 8, 17, 19))
    config = {"pixels": 16, "block": 16, "parts": 5, "warps": 4}
    first = op("global_pool").launch(x, config=config)
    assert torch.equal(first, op("global_pool").launch(x, config=config))
    assert near(first, x.mean((2, 3), keepdim=True))


def test_a_cast_to_float16_rounds_as_pytorch_does() -> None:
    x = rows(noise(2, 3, 5, 7))
    assert torch.equal(op("pointwise").launch(x, out_dtype=torch.float16), x.half())


def test_a_cast_to_bfloat16_is_a_neighbour_and_on_a_gpu_the_nearest() -> None:
    x = rows(noise(2, 3, 5, 7))
    found = op("pointwise").launch(x, out_dtype=torch.bfloat16)
    # Triton's interpreter cuts the lower bits off where a GPU rounds, so only there must it be the nearest.
    assert torch.equal(found, x.bfloat16()) if x.is_cuda else bool(((found.float() - x).abs() <= 2**-7 * x.abs()).all())
