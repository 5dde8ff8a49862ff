"""BatchNorm in train mode with the residual and the activation behind it: one pass for the statistics, one to apply them.

`batch_norm_act` is what networks call; its backward is the op `batch_norm_act_grad`. Kept for it are x, which the convolution before
has written anyway, three floats a channel and, where there is a residual, the output, which the next convolution keeps anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.ops import _norm_cases
from zoo.kernels.ops._activation import ACTIVATIONS, SLOPES, affine
from zoo.kernels.ops._arguments import Drawing, launches, named, of, partly
from zoo.kernels.ops._exchange import gathered
from zoo.kernels.ops._fold import second_reading
from zoo.kernels.ops._layout import DTYPES, empty_map, per_channel, pixel_stride, unreadable
from zoo.kernels.ops._norm import PASSES, apply, join, partial_statistics
from zoo.kernels.ops._overlap import followed_by_ours

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
PACK: dict[str, Any] = {}


def reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None = None,
    *,
    momentum: float = 0.1,
    eps: float = 1e-5,
    act: str = "none",
    training: bool = True,
) -> tuple[Tensor, ...]:
    """Compute ``act(batch_norm(x) + residual)``.

    Args:
        x: map (N, C, H, W), channels_last, maybe a channel slice.
        weight: (C,), or None for ones.
        bias: (C,), or None for zeros.
        running_mean: (C,), or None where none is kept.
        running_var: (C,), or None with `running_mean`.
        residual: map of the shape of `x`, added before the activation.
        momentum: the new statistics' share of the running ones.
        eps: added to the variance.
        act: a name of `SLOPES`.
        training: statistics of `x`; else the running ones.

    Returns:
        The map in the dtype of `x`, computed in float32 (float64 for float64) and rounded once; float32 (3, C) of means,
        1 / deviations and 1 / pixels, the last 0 where statistics don't depend on `x`; then, where there are any, the new running
        statistics: an unbiased variance, as PyTorch has it. With no pixels, statistics are zeros and the running ones stay.

    Source:
        Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167, algorithm 1.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    z, count = x.to(wide), x.numel() // max(1, x.shape[1])
    new: tuple[Tensor, ...] = () if running_mean is None or running_var is None else (running_mean.clone(), running_var.clone())
    if not training:
        assert running_mean is not None
        assert running_var is not None
        mean, var = running_mean.to(wide), running_var.to(wide)
    elif count:
        mean = z.mean((0, 2, 3))
        var = (z - mean[:, None, None]).square().mean((0, 2, 3))
        if new:
            old = [t.to(wide) for t in new]
            moved = (old[0].lerp(mean, momentum), old[1].lerp(var * count / max(count - 1, 1), momentum))
            new = tuple(m.to(t.dtype) for m, t in zip(moved, new, strict=True))
    else:
        mean = var = z.new_zeros(x.shape[1])
    inverse = (var + eps).rsqrt()
    y = affine((z - mean[:, None, None]) * inverse[:, None, None], weight, bias)
    if residual is not None:
        y = y + residual.to(wide)
    stats = torch.stack([mean, inverse, torch.full_like(mean, 1 / count if training and count else 0)])
    return ACTIVATIONS[act](y).to(x.dtype), stats if count or not training else torch.zeros_like(stats), *new


@of(reference)
def rival(x, residual, act, **options) -> Tensor:
    """Compute the same map by PyTorch's own operators, for a comparison of times."""
    y = F.batch_norm(x, **options)
    return ACTIVATIONS[act](y if residual is None else y + residual)


@of(reference)
def supports(x, weight, bias, running_mean, running_var, residual, act, training, **_) -> str:
    """Return "" where the kernels take these arguments, else the reason why not."""
    if x.dim() != 4 or x.dtype not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if act not in SLOPES:
        return f"activation {act}"
    if (running_mean is None) != (running_var is None) or (not training and running_mean is None):
        return "running statistics are missing"
    if not per_channel(x, weight, bias, running_mean, running_var, dtypes=DTYPES):
        return "weight, bias and statistics are not one for each channel"
    if residual is not None and (residual.shape != x.shape or residual.dtype not in DTYPES or pixel_stride(residual) is None):
        return "the residual is no map of the same shape in channels_last memory"
    if training and x.shape[0] * x.shape[2] * x.shape[3] == 1:
        return "one pixel has no variance"
    return unreadable(x, residual, small=x.numel() < 2**31 - 2**22)


