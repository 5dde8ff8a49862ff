"""NaN, infinity and overflow in any argument of any op are in its results where PyTorch has them: no kernel makes a number of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zoo.kernels.comparing import op_checks as checking
from zoo.kernels.ops import cudnn_conv, discover
from zoo.kernels.ops._layout import NARROW

OPS = discover()
PLANTS = ("nan", "inf", "-inf", "both", "row of -inf", "row of nan", "overflow")
"""What is planted; the last, float16's largest number, only in float16: sums in float32 don't overflow by it, in no order."""
FOLLOWING = {"pointwise_norm_grad": ("stats", "spread", "level")}
"""Arguments that are another op's results and say the same in two ways, so that what is in one only is in no network."""
SKIPPED = {"cudnn_conv": ("weight",), "cudnn_graph": ("weight",)}
"""On a GPU: what cuDNN, which PyTorch's own operator calls as these ops do, does not multiply with the zeros of a border."""
THEIRS = ("cudnn_conv",)
"""On a GPU: calls PyTorch's own convolution, which in float16 loses -inf by a kernel that cuDNN has for few channels (`sm80_xmma_fprop_…
indexed_wo_smem`, torch 2.11 on an H200), in the plain network too. There, what the plain operator answers is right."""
LIBRARIES = ("cublaslt", "cudnn_conv", "cudnn_graph", "narrow_cublaslt", "narrow_cudnn")
"""Ops whose kernels others wrote, and which take others for large shapes than for small ones."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_op = pytest.mark.parametrize("op", list(OPS.values()), ids=list(OPS))


def plant(values: Tensor, how: str) -> None:
    """Write into the middle of a tensor, or into all of its first image or row, without moving it."""
    if how == "overflow":
        values[0] = torch.finfo(torch.float16).max
    elif how.startswith("row of "):
        values[0] = float(how.removeprefix("row of "))
    else:
        middle = tuple(int(i) for i in torch.unravel_index(torch.tensor(values.numel() // 2), values.shape))
        values[middle] = float("inf" if how == "both" else how)
        if how == "both":
            values[tuple(size - 1 for size in values.shape)] = float("-inf")


def places(op: ModuleType, args: checking.Arguments) -> list[str]:
    """The arguments that hold floating-point numbers, but for what follows from others of them."""
    name = op.__name__.rpartition(".")[2]
    return [
        key for key, value in args.items() if isinstance(value, Tensor) and value.is_floating_point() and key not in FOLLOWING.get(name, ())
    ]


def cases(op: ModuleType, dtype: torch.dtype, device: torch.device) -> Iterator[dict[str, Any]]:
    """The cases that the op takes here and that have any image."""
    for case in op.CASES:
        args = checking.draw(op, case, dtype, device)
        if not op.supports(**args) and all(value.numel() for value in args.values() if isinstance(value, Tensor)):
            yield case


def exact(op: ModuleType, args: checking.Arguments, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What PyTorch computes on the CPU, product by product: a faster convolution would spread what is not finite."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return dtype
        return value.cpu().to(dtype if value.is_floating_point() else value.dtype) if isinstance(value, Tensor) else value

    with torch.inference_mode():
        return checking.as_tuple(op.reference(**{key: plain(value) for key, value in args.items()}))


def as_plain(op: ModuleType, args: checking.Arguments, theirs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of what is right, what PyTorch's own operator on the device gets right as well."""
    with torch.inference_mode():
        plain = [result.cpu() for result in checking.as_tuple(op.reference(**args))]
    return tuple(torch.where(own.isfinite(), own.double(), right) for own, right in zip(plain, theirs, strict=True))


def lost(op: ModuleType, args: checking.Arguments, theirs: tuple[Tensor, ...], how: str, config: checking.Config | None = None) -> str:
    """Tell what an op makes of its arguments other than PyTorch, "" if nothing.

    No result is a number where PyTorch's is none, and what a network passes on is NaN wherever PyTorch's is; of gradients and of
    statistics, infinity is as good. A type of 8 bits ends at its largest number, by design: there, only what isn't finite is NaN.
    """
    with torch.inference_mode(), np.errstate(all="ignore"):  # the interpreter computes by NumPy, which warns
        found = [result.cpu() for result in checking.as_tuple(op.launch(**checking.packed(op, args), config=config))]
    for number, (ours, exact) in enumerate(zip(found, theirs, strict=True)):
        if not ours.is_floating_point():
            continue
        ends = ours.dtype in NARROW
        ours = ours.float() if ends else ours
        too_large = torch.zeros_like(exact, dtype=torch.bool) if ends else exact.abs() > 2 * torch.finfo(ours.dtype).max
        gone = too_large if how == "overflow" else ~exact.isfinite()
        bad = ours.isfinite() & gone
        if not number and not op.__name__.endswith(("_grad", "_add")):
            bad |= exact.isnan() & ~ours.isnan()
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            return f"result {number} at {at} is {ours[at].item()}, PyTorch's {exact[at].item()}, {int(bad.sum())} of {bad.numel()} differ"
    return ""


