"""Let squeeze-and-excite's mean add its gradient to that of the product, which reads the same map: autograd takes two passes for that."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from zoo.kernels.training import kernels
from zoo.kernels.training.calls import arguments, plainly
from zoo.kernels.training.finder import Finder, Placed, in_order, placed
from zoo.kernels.training.record import Call, Ref
from zoo.kernels.training.replay import Chain, Without, values_of

_MEAN = {"input": None, "dim": None, "keepdim": False, "dtype": None}
_POOL = {"input": None, "output_size": None}


def squeezes(finder: Finder, found: list[Placed], without: Without) -> list[Placed]:
    """Return the chains with the means whose maps are scaled as chains that hand them on.

    The gradient that comes back from there is the mean's to write into: the product makes it anew for nobody else.
    """
    made = list(found)
    free = 1 + max([len(finder.values), *(number for chain, _ in found for number in values_of(chain))])
    for place, (chain, indices) in enumerate(found):
        if chain.note or chain.op != "scale_channels":
            continue
        x = chain.reads[-1]
        readers = finder.readers.get(x, [])
        if len(readers) != 2 or readers[1] != indices[0] or x in finder.outputs or finder.values[x].place is not None:
            continue
        flat = _is_mean(finder, finder.calls[readers[0]], x)
        if flat is None or readers[0] in finder.taken or not finder.untouched([x], (readers[0], indices[0])):
            continue
        call = finder.calls[readers[0]]
        run = partial(kernels.mean_and_map, keep=not flat)
        mean = Chain("mean + scale_channels", run, (x,), int(call.result), (call,), rank=1, keeps_no_map=True)
        if mean.key in without:
            made.append(placed(mean, (), without))
            continue
        mean.branch_out = free
        made[place] = replace(chain, branch_in=free), indices
        made.append((mean, (readers[0],)))
        free += 1
    return in_order(made)


def _is_mean(finder: Finder, call: Call, x: int) -> bool | None:
    """Tell whether a mean over all pixels of the map `x` has lost the axes of these; None of another call, or where no kernel takes it."""
    if not plainly(call) or call.writes or not isinstance(call.result, Ref):
        return None
    value, result = finder.values[x], finder.values[int(call.result)]
    flat = result.shape == value.shape[:2]
    if len(value.shape) != 4 or result.dtype != value.dtype or not (flat or result.shape == (*value.shape[:2], 1, 1)):
        return None
    given: dict[str, Any] | None
    if call.name == "mean":
        given = arguments(call, _MEAN)
        axes = None if given is None else given["dim"]
        whole = isinstance(axes, (tuple, list)) and all(isinstance(axis, int) for axis in axes) and {axis % 4 for axis in axes} == {2, 3}
    else:
        given = arguments(call, _POOL) if call.name == "adaptive_avg_pool2d" else None
        whole = given is not None
    if given is None or not whole or not isinstance(given["input"], Ref) or int(given["input"]) != x:
        return None
    return None if kernels.mean_and_map_refuses(finder.device, finder.like(x)) else flat