@partly(reference)
def configs(x, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: of the pass that sums and of the one that applies.

    For each the columns of a tile, warps and tiles in flight; and the programs that sum.
    """
    small = x.numel() * x.element_size() < 10_000_000  # then one round of loads does, and what joins fewer programs' sums is quicker
    sizes = [(64, 4, 8, 396, 128, 4, 2), (64, 4, 8, 264, 128, 4, 4), (64, 8, 8, 264, 128, 8, 8), (64, 8, 4, 396, 64, 4, 4)]
    sizes += [(64, 4, 4, 792, 64, 8, 8), (64, 4, 2, 792, 128, 4, 1), (64, 16, 4, 132, 64, 8, 4), (32, 8, 4, 396, 32, 4, 4)]
    if small:
        sizes = [(64, 4, 8, 132, 128, 4, 4), (64, 4, 8, 264, 128, 4, 2), (64, 4, 8, 396, 64, 4, 8), (64, 4, 2, 264, 64, 4, 1)]
        sizes += [(32, 8, 2, 264, 32, 4, 1), (64, 8, 4, 132, 64, 4, 2)]
    return named(PASSES, sizes)


def take_statistics(
    x: Tensor, stats: Tensor, old: Any, new: tuple[Tensor, ...], *, eps: float, momentum: float, training: bool, group: Any = None,
    row: Tensor | None = None, config: dict[str, int] | None = None,
) -> None:  # fmt: skip
    """Write `reference`'s statistics and, of the running ones `old`, the `new` ones; `group` and `row` as for `launch`."""
    if training and (x.numel() or group is not None):
        with followed_by_ours(group is None):
            if row is None:
                row = partial_statistics(x, config or configs(x)[0]) if x.numel() else stats.new_zeros((1, *stats.shape))
            partials = row.view(-1, *stats.shape)
            if group is not None:
                partials = gathered(join(partials, torch.empty_like(partials[:1]), None, None, eps, momentum, raw=True), group)
        with followed_by_ours(True):
            join(partials, stats, old, new, eps, momentum)
        return
    if training or old is None:
        stats.zero_()
    else:
        torch.stack([old[0].float(), (old[1].float() + eps).rsqrt(), torch.zeros_like(stats[2])], out=stats)
    for before, after in zip(old or (), new, strict=True):
        if after is not before:
            after.copy_(before)


@launches(reference, configs, tuned=True, by=("x", "residual", "act", "training"))
def launch(
    x, weight, bias, running_mean, running_var, residual, act, config, group: Any = None, row: Any = None, out: Any = None, **how
) -> tuple[Tensor, ...]:
    """Run the kernels; see `reference`.

    Args:
        row: float32 (3, C) of this process's pixels, where whoever wrote `x` has taken its statistics already.
        group: processes whose pixels count too, a `torch.distributed` process group.
        out: results to write; the map may be a channel slice, the running statistics may be written over the old ones.
        config: one of `configs`; the first if None.

    Returns:
        `out`.
    """
    n, channels, h, w = x.shape
    old = None if running_mean is None or running_var is None else (running_mean, running_var)
    if out is None:
        out = (empty_map(n, channels, h, w, x), torch.empty((3, channels), dtype=torch.float32, device=x.device))
        out += () if old is None else (torch.empty_like(old[0]), torch.empty_like(old[1]))
    y, stats, *new = out
    take_statistics(x, stats, old, tuple(new), **how, group=group, row=row, config=config)
    if x.numel():
        apply(x, residual, stats, weight, bias, act, y, config)
    return out


@of(reference)
def cost(x, residual, training, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move): what of `x` doesn't stay in the cache is read twice."""
    moved = x.numel() * x.element_size() * (2 if residual is None else 3) + (second_reading(x) if training else 0)
    return x.numel() * 8, moved + 32 * x.shape[1]


CASES, LARGE_CASES = _norm_cases.CASES, _norm_cases.LARGE_CASES


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case; the maps' means differ from 0."""
    draw, c, wide = Drawing(*how), case["shape"][1], case.get("wide", 0)
    x = draw.map(case["shape"], wide).mul_(1.5).add_(draw.normal(c).to(draw.dtype)[:, None, None])
    args: dict[str, Any] = {"x": x, "weight": None, "bias": None, "running_mean": None, "running_var": None}
    if not case.get("bare"):
        args |= {"weight": 0.3 * draw.normal(c) + 1.0, "bias": 0.3 * draw.normal(c)}
        args |= {"running_mean": 0.2 * draw.normal(c), "running_var": (0.1 * draw.normal(c) + 1.0).abs()}
    if case.get("residual"):
        args["residual"] = draw.map(case["shape"], wide)
    return args | {key: case[key] for key in ("act", "training") if key in case}
