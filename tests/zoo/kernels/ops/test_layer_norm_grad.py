"""The reference of what goes back through a stream and its norm, against autograd in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.comparing import op_checks as checking
from zoo.kernels.ops import layer_norm_grad


def wide(args: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if isinstance(value, Tensor) else value for name, value in args.items()}


@pytest.mark.parametrize("case", layer_norm_grad.CASES, ids=lambda case: case["name"].replace(" ", "_"))
def test_the_reference_is_what_autograd_computes(case: dict[str, Any]) -> None:
    args = wide(checking.draw(layer_norm_grad, case, torch.float32, "cpu"))
    total, factor, scale, share = (args.get(name) for name in ("total", "factor", "scale", "share"))
    assert total is not None
    c = total.shape[1]
    branch = args.get("branch")
    branch = torch.randn_like(total) if branch is None else branch
    scaled = branch if scale is None else branch * scale[:, None, None]
    stream = (total - (scaled if share is None else scaled * share[:, None, None, None])).requires_grad_()
    shift = torch.zeros(c, dtype=torch.float64, requires_grad=True)
    learning = [t.requires_grad_() for t in (branch, torch.ones(c, dtype=torch.float64) if factor is None else factor)]
    scale = None if scale is None else scale.requires_grad_()
    bias = torch.zeros(c, dtype=torch.float64, requires_grad=True)  # of the branch, before it is scaled
    held = branch + bias[:, None, None]
    held = held if scale is None else held * scale[:, None, None]
    again = stream + (held if share is None else held * share[:, None, None, None])
    y = F.layer_norm(again.permute(0, 2, 3, 1), (c,), learning[1], shift, 1e-6).permute(0, 3, 1, 2)
    outs, gradients = [y], [args["gradient"]]
    if args.get("beside") is not None:
        outs, gradients = [y, again], [args["gradient"], args["beside"]]
    asked = [stream, shift, bias, *learning, *([] if scale is None else [scale])]
    of_stream, of_shift, of_bias, of_branch, of_factor, *of_scale = torch.autograd.grad(outs, asked, gradients)
    mean = again.detach().mean(1).reshape(-1)
    inverse = (again.detach().var(1, correction=0) + 1e-6).rsqrt().reshape(-1) if total.numel() else mean
    kind = torch.float64 if args["branch_dtype"] is not None else None
    exact = {**args, "total": again.detach(), "mean": mean, "inverse": inverse, "branch_dtype": kind}
    sums, of_total, *more = layer_norm_grad.reference(**exact)
    expected = [(sums[0], of_factor), (sums[1], of_shift), (of_total, of_stream)]
    if kind is not None:
        expected += [(more[0], of_branch), (sums[2] if scale is None else sums[2] * scale, of_bias)]
    if scale is not None:
        expected.append((sums[3], of_scale[0]))
    for got, right in expected:
        torch.testing.assert_close(got, right, rtol=1e-8, atol=1e-8)
