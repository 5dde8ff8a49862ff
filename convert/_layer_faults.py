"""Hypotheses about one layer of ours, tried on that layer with the source's input to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from convert import _fault, _ops, _probe, _windows
from convert._fault import Change, Fault, Site, Trial, search
from convert.steps import FlattenOrder

if TYPE_CHECKING:
    from torch import Tensor, nn

Divisor = Callable[[np.ndarray, float], np.ndarray]

ORDERS = ("hwc", "cwh", "whc", "wch", "hcw")
VECTORS = ("gamma", "beta", "mean", "variance")
MOST_BLOCKS = 4


_WINDOW = (_fault.SAME, _fault.PADDING, _fault.STRIDE, _fault.STRIDE_ALONE)


def explain(site: Site) -> Fault | None:
    """Find what must be changed in our layer, or in the order of its tensors, to have it compute what theirs does."""
    from torch import nn

    found: Fault | None = None
    if site.target.shape[1] != site.ours.shape[1] and site.last:
        return _head(site)
    if isinstance(site.module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
        found = _weights(site)
    elif isinstance(site.module, nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportPrivateUsage]  # the class of all BatchNorms has no public name
        found = _norm(site)
    return found or (_head(site) if site.last else None) or _replaced(site)


def call(module: nn.Module, x: np.ndarray, tensors: dict[str, Tensor] | None = None) -> np.ndarray:
    """Compute a layer, with other tensors than its own where they are given."""
    import torch

    with torch.no_grad():
        return torch.func.functional_call(module, tensors or {}, (_probe.tensor(x),)).numpy()


def _weights(site: Site) -> Fault | None:
    """Try a convolution or a dense layer with other orientations, orders of its inputs, windows and biases."""
    from torch import nn

    module: Any = site.module
    convolution = isinstance(module, nn.Conv2d)
    weight: Tensor = module.weight
    aspects = [
        _orientations(site, weight),
        _inputs(site, weight),
        _outputs(site, weight),
        _windows_of(site) if convolution else [],
        _bias(site),
    ]

    def attempt(changes: tuple[Change, ...], x: np.ndarray) -> np.ndarray:
        import torch
        from torch.nn import functional as F

        changed, window, shift = weight, None, 0.0
        for change in changes:
            if change.cause in _WINDOW:
                window = change.how
            elif change.cause == _fault.BIAS:
                shift = change.how
            else:
                changed = change.how(changed)
        if window is None:
            out = call(module, x, {"weight": changed})
        else:
            (top, left, bottom, right), stride, dilation = window
            padded = F.pad(_probe.tensor(x), (left, right, top, bottom))
            with torch.no_grad():
                out = F.conv2d(padded, changed, module.bias, stride, 0, dilation, module.groups).numpy()
        return out + np.reshape(shift, (1, -1, *(1,) * (out.ndim - 2))) if np.ndim(shift) else out

    return search(site, aspects, attempt)


def _as_map(weight: Tensor, site: Site) -> tuple[int, ...] | None:
    """Tell the shape in which a weight has a height and a width, if it has."""
    if weight.dim() == 4:
        return tuple(weight.shape)
    if site.grid is not None and weight.shape[1] == np.prod(site.grid):
        return weight.shape[0], *site.grid
    return None


def _orientations(site: Site, weight: Tensor) -> list[Change]:
    shape = _as_map(weight, site)
    if shape is None or max(shape[2:]) == 1 or (site.node.op == "dense" and site.grid is not None):
        return []  # of a dense layer the flatten orders say the same
    names = {
        (False, 2, 3): (_fault.FLIPPED, "the kernels flipped"),
        (True,): (_fault.TRANSPOSED, "the kernels transposed"),
        (True, 2, 3): (_fault.TRANSPOSED, "the kernels transposed and flipped"),
        (False, 2): (_fault.FLIPPED, "the kernels' rows alone flipped"),
        (False, 3): (_fault.FLIPPED, "the kernels' columns alone flipped"),
        (True, 2): (_fault.TRANSPOSED, "the kernels turned by 90 degrees"),
        (True, 3): (_fault.TRANSPOSED, "the kernels turned by 270 degrees"),
    }

    def turned(key: tuple[Any, ...], w: Tensor) -> Tensor:
        four = w.reshape(shape)
        four = four.transpose(2, 3) if key[0] else four
        return four.flip(key[1:]).reshape(w.shape) if len(key) > 1 else four.reshape(w.shape)

    return [Change(cause, said, partial(turned, key)) for key, (cause, said) in names.items() if not key[0] or shape[2] == shape[3]]


def _inputs(site: Site, weight: Tensor) -> list[Change]:
    """List orders of the input channels, and orders in which a flattened map is read."""
    axis = 0 if "Transpose" in type(site.module).__name__ else 1
    found: list[Change] = []

    def add(cause: str, said: str, how: Callable[[Tensor], Tensor]) -> None:
        found.append(Change(cause, said, how))

    if weight.shape[axis] == 3 and weight.dim() == 4 and getattr(site.module, "groups", 1) == 1:
        add(_fault.BGR, "the input channels reversed", lambda w: w.flip(axis))
    if len(site.blocks) > 1 and sum(site.blocks) == weight.shape[axis]:
        for order in orders_of(len(site.blocks)):
            index = _blocks(site.blocks, order).argsort()
            said = f"the input channels' blocks in the order {', '.join(str(i + 1) for i in order)}"
            add(_fault.CONCAT, said, lambda w, index=index: w.index_select(axis, index))
    if weight.dim() == 2 and weight.shape[0] == weight.shape[1]:
        add(_fault.TRANSPOSED, "the dense weight transposed", lambda w: w.T)
    if site.grid is not None and site.grid[1] * site.grid[2] > 1 and site.node.op == "dense":
        for order in ORDERS:
            step = FlattenOrder(*site.grid, order)
            for said, do in (
                (f"the inputs read in the order {order}", step.do),
                (f"the inputs put back from the order {order}", step.undo),
            ):
                add(_fault.FLATTEN, said, partial(_reordered, do=do))
    return found


def _reordered(weight: Tensor, do: Any) -> Tensor:
    flat = weight.detach().reshape(weight.shape[0], -1).numpy()
    return _probe.tensor(do(flat)).reshape(weight.shape)


def _outputs(site: Site, weight: Tensor) -> list[Change]:
    groups = getattr(site.module, "groups", 1)
    multiplier = weight.shape[0] // groups if weight.dim() == 4 and weight.shape[1] == 1 else 1
    ways: list[tuple[str, Callable[[Tensor], Tensor]]] = []
    if groups > 1 and multiplier > 1:
        said = "the depthwise kernels ordered by channel, then multiplier"
        ways.append((said, lambda w: w.reshape(multiplier, groups, *w.shape[1:]).transpose(0, 1).reshape(w.shape)))
    if weight.dim() == 4 and weight.shape[0] == weight.shape[1] > 1 and groups == 1:
        ways.append(("the kernels' input and output channels swapped", lambda w: w.transpose(0, 1)))
    return [Change(_fault.CHANNELS, said, how) for said, how in ways]


def _windows_of(site: Site) -> list[Change]:
    """Take the source's stride, pads and dilation for our convolution."""
    from torch import nn

    module: Any = site.module
    stride, dilation = _windows.pair(site.node.attrs.get("stride")), _windows.pair(site.node.attrs.get("dilation"))
    if site.source.spatial == "wh":
        stride, dilation = stride[::-1], dilation[::-1]
    plain = type(module) is nn.Conv2d  # another class may pad by itself
    own = site.pads if isinstance(module.padding, str) else (*module.padding, *module.padding)
    if plain and stride == tuple(module.stride) and dilation == tuple(module.dilation) and own == site.pads:
        return []
    said = f"the source's stride {stride}, dilation {dilation} and pads {site.pads}"
    if stride != tuple(module.stride):
        cause = _fault.STRIDE if site.shifted else _fault.STRIDE_ALONE
    else:
        same = isinstance(site.node.attrs.get("pads"), str) or site.pads[:2] != site.pads[2:] or not plain
        cause = _fault.SAME if same else _fault.PADDING
    return [Change(cause, said, (site.pads, stride, dilation))]


