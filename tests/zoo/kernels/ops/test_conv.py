"""What is special to the dense and the grouped convolution: splitting k, slices, padding, packed weights, borrowed workspaces."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from zoo.kernels.comparing import op_checks as checking
from zoo.kernels.ops import conv, cublaslt, grouped
from zoo.kernels.ops._tiles import by_image

TILE = {"kind": "tile", "BM": 64, "BN": 16, "BK": 16, "SPLIT": 1, "warps": 4, "stages": 2, "GROUP": 1, "EARLY": False}
PADDED: dict[str, Any] = {"padding": (1, 1, 1, 1)}


def args(device: torch.device, n: int = 1, c: int = 32, k: int = 16, size: int = 4, kernel: int = 3, **options: Any) -> dict[str, Any]:
    case = {"n": n, "c": c, "k": k, "size": (size, size), "kernel": (kernel, kernel), "bias": True, **options}
    return conv.make(case, torch.float32, device, torch.Generator().manual_seed(1))


def packed(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "weight": conv.PACK["weight"](given["weight"])}


def error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("split", [2, 3, 5])
def test_split_sums_are_the_whole_sum_and_repeat_bit_for_bit(split: int, device: torch.device) -> None:
    given = packed(args(device, residual=True, act="relu", **PADDED))
    config = {**TILE, "SPLIT": split}
    whole = conv.launch(**given, config=TILE)
    found = conv.launch(**given, config=config)
    assert error(found, whole) < 1e-6
    assert torch.equal(found, conv.launch(**given, config=config))


@pytest.mark.parametrize(("gate", "size", "rows"), [(False, 4, 48), (False, 5, 64), (True, 6, 36), (True, 9, 64)])
def test_split_sums_are_of_rows_that_exist(gate: bool, size: int, rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of 64 pixels has fewer of three images of 16, and where tiles keep to an image, of one of 36; of no more are there sums."""
    given = packed(args(device, n=3, c=40, k=24, size=size, kernel=1, gate=gate))
    tiles = 2 * (3 if gate else 1) * -(-(size * size if gate else 3 * size * size) // 64)
    memory = torch.full((3 * tiles * 64 * 16,), torch.nan, device=device)
    plain = conv.borrow

    def borrowing(*told: Any) -> Any:
        counters, partials = plain(*told)
        assert partials is not None
        assert partials.numel() == 3 * tiles * rows * 16
        return counters, memory[: partials.numel()]

    monkeypatch.setattr(conv, "borrow", borrowing)
    assert error(conv.launch(**given, config={**TILE, "SPLIT": 3}), conv.reference(**given)) < 1e-5
    assert memory[3 * tiles * rows * 16 :].isnan().all()


@pytest.mark.parametrize("config", [TILE, {**TILE, "SPLIT": 3}, {**TILE, "EARLY": True}, {"kind": "row", "BN": 8, "BK": 32, "warps": 4}])
def test_the_result_may_overwrite_the_residual(config: dict[str, Any], device: torch.device) -> None:
    given = packed(args(device, n=2, k=40, size=9, kernel=1, residual=True, act="relu"))
    expected = conv.reference(**given)
    out = given["residual"]
    assert conv.launch(**given, out=out, config=config).data_ptr() == out.data_ptr()
    assert error(out, expected) < 1e-5


def test_more_splits_than_steps_of_k_add_nothing(device: torch.device) -> None:
    given = packed(args(device, kernel=1))
    assert torch.equal(conv.launch(**given, config={**TILE, "SPLIT": 4}), conv.launch(**given, config={**TILE, "SPLIT": 2}))


def test_a_workspace_is_left_as_the_next_launch_needs_it(device: torch.device) -> None:
    large, small = packed(args(device, n=5, **PADDED)), packed(args(device, k=48, kernel=1))
    config = {**TILE, "SPLIT": 2}
    workspace = torch.zeros(conv.workspace(config), dtype=torch.uint8, device=device)
    for given in (large, small, large):
        assert error(conv.launch(**given, config=config, workspace=workspace), conv.reference(**given)) < 1e-5
        assert not workspace.any()


def test_an_unsplit_launch_needs_no_workspace_and_a_split_one_refuses_less_than_it_needs(device: torch.device) -> None:
    given = packed(args(device))
    config = {**TILE, "SPLIT": 2}
    assert conv.workspace(TILE) == 0
    short = torch.zeros(conv.workspace(config) - 1, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="workspace"):
        conv.launch(**given, config=config, workspace=short)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("affine", [False, True])
def test_channels_beside_the_slice_are_neither_read_nor_written(kernel: int, affine: bool, device: torch.device) -> None:
    side = (kernel // 2,) * 4
    given = packed(args(device, n=2, c=24, kernel=kernel, padding=side, residual=True, affine=affine, pre_act="relu", act="relu"))
    expected = conv.reference(**given)
    wide = torch.full((2, 40, 4, 4), torch.nan, device=device).contiguous(memory_format=torch.channels_last)
    wide[:, 8:32] = given["x"]
    beside = torch.full((2, 48, 4, 4), torch.nan, device=device).contiguous(memory_format=torch.channels_last)
    beside[:, 16:32] = given["residual"]
    home = torch.full((2, 48, 4, 4), 7.0, device=device).contiguous(memory_format=torch.channels_last)
    found = conv.launch(**{**given, "x": wide[:, 8:32], "residual": beside[:, 16:32]}, out=home[:, 16:32], config={**TILE, "BK": 32})
    assert error(found, expected) < 1e-5
    assert (home[:, :16] == 7).all()
    assert (home[:, 32:] == 7).all()


@pytest.mark.parametrize("early", [False, True])
def test_a_residual_read_before_the_products_is_the_same_residual(early: bool, device: torch.device) -> None:
    given = packed(args(device, kernel=1, residual=True, act="relu"))
    assert error(conv.launch(**given, config={**TILE, "EARLY": early}), conv.reference(**given)) < 1e-5


def test_padding_is_zero_after_the_affine_map(device: torch.device) -> None:
    given = packed(args(device, affine=True, **PADDED))
    given["x"] = torch.zeros_like(given["x"])
    given["shift"] = torch.ones_like(given["shift"])
    inner = given["weight"][:, :, 1:, 1:].sum((1, 2, 3)) + given["bias"]
    torch.testing.assert_close(conv.launch(**given, config=TILE)[0, :, 0, 0], inner)


@pytest.mark.parametrize("changed", [{}, {"GROUP": 2}, {"SPLIT": 2}, {"SPLIT": 2, "GROUP": 16}], ids=str)
@pytest.mark.parametrize(("size", "alone"), [(5, False), (6, True), (9, True)])
def test_a_gate_belongs_to_its_image(size: int, alone: bool, changed: dict[str, int], device: torch.device) -> None:
    assert by_image(size * size, TILE["BM"]) == alone  # tiles of one image each, or of several
    given = packed(args(device, n=3, c=40, k=24, size=size, kernel=1, gate=True))
    given["gate"][1] = 0
    out = torch.full((3, 24, size, size), torch.nan, device=device).contiguous(memory_format=torch.channels_last)
    found = conv.launch(**given, out=out, config={**TILE, "BK": 16, **changed})
    torch.testing.assert_close(found[1], given["bias"][:, None, None].expand(24, size, size))
    assert error(found, conv.reference(**given)) < 1e-5


def test_a_gated_layers_tiles_are_ranked_by_how_many_there_are(device: torch.device) -> None:
    x, weight, gate = torch.zeros(32, 64, 7, 7), torch.zeros(64, 64, 1, 1), torch.zeros(32, 64)
    assert conv.configs(x, weight) != conv.configs(x, weight, gate=gate)  # of 49 pixels a tile of 128 is no better than one of 64
    assert conv.configs(x[:0], weight, gate=gate[:0])


@pytest.mark.parametrize("group", [1, 2, 16])
def test_every_order_of_tiles_covers_every_tile(group: int, device: torch.device) -> None:
    given = packed(args(device, n=5, k=40, size=8, kernel=1))
    out = torch.full((5, 40, 8, 8), torch.nan, device=device).contiguous(memory_format=torch.channels_last)
    assert error(conv.launch(**given, out=out, config={**TILE, "GROUP": group}), conv.reference(**given)) < 1e-5


def test_an_unpacked_weight_is_refused(device: torch.device) -> None:
    given = args(device)
    given["weight"] = given["weight"].contiguous()
    with pytest.raises(ValueError, match="channels_last"):
        conv.launch(**given)


def test_what_the_kernel_cannot_do_is_said(device: torch.device) -> None:
    given = args(device)
    assert conv.supports(**given) == ""
    assert "gate" in conv.supports(**given, gate=torch.ones(1, 32, device=device))
    assert "grouped" in conv.supports(**{**given, "x": given["x"][:, :16]})
    assert "channels_last" in conv.supports(**{**given, "x": given["x"].contiguous()})
    assert "types" in conv.supports(**{**given, "weight": given["weight"].double()})
    assert "shift" in conv.supports(**given, scale=torch.ones(32, device=device))
    assert "window" in conv.supports(**{**given, "dilation": (4, 4)})


@pytest.mark.parametrize("each", [2, 4, 16, 32])
def test_a_packed_weight_is_block_diagonal(each: int) -> None:
    groups = 64 // each
    weight = torch.arange(1.0, 64 * each * 9 + 1).reshape(64, each, 3, 3)
    wide = grouped.pack(weight)
    width = wide.shape[1]
    assert width == max(16, each)
    for row in range(64):
        start = row // each * each % width
        assert torch.equal(wide[row, start : start + each], weight[row])
        assert wide[row].count_nonzero() == weight[row].numel()
    assert groups * each == 64


def test_groups_do_not_see_each_other(device: torch.device) -> None:
    case = {"n": 1, "c": 64, "k": 64, "groups": 16, "size": (3, 3), "kernel": (3, 3), "bias": True, **PADDED}
    given = grouped.make(case, torch.float32, device, torch.Generator().manual_seed(1))
    given["weight"] = grouped.pack(given["weight"])
    before = grouped.launch(**given)
    given["x"][:, 16:20] += 1.0
    changed = (grouped.launch(**given) != before).any(3).any(2)[0]
    assert changed.nonzero().flatten().tolist() == [16, 17, 18, 19]


def test_grouped_splits_k_too(device: torch.device) -> None:
    case = {"n": 1, "c": 32, "k": 32, "groups": 2, "size": (3, 3), "kernel": (3, 3), "bias": True, **PADDED}
    given = grouped.make(case, torch.float32, device, torch.Generator().manual_seed(1))
    expected = grouped.reference(**given)
    given["weight"] = grouped.pack(given["weight"])
    assert error(grouped.launch(**given, config={**TILE, "SPLIT": 3}), expected) < 1e-5


@pytest.mark.parametrize("op", [grouped, cublaslt], ids=lambda op: op.__name__)
def test_the_result_of_others_may_overwrite_the_residual_too(op: ModuleType, device: torch.device) -> None:
    case = next(case for case in op.CASES if case.get("residual") and not case.get("wide"))
    given = checking.draw(op, case, torch.float32, device)
    expected = op.reference(**given)
    out = given["residual"]
    op.launch(**checking.packed(op, given), out=out)
    assert error(out, expected) < 1e-5


def test_grouped_says_what_it_cannot_do(device: torch.device) -> None:
    x = torch.zeros(1, 96, 4, 4, device=device).contiguous(memory_format=torch.channels_last)
    weight = torch.zeros(96, 3, 3, 3, device=device)
    assert "groups of 3" in grouped.supports(x, weight, groups=32)
    assert "output channels" in grouped.supports(x, torch.zeros(64, 6, 3, 3, device=device), groups=16)
    assert "grouped" in grouped.supports(x, weight, groups=16)
