"""Find convolutions with what stands behind them: a bias, an activation, a max pool; and those of images."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from zoo.kernels.training import kernels
from zoo.kernels.training.calls import CONV2D, activation_of, arguments, pair, plainly
from zoo.kernels.training.finder import Finder, Placed, in_order, placed
from zoo.kernels.training.record import Call, Ref
from zoo.kernels.training.replay import Chain, Without


def conv_bias_act(finder: Finder, index: int, call: Call) -> Placed | None:
    """Return a convolution with bias, and the activation behind it if there is one, as one chain."""
    given = arguments(call, CONV2D)
    if given is None or not plainly(call) or isinstance(given["padding"], str) or not isinstance(call.result, Ref):
        return None
    x, weight, bias = reads = [given[name] for name in ("input", "weight", "bias")]
    if any(not isinstance(part, Ref) for part in reads) or len(finder.values[x].shape) != 4:
        return None
    number, indices, act = int(call.result), [index], "none"
    if (after := finder.follower(number)) is not None and plainly(finder.calls[after]):
        name, grown = activation_of(finder.calls[after]), [index, after]
        if name in kernels.ACTIVATIONS and finder.untouched(reads, grown) and finder.hidden([number], after):
            indices, act, number = grown, name, int(finder.calls[after].result)
    if act not in ("none", "relu") and finder.written(number, indices[-1]):
        return None  # what is kept for the way back would be changed, where PyTorch has kept something else
    options = {"act": act, **{name: pair(given[name]) for name in ("stride", "padding", "dilation")}, "groups": given["groups"]}
    out = finder.like(int(call.result))
    if kernels.conv_bias_act_refuses(finder.device, finder.like(x), finder.like(weight), finder.like(bias), out, **options):
        return None
    words = f"conv {out_of(finder, weight)} + bias" + ("" if act == "none" else f" + {act}")
    run = partial(_run, dtype=out.dtype, **options)
    calls = tuple(finder.calls[i] for i in indices)
    return Chain(words, run, (int(x), int(weight), int(bias)), number, calls), tuple(indices)


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
        parts = [finder.like(part) for part in (*chain.reads, int(chain.calls[0].result))]
        if kernels.conv_bias_act_refuses(finder.device, *parts, **options, pool=pool):
            continue
        run = partial(_run, dtype=finder.values[chain.makes].dtype, **options, pool=pool)
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
    given = arguments(call, CONV2D)
    if given is None or not plainly(call) or isinstance(given["padding"], str) or not isinstance(call.result, Ref):
        return None
    x, weight = given["input"], given["weight"]
    if given["bias"] is not None or given["groups"] != 1 or pair(given["dilation"]) != (1, 1):
        return None
    if not isinstance(x, Ref) or not isinstance(weight, Ref) or not _images(finder, x):
        return None
    told = {"act": "none", **{name: pair(given[name]) for name in ("stride", "padding")}}
    told |= {"dtype": finder.values[call.result].dtype, "pool": None}
    if kernels.stem_conv_refuses(finder.device, finder.like(x), finder.like(weight), None, **told):
        return None
    return Chain(
        f"stem conv {out_of(finder, weight)}", partial(kernels.stem_conv, **told), (int(x), int(weight)), int(call.result), (call,)
    )


def _images(finder: Finder, number: int) -> bool:
    shape = finder.values[number].shape
    return len(shape) == 4 and shape[1] <= 4


def _is_ours(chain: Chain) -> bool:
    return isinstance(chain.run, partial) and chain.run.func is _run


def _options(chain: Chain) -> dict[str, Any]:
    assert isinstance(chain.run, partial)
    return {name: value for name, value in chain.run.keywords.items() if name != "dtype"}
