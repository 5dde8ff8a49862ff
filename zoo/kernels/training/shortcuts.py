"""Let the 1x1 convolution at a residual block's beginning add its input's gradient to the shortcut's, which autograd does in a pass."""

from __future__ import annotations

from functools import partial

from zoo.kernels.training import kernels
from zoo.kernels.training.calls import plainly
from zoo.kernels.training.finder import Finder, Placed, in_order, placed
from zoo.kernels.training.joins import pointwise
from zoo.kernels.training.record import Call, Ref
from zoo.kernels.training.replay import Chain, Without, values_of


def shortcuts(finder: Finder, found: list[Placed], without: Without) -> list[Placed]:
    """Return the chains with the 1x1 convolutions that read what a residual is too as chains that hand it on.

    The gradient that comes back from there is the convolution's to write into: BatchNorm with a residual and an activation makes it
    anew for nobody else, and so does the convolution of a shortcut that changes the map's shape. Without an activation it would be
    its output's own gradient, which may be the user's tensor.
    """
    made = list(found)
    free = 1 + max([len(finder.values), *(number for chain, _ in found for number in values_of(chain))])
    owners = {index: place for place in found if not place[0].note for index in place[1]}
    for place in found:
        chain, indices = place
        if chain.note or not chain.fresh:
            continue
        index = next((i for i in finder.readers.get(chain.reads[-1], []) if i not in indices), -1)
        if 0 <= index < indices[-1] and _handing_on(finder, chain.reads[-1], index, owners, without, made, free) is not None:
            chain.branch_in = free
            free += 1
    for x, readers in finder.readers.items():
        for index, beside in (readers, readers[::-1]) if len(readers) == 2 else ():
            handed = any(chain.branch_out is not None and chain.reads[0] == x for chain, _ in made)
            if handed or beside in owners or not _fresh(finder, finder.calls[beside], x) or not _movable(finder, index, beside):
                continue
            joined = _handing_on(finder, x, index, owners, without, made, free)
            if joined is not None:
                joined.beside = beside
                free += 1
    return in_order(made)


def _handing_on(
    finder: Finder, x: int, index: int, owners: dict[int, Placed], without: Without, made: list[Placed], free: int
) -> Chain | None:
    """Make a 1x1 convolution a chain that hands `x` on as the value `free`; None where it can't be one, or isn't to be."""
    call, owner = finder.calls[index], owners.get(index)
    if len(finder.readers.get(x, [])) != 2 or x in finder.outputs or finder.values[x].place is not None:
        return None
    conv = pointwise(finder, call)
    if conv is None or conv.x != x or kernels.shortcut_conv_refuses(finder.device):
        return None
    if owner is not None and owner[0].op != "1x1, statistics":
        return None
    run = partial(kernels.shortcut_conv, stats=owner is not None)
    pieces, rank = ((), 2) if owner is None else ((owner[0],), 1)
    words = "1x1 + shortcut" if owner is None else "1x1, statistics + shortcut"
    joined = Chain(words, run, (x, conv.weight), conv.makes, (call,), pieces=pieces, rank=rank)
    if joined.key in without:
        made.append(placed(joined, (), without))
        return None
    if owner is not None:
        made.remove(owner)
        joined.row_out = owner[0].row_out
    joined.branch_out = free
    made.append((joined, (index,)))
    return joined


def _movable(finder: Finder, index: int, beside: int) -> bool:
    """Tell whether a convolution may be done before the call beside it, which reads what it hands on."""
    reads = finder.calls[index].reads
    return index < beside or (
        all(n in finder.calls[beside].reads or finder.values[n].place is not None for n in reads)
        and finder.untouched(reads, (beside, index))
    )


def _fresh(finder: Finder, call: Call, x: int) -> bool:
    """Tell a convolution that reads `x` first, and nothing else of it: the gradient that comes back from there is nobody else's."""
    whole = call.name == "conv2d" and plainly(call) and bool(call.args) and isinstance(call.args[0], Ref)
    return whole and int(call.args[0]) == x == call.reads[0] and x not in call.reads[1:] and len(finder.values[x].shape) == 4