def tried(op: ModuleType, case: dict[str, Any], key: str, how: str, dtype: torch.dtype, device: torch.device, configs: int) -> list[str]:
    """What is lost of one thing that is planted into one argument of a case."""
    args = checking.draw(op, case, dtype, device)
    plant(args[key], how)
    theirs = exact(op, args, torch.float64)
    if dtype == torch.float16 and device.type == "cuda" and op.__name__.rpartition(".")[2] in THEIRS:
        theirs = as_plain(op, args, theirs)
    launches = op.configs(**checking.packed(op, args))[:configs]
    faults = ((config, lost(op, args, theirs, how, config)) for config in launches)
    return [f"{case['name']}, {how} in {key}, {config}: {fault}" for config, fault in faults if fault]


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of NumPy, where the interpreter looks for the largest
@every_op
def test_what_is_not_finite_stays_so(op: ModuleType, device: torch.device) -> None:
    """One argument a case and one way, others for the next; the GPU tries all of them."""
    faults = []
    for number, case in enumerate(cases(op, torch.float32, device)):
        dtype = torch.float16 if (how := PLANTS[number % len(PLANTS)]) == "overflow" else torch.float32
        keys = places(op, checking.draw(op, case, dtype, device))
        faults += tried(op, case, keys[number % len(keys)], how, dtype, device, 1)
    assert not faults, "\n".join(faults)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@every_op
def test_what_is_not_finite_stays_so_on_the_gpu(op: ModuleType, dtype: torch.dtype) -> None:
    device, faults = torch.device("cuda"), []
    for case in cases(op, dtype, device):
        left_out = SKIPPED.get(op.__name__.rpartition(".")[2], ())
        for key in [key for key in places(op, checking.draw(op, case, dtype, device)) if key not in left_out]:
            for how in PLANTS if dtype == torch.float16 else PLANTS[:-1]:
                faults += tried(op, case, key, how, dtype, device, 2)
    assert not faults, f"{len(faults)}:\n" + "\n".join(faults[:40])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
def test_large_shapes_keep_what_is_not_finite_in_the_first_pixel(what: float, name: str, dtype: torch.dtype) -> None:
    """One channel of one pixel isn't finite, and so must be all channels of the result's first pixel, but where ReLU makes 0 of -inf."""
    op, faults, tried, refused = OPS[name], [], 0, ""
    for case in op.LARGE_CASES:
        args = checking.draw(op, case, dtype, torch.device("cuda"))
        whole = not args["x"].is_floating_point()
        if refused := op.supports(**args) or whole * "whole numbers hold no NaN":
            continue
        args["x"][0, 0, 0, 0] = what
        for config in op.configs(**checking.packed(op, args))[:4]:
            with torch.inference_mode():
                result = checking.as_tuple(op.launch(**checking.packed(op, args), config=config))[0]
            tried += 1
            first = result[0, :, 0, 0].float()
            cut_off = (first == 0) & (args.get("act", "none") == "relu")  # of NaN it is none
            right = first.isnan() if math.isnan(what) else ~first.isfinite() | cut_off
            if not right.all():
                faults.append(f"{case['name']}, {config}: {first[~right][:3].tolist()}, {int((~right).sum())} of {len(first)}")
    if not tried:
        pytest.skip(f"{name} takes none of these in this type: {refused}")
    assert not faults, "\n".join(faults)


def test_a_kernel_that_makes_numbers_of_nan_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    op, args = cudnn_conv, checking.draw(cudnn_conv, cudnn_conv.CASES[0], torch.float32, "cpu")
    plant(args["x"], "nan")
    theirs = exact(op, args, torch.float64)
    assert not lost(op, args, theirs, "nan", {})
    launch = op.launch
    monkeypatch.setattr(op, "launch", lambda **given: launch(**given).nan_to_num(0.0))
    assert "is 0.0, PyTorch's nan" in lost(op, args, theirs, "nan", {})
    monkeypatch.setattr(op, "launch", lambda **given: launch(**given).nan_to_num(nan=torch.inf))
    assert "is inf, PyTorch's nan" in lost(op, args, theirs, "nan", {})
