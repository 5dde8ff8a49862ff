"""Join BatchNorms with the 1x1 convolutions beside them: one kernel applies, multiplies and takes the result's statistics.

The activated map between a BatchNorm and a 1x1 convolution is then never in memory, and the BatchNorm behind a 1x1 convolution has
its statistics when the map is written: they travel as a `row` from chain to chain.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count

from zoo.kernels.training import kernels
from zoo.kernels.training.calls import Convolution, convolution_of
from zoo.kernels.training.finder import Finder, Placed, in_order
from zoo.kernels.training.record import Call
from zoo.kernels.training.replay import Chain, Without


def join(finder: Finder, found: list[Placed], without: Without) -> list[Placed]:
    """Return the chains with BatchNorms and 1x1 convolutions joined, in the order of their last calls."""
    norms = {chain.makes: place for place in found if (chain := place[0]).norm and not chain.note}
    after = {place[0].reads[0]: place for place in norms.values()}
    rows = count(len(finder.values))
    finder.taken = set()
    joined = list(found)
    theirs = {index for chain, indices in found if not chain.norm for index in indices}
    for index, call in enumerate(finder.calls):
        if index in theirs or (conv := pointwise(finder, call)) is None:
            continue
        x, kernel, makes = conv.x, conv.weight, conv.makes
        norm = norms.get(x)
        if norm is not None and (place := _normalised(finder, norm, index, kernel, makes)) is not None:
            if (makes, 0) not in without:
                joined.remove(norm)
                place[0].row_out = next(rows)
                joined.append(place)
                continue
            joined.append((replace(place[0], note=without[makes, 0]), ()))
            continue
        if makes in after and not kernels.conv_stats_refuses(finder.device, finder.like(x), finder.like(kernel)):
            chain = Chain("1x1, statistics", kernels.conv_stats, (x, kernel), makes, (call,), note=without.get((makes, 0), ""))
            chain.row_out = None if chain.note else next(rows)
            joined.append((chain, (index,)))
    made = {chain.makes: chain.row_out for chain, _ in joined if chain.row_out is not None}
    for chain, _ in joined:
        if chain.norm:
            chain.row_in = made.get(chain.reads[0])
    return in_order(joined)


def _normalised(finder: Finder, norm: Placed, index: int, kernel: int, makes: int) -> Placed | None:
    """Return BatchNorm, activation and a 1x1 convolution as one chain, if nobody else reads what is between them."""
    chain, indices = norm
    options = chain.norm
    if options is None or options["residual"] or finder.follower(chain.makes) != index:
        return None
    together = (*indices, index)
    inner = [number for i in indices for number in finder.calls[i].makes]
    if not finder.untouched(chain.reads, together) or not finder.hidden(inner, index):
        return None
    parts = [finder.like(number) for number in (*chain.reads, kernel)]
    if kernels.norm_act_conv_refuses(finder.device, *parts, act=options["act"]):
        return None
    told = {name: value for name, value in options.items() if name != "residual"}
    run = partial(kernels.norm_act_conv, **told)
    calls = (*chain.calls, finder.calls[index])
    return Chain(
        f"{chain.op} + 1x1", run, (*chain.reads, kernel), makes, calls, norm=options, pieces=(chain, finder.calls[index])
    ), together


def pointwise(finder: Finder, call: Call) -> Convolution | None:
    """Return a 1x1 convolution in half precision whose kernels could be joined with a BatchNorm; None of another call."""
    conv = convolution_of(finder.values, call)
    if conv is None or (conv.bias, conv.groups, conv.stride, conv.padding, conv.dilation) != (None, 1, (1, 1), (0, 0), (1, 1)):
        return None
    x, kernel, out = (finder.values[number] for number in (conv.x, conv.weight, conv.makes))
    return conv if kernel.shape[2:] == (1, 1) and x.dtype == out.dtype and out.dtype in kernels.HALF else None
