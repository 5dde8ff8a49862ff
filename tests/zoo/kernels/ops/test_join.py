"""Two blocks joined in one kernel: what it may read and write, that its kernels and tiles agree, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.kernels.ops import join

CASE = {case["name"]: case for case in join.CASES}
NAN = float("nan")


def drawn(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return join.make(CASE[name], dtype, device, torch.Generator().manual_seed(7))


def both(result: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    assert isinstance(result, tuple)
    return result


def single(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def filled(shape: tuple[int, ...], value: float, device: torch.device) -> Tensor:
    return torch.full(shape, value, device=device).contiguous(memory_format=torch.channels_last)


def refusal(args: dict[str, Any], **changes: Any) -> str:
    return join.supports(**{**args, **changes})


def outline(n: int, k: int, c: int, size: int, c2: int = 0, k2: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Arguments without memory."""

    def image(channels: int) -> Tensor:
        return torch.empty((n, channels, size, size), dtype=dtype, device="meta", memory_format=torch.channels_last)

    def weight(channels: int, inputs: int) -> Tensor:
        return torch.empty((channels, inputs, 1, 1), dtype=dtype, device="meta")

    args: dict[str, Any] = {"x": image(k), "weight": weight(c, k), "bias": torch.empty(c, device="meta")}
    args |= {"x2": image(k2), "weight2": weight(c, k2)} if k2 else {"residual": image(c)}
    if c2:
        args |= {"next_weight": weight(c2, c), "next_bias": torch.empty(c2, device="meta")}
    return args


def test_pixels_between_the_steps_of_a_projected_shortcut_are_not_read(device: torch.device) -> None:
    args = drawn("projected_stride2_odd", device)
    skipped = torch.ones(args["x2"].shape[2:], dtype=torch.bool, device=device)
    skipped[::2, ::2] = False
    expected = single(join.reference(**args))
    args["x2"].masked_fill_(skipped, NAN)
    torch.testing.assert_close(single(join.launch(**args)), expected, rtol=1e-4, atol=1e-4)


def test_pixels_behind_the_last_are_not_written(device: torch.device) -> None:
    args = drawn("identity_next", device)
    n, _, h, w = args["x"].shape
    maps = [filled((n + 3, args[name].shape[0], h, w), NAN, device) for name in ("weight", "next_weight")]
    join.launch(**args, out=(maps[0][:n], maps[1][:n]))
    for m in maps:
        assert m[:n].isfinite().all()
        assert m[n:].isnan().all()


@pytest.mark.parametrize("kind", ["wide", "narrow"])
def test_nan_stays_in_its_pixel(kind: str, device: torch.device) -> None:
    args = drawn("plain_next", device)
    args["x"][1, 5, 2, 3] = NAN
    for config in join.configs(**args):
        if config["kind"] == kind:
            for m in both(join.launch(**args, config=config)):
                dirty = m.isnan()
                assert dirty[1, :, 2, 3].all()
                assert int(dirty.sum()) == m.shape[1]
            return
    pytest.fail(f"no {kind} tile")


@pytest.mark.parametrize("alone", [False, True])
def test_the_result_may_overwrite_the_residual(alone: bool, device: torch.device) -> None:
    args = drawn("identity_next", device)
    expected = both(join.reference(**args))
    z = torch.empty_like(expected[1], memory_format=torch.channels_last)
    y, z = both(join.launch(**args, out=args["residual"] if alone else (args["residual"], z)))
    assert y is args["residual"]
    torch.testing.assert_close((y, z), expected, rtol=1e-4, atol=1e-4)


def test_the_second_convolution_reads_the_map_as_it_is_stored(device: torch.device) -> None:
    """So that what a later layer reads of y and what z was made of are the same numbers."""
    args = drawn("identity_next", device, torch.float16)
    y, z = both(join.launch(**args))
    weight = args["next_weight"].flatten(1).float()

    def second(stored: Tensor) -> Tensor:
        return (torch.einsum("nchw,kc->nkhw", stored.float(), weight) + args["next_bias"][:, None, None]).relu().half()

    exact = torch.einsum("nchw,kc->nkhw", args["x"].float(), args["weight"].flatten(1).float()) + args["bias"][:, None, None]
    unrounded = second((exact + args["residual"].float()).relu())
    assert (z == second(y)).float().mean() > 0.99
    assert (z == second(y)).sum() > (z == unrounded).sum()


