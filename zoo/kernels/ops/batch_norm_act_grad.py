"""The way back through BatchNorm in train mode, its residual and its activation: one pass that sums, one that applies.

Where there is a residual, the first pass writes its gradient, which is all that the second one then needs of the three tensors that
the first one read. Without one nothing is kept of the output: the activation's slope is computed again from x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.ops import _norm_cases
from zoo.kernels.ops._activation import BY_OUTPUT, SLOPES
from zoo.kernels.ops._arguments import Drawing, as_output, launches, named, of, partly
from zoo.kernels.ops._exchange import added
from zoo.kernels.ops._fold import second_reading
from zoo.kernels.ops._layout import DTYPES, empty_map, per_channel, pixel_stride, unreadable
from zoo.kernels.ops._norm import PASSES
from zoo.kernels.ops._norm_grad import back, reduce
from zoo.kernels.ops._overlap import kernels_run

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
PACK: dict[str, Any] = {}


def reference(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    kept: Tensor | None = None,
    *,
    act: str = "none",
) -> tuple[Tensor, ...]:
    """Compute the gradients of `batch_norm_act`.

    Args:
        gradient: of the output, a map (N, C, H, W).
        x: the input.
        weight: (C,), or None for ones.
        bias: (C,), or None for zeros.
        stats: float32 (3, C), what the way there has returned: means, 1 / deviations, 1 / pixels or 0.
        kept: where there was a residual and an activation, the output if `act` is one of `BY_OUTPUT`, else the residual.
        act: a name of `SLOPES`.

    Returns:
        The gradient of x in the dtype of `x`; float32 (2, C) with the gradients of bias and weight; and with `kept` the gradient of
        the residual, in the dtype of `gradient`, from which the first is computed as it was rounded.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    mean, inverse, share = (row[:, None, None] for row in stats.to(wide))
    normal, g = (x.to(wide) - mean) * inverse, gradient.to(wide)
    factor, shift = (fill if p is None else p.to(wide)[:, None, None] for p, fill in ((weight, 1.0), (bias, 0.0)))
    if kept is not None and act in BY_OUTPUT:
        g = SLOPES[act](g, kept.to(wide))
    else:
        g = SLOPES[act](g, normal * factor + shift + (0.0 if kept is None else kept.to(wide)))
    if kept is not None:
        g = g.to(gradient.dtype).to(wide)
    sums = torch.stack([g.sum((0, 2, 3)), (g * normal).sum((0, 2, 3))])
    level, tilt = (row[:, None, None] for row in sums)
    of_x = ((g - (level + normal * tilt) * share) * (inverse * factor)).to(x.dtype)
    return (of_x, sums) if kept is None else (of_x, sums, g.to(gradient.dtype))


@of(reference)
def rival(gradient, x, weight, stats, kept, act, **_) -> Tensor:
    """Compute the gradient of x by PyTorch's own operators, for a comparison of times."""
    if act != "none":  # any output serves: its time doesn't depend on the numbers
        gradient = torch.ops.aten.threshold_backward(gradient, x if kept is None else kept, 0)
    return torch.ops.aten.native_batch_norm_backward(
        gradient, x, weight, None, None, stats[0], stats[1], True, 1e-5, [True, weight is not None, weight is not None]
    )[0]  # fmt: skip


@of(reference)
def supports(gradient, x, weight, bias, stats, kept, act) -> str:
    """Return "" where the kernels take these arguments, else the reason why not."""
    if x.dim() != 4 or x.dtype not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if act not in SLOPES:
        return f"activation {act}"
    if not per_channel(x, weight, bias, dtypes=DTYPES):
        return "weight and bias are not one for each channel"
    if stats.shape != (3, x.shape[1]) or stats.dtype != torch.float32 or not stats.is_contiguous():
        return "statistics are not three float32 for each channel"
    maps = (gradient, x, kept)
    if any(m is not None and (m.shape != x.shape or m.dtype not in DTYPES) for m in maps):
        return "maps of different shapes, or not of float32, bfloat16 or float16"
    return unreadable(*maps, small=x.numel() < 2**31 - 2**22)


