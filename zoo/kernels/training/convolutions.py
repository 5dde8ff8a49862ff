"""Find convolutions with what stands behind them: a bias, an activation, a max pool; and those of images."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from torch import Tensor

from zoo.kernels.training import kernels
from zoo.kernels.training.calls import activation_of, convolution_of, plainly
from zoo.kernels.training.finder import Finder, Placed, in_order, placed
from zoo.kernels.training.record import Call
from zoo.kernels.training.replay import Chain, Without
from zoo.kernels.training.rounding import ONE_PIXEL

WIDE_PATCH = 64
"""Pixels of a patch of images from which on it is a row of a product; smaller ones are a stem's."""


def patches(finder: Finder, index: int, call: Call) -> Placed | None:
    """Return a convolution whose windows lie side by side, as a transformer's patches do, as a product."""
    conv = convolution_of(finder.values, call)
    if conv is None or (conv.groups, conv.padding, conv.dilation) != (1, (0, 0), (1, 1)):
        return None
    kernel, out = finder.values[conv.weight].shape[2:], finder.values[conv.makes]
    small = _images(finder, conv.x) and prod(kernel) < WIDE_PATCH
    if conv.stride != kernel or prod(kernel) == 1 or small or prod(out.shape[2:]) <= 1 or out.dtype not in kernels.HALF:
        return None
    reads = tuple(number for number in (conv.x, conv.weight, conv.bias) if number is not None)
    words = f"patches {out_of(finder, conv.weight)}" + ("" if conv.bias is None else " + bias")
    return Chain(words, partial(_run_patches, dtype=out.dtype), reads, conv.makes, (call,)), (index,)


def of_one_pixel(finder: Finder, index: int, call: Call) -> Placed | None:
    """Return a 1x1 convolution of maps of one pixel, as squeeze-and-excite's are, as a product: cuDNN's kernels are for larger ones."""
    conv = convolution_of(finder.values, call)
    if conv is None or (conv.groups, conv.padding) != (1, (0, 0)) or not kernels.on_kernels(finder.device):
        return None
    x, weight, out = (finder.values[number] for number in (conv.x, conv.weight, conv.makes))
    if x.shape[2:] != (1, 1) or weight.shape[2:] != (1, 1) or out.dtype not in kernels.HALF:
        return None
    reads = tuple(number for number in (conv.x, conv.weight, conv.bias) if number is not None)
    return Chain(ONE_PIXEL, partial(_run_patches, dtype=out.dtype), reads, conv.makes, (call,)), (index,)


def _run_patches(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dtype: Any) -> Tensor:
    return kernels.patch_conv(x, weight, bias, dtype=dtype)