def test_both_kernels_agree(device: torch.device) -> None:
    args = drawn("odd_channels_projected", device)
    expected = both(join.reference(**args))
    configs = join.configs(**args)
    for kind in ("wide", "narrow"):
        config = next(c for c in configs if c["kind"] == kind)
        torch.testing.assert_close(both(join.launch(**args, config=config)), expected, rtol=1e-4, atol=1e-4)


def test_keeping_the_pixels_and_reading_them_in_steps_agree(device: torch.device) -> None:
    args = drawn("expand_long_k", device)
    expected = both(join.reference(**args))
    config = {"kind": "wide", "BM": 16, "BN": 16, "BK": 32, "PARTS": 1, "warps": 4, "stages": 2, "registers": 0}
    for keep in (True, False):
        torch.testing.assert_close(both(join.launch(**args, config=config | {"KEEP": keep})), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_programs_that_share_the_channels_give_equal_bits(parts: int, device: torch.device) -> None:
    args = drawn("projected_stride2_odd", device)
    config = {"kind": "wide", "BM": 16, "BN": 16, "BK": 16, "KEEP": True, "PARTS": 1, "warps": 4, "stages": 1, "registers": 0}
    whole = single(join.launch(**args, config=config))
    shared = single(join.launch(**args, config=config | {"PARTS": parts}, out=torch.full_like(whole, NAN)))
    assert torch.equal(whole, shared)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("pixels", [1, 7, 56, 1000])
def test_every_width_of_real_networks_has_a_tile_within_shared_memory(pixels: int, dtype: torch.dtype) -> None:
    resnets = [(64, 256, 64, 0), (64, 256, 128, 64), (128, 512, 256, 256), (256, 1024, 256, 512), (512, 2048, 0, 1024), (2048, 2048, 0, 0)]
    mobiles = [(32, 16, 96, 0), (144, 24, 144, 0), (192, 64, 384, 0), (576, 160, 960, 0)]
    taken = 0
    for k, c, c2, k2 in (*resnets, *mobiles, (960, 320, 1280, 0)):
        args = outline(1, k, c, pixels, c2, k2, dtype)
        if refusal(args):
            continue
        taken += 1
        configs = join.configs(**args)
        assert 1 <= len(configs) <= 24
        for config in configs:
            if config["KEEP"]:
                assert config["BM"] * (k + k2) * dtype.itemsize <= 227 * 1024
    assert taken == (11 if dtype == torch.bfloat16 else 9)


def test_what_no_kernel_holds_is_refused(device: torch.device) -> None:
    args = drawn("identity_next", device)
    assert refusal(args) == ""
    assert "both" in refusal(args, x2=args["x"], weight2=args["weight"])
    assert "half" in refusal(args, weight2=args["weight"])
    assert "half" in refusal(args, next_bias=None)
    assert "shape" in refusal(args, residual=args["residual"][:, :, 1:])
    assert "bias" in refusal(args, bias=args["bias"].double())
    assert "activation" in refusal(args, act="tanh")
    assert "float64" in refusal(args, x=args["x"].double())
    assert "several" in refusal(args, weight=args["weight"].half())
    assert "channels_last" in refusal(args, x=args["x"].contiguous())
    assert "registers" in refusal(outline(1, 64, 1024, 7, c2=1024))
    assert "32-bit" in refusal(outline(4096, 64, 256, 56, c2=64))


def test_memory_in_another_order_is_no_launch(device: torch.device) -> None:
    args = drawn("identity_next", device)
    with pytest.raises(ValueError, match="channels_last"):
        join.launch(**{**args, "x": args["x"].contiguous()})


def test_a_shortcut_of_another_size_is_refused(device: torch.device) -> None:
    args = drawn("projected_stride2_even", device)
    assert refusal(args) == ""
    assert "pixels" in refusal(args, stride2=(1, 2))


def test_the_floor_of_resnets_first_stage_is_its_maps() -> None:
    flop, moved = join.cost(**outline(256, 64, 256, 56, c2=64))
    pixels = 256 * 56 * 56
    assert flop == 2 * pixels * 2 * 64 * 256
    assert moved == 2 * (pixels * (64 + 256 + 256 + 64) + 2 * 64 * 256) + 4 * 256