def _bias(site: Site) -> list[Change]:
    stored = site.source.tensors.get(f"{site.node.name}.bias")
    if stored is None:
        return []
    own: Any = getattr(site.module, "bias", None)
    difference = stored.load().astype(np.float64).reshape(-1) - (0.0 if own is None else own.detach().numpy())
    return [Change(_fault.BIAS, "the source's bias added", difference)] if np.any(difference) and (own is None or not own.any()) else []


def _deviation(variance: np.ndarray, eps: float) -> np.ndarray:
    return np.sqrt(variance + eps)


def _norm(site: Site) -> Fault | None:
    """Try a norm with its four vectors in other orders, another meaning of the fourth one, another epsilon."""
    module: Any = site.module
    width = module.num_features
    affine = (module.weight, module.bias) if module.affine else (None, None)
    own = [np.ones(width) if affine[0] is None else affine[0].numpy(), np.zeros(width) if affine[1] is None else affine[1].numpy()]
    own += [module.running_mean.numpy(), module.running_var.numpy()]
    eps, factor = float(site.node.attrs["eps"]), float(site.node.attrs.get("factor", 1)) or 1.0

    names: dict[tuple[int, ...], tuple[str, str]] = {
        (1, 0, 2, 3): (_fault.SWAPPED, "gamma and beta swapped"),
        (0, 1, 3, 2): (_fault.MOMENTS, "mean and variance swapped"),
    }
    orders: list[Change] = []
    for order in permutations(range(4)):
        if order != (0, 1, 2, 3):
            named = (_fault.VECTORS, f"its vectors taken as {', '.join(VECTORS[order.index(i)] for i in range(4))}")
            cause, said = names.get(order, named)
            orders.append(Change(cause, said, order))
    divisors: list[tuple[str, str, Divisor]] = [
        (_fault.SPREAD, "the second moment taken for a standard deviation", lambda v, e: v),
        (_fault.SPREAD, "the second moment taken for a standard deviation, to which epsilon is added", lambda v, e: v + e),
        (_fault.SPREAD, "the second moment taken for one over a standard deviation", lambda v, e: 1 / v),
        (_fault.SPREAD, "the root of the second moment taken for the variance", lambda v, e: np.sqrt(np.sqrt(v) + e)),
        (_fault.EPSILON, "epsilon added behind the root", lambda v, e: np.sqrt(v) + e),
    ]
    spreads = [Change(*each) for each in divisors]
    epsilons = [Change(_fault.EPSILON, f"epsilon {eps:g} where ours has {module.eps:g}", eps)] if eps != module.eps else []
    factors = [Change(_fault.FACTOR, f"mean and variance divided by {factor:g}", factor)] if factor != 1 else []

    def attempt(changes: tuple[Change, ...], x: np.ndarray) -> np.ndarray:
        vectors, added, divide = own, module.eps, 1.0
        divisor = _deviation
        for change in changes:
            if change in orders:
                vectors = [own[i] for i in change.how]
            elif change in spreads:
                divisor = change.how
            elif change in epsilons:
                added = change.how
            else:
                divide = change.how
        gamma, beta, mean, spread = (v.reshape(1, -1, *(1,) * (x.ndim - 2)) for v in vectors)
        return (x - mean / divide) / divisor(spread / divide, added) * gamma + beta

    return search(site, [orders, spreads, epsilons, factors], attempt)


