"""The profile counts each kernel once, by who wrote it, and the time in which none runs."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

RECIPE = Path(__file__).parents[2] / "recipes" / "profile_gpu.py"


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    return runpy.run_path(str(RECIPE))


def test_kernels_are_known_by_who_wrote_them(recipe: dict[str, Any]) -> None:
    own = recipe["own_kernels"]()
    assert own["conv_kernel"] == "dense"
    assert own["weight_kernel"] == "depthwise_grad or pointwise_stats"
    kinds = {
        "conv_kernel": "zoo: dense",
        "Memcpy DtoD (Device -> Device)": "copies, fills",
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64": "cuDNN, cuBLAS",
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "cuDNN, cuBLAS",
        "void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16>": "cuDNN, cuBLAS",
        "void at::native::multi_tensor_apply_kernel<at::native::FusedSgdMathFunctor<float, 3>>": "PyTorch: optimiser",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "PyTorch: others",
    }
    assert {name: recipe["kind_of"](name, own) for name in kinds} == kinds


def test_kernels_that_overlap_leave_no_gap_between_them(recipe: dict[str, Any]) -> None:
    span, own = recipe["Span"], {"mine": "op"}
    kind = partial(recipe["kind_of"], own=own)
    spans = [span("mine", 10, 14), span("cudnn", 0, 8), span("mine", 13, 15), span("cudnn", 16, 20), span("Memset", 17, 18)]
    found, idle = recipe["shares"](spans, 2, kind)
    assert idle == (2 + 1) / 2
    assert [(share.name, share.us, share.launches) for share in found] == [
        ("cuDNN, cuBLAS", 6, 1),
        ("zoo: op", 3, 1),
        ("copies, fills", 0.5, 0.5),
    ]
    assert [share.name for share in recipe["shares"](spans, 2, str)[0]] == ["cudnn", "mine", "Memset"]
    *lines, _, ready = recipe["table"](found, idle, 10.0, 41.6).splitlines()
    assert ready == "ready after 42 s"
    assert lines[2] == "| cuDNN, cuBLAS | 0.01 | 1 | 60% |"
    assert lines[-2] == "| nothing | 0.00 | | 15% |"
    with pytest.raises(ValueError, match="no kernel"):
        recipe["shares"]([], 1, str)


def test_without_a_gpu_it_says_so(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["profile_gpu.py"])
    assert recipe["main"]() == 1
    assert "GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["train", "infer"])
def test_a_network_is_profiled(what: str, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["profile_gpu.py", "--model", "ResNet20", "--what", what, "--out", str(tmp_path / "found")])
    assert recipe["main"]() == 0
    printed = capsys.readouterr().out
    assert "| zoo: " in printed
    assert (tmp_path / "found.json").is_file()
