"""Find 1x1 convolutions that widen, with the BatchNorm behind each: together they need not write what is between them."""

from __future__ import annotations

from functools import partial

from zoo.kernels.training import kernels
from zoo.kernels.training.calls import Convolution
from zoo.kernels.training.finder import Finder, Placed, in_order, placed
from zoo.kernels.training.joins import pointwise
from zoo.kernels.training.replay import Chain, Without

RANK = 1
"""Of what makes a BatchNorm's value with the convolution before it."""


def widened(finder: Finder, found: list[Placed], without: Without) -> list[Placed]:
    """Return the chains with BatchNorms put together with the 1x1 convolutions before them that widen."""
    norms = {chain.reads[0]: place for place in found if (chain := place[0]).norm and not chain.note}
    made = list(found)
    finder.taken = set()
    theirs = {index for chain, indices in found if not chain.note and not chain.norm for index in indices}
    for index, call in enumerate(finder.calls):
        if index in theirs or (conv := pointwise(finder, call)) is None or (place := norms.get(conv.makes)) is None:
            continue
        chain = _together(finder, index, conv, place)
        if chain is None:
            continue
        if chain.key not in without:
            made.remove(place)
        made.append(placed(chain, (index, *place[1]), without))
    return in_order(made)


def _together(finder: Finder, index: int, conv: Convolution, place: Placed) -> Chain | None:
    """Return a convolution and the chain of a BatchNorm as one, if nobody else reads what is between them."""
    norm, indices = place
    call, options = finder.calls[index], norm.norm
    if options is None or options["group"] is not None or finder.follower(norm.reads[0]) != indices[0]:
        return None
    if finder.values[conv.weight].shape[0] < kernels.WIDER * finder.values[conv.x].shape[1]:
        return None  # no more channels than come in, or hardly more
    together, reads = (index, *indices), (conv.x, conv.weight, *norm.reads[1:])
    inner = [number for i in together[:-1] for number in finder.calls[i].makes]
    if not finder.untouched(reads, together) or not finder.hidden(inner, together[-1]):
        return None
    if options["act"] not in ("none", "relu") and finder.written(norm.makes, together[-1]):
        return None  # the output is kept, where PyTorch keeps what the activation reads
    parts = [finder.like(number) for number in reads]
    told = {name: options[name] for name in ("momentum", "eps", "act")}
    if kernels.conv_norm_act_refuses(finder.device, *parts, act=told["act"]):
        return None
    run, calls = partial(kernels.conv_norm_act, **told), (call, *norm.calls)
    return Chain(
        f"1x1 + {norm.op}", run, reads, norm.makes, calls, pieces=(call, norm), rank=RANK,
        fresh=norm.fresh, frees=True, remakes=not options["residual"],
    )  # fmt: skip