def _head(site: Site) -> Fault | None:
    """Compare the classes, where the numbers up to here agree: others, or the same in another order."""
    upstream = site.error(site.read, site.fed)
    if upstream > site.limit:
        return None
    ours, theirs = (a.reshape(a.shape[0], -1) for a in (site.ours, site.target))
    found = match_columns(ours, theirs, site.limit)
    counts = f"ours has {ours.shape[1]} classes, theirs {theirs.shape[1]}"
    site.tried.append(Trial("the classes in another order", float("inf") if found is None else found[1]))
    if found is not None:
        return Fault((_fault.HEAD,), f"{counts}; {found[0]}", found[1])
    if ours.shape[1] != theirs.shape[1]:
        return Fault((_fault.HEAD,), f"{counts}, and none follows from the other; what the head reads agrees", upstream)
    replaced = _replaced(site)
    return None if replaced is None else Fault((_fault.HEAD,), replaced.said, replaced.error)


def match_columns(ours: np.ndarray, theirs: np.ndarray, limit: float) -> tuple[str, float] | None:
    """Find our classes among theirs, or theirs among ours: (what the order is, the error that is left), or None."""
    few, many = (ours, theirs) if ours.shape[1] <= theirs.shape[1] else (theirs, ours)
    if few.shape[1] < 2 or not np.isfinite(few).all() or not np.isfinite(many).all():
        return None
    ranks = np.argsort(many[0], kind="stable")
    places = cast("np.ndarray", np.searchsorted(many[0][ranks], few[0]))
    at: np.ndarray = np.clip(places, 1, many.shape[1] - 1)
    low, high = ranks[at - 1], ranks[at]
    order: np.ndarray = np.where(np.abs(many[0][low] - few[0]) <= np.abs(many[0][high] - few[0]), low, high)
    error = _probe.relative(few, many[:, order])
    if error > limit or len(set(order.tolist())) < len(order):
        return None
    extra = many.shape[1] - few.shape[1]
    which, other = ("ours", "theirs") if few is ours else ("theirs", "ours")
    if extra and np.array_equal(order, range(extra, many.shape[1])):
        said = f"{other} has {extra} in front of {which}, such as a background class"
    elif np.array_equal(order, np.arange(len(order))):
        said = f"{other} has {extra} behind {which}" if extra else "they are the same"
    else:
        said = f"{which} are {other} in another order: {', '.join(map(str, order[:8].tolist()))}{' …' if len(order) > 8 else ''}"
    return said, error


