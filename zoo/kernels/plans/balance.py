"""Behind the passes, in half precision: round the weights so that what rounding takes away leaves each output's mean where it was.

A rounded weight is off by the same amount for every image, and most of what it does to an output is to shift its mean: (w - round(w))
times the mean of what comes in. Nagel et al. 2019 (Data-Free Quantization, section 4.2) put the shift into the bias; but shifts that one
kind of picture has are wrong for another, by twice plain eager's error in an SEResNet50. So the means are measured on two kinds of made-up
images, in float32, and of each output a few weights are rounded the other way, until neither kind is shifted. Folding BatchNorm gives
weights another rounding than plain eager's, better or worse by chance; with this a plan's error is about plain eager's or below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zoo.kernels.comparing.precision import products
from zoo.kernels.ops._activation import ACTIVATIONS
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.place import Place
from zoo.kernels.plans.arena import ALIGNED
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.steps import Setting

Means = dict[tuple[Any, ...], Tensor]
"""By layer: the mean of what each weight of a filter is multiplied by, float32 (kinds of pictures, C, KH, KW), on the host."""

TURNS = 24
"""Weights of an output that may be rounded the other way."""

PIECE = 1 << 24
"""Weights that are looked at together: each needs some 40 bytes for a moment."""


def balance(graph: Graph, means: Means, setting: Setting, kept: dict[tuple[Any, ...], Tensor] | None = None) -> None:
    """Round the weights of all convolutions to the plan's dtype, those with known means so that these stay.

    Args:
        graph: whose weights are replaced.
        means: what `mean_inputs` measured.
        setting: of the plan.
        kept: weights that graphs of other shapes had rounded, by `key`; where they are a rounding of this graph's, they are taken as they
            are, and what is rounded now is added. That lies in one piece of memory, because an allocator leaves up to 1 MiB unused
            behind a large piece. Those of groups lie apart and are not kept, for some kernels pack them anew; others pack few and small.
    """
    kept = {} if kept is None else kept
    convolutions = [node for node in graph.nodes if node.op == "conv"]
    fresh: dict[tuple[Any, ...], Node] = {}
    for node in convolutions:
        if node.attrs["groups"] == 1 and key(node) not in kept:
            fresh.setdefault(key(node), node)
    made = dict(zip(fresh, _together([node.attrs["weight"].shape for node in fresh.values()], setting), strict=True))
    for some in _alike(fresh.values(), means):
        for node, weight in zip(some, _weights_of(some, means, setting), strict=True):
            made[key(node)].copy_(weight)
    for node in convolutions:
        name = key(node)
        there = made.get(name, kept.get(name)) if node.attrs["groups"] == 1 else None
        own = fresh.get(name) is node
        same = there is not None and (own or _rounds(there, node.attrs["weight"]))  # functions that share a parameter share its name
        node.attrs["weight"] = there if same else _weights_of([node], means, setting)[0]
    kept |= made  # only now: an interrupted call leaves nothing half done


def _rounds(found: Tensor, weight: Tensor) -> bool:
    """Tell whether a tensor is a weight rounded to one of its neighbours in the tensor's dtype."""
    exact, limits = weight.to(found.device, torch.float32), torch.finfo(found.dtype)
    return bool(((found.float() - exact).abs() <= limits.eps * (exact.abs() + limits.smallest_normal)).all())


def _alike(nodes: Iterable[Node], means: Means) -> Iterator[list[Node]]:
    """Yield convolutions of one shape together, few where they are large, and alone those whose means are not known."""
    waiting: dict[torch.Size, list[Node]] = {}
    for node in nodes:
        weight: Tensor = node.attrs["weight"]
        if key(node) not in means:
            yield [node]
            continue
        some = waiting.setdefault(weight.shape, [])
        some.append(node)
        if (len(some) + 1) * weight.numel() > PIECE:
            yield waiting.pop(weight.shape)
    yield from waiting.values()


def _weights_of(nodes: list[Node], means: Means, setting: Setting) -> Sequence[Tensor]:
    """Round the weights of convolutions of one shape: as many turns as one of them needs, for all of them."""
    weights = [node.attrs["weight"].to(setting.device, torch.float32) for node in nodes]
    known = means.get(key(nodes[0]))
    if known is None:
        return [weight.to(setting.dtype) for weight in weights]
    if len(nodes) == 1:
        return [rounded(weights[0], known.to(setting.device), setting.dtype)]
    shape, kinds = weights[0].shape, len(known)
    flat = torch.stack([weight.reshape(shape[0], -1) for weight in weights])
    together = torch.stack([means[key(node)] for node in nodes]).to(setting.device).reshape(len(nodes), kinds, -1)
    return _rounded(flat, together, setting.dtype).view(len(nodes), *shape).unbind()


