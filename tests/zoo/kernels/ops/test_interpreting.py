"""The quick interpreter computes what Triton's computes, bit for bit, and refuses what that refuses."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from zoo.kernels.comparing import op_checks as checking
from zoo.kernels.ops import discover

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here", allow_module_level=True)

import interpreting
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

SEVERAL = ("conv", "depthwise", "batch_norm_act_grad", "cross_entropy", "max_pool", "squeeze_excite")
"""Products, maps walked by pixels, statistics, a softmax, a search, and a gate."""


def computed(name: str, dtype: torch.dtype) -> list[Tensor]:
    op = discover()[name]
    drawn = (checking.draw(op, case, dtype, "cpu") for case in op.CASES)
    args = next(args for args in drawn if not any(isinstance(value, Tensor) and not value.numel() for value in args.values()))
    outs = tuple(checking.poisoned(like, "cpu")[0] for like in checking.outlines(op, args))
    with torch.inference_mode():
        op.launch(**checking.packed(op, args), out=outs[0] if len(outs) == 1 else outs)
    return [out.contiguous().reshape(-1).view(torch.uint8) for out in outs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SEVERAL)
def test_every_bit_is_what_tritons_own_interpreter_computes(name: str, dtype: torch.dtype) -> None:
    quick = computed(name, dtype)
    with interpreting.as_it_comes():
        assert interpreting.interpreter.GridExecutor.__call__ is interpreting.launch
        slow = computed(name, dtype)
    assert (interpreting.interpreter.GridExecutor.__call__ is interpreting.quick_launch) == interpreting.KNOWN
    assert sum(bits.numel() for bits in quick)
    assert all(torch.equal(a, b) for a, b in zip(quick, slow, strict=True))


@triton.jit
def zeros_kernel(out, size: tl.constexpr):
    tl.store(out + tl.arange(0, 4), tl.sum(tl.zeros((4, size), tl.float32), 1))


def test_a_block_of_three_is_refused_each_time() -> None:
    out = torch.ones(4)
    zeros_kernel[(1,)](out, size=2)
    assert not out.any()
    for _ in range(2):
        with pytest.raises(InterpreterError, match="power of 2"):
            zeros_kernel[(1,)](out, size=3)
