"""The end of a residual block and the beginning of the next in one kernel, so that the map between them isn't read back.

In a bottleneck of ResNet two 1x1 convolutions meet: the one that ends a block, with its addition, and the one that begins the next.
Both are bound by memory at the wide map between them. Here a program owns some pixels, makes that map's channels in chunks, writes
each chunk and multiplies it at once into the sums of the second convolution. MobileNetV2 meets the other way: the map between is the
narrow one, so a program makes it whole, keeps it, and makes the second convolution's channels in chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.ops._activation import ACTIVATIONS
from zoo.kernels.ops._arguments import Drawing, given, launches, of
from zoo.kernels.ops._join import Task, block, narrow_kernel, ranked, wide_kernel
from zoo.kernels.ops._layout import LARGEST, empty_map, pixel_stride, reachable
from zoo.kernels.ops._overlap import overlap

PACK: dict[str, Any] = {}

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None = None,
    x2: Tensor | None = None,
    weight2: Tensor | None = None,
    *,
    stride2: tuple[int, int] = (1, 1),
    act: str = "relu",
    next_weight: Tensor | None = None,
    next_bias: Tensor | None = None,
    next_act: str = "relu",
    tf32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """End a residual block and begin the next: y = act(x * weight + bias + shortcut), z = next_act(y * next_weight + next_bias).

    Args:
        x: (N, K, H, W), the block's inner map.
        weight: (C, K, 1, 1).
        bias: (C,), float32; of a projected shortcut's bias the sum.
        residual: (N, C, H, W), the identity shortcut; not together with `x2`.
        x2: (N, K2, H2, W2), the projected shortcut's map, of which every `stride2`-th pixel is read, from the first.
        weight2: (C, K2, 1, 1), the projection.
        stride2: Rows and columns from one read pixel of `x2` to the next.
        act: Activation of y, a name of `ACTIVATIONS`.
        next_weight: (C2, C, 1, 1), the convolution that begins the next block; None where there is none.
        next_bias: (C2,), float32.
        next_act: Activation of z.
        tf32: Whether float32 is multiplied as TF32; the reference never does.

    Returns:
        y (N, C, H, W), or where `next_weight` is given (y, z) with z (N, C2, H, W). The kernel sums in float32, rounds y to the
        maps' dtype before it multiplies it on, and agrees within `TOLERANCE`; its maps are channels_last, read and written with
        a pixel stride.
    """
    y = F.conv2d(x, weight, bias.to(x.dtype))
    if residual is not None:
        y = y + residual
    if x2 is not None and weight2 is not None:
        y = y + F.conv2d(x2[:, :, :: stride2[0], :: stride2[1]], weight2)
    y = ACTIVATIONS[act](y)
    if next_weight is None or next_bias is None:
        return y
    return y, ACTIVATIONS[next_act](F.conv2d(y, next_weight, next_bias.to(x.dtype)))


def _refusal(x: Tensor, c: int, c2: int | None, tf32: bool) -> str:
    """Say which widths neither kernel holds in registers, or nothing."""
    if c2 is None or _wide_fits(x, c2) or _narrow_fits(x, c, tf32):
        return ""
    return f"neither {c} channels between the convolutions nor {c2} behind the second fit into registers"


def _wide_fits(x: Tensor, c2: int) -> bool:
    return block(c2) <= (512 if x.element_size() == 2 else 256)


def _narrow_fits(x: Tensor, c: int, tf32: bool) -> bool:
    # Products in exact float32 hold a row of the narrow map and of the weights in each thread.
    return block(c) <= (512 if x.element_size() == 2 else 256 if tf32 else 64)


@of(reference)
def supports(x, weight, bias, residual, x2, weight2, stride2, act, next_weight, next_bias, next_act, tf32) -> str:
    """Return why the kernel doesn't take these arguments, or nothing where it does."""
    n, k, h, w = x.shape
    c = weight.shape[0]
    c2 = None if next_weight is None else next_weight.shape[0]
    if x.dtype not in TOLERANCE:
        return f"{x.dtype} maps"
    if residual is not None and x2 is not None:
        return "both an identity and a projected shortcut"
    if (x2 is None) != (weight2 is None) or (next_weight is None) != (next_bias is None):
        return "half of a convolution's arguments"
    if act not in ACTIVATIONS or next_act not in ACTIVATIONS:
        return "an unknown activation"
    maps = [m for m in (x, residual, x2) if m is not None]
    weights = [(weight, (c, k)), (weight2, (c, 0 if x2 is None else x2.shape[1])), (next_weight, (c2, c))]
    for tensor, shape in weights:
        if tensor is not None and (tuple(tensor.shape) != (*shape, 1, 1) or not tensor.flatten(1).is_contiguous()):
            return f"weights of shape {tuple(tensor.shape)} that are no contiguous {shape} of a 1x1 convolution"
    for vector, size in ((bias, c), (next_bias, c2)):
        if vector is not None and (vector.dtype != torch.float32 or tuple(vector.shape) != (size,) or not vector.is_contiguous()):
            return "a bias that is no contiguous float32 vector of the output channels"
    tensors = [*maps, *(tensor for tensor, _ in weights if tensor is not None)]
    if any(t.dtype != x.dtype for t in tensors) or any(t.device != x.device for t in (*tensors, bias)):
        return "maps and weights of several dtypes or devices"
    if residual is not None and residual.shape != (n, c, h, w):
        return f"a shortcut of shape {tuple(residual.shape)} on a map of {(n, c, h, w)}"
    if x2 is not None:
        lines, columns = (-(-size // step) for size, step in zip(x2.shape[2:], stride2, strict=True))
        if (x2.shape[0], lines, columns) != (n, h, w):
            return f"a projected shortcut of {(x2.shape[0], lines, columns)} pixels on a map of {(n, h, w)}"
    if any(pixel_stride(m) is None for m in maps):
        return "maps that are not channels_last"
    if not reachable(*maps) or n * h * w * max(c, c2 or 0) > LARGEST:
        return "maps beyond 32-bit reach"
    return _refusal(x, c, c2, tf32)


@of(reference)
def configs(x, weight, residual, x2, next_weight, tf32, **_) -> list[dict[str, Any]]:
    """Return launch parameters, the best guess first: see `_join.py`'s constants, `registers` a cap on them or 0."""
    n, k, h, w = x.shape
    c, c2 = weight.shape[0], 0 if next_weight is None else next_weight.shape[0]
    k2, item = 0 if x2 is None else x2.shape[1], x.element_size()
    task = Task(max(n * h * w, 1), k, k2, c, c2, item, residual is not None, item == 4 and not tf32)
    return ranked(task, not c2 or _wide_fits(x, c2), c2 > 0 and _narrow_fits(x, c, tf32))


@launches(reference, configs)
def launch(
    x, weight, bias, residual, x2, weight2, stride2, act, next_weight, next_bias, next_act, tf32, config,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Run the kernel; see `reference`.

    Args:
        tf32: whether float32 is multiplied as TF32.
        out: y, or (y, z), each maybe a channel slice; y may be `residual` itself; what is not given is made.
        config: one of `configs`.

    Returns:
        y or (y, z). Sums are float32's, in an order that the launch parameters fix, so equal launches give equal bits.

    Raises:
        ValueError: where maps are not channels_last.
    """
    n, k, h, w = x.shape
    c, c2 = weight.shape[0], 0 if next_weight is None else next_weight.shape[0]
    y, z = out if isinstance(out, tuple) else (out, None)
    y = empty_map(n, c, h, w, x) if y is None else y
    z = empty_map(n, c2, h, w, x) if z is None and c2 else z
    result = y if z is None else (y, z)
    pixels = n * h * w
    if pixels == 0:
        return result
    k2, h2, w2 = (0, 1, 1) if x2 is None else x2.shape[1:]
    steps = [0 if m is None else pixel_stride(m) for m in (x, residual, x2, y, z)]
    if None in steps:
        raise ValueError("join needs channels_last maps or channel slices of such")
    bm, bn = config["BM"], config["BN"]
    settings: dict[str, Any] = {"BM": bm, "BN": bn, "BK": config["BK"], "STAGES": config["stages"], "num_warps": config["warps"]}
    settings |= overlap(x)
    if config["registers"]:
        settings["maxnreg"] = config["registers"]
    programs = triton.cdiv(pixels, bm)
    if config["kind"] == "narrow":
        kernel = narrow_kernel
        settings["WHOLE"] = block(c)
    else:
        kernel = wide_kernel
        part = triton.cdiv(triton.cdiv(c, bn), config["PARTS"]) * bn
        parts = triton.cdiv(c, part)
        programs *= parts
        settings |= {"WHOLE": block(k), "WHOLE2": block(k2), "WHOLE_NEXT": block(c2), "KEEP": config["KEEP"], "PART": part, "PARTS": parts}
    arguments: tuple[Any, ...] = (
        x, weight, bias, residual, x2, weight2, next_weight, next_bias, y, z, pixels, h, w, h2, w2, k, k2, *steps, k, k2, c, c2, *stride2,
        act, next_act, "tf32" if tf32 else "ieee",
    )  # fmt: skip
    kernel[(programs,)](*arguments, **settings)
    return result


@of(reference)
def cost(x, weight, bias, residual, weight2, next_weight, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move); of a strided shortcut's map only the pixels that are read."""
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    weights = [m.numel() for m in (weight, weight2, next_weight) if m is not None]
    widths = [x.shape[1], weight.shape[0]]
    widths += [m.shape[channels] for m, channels in ((residual, 1), (weight2, 1), (next_weight, 0)) if m is not None]
    return 2 * pixels * sum(weights), (pixels * sum(widths) + sum(weights)) * x.element_size() + 4 * bias.numel()


def _case(name: str, n: int, k: int, c: int, size: tuple[int, int], **options: Any) -> dict[str, Any]:
    return {"name": name, "n": n, "k": k, "c": c, "size": size, **options}


# x is (n, k, *size) and y (n, c, *size); `next`: z's channels; `k2`, `size2`: the projected shortcut's map; `wide`: maps are slices of one
# so much wider, from channel 8 on.
CASES: list[dict[str, Any]] = [
    _case("identity_next", 2, 32, 64, (5, 7), residual=True, next=16),
    _case("identity", 1, 16, 48, (3, 3), residual=True, act="relu6"),
    _case("plain_next", 3, 16, 40, (3, 5), next=24, next_act="silu"),
    _case("projected_next", 1, 16, 32, (4, 4), k2=24, size2=(4, 4), next=16, act="leaky_relu_0.1", next_act="leaky_relu_0.01"),
    _case("projected_stride2_even", 2, 16, 64, (3, 4), k2=32, size2=(6, 8), stride2=(2, 2), next=32),
    _case("projected_stride2_odd", 2, 16, 48, (3, 4), k2=16, size2=(5, 7), stride2=(2, 2), act="hardswish"),
    _case("projected_stride2_1", 1, 16, 32, (3, 4), k2=16, size2=(6, 4), stride2=(2, 1), act="sigmoid"),
    _case("one_pixel", 1, 64, 32, (1, 1), residual=True, next=16, next_act="gelu"),
    _case("odd_channels", 1, 13, 37, (5, 3), residual=True, next=11, act="hardsigmoid"),
    _case("odd_channels_projected", 2, 13, 21, (2, 3), k2=7, size2=(3, 5), stride2=(2, 2), next=50, next_act="none"),
    _case("expand", 2, 24, 16, (4, 5), residual=True, next=96, act="none", next_act="relu6"),
    _case("expand_long_k", 1, 96, 24, (3, 5), next=144, act="none", next_act="relu6"),
    _case("slices", 2, 24, 32, (3, 5), residual=True, next=16, wide=24),
    _case("slices_projected", 1, 16, 24, (3, 3), k2=16, size2=(5, 6), stride2=(2, 2), wide=16),
    _case("rows_beyond_a_block", 1, 16, 16, (9, 15), residual=True, next=16),
    _case("batch_0", 0, 16, 32, (4, 4), residual=True, next=16),
]
LARGE_CASES: list[dict[str, Any]] = [
    _case(f"{name}_b{n}", n, k, c, (size, size), **options)
    for n in (256, 32, 1)
    for name, k, c, size, options in (
        ("stage1", 64, 256, 56, {"residual": True, "next": 64}),
        ("stage1_first", 64, 256, 56, {"k2": 64, "size2": (56, 56), "next": 64}),
        ("stage1_last", 64, 256, 56, {"residual": True, "next": 128}),
        ("stage2", 128, 512, 28, {"residual": True, "next": 128}),
        ("stage2_first", 128, 512, 28, {"k2": 256, "size2": (56, 56), "stride2": (2, 2), "next": 128}),
        ("stage2_first_alone", 128, 512, 28, {"k2": 256, "size2": (56, 56), "stride2": (2, 2)}),
        ("stage2_last", 128, 512, 28, {"residual": True, "next": 256}),
        ("stage3", 256, 1024, 14, {"residual": True, "next": 256}),
        ("stage3_first_alone", 256, 1024, 14, {"k2": 512, "size2": (28, 28), "stride2": (2, 2)}),
        ("stage4", 512, 2048, 7, {"residual": True, "next": 512}),
        ("stage4_first_alone", 512, 2048, 7, {"k2": 1024, "size2": (14, 14), "stride2": (2, 2)}),
        ("mobile_16_96_112", 32, 16, 112, {"next": 96, "act": "none", "next_act": "relu6"}),
        ("mobile_24_144_56", 144, 24, 56, {"residual": True, "next": 144, "act": "none", "next_act": "relu6"}),
        ("mobile_64_384_14", 384, 64, 14, {"residual": True, "next": 384, "act": "none", "next_act": "relu6"}),
        ("mobile_160_960_7", 960, 160, 7, {"residual": True, "next": 960, "act": "none", "next_act": "relu6"}),
    )
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case, weights scaled so that sums are near 1."""
    draw, n, k, c, wide = Drawing(*how), case["n"], case["k"], case["c"], case.get("wide", 0)

    def image(channels: int, size: tuple[int, int]) -> Tensor:
        return draw.map((n, channels, *size), wide and channels + wide)

    def weight(channels: int, inputs: int) -> Tensor:
        return (draw.normal(channels, inputs, 1, 1) * inputs**-0.5).to(draw.dtype)

    args: dict[str, Any] = {"x": image(k, case["size"]), "weight": weight(c, k), "bias": draw.normal(c)}
    args |= given(case, "stride2", "act", "next_act")
    if case.get("residual"):
        args["residual"] = image(c, case["size"])
    if "k2" in case:
        args |= {"x2": image(case["k2"], case["size2"]), "weight2": weight(c, case["k2"])}
    if "next" in case:
        args |= {"next_weight": weight(case["next"], c), "next_bias": draw.normal(case["next"])}
    return args