def _together(shapes: list[torch.Size], setting: Setting) -> list[Tensor]:
    """Return a channels_last tensor of each shape, all in one piece of memory."""
    per = ALIGNED // setting.dtype.itemsize
    ends = list(accumulate(-(-shape.numel() // per) * per for shape in shapes))
    memory = torch.empty(ends[-1] if ends else 0, dtype=setting.dtype, device=setting.device)
    pieces = []
    for start, (k, c, h, w) in zip([0, *ends], shapes, strict=False):
        pieces.append(memory[start : start + k * c * h * w].view(k, h, w, c).permute(0, 3, 1, 2))
    return pieces


def mean_inputs(graph: Graph, places: dict[Node, Place], kinds: Sequence[Sequence[list[Tensor]]], setting: Setting) -> Means:
    """Measure what the weights of all convolutions are multiplied by, on average over images and pixels.

    The graph is fused and placed, with the weights as they were; `kinds` holds for each kind of picture what the network is given, of the
    graph's shapes, several times.
    """
    exact = Setting(setting.device, torch.float32)
    program = Program(graph, places, {}, exact, Weights(), compiled=False)
    measured: list[dict[tuple[Any, ...], list[Tensor]]] = []
    for batches in kinds:
        found: dict[tuple[Any, ...], list[Tensor]] = {}

        def probe(node: Node, inputs: list[Any], value: Any, found: dict[tuple[Any, ...], list[Tensor]] = found) -> None:
            del value
            if node.op == "conv":
                found.setdefault(key(node), []).append(taps(node, inputs))

        with torch.no_grad(), products(tf32=False), _ContiguousDepthwise():
            for tensors in batches:
                images = [t.float() if t.is_floating_point() else t for t in tensors]
                images = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in images]
                program.run([[image] * len(program.forms[node]) for node, image in zip(graph.inputs, images, strict=True)], probe)
        measured.append(found)
    return {name: torch.stack([torch.stack(found[name]).mean(0) for found in measured]).cpu() for name in measured[0]}


class _ContiguousDepthwise(TorchFunctionMode):
    """Gives depthwise convolutions contiguous (NCHW) maps, for the thread that enters it.

    PyTorch has a kernel for those. For channels_last maps cuDNN makes one, which takes seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given, named = list(args), kwargs or {}
        if func is F.conv2d and named.get("groups", given[6] if len(given) > 6 else 1) == given[0].shape[1] > 1:
            given[:2] = (tensor.contiguous() for tensor in given[:2])
        return func(*given, **named)


def taps(node: Node, inputs: list[Any]) -> Tensor:
    """Return the mean over images and outputs of what each tap of a convolution's filters reads, (C, KH, KW)."""
    given, a = dict(zip(node.roles, inputs, strict=True)), node.attrs
    x: Tensor = given["x"]
    if a.get("scale") is not None:
        x = x * a["scale"].to(x.device, x.dtype)[:, None, None] + a["shift"].to(x.device, x.dtype)[:, None, None]
    x = ACTIVATIONS[a["pre_act"]](x)
    if "gate" in given:
        x = x * given["gate"]
    top, bottom, left, right = a["padding"]
    x = F.pad(x, (left, right, top, bottom))
    (_, _, kh, kw), (down, along), (sh, sw) = a["weight"].shape, a["dilation"], a["stride"]
    height, width = (node.shape[2] - 1) * sh + 1, (node.shape[3] - 1) * sw + 1
    rows = x.unfold(2, height, down)[:, :, :kh, :, ::sh]  # (N, C, KH, W, H'): each tap's rows
    seen = rows.unfold(3, width, along)[:, :, :, :kw, :, ::sw]
    return seen.mean((0, 4, 5))


def rounded(weight: Tensor, means: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest of a half type, but for a few weights of each output, which go the other way so that its mean stays."""
    groups, depth = means.shape[1] // weight.shape[1], weight[0].numel()
    flat, known = weight.reshape(groups, weight.shape[0] // groups, depth), means.reshape(len(means), groups, depth).transpose(0, 1)
    result = torch.empty_like(flat, dtype=dtype)
    many = max(1, PIECE // depth)  # outputs at a time: whole groups, or some of one
    for first in range(0, groups, whole := max(1, many // flat.shape[1])):
        these = slice(first, first + whole)
        for row in range(0, flat.shape[1], many):
            rows = slice(row, row + many)
            result[these, rows] = _rounded(flat[these, rows], known[these], dtype)
    return result.view(weight.shape).contiguous(memory_format=torch.channels_last)


def _rounded(weight: Tensor, means: Tensor, dtype: torch.dtype) -> Tensor:
    """Round (groups, K, depth) by means (groups, kinds, depth): at each turn one weight of an output goes the other way.

    That is the one which leaves the smallest shifts.
    """
    nearest = weight.to(dtype)
    off = weight - nearest.float()
    away = torch.where((off > 0) == (nearest > 0), 1, -1).to(torch.int16)  # of the magnitude's last bit, up or down
    other = (nearest.view(torch.int16) + away).view(dtype)
    step = nearest.float() - other.float()  # what that adds to `off`
    able = (off != 0) & (nearest != 0) & other.isfinite()
    worse = ((off + step).square() - off.square()) * means.square().mean((1, 2), keepdim=True)  # a pixel's own error, about its mean
    squares = means.square().sum(1, keepdim=True)
    across = means.transpose(1, 2)
    shifts = off @ across
    for _ in range(TURNS):
        change = (2 * step * (shifts @ means) + step.square() * squares + worse).masked_fill_(~able, 0.0)
        least, where = change.min(2, keepdim=True)
        turned = least < 0
        if not turned.any():
            break
        nearest = torch.where(torch.zeros_like(able).scatter_(2, where, turned), other, nearest)
        shifts = shifts + torch.where(turned, step.gather(2, where), 0.0) * across.gather(1, where.expand(-1, -1, means.shape[1]))
        able = able.scatter(2, where, False)
    return nearest


def key(node: Node) -> tuple[Any, ...]:
    """Name a convolution alike in the graphs of all shapes; two that compute with parts of one parameter may have the same name."""
    return (node.layers, node.attrs.get("source", ""), tuple(node.attrs["weight"].shape))
