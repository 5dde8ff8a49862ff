"""Find in a recording what one kernel does: BatchNorm + residual + activation, depthwise convolutions, gates, stochastic depth, pools."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.training import kernels
from zoo.kernels.training.blocks import dense_blocks
from zoo.kernels.training.calls import activation_of, arguments, convolution_of, norm_of, pair, plainly
from zoo.kernels.training.convolutions import conv_bias_act, grouped, of_one_pixel, out_of, patches, pooled, stems
from zoo.kernels.training.finder import Finder, Placed
from zoo.kernels.training.joins import join
from zoo.kernels.training.record import Call, Recording, Ref
from zoo.kernels.training.replay import Beside, Chain, Step, Without, counters
from zoo.kernels.training.shortcuts import shortcuts
from zoo.kernels.training.squeezes import squeezes
from zoo.kernels.training.widening import widened

_MAX_POOL = {"input": None, "kernel_size": None, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
_AVG_POOL = {
    "input": None, "kernel_size": None, "stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True,
    "divisor_override": None,
}  # fmt: skip
_ADD = {"add", "add_", "__add__", "__iadd__", "__radd__"}
_MUL = {"mul", "mul_", "__mul__", "__imul__", "__rmul__"}


def steps_of(recording: Recording, without: Without) -> tuple[list[Step], list[Chain], dict[int, list[int]]]:
    """Replace chains of a recording's calls by steps of one kernel each.

    Those in `without` are left as they are, by their `key`, for the reason there.

    Returns:
        the steps in order; all chains that were found, those left as they are with a note; buffers that only count.
    """
    counted, gone = counters(recording)
    finder = Finder(recording, gone)
    found: list[Placed] = []
    taken = finder.taken = set(gone)
    for index, call in enumerate(recording.calls):
        if index in taken:
            continue
        for rule in _RULES.get(call.name, ()):
            if (made := rule(finder, index, call)) is not None and not taken & set(made[1]):
                made[0].note = without.get(made[0].key, "")
                found.append(made)
                taken.update(made[1])
                break
    found = stems(finder, pooled(finder, found, without), without)
    found = join(finder, widened(finder, found, without), without)
    found = squeezes(finder, shortcuts(finder, found, without), without)
    found = dense_blocks(finder, found, without)
    at = {indices[-1]: chain for chain, indices in found if not chain.note}
    gone = gone.union(*(indices for chain, indices in found if not chain.note))
    handed = {chain.beside: chain.branch_out for chain in at.values() if chain.beside is not None and chain.branch_out is not None}
    early = {chain.beside: index for index, chain in at.items() if chain.beside is not None and chain.beside < index}
    steps: list[Step] = []
    for index, call in enumerate(recording.calls):
        if index in early:  # what reads the map that it hands on comes behind it
            steps.append(at[early[index]])
        if index in at:
            steps += [] if index in early.values() else [at[index]]
        elif index not in gone:
            steps.append(Beside.of(call, handed[index]) if index in handed else call)
    return steps, [chain for chain, _ in found], counted


def without_any(recording: Recording) -> Without:
    """Return the keys of all chains, and of all that are found in their places without them."""
    without: Without = {}
    while fresh := [chain.key for chain in steps_of(recording, without)[1] if not chain.note]:
        without |= dict.fromkeys(fresh, "without it")
    return without


Found = Placed | None


def _batch_norm(finder: Finder, index: int, call: Call) -> Found:
    norm = norm_of(finder.values, call)
    if norm is None or not norm.training:
        return None
    reads, residual, act = norm.reads, None, "none"
    number, indices, inner = int(call.result), [index], []
    if (after := finder.follower(number)) is not None and (other := _added(finder, finder.calls[after], number)) is not None:
        grown = [*indices, after], [*inner, number]
        if finder.untouched([*reads, other], grown[0]) and finder.hidden(grown[1], after):
            (indices, inner), reads, residual, number = grown, (*reads, other), other, int(finder.calls[after].result)
    if (after := finder.follower(number)) is not None and plainly(finder.calls[after]):
        name = activation_of(finder.calls[after])
        grown = [*indices, after], [*inner, number]
        made = int(finder.calls[after].result)
        seen = name in kernels.ACTIVATIONS and finder.untouched(reads, grown[0]) and finder.hidden(grown[1], after)
        if seen and name is not None and (residual is None or name == "relu" or not finder.written(_kept(name, residual, made), after)):
            (indices, inner), act, number = grown, name, made
    if kernels.batch_norm_act_refuses(finder.device, *map(finder.like, reads), act=act):
        return None
    options = {**norm.options, "act": act}
    words = call.name + ("" if residual is None else " + residual") + ("" if act == "none" else f" + {act}")
    chain, indices = _chain(finder, words, partial(kernels.batch_norm_act, **options), reads, number, indices)
    chain.norm = {**options, "residual": residual is not None}
    chain.fresh = residual is not None and act != "none" and len(chain.calls) > 1
    return chain, indices


def _kept(act: str, residual: int, made: int) -> int:
    """Return what the kernel keeps for an activation's slope behind a sum, where PyTorch keeps the sum."""
    return residual if act in ("hardswish", "silu") else made


def _added(finder: Finder, call: Call, number: int) -> int | None:
    """Return the other operand where a call adds two maps of one shape and dtype and leaves that one as it is."""
    if call.name not in _ADD or not plainly(call) or len(call.args) != 2 or call.kwargs or not all(isinstance(a, Ref) for a in call.args):
        return None
    first, second = (int(arg) for arg in call.args)
    other = second if first == number else first
    a, b = finder.values[number], finder.values[other]
    if other == number or a.shape != b.shape or a.dtype != b.dtype or call.writes - {a.memory}:
        return None
    return other