def grouped(finder: Finder, index: int, call: Call) -> Placed | None:
    """Return a convolution in groups, without a bias, as a chain."""
    conv = convolution_of(finder.values, call)
    if conv is None or conv.bias is not None or conv.groups == 1:
        return None
    x, out = finder.values[conv.x], finder.values[conv.makes]
    window = {"groups": conv.groups, "stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
    if out.dtype not in kernels.HALF:  # TF32 or not is cuDNN's to say
        return None
    if kernels.grouped_conv_refuses(finder.device, kernels.stand_in(x.shape, out.dtype), finder.like(conv.weight), window):
        return None
    run, words = partial(_run_grouped, dtype=out.dtype, **window), f"grouped conv {out_of(finder, conv.weight)}"
    return Chain(words, run, (conv.x, conv.weight), conv.makes, (call,)), (index,)


def _run_grouped(x: Tensor, weight: Tensor, *, dtype: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    return kernels.grouped_conv(x.to(dtype), weight, stride, padding, dilation, groups=groups)  # what autocast does before one


def conv_bias_act(finder: Finder, index: int, call: Call) -> Placed | None:
    """Return a convolution with bias, and the activation behind it if there is one, as one chain."""
    conv = convolution_of(finder.values, call)
    if conv is None or conv.bias is None or prod(finder.values[conv.makes].shape[2:]) <= 1:  # which leaves little to gain
        return None
    reads, number, indices, act = (conv.x, conv.weight, conv.bias), conv.makes, [index], "none"
    if (after := finder.follower(number)) is not None and plainly(finder.calls[after]):
        name, grown = activation_of(finder.calls[after]), [index, after]
        if name in kernels.ACTIVATIONS and finder.untouched(reads, grown) and finder.hidden([number], after):
            indices, act, number = grown, name, int(finder.calls[after].result)
    if act not in ("none", "relu") and finder.written(number, indices[-1]):
        return None  # what is kept for the way back would be changed, where PyTorch has kept something else
    dtype = finder.values[conv.makes].dtype
    options = {"act": act, "stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation, "groups": conv.groups}
    if _refused(finder, reads, dtype, options):
        return None
    words = f"conv {out_of(finder, conv.weight)} + bias" + ("" if act == "none" else f" + {act}")
    calls = tuple(finder.calls[i] for i in indices)
    return Chain(words, partial(_run, dtype=dtype, **options), reads, number, calls), tuple(indices)


def _refused(finder: Finder, reads: Sequence[int], dtype: Any, options: dict[str, Any], pool: dict[str, Any] | None = None) -> str:
    x, weight = (kernels.stand_in(finder.values[number].shape, dtype) for number in reads[:2])
    window = {name: options[name] for name in ("stride", "padding", "dilation")} | {"groups": (options["groups"],)}
    return kernels.conv_bias_act_refuses(finder.device, x, weight, finder.like(reads[2]), options["act"], window, pool)


def out_of(finder: Finder, weight: int) -> str:
    """Return a kernel's height and width as `why` shows them."""
    return "x".join(map(str, finder.values[weight].shape[2:]))


def _run(x: Tensor, weight: Tensor, bias: Tensor, *, dtype: Any, **options: Any) -> Tensor:
    return kernels.conv_bias_act(x.to(dtype), weight, bias, **options)  # what autocast does before a convolution


def pooled(finder: Finder, found: list[Placed], without: Without) -> list[Placed]:
    """Return the chains with convolutions and the max pools behind them joined: the map between them has no gradient of its own."""
    pools = {place[0].reads[0]: place for place in found if place[0].op.startswith("max_pool") and not place[0].note}
    joined = list(found)
    finder.taken = set()
    for place in found:
        chain, indices = place
        behind = pools.get(chain.makes)
        if chain.note or not _is_ours(chain) or behind is None or finder.follower(chain.makes) != behind[1][0]:
            continue
        together = (*indices, *behind[1])
        inner = [number for i in indices for number in finder.calls[i].makes]
        options, pool = _options(chain), _options(behind[0])
        seen = finder.hidden(inner, together[-1]) and finder.untouched(chain.reads, together)
        if not seen or (options["act"] != "none" and finder.written(behind[0].makes, together[-1])):
            continue
        dtype = finder.values[chain.makes].dtype
        if _refused(finder, chain.reads, dtype, options, pool):
            continue
        run = partial(_run, dtype=dtype, **options, pool=pool)
        calls, makes = (*chain.calls, *behind[0].calls), behind[0].makes
        made = Chain(f"{chain.op} + {behind[0].op}", run, chain.reads, makes, calls, pieces=(chain, behind[0]), rank=1)
        if made.key not in without:
            joined.remove(place)
            joined.remove(behind)
        joined.append(placed(made, together, without))
    return in_order(joined)


def stems(finder: Finder, found: list[Placed], without: Without) -> list[Placed]:
    """Return the chains with convolutions of images, alone or with what stands behind them, by a kernel that packs the images."""
    made = list(found)
    mine = {place[1][0]: place for place in found if place[1] and _is_ours(place[0]) and not place[0].note}
    taken = {index for chain, indices in found if not chain.note for index in indices}
    for index, call in enumerate(finder.calls):
        place = mine.get(index)
        if call.name != "conv2d" or (index in taken and place is None):
            continue
        chain = _stem_of(finder, call, place[0]) if place is not None else _bare_stem(finder, call)
        if chain is None:
            continue
        if place is not None and chain.key not in without:
            made.remove(place)
        made.append(placed(chain, place[1] if place is not None else (index,), without))
    return in_order(made)


def _stem_of(finder: Finder, call: Call, chain: Chain) -> Chain | None:
    """Return a chain of a convolution with its bias as one of images, if it is."""
    assert isinstance(chain.run, partial)
    told = {"pool": None, **chain.run.keywords}
    if told.pop("groups") != 1 or told.pop("dilation") != (1, 1) or not _images(finder, chain.reads[0]):
        return None
    if kernels.stem_conv_refuses(finder.device, *(finder.like(number) for number in chain.reads), **told):
        return None
    run, rank = partial(kernels.stem_conv, **told), chain.rank + 1
    remakes = told["pool"] is None
    return Chain(f"stem {chain.op}", run, chain.reads, chain.makes, chain.calls, pieces=(chain,), rank=rank, remakes=remakes)


def _bare_stem(finder: Finder, call: Call) -> Chain | None:
    """Return a convolution of images without a bias as a chain."""
    conv = convolution_of(finder.values, call)
    if conv is None or (conv.bias, conv.groups, conv.dilation) != (None, 1, (1, 1)) or not _images(finder, conv.x):
        return None
    told = {"act": "none", "stride": conv.stride, "padding": conv.padding, "dtype": finder.values[conv.makes].dtype, "pool": None}
    if kernels.stem_conv_refuses(finder.device, finder.like(conv.x), finder.like(conv.weight), None, **told):
        return None
    words = f"stem conv {out_of(finder, conv.weight)}"
    return Chain(words, partial(kernels.stem_conv, **told), (conv.x, conv.weight), conv.makes, (call,))


def _images(finder: Finder, number: int) -> bool:
    shape = finder.values[number].shape
    return len(shape) == 4 and shape[1] <= 4


def _is_ours(chain: Chain) -> bool:
    return isinstance(chain.run, partial) and chain.run.func is _run


def _options(chain: Chain) -> dict[str, Any]:
    assert isinstance(chain.run, partial)
    return {name: value for name, value in chain.run.keywords.items() if name != "dtype"}