@partly(reference)
def configs(x, kept, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first; see `batch_norm_act.configs`."""
    sizes = [(64, 4, 4, 396, 128, 4, 2), (64, 8, 4, 264, 128, 4, 2), (128, 4, 4, 264, 128, 4, 4), (64, 4, 2, 792, 128, 4, 1)]
    sizes += [(64, 4, 1, 792, 128, 4, 4), (64, 8, 1, 264, 64, 4, 1), (32, 8, 1, 264, 32, 4, 1), (64, 8, 2, 132, 64, 4, 2)]
    if x.numel() * x.element_size() >= 16_000_000:  # three maps are read where one is kept: fewer tiles hide their waiting
        first, second = (2, 1) if kept is not None else (1, 2)
        sizes = [sizes[first], sizes[second], *(size for index, size in enumerate(sizes) if index not in (first, second))]
    return named(PASSES, sizes)


@launches(reference, configs, tuned=True, by=("gradient", "x", "kept", "act"))
def launch(
    gradient, x, weight, bias, stats, kept, act, config, group: Any = None, of_x: bool = True, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """Run the kernels; see `reference`.

    Args:
        group: processes over whose pixels the statistics were taken; the sums returned are this process's own.
        of_x: whether the gradient of x is wanted; its memory is left as it is where not.
        out: results to write; maps may be channel slices.
        config: one of `configs`; the first if None.

    Returns:
        `out`.
    """
    n, channels, h, w = x.shape
    if out is None:
        out = (empty_map(n, channels, h, w, x), torch.empty((2, channels), dtype=torch.float32, device=x.device))
        out += () if kept is None else (empty_map(n, channels, h, w, gradient),)
    to, sums, *residual = out
    if x.numel():
        reduce(gradient, x, weight, bias, stats, kept, act, sums, residual[0] if residual else None, config)
    else:
        sums.zero_()
    of_all = added(sums, group) if group is not None and of_x else sums
    if x.numel() and of_x:
        if residual:  # what the first pass has written holds the slope already
            gradient, kept, act = residual[0], None, "none"
        back(gradient, x, weight, bias, stats, kept, act, of_all, to, config)
    return out


def gradients(
    gradient: Tensor, x: Tensor, weight: Any, bias: Any, stats: Tensor, kept: Any, *, act: str, group: Any = None, of_x: bool = True
) -> tuple[Tensor, ...]:
    """Return what `launch` does, by the kernels where they can run, else by the reference."""
    if pixel_stride(gradient) is None:
        gradient = gradient.contiguous(memory_format=torch.channels_last)
    tensors = (gradient, x, weight, bias, stats, kept)
    if kernels_run(x) and not supports(*tensors, act=act):
        return launch(*tensors, act=act, group=group, of_x=of_x)
    if group is None or not of_x:
        return reference(*tensors, act=act)
    none = stats.clone()
    none[2] = 0
    slanted, sums, *more = reference(gradient, x, weight, bias, none, kept, act=act)
    mean, inverse, share, level, tilt = (row[:, None, None] for row in (*stats, *added(sums, group)))
    factor = inverse if weight is None else inverse * weight[:, None, None]
    return (slanted - (level + (x - mean) * inverse * tilt) * (share * factor)).to(x.dtype), sums, *more


@of(reference)
def cost(gradient, x, kept, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move): what doesn't stay in the cache is read twice."""
    maps = 3 if kept is None else 5
    return x.numel() * 12, x.numel() * x.element_size() * maps + second_reading(gradient, x) + 32 * x.shape[1]


CASES, LARGE_CASES = _norm_cases.CASES, _norm_cases.LARGE_CASES


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw, shape, wide, act = Drawing(*how), case["shape"], case.get("wide", 0), case.get("act", "none")
    level = draw.normal(shape[1])
    affine = (None, None) if case.get("bare") else (0.3 * draw.normal(shape[1]) + 1.0, 0.3 * draw.normal(shape[1]))
    x = draw.map(shape, wide).mul_(1.5).add_(level.to(draw.dtype)[:, None, None])
    kept = as_output(draw.map(shape, wide), act) if case.get("residual") and act != "none" else None
    count = x.numel() // shape[1]
    var, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0) if count else (level.abs(), level)
    share = 1 / count if count and case.get("training", True) else 0.0
    stats = torch.stack([mean, (var + 1e-5).rsqrt(), torch.full_like(mean, share)])
    return {"gradient": draw.map(shape, wide), "x": x, "weight": affine[0], "bias": affine[1], "stats": stats, "kept": kept, "act": act}
