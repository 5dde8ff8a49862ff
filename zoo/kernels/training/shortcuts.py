"""Let the 1x1 convolution at a residual block's beginning add its input's gradient to the shortcut's, which autograd does in a pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from zoo.kernels.training import kernels
from zoo.kernels.training.finder import Finder, Placed
from zoo.kernels.training.joins import pointwise
from zoo.kernels.training.replay import Chain, values_of


def shortcuts(finder: Finder, found: list[Placed], without: dict[int, str]) -> list[Placed]:
    """Return the chains with the 1x1 convolutions that read what a residual is too as chains that hand it on.

    The gradient that comes back from there is the convolution's to write into: BatchNorm with a residual and an activation makes it
    anew for nobody else. Without an activation it would be its output's own gradient, which may be the user's tensor.

    Args:
        finder: of the recording.
        found: the chains so far.
        without: chains to leave as they are, by their `key`, and why.
    """
    made = list(found)
    free = 1 + max([len(finder.values), *(number for chain, _ in found for number in values_of(chain))])
    owners = {index: place for place in found if not place[0].note for index in place[1]}
    for chain, indices in found:
        norm = chain.norm
        if chain.note or norm is None or not norm["residual"] or norm["act"] == "none" or len(chain.calls) < 2:
            continue
        x = chain.reads[-1]
        index = next((i for i in finder.readers.get(x, []) if i not in indices), -1)
        if len(finder.readers.get(x, [])) != 2 or x in finder.outputs or not 0 <= index < indices[-1]:
            continue
        call, owner = finder.calls[index], owners.get(index)
        if not pointwise(finder, call) or int(call.args[0]) != x or finder.values[x].place is not None:
            continue
        if kernels.shortcut_conv_refuses(finder.device):
            continue
        if owner is not None and owner[0].op != "1x1, statistics":
            continue
        run = partial(kernels.shortcut_conv, stats=owner is not None)
        pieces, rank = ((), 2) if owner is None else ((owner[0],), 1)
        words = "1x1 + shortcut" if owner is None else "1x1, statistics + shortcut"
        joined = Chain(words, run, (x, int(call.args[1])), int(call.result), (call,), pieces=pieces, rank=rank)
        if joined.key in without:
            made.append((replace(joined, note=without[joined.key]), ()))
            continue
        if owner is not None:
            made.remove(owner)
            joined.row_out = owner[0].row_out
        joined.branch_out = chain.branch_in = free
        free += 1
        made.append((joined, (index,)))
    return sorted(made, key=lambda place: place[1][-1] if place[1] else -1)