def _depthwise(finder: Finder, index: int, call: Call) -> Found:
    conv = convolution_of(finder.values, call)
    if conv is None:
        return None
    x, weight, out = (finder.values[number] for number in (conv.x, conv.weight, conv.makes))
    if not 1 < conv.groups == x.shape[1] == weight.shape[0]:
        return None
    window = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    if kernels.depthwise_conv_refuses(finder.device, kernels.stand_in(x.shape, out.dtype), finder.like(conv.weight), window):
        return None
    run = partial(_run_depthwise, dtype=out.dtype, **window)
    words = f"depthwise {out_of(finder, conv.weight)}" + ("" if conv.bias is None else " + bias")
    reads = (conv.x, conv.weight) if conv.bias is None else (conv.x, conv.weight, conv.bias)
    return _chain(finder, words, run, reads, conv.makes, [index])


def _run_depthwise(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    return kernels.depthwise_conv(x.to(dtype), weight, stride, padding, dilation, bias)  # what autocast does before a convolution


def _gate(finder: Finder, index: int, call: Call) -> Found:
    if not plainly(call) or len(call.args) != 2 or call.kwargs or call.writes or not all(isinstance(a, Ref) for a in call.args):
        return None
    for x, gate in (call.args, call.args[::-1]):
        a, b = finder.values[x], finder.values[gate]
        fits = len(a.shape) == 4 and b.shape == (*a.shape[:2], 1, 1) != a.shape and a.dtype == b.dtype
        if fits and not kernels.scale_channels_refuses(finder.device, finder.like(x), finder.like(gate)):
            return _chain(finder, "scale_channels", _scaled, (gate, x), call.result, [index])
    return None


def _kept_branch(finder: Finder, index: int, call: Call) -> Found:
    """Return stochastic depth's product of a branch and a share for each image, and the sum with the shortcut behind it."""
    if not plainly(call) or len(call.args) != 2 or call.kwargs or call.writes or not all(isinstance(a, Ref) for a in call.args):
        return None
    number = int(call.result)
    for branch, share in (call.args, call.args[::-1]):
        a, b = finder.values[branch], finder.values[share]
        if len(a.shape) != 4 or b.shape != (a.shape[0], 1, 1, 1) or a.shape == b.shape or a.dtype != b.dtype:
            continue
        if (after := finder.follower(number)) is None or (other := _added(finder, finder.calls[after], number)) is None:
            return None
        reads = (int(branch), int(share), other)
        if other in reads[:2] or int(share) not in finder.drawn or kernels.add_branch_refuses(finder.device, *map(finder.like, reads)):
            return None
        if not finder.untouched(reads, (index, after)) or not finder.hidden([number], after):
            return None
        placed = _chain(finder, "stochastic depth + residual", kernels.add_branch, reads, finder.calls[after].result, [index, after])
        placed[0].keeps_no_map, placed[0].yields, placed[0].drawn = True, True, frozenset((int(share),))
        return placed
    return None


def _scaled(gate: Tensor, x: Tensor) -> Tensor:
    return kernels.scale_channels(x, gate)


def _max_pool(finder: Finder, index: int, call: Call) -> Found:
    given = arguments(call, _MAX_POOL)
    if given is None or not plainly(call) or given["return_indices"] or pair(given["dilation"]) != (1, 1):
        return None
    x = finder.values[given["input"]]
    if len(x.shape) != 4 or not isinstance(call.result, Ref):
        return None
    kernel = pair(given["kernel_size"])
    window = {"kernel": kernel, "stride": pair(given["stride"]) if given["stride"] else kernel, "padding": pair(given["padding"])}
    if kernels.max_pool_refuses(finder.device, finder.like(given["input"]), **window, ceil_mode=bool(given["ceil_mode"])):
        return None
    run = partial(kernels.max_pool, **window, ceil_mode=bool(given["ceil_mode"]))
    return _chain(finder, f"max_pool {kernel[0]}x{kernel[1]}", run, (given["input"],), call.result, [index])


def _avg_pool(finder: Finder, index: int, call: Call) -> Found:
    given = arguments(call, _AVG_POOL)
    if given is None or not plainly(call) or pair(given["padding"]) != (0, 0) or given["divisor_override"] is not None:
        return None
    kernel, ceil_mode = pair(given["kernel_size"]), bool(given["ceil_mode"])
    if len(finder.values[given["input"]].shape) != 4 or (given["stride"] and pair(given["stride"]) != kernel):
        return None
    if kernels.avg_pool_refuses(finder.device, finder.like(given["input"]), kernel, ceil_mode):
        return None
    run = partial(kernels.avg_pool, kernel=kernel, ceil_mode=ceil_mode)
    return _chain(finder, f"avg_pool {kernel[0]}x{kernel[1]}", run, (given["input"],), call.result, [index])


def _chain(finder: Finder, op: str, run: Callable[..., Tensor], reads: tuple[int, ...], makes: int, indices: list[int]) -> Placed:
    return Chain(op, run, tuple(int(r) for r in reads), int(makes), tuple(finder.calls[i] for i in indices)), tuple(indices)


_RULES: dict[str, tuple[Callable[[Finder, int, Call], Found], ...]] = {
    "batch_norm": (_batch_norm,),
    "shared_batch_norm": (_batch_norm,),
    "conv2d": (_depthwise, grouped, patches, of_one_pixel, conv_bias_act),
    "max_pool2d": (_max_pool,),
    "boolean_dispatch.<locals>.fn": (_max_pool,),
    "avg_pool2d": (_avg_pool,),
    **dict.fromkeys(_MUL, (_gate, _kept_branch)),
}
