"""Cross-entropy with smoothed labels and its gradient in one reading of the logits: a program holds an image's scores in registers."""

# pyright: reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.ops._arguments import Drawing, launches, of
from zoo.kernels.ops._layout import DTYPES
from zoo.kernels.ops._overlap import begin, followed_by_ours, overlap

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
"""Results are float32 whatever the logits are."""

IGNORED = -100
"""The label of images that don't count, as in PyTorch."""

MOST_CLASSES = 2**15


def reference(logits: Tensor, target: Tensor, *, smoothing: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the mean cross-entropy and its gradient.

    Args:
        logits: (N, K).
        target: int64 (N,), a class each, -100 where an image doesn't count; or shares of all classes (N, K), any floating dtype, as images
            that were mixed have.
        smoothing: this share of each label is spread evenly over all classes, 0 to 1.

    Returns:
        float32 (float64 for float64): the mean loss of the images that count, a scalar, NaN if none does; the gradient (N, K) of the
        *sum* of losses, which a half type could hold where the mean's would be too small; and 1 / images that count, a scalar, 0 if
        none does.

    Source:
        Szegedy et al. 2015, https://arxiv.org/abs/1512.00567, section 7; PyTorch's `cross_entropy`.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = wide.log_softmax(1)
    share = torch.full_like(wide, smoothing / max(1, wide.shape[1]))
    if target.is_floating_point():
        counted = torch.ones_like(wide[:, 0], dtype=torch.bool)
        share = share + (1 - smoothing) * target.to(wide.dtype)
    else:
        counted = target != IGNORED
        share = share.scatter_add(1, target.clamp_min(0)[:, None], torch.full_like(wide[:, :1], 1 - smoothing)) * counted[:, None]
    gradient = (log_p.exp() * share.sum(1, keepdim=True) - share) * counted[:, None]
    loss = -torch.where(share != 0, share * log_p, 0).sum()  # a score of -inf for a class without a share is no loss
    number = counted.sum().to(wide.dtype)
    return loss / number, gradient, torch.where(number > 0, 1.0 / number, 0.0)


@of(reference)
def rival(logits, target, smoothing) -> Any:
    """Compute loss and gradient by PyTorch's own kernels, for a comparison of times."""
    log_p = logits.float().log_softmax(1)
    if target.is_floating_point():
        share = -(target * (1 - smoothing) + smoothing / log_p.shape[1])
        return (log_p * share).sum(1).mean(), torch.ops.aten._log_softmax_backward_data(share, log_p, 1, torch.float32).to(logits.dtype)
    loss = F.nll_loss(log_p, target) * (1 - smoothing) - log_p.mean(1).mean() * smoothing
    share = torch.full_like(log_p, -smoothing / log_p.shape[1])
    share.scatter_(1, target[:, None], -(1 - smoothing))
    return loss, torch.ops.aten._log_softmax_backward_data(share, log_p, 1, torch.float32).to(logits.dtype)


@of(reference)
def supports(logits, target, smoothing) -> str:
    """Return "" where the kernels take these arguments, else the reason why not."""
    if logits.dim() != 2 or logits.dtype not in DTYPES or not logits.is_contiguous() or logits.shape[1] < 1:
        return "logits that are no contiguous rows of float32, bfloat16 or float16"
    classes, shares = (
        target.shape == logits.shape[:1] and target.dtype == torch.int64,
        target.shape == logits.shape and target.dtype in DTYPES,
    )
    if not (classes or shares) or not target.is_contiguous():
        return "targets that are no int64 class for each image, and no shares of all classes"
    if not 0.0 <= smoothing <= 1.0:
        return f"a smoothing of {smoothing}"
    if logits.shape[1] > MOST_CLASSES:
        return f"more than {MOST_CLASSES} classes"
    return "" if logits.numel() < 2**31 else "larger than 32-bit indices reach"


@triton.jit
def _rows(
    logits, target, losses, gradient, class_units, smoothing,
    V: tl.constexpr, BLOCK: tl.constexpr, IGNORE: tl.constexpr, SHARES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    classes = class_units * V
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    live = k < classes
    z = tl.load(logits + (row * classes + k), mask=live, other=float("-inf")).to(tl.float32)
    z = z - tl.max(z, axis=0)
    p = tl.exp(z)
    total = tl.sum(p, axis=0)
    even = smoothing / classes
    if SHARES:
        share = even + (1.0 - smoothing) * tl.load(target + (row * classes + k), mask=live, other=0.0).to(tl.float32)
        share = tl.where(live, share, 0.0)
        whole = tl.sum(share, axis=0)
        loss = whole * tl.log(total) - tl.sum(tl.where(share != 0.0, z, 0.0) * share, axis=0)
        tl.store(losses + row, loss)
        tl.store(gradient + (row * classes + k), p / total * whole - share, mask=live)
    else:
        label = tl.load(target + row)
        share = even + tl.where(k == label, 1.0 - smoothing, 0.0)
        loss = tl.log(total) - tl.sum(tl.where(live & (share > 0.0), z, 0.0) * share, axis=0)
        counted = label != IGNORE
        # A label that is no class makes a loss that nobody overlooks, and a gradient that a scaler skips.
        wrong = tl.where((label >= 0) & (label < classes), 0.0, float("nan"))
        tl.store(losses + row, tl.where(counted, loss + wrong, 0.0))
        p = p / total
        tl.store(gradient + (row * classes + k), tl.where(counted, p - share + wrong, p * 0.0), mask=live)


@triton.jit
def _mean(
    losses, target, mean, share, images, BLOCK: tl.constexpr, IGNORE: tl.constexpr, SHARES: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    begin(OVERLAP)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for first in range(0, images, BLOCK):
        n = first + tl.arange(0, BLOCK)
        total += tl.load(losses + n, mask=n < images, other=0.0)
        counted = n < images
        if not SHARES:
            counted = tl.load(target + n, mask=counted, other=IGNORE) != IGNORE
        count += counted.to(tl.int32)
    number = tl.sum(count, axis=0).to(tl.float32)
    least = tl.maximum(number, 1.0)
    tl.store(mean, tl.where(number > 0.0, tl.sum(total, axis=0) / least, float("nan")))
    tl.store(share, tl.where(number > 0.0, 1.0 / least, 0.0))


@of(reference)
def configs(logits, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: warps a row."""
    few = [4, 8, 2, 16] if logits.shape[1] <= 4096 else [32, 16]
    return [{"warps": warps} for warps in few]


@launches(reference, configs)
def launch(logits, target, smoothing, config, out: tuple[Tensor, Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernels; see `reference`."""
    images, classes = logits.shape
    if out is None:
        scalars = [torch.empty((), dtype=torch.float32, device=logits.device) for _ in range(2)]
        out = (scalars[0], torch.empty((images, classes), dtype=torch.float32, device=logits.device), scalars[1])
    mean, gradient, share = out
    if images == 0:
        return mean.fill_(torch.nan), gradient, share.zero_()
    unit = math.gcd(classes, 16)
    losses, shares = torch.empty(images, dtype=torch.float32, device=logits.device), target.is_floating_point()
    with followed_by_ours(True):
        _rows[(images,)](
            logits, target, losses, gradient, classes // unit, float(smoothing), V=unit, BLOCK=triton.next_power_of_2(classes),
            IGNORE=IGNORED, SHARES=shares, num_warps=config["warps"], **overlap(logits),
        )  # fmt: skip
    block = min(1024, triton.next_power_of_2(images))
    _mean[(1,)](losses, target, mean, share, images, BLOCK=block, IGNORE=IGNORED, SHARES=shares, num_warps=4, **overlap(logits))
    return out


@of(reference)
def cost(logits, target, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    return 6 * logits.numel(), logits.numel() * (logits.element_size() + 4) + target.numel() * target.element_size() + 8


CASES: list[dict[str, Any]] = [
    {"name": "plain", "sizes": (5, 10)},
    {"name": "smoothed", "sizes": (7, 33), "smoothing": 0.1},
    {"name": "one image, many classes", "sizes": (1, 1000), "smoothing": 0.1},
    {"name": "large scores", "sizes": (4, 16), "smoothing": 0.2, "scale": 80.0},
    {"name": "some don't count", "sizes": (6, 9), "smoothing": 0.1, "ignored": 2},
    {"name": "one class", "sizes": (3, 1), "smoothing": 0.5},
    {"name": "all smooth", "sizes": (3, 5), "smoothing": 1.0},
    {"name": "batch 0", "sizes": (0, 5), "smoothing": 0.1},
    {"name": "mixed", "sizes": (7, 33), "smoothing": 0.1, "shares": True},
    {"name": "none counts", "sizes": (3, 7), "smoothing": 0.1, "ignored": 3},
    {"name": "mixed, one image", "sizes": (1, 7), "smoothing": 0.1, "shares": True},
    {"name": "mixed, one class", "sizes": (3, 1), "shares": True},
    {"name": "mixed, batch 0", "sizes": (0, 5), "shares": True},
]
"""`sizes` are images and classes; `ignored`: so many images don't count; `scale`: of the scores; `shares`: two classes an image."""

LARGE_CASES: list[dict[str, Any]] = [{"name": f"{n}x{k}", "sizes": (n, k), "smoothing": 0.1} for n in (256, 32) for k in (1000, 21843)] + [
    {"name": "64x1000 mixed", "sizes": (64, 1000), "smoothing": 0.1, "shares": True}
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    n, k = case["sizes"]
    draw = Drawing(*how)
    logits = (draw.normal(n, k) * case.get("scale", 3.0)).to(draw.dtype)
    target = torch.randint(k, (n,), generator=draw.generator, device=draw.generator.device).to(draw.device)
    target[: case.get("ignored", 0)] = IGNORED
    if case.get("shares"):
        one, other = (F.one_hot(label, k).to(draw.dtype) for label in (target, target.flip(0)))
        target = 0.7 * one + 0.3 * other
    return {"logits": logits, "target": target, "smoothing": case.get("smoothing", 0.0)}