def _replaced(site: Site) -> Fault | None:
    """Put the file's own tensors in: what is left then is no fault of the weights."""
    tensors = _canonical(site)
    if tensors is None:
        return None
    own = {name: tensor.detach().numpy() for name, tensor in site.module.state_dict().items()}
    if any(name not in own or own[name].size != array.size for name, array in tensors.items()):
        return None
    given = {name: _probe.tensor(a.reshape(own[name].shape)) for name, a in tensors.items()}
    try:
        error = min(site.error(call(site.module, x, given)) for x in (site.fed, site.read))
    except RuntimeError:
        error = float("inf")
    site.tried.append(Trial("the file's own tensors in our layer", error))
    if error > site.limit:
        return None
    holder = _holder(site, own["weight"]) if "weight" in own else None
    crossed = f"; it holds those of {holder}" if holder else ""
    return Fault((_fault.OTHER,), f"with the file's {site.node.name} in it our layer computes what theirs does{crossed}", error)


def _canonical(site: Site) -> dict[str, np.ndarray] | None:
    """Read the file's tensors of this layer in PyTorch's form, by the executor's own reading of them."""
    node, source = site.node, site.source
    raw = {leaf: source.tensors[key].load().astype(np.float64) for leaf in _LEAVES if (key := f"{node.name}.{leaf}") in source.tensors}
    if "weight" not in raw or node.op not in ("conv", "depthwise", "transposed", "dense"):
        return None
    turn = source.spatial == "wh"
    if node.op == "dense":
        weight = _ops.dense(node, raw["weight"])
        if site.grid is not None and weight.shape[1] == np.prod(site.grid):
            order = site.order.translate(str.maketrans("hw", "wh")) if turn else site.order
            weight = FlattenOrder(*site.grid, order).do(weight)
    else:
        weight = _ops.kernel(node, raw["weight"])
        weight = weight[:, :, ::-1, ::-1] if _ops.backwards(node, weight.shape[2:]) else weight
        weight = weight.swapaxes(2, 3) if turn else weight
    found = {"weight": weight}
    bias = getattr(site.module, "bias", None)
    if bias is not None:
        found["bias"] = raw["bias"].reshape(-1) if "bias" in raw else np.zeros(bias.shape[0])
    return found


_LEAVES = ("weight", "bias")


def _holder(site: Site, weight: np.ndarray) -> str | None:
    """Name the module of the file whose weight ours has."""
    for name, stored in site.source.tensors.items():
        if name.endswith(".weight") and sorted(stored.stored_shape) == sorted(weight.shape):
            array = stored.as_correlation().array()
            if array.shape == weight.shape and np.array_equal(array.astype(np.float64), weight):
                return name.removesuffix(".weight")
    return None


def orders_of(count: int) -> list[tuple[int, ...]]:
    """List the orders of some blocks: all of few, of many the reversed one, the rotations and the swaps of neighbours."""
    straight = tuple(range(count))
    if count <= MOST_BLOCKS:
        return [order for order in permutations(straight) if order != straight]
    swaps = [(*straight[:i], i + 1, i, *straight[i + 2 :]) for i in range(count - 1)]
    return list(dict.fromkeys([straight[::-1], *(straight[i:] + straight[:i] for i in range(1, count)), *swaps]))


def _blocks(sizes: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    import torch

    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return torch.tensor([at for i in order for at in range(starts[i], starts[i] + sizes[i])])
