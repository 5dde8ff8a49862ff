"""Hypotheses about a whole network, for references that are only outputs: each is carried out on a copy and runs the images again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from convert import _fault, _patches, _probe
from convert._fault import Fault, Trial
from convert._layer_faults import ORDERS, match_columns
from convert.certificate import as_comparable
from convert.network import Layer, layers, modules_of
from convert.steps import FlattenOrder

if TYPE_CHECKING:
    from torch import Tensor, nn

Leaves = dict[str, "Tensor"]
Weights = Callable[[Mapping[str, "Tensor"]], Leaves]

LEAVES = ("weight", "bias", "running_mean", "running_var")

MOST_PAIRS = 250
"""So many pairs of changes are tried when no single one explains the outputs."""
IMAGES = 1
"""The hypotheses run on so many; the one that fits is then confirmed on all."""
SURE = 1 / 300
"""Two changes that leave less than this part of the difference need no comparison with other pairs."""
EPSILONS = (1e-3, 1e-5, 1.001e-5, 1e-4, 2e-5, 1e-6, 1e-8, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """One change to everything.

    Attributes:
        cause: a key of `MEANING`, or two joined by " and ".
        said: for people.
        weights: makes other tensors of the network's.
        patch: changes the network's layers as long as it lasts.
        images: makes other images.
    """

    cause: str
    said: str
    weights: Weights | None = None
    patch: Callable[[], Any] | None = None
    images: Callable[[np.ndarray], np.ndarray] | None = None


@dataclass(slots=True)
class Search:
    """Where the search ended.

    Attributes:
        before: the error of the network as it is.
        fault: the cause, if one is known.
        tried: all hypotheses.
        said: why no cause is known.
    """

    before: float
    fault: Fault | None = None
    tried: list[Trial] = field(default_factory=list[Trial])
    said: str = "no change to the whole network that was tried gives the reference's outputs"


def explain(network: nn.Module, inputs: np.ndarray, wanted: np.ndarray, tolerance: float, seconds: float) -> Search:
    """Find the change that gives the outputs that are wanted: one alone, else two."""
    twin = _probe.twin(network)
    tensors = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    ours = _run(twin, tensors, (), inputs)
    search = Search(_error(ours, wanted))
    if search.before <= tolerance:
        return search
    limit = min(tolerance, search.before / 30)
    search.fault = _head(ours, wanted, limit)
    search.tried.append(Trial("the classes in another order", float("inf") if search.fault is None else search.fault.error))
    if search.fault is not None:
        return search

    def attempt(guesses: tuple[Guess, ...]) -> float:
        error = _error(_run(twin, tensors, guesses, inputs[:IMAGES]), wanted[:IMAGES])
        if error <= limit and len(inputs) > IMAGES:
            error = _error(_run(twin, tensors, guesses, inputs), wanted)
        search.tried.append(Trial(" and ".join(guess.said for guess in guesses), error))
        return error

    until = time.monotonic() + seconds
    singles = [(guess,) for guess in _guesses(twin, inputs)]
    errors: dict[tuple[Guess, ...], float] = {}
    for stage in (lambda: singles, lambda: _pairs(errors)):
        fitting: dict[tuple[Guess, ...], float] = {}
        for guesses in stage():
            if time.monotonic() > until and fitting:
                break
            if time.monotonic() > until:
                search.said = (
                    f"of {len(search.tried)} changes to the whole network, tried in {seconds:g} s, none gives the reference's outputs"
                )
                return search
            errors[guesses] = attempt(guesses)
            if errors[guesses] <= limit:
                fitting[guesses] = errors[guesses]
                if len(guesses) > 1 and errors[guesses] <= search.before * SURE:
                    break
        if fitting:
            return _chosen(search, fitting)
    return search


def _pairs(errors: Mapping[tuple[Guess, ...], float]) -> list[tuple[Guess, ...]]:
    """List pairs of different causes, those first that were the nearest alone."""
    pairs = [(*a, *b) for a, b in combinations(list(errors), 2) if a[0].cause != b[0].cause]
    return sorted(pairs, key=lambda pair: errors[pair[:1]] + errors[pair[1:]])[:MOST_PAIRS]


def _chosen(search: Search, fitting: Mapping[tuple[Guess, ...], float]) -> Search:
    """Take the best of those that fit, unless another cause fits as well: then these images can't tell."""
    best = min(fitting, key=lambda guesses: fitting[guesses])
    rivals = {guesses: error for guesses, error in fitting.items() if _causes(guesses) != _causes(best)}
    if any(error <= 10 * fitting[best] for error in rivals.values()):
        said = dict.fromkeys(" and ".join(_causes(guesses)) for guesses in (best, *rivals))
        search.said = f"these images can't tell apart what would explain the outputs: {', or '.join(said)}. Give photographs"
        return search
    search.fault = Fault(_causes(best), " and ".join(guess.said for guess in best), fitting[best])
    return search


def _causes(guesses: tuple[Guess, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cause for guess in guesses for cause in guess.cause.split(" and ")))


def _error(ours: np.ndarray | None, wanted: np.ndarray) -> float:
    return float("inf") if ours is None else max(_probe.relative(a, b) for a, b, _ in as_comparable(ours, wanted))


def _run(twin: nn.Module, tensors: Mapping[str, Tensor], guesses: tuple[Guess, ...], inputs: np.ndarray) -> np.ndarray | None:
    import torch

    changed, images = dict(tensors), inputs
    try:
        with ExitStack() as stack, torch.no_grad(), np.errstate(all="ignore"):
            for guess in guesses:
                changed = guess.weights(changed) if guess.weights is not None else changed
                images = guess.images(images) if guess.images is not None else images
                if guess.patch is not None:
                    stack.enter_context(guess.patch())
            given = _probe.tensor(images)
            result = torch.func.functional_call(twin, changed, (given,), strict=False)
            return next(iter(_probe.tensors_of(result))).numpy()
    except (RuntimeError, ValueError, IndexError, StopIteration):  # shapes that no longer fit are no explanation
        return None


def _head(ours: np.ndarray | None, wanted: np.ndarray, limit: float) -> Fault | None:
    if ours is None or ours.ndim != 2 or wanted.ndim != 2:
        return None
    a, b = (np.log(v) if _probe.probabilities(v) and v.min() > 0 else v for v in (ours, wanted))
    if a.shape[1] == b.shape[1] and _probe.probabilities(wanted):
        a = a - np.log(np.exp(a).sum(1, keepdims=True))
    found = match_columns(a, b, limit)
    said = f"ours has {ours.shape[1]} classes, theirs {wanted.shape[1]}"
    return None if found is None else Fault((_fault.HEAD,), f"{said}; {found[0]}", found[1])


def _guesses(twin: nn.Module, inputs: np.ndarray) -> list[Guess]:
    from torch import nn

    found = layers(twin, inputs.shape[1:])
    convolutions = [layer.name for layer in found if layer.kind in ("conv", "depthwise", "transposed")]
    guesses = [*_kernels(convolutions), *_dense(found), *_images(inputs), *_norms(twin, found)]
    modules = modules_of(twin)
    rounding, border = partial(_patches.toggled, "ceil_mode", False), partial(_patches.toggled, "count_include_pad", True)
    strided = [modules[name] for name in convolutions if isinstance(modules[name], nn.Conv2d)]
    guesses += [
        Guess(_fault.SAME, "SAME padding in every convolution and pool", patch=lambda: _patches.padded(strided, "same_upper")),
        Guess(_fault.SAME, "SAME padding in every convolution", patch=lambda: _patches.padded(strided, "same_upper", pools=False)),
        Guess(_fault.SAME, "symmetric padding in every convolution", patch=lambda: _patches.padded(strided, "symmetric", pools=False)),
        Guess(_fault.SAME, "SAME padding in every pool", patch=lambda: _patches.padded([], "same_upper")),
        Guess(_fault.CEIL, "every pool's size rounded the other way", patch=lambda: _patches.functions(rounding)),
        Guess(_fault.BORDER, "every average pool's border counted the other way", patch=lambda: _patches.functions(border)),
        Guess(_fault.CONCAT, "every concatenation in reverse order", patch=lambda: _patches.functions(_patches.reversed_concat)),
    ]
    if bottlenecks := _bottlenecks(found, modules):
        said = f"the stride of {len(bottlenecks)} bottlenecks on the other convolution"
        swaps = [change for a, b in bottlenecks for change in ((a, "stride", b.stride), (b, "stride", a.stride))]
        guesses.append(Guess(_fault.STRIDE, said, patch=lambda: _patches.attributes(swaps)))
    for name, function in _patches.activations().items():
        patch = partial(_patches.functions, partial(_patches.activated, function))
        guesses.append(Guess(_fault.ACTIVATION, f"{name} for every activation", patch=patch))
    return guesses


def _changed(names: list[str], do: Callable[[str, Leaves], Leaves]) -> Weights:
    """Make other tensors of some layers: `do` is told a layer's name and its tensors by leaf."""

    def weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        changed = dict(tensors)
        for name in names:
            leaves = {leaf: tensors[f"{name}.{leaf}"] for leaf in LEAVES if f"{name}.{leaf}" in tensors}
            changed.update({f"{name}.{leaf}": value for leaf, value in do(name, leaves).items()})
        return changed

    return weights


def _kernels(names: list[str]) -> Iterator[Guess]:
    def every(do: Callable[[Tensor], Tensor]) -> Weights:
        return _changed(names, lambda name, leaves: {"weight": do(leaves["weight"])})

    if not names:
        return
    yield Guess(_fault.FLIPPED, "every kernel flipped", every(lambda w: w.flip(2, 3)))
    yield Guess(_fault.TRANSPOSED, "every kernel transposed", every(lambda w: w.transpose(2, 3)))
    yield Guess(_fault.TRANSPOSED, "every kernel transposed and flipped", every(lambda w: w.transpose(2, 3).flip(2, 3)))


def _dense(found: list[Layer]) -> Iterator[Guess]:
    grids = {layer.name: layer.grid for layer in found if layer.grid is not None}

    def ordered(order: str, back: bool) -> Weights:
        def weight(name: str, leaves: Leaves) -> Leaves:
            step, array = FlattenOrder(*grids[name], order), leaves["weight"].detach().numpy()
            return {"weight": _probe.tensor(step.undo(array) if back else step.do(array))}

        return _changed(list(grids), weight)

    for order in ORDERS if grids else ():
        yield Guess(_fault.FLATTEN, f"flattened maps read in the order {order}", ordered(order, False))
        yield Guess(_fault.FLATTEN, f"flattened maps put back from the order {order}", ordered(order, True))


RGB = (1, 3, 1, 1)
SCALES: dict[str, tuple[np.ndarray, np.ndarray]] = {  # from pixels on 0..1: times the first, plus the second
    "0..1": (np.ones(RGB), np.zeros(RGB)),
    "0..255": (np.full(RGB, 255.0), np.zeros(RGB)),
    "-1..1": (np.full(RGB, 2.0), np.full(RGB, -1.0)),
    "ImageNet's mean and std": (
        1 / np.reshape((0.229, 0.224, 0.225), RGB),
        -np.reshape((0.485 / 0.229, 0.456 / 0.224, 0.406 / 0.225), RGB),
    ),
    "0..255 less ImageNet's mean": (np.full(RGB, 255.0), -np.reshape((123.68, 116.779, 103.939), RGB)),
    "0..255 less Caffe's mean": (np.full(RGB, 255.0), -np.reshape((123.0, 117.0, 104.0), RGB)),
}


def _images(inputs: np.ndarray) -> Iterator[Guess]:
    """List the ways from what the images can be, by their range, to what else networks are fed, in both channel orders."""
    if inputs.shape[1] == 3:
        yield Guess(_fault.BGR, "images in the other channel order", images=lambda x: x[:, ::-1])
    for name, (scale, offset) in SCALES.items():
        if inputs.shape[1] != 3 and np.ptp(offset) > 0:
            continue
        scale, offset = (scale, offset) if inputs.shape[1] == 3 else (scale[:, :1], offset[:, :1])
        pixels = (inputs - offset) / scale
        if pixels.min() < -0.02 or pixels.max() > 1.02:
            continue  # they are not on this scale
        for other, (times, plus) in SCALES.items():
            if other == name or (inputs.shape[1] != 3 and np.ptp(plus) > 0):
                continue
            yield from _rescaled(name, (scale, offset), other, (times[:, : inputs.shape[1]], plus[:, : inputs.shape[1]]))


def _rescaled(name: str, now: tuple[np.ndarray, np.ndarray], other: str, then: tuple[np.ndarray, np.ndarray]) -> Iterator[Guess]:
    cause = _fault.RANGE if not (np.any(now[1]) or np.any(then[1])) else _fault.MEAN
    if ("255" in name) != ("255" in other):
        cause = _fault.RANGE
    channels = now[0].shape[1]
    for turned in (False, True) if channels == 3 else (False,):

        def images(x: np.ndarray, turned: bool = turned) -> np.ndarray:
            made = (x - now[1]) / now[0] * then[0] + then[1]
            return made[:, ::-1] if turned else made

        said = f"images as {other} where ours are {name}" + (", in the other channel order" if turned else "")
        yield Guess(f"{_fault.BGR} and {cause}" if turned else cause, said, images=images)


def _norms(twin: nn.Module, found: list[Layer]) -> Iterator[Guess]:
    modules = modules_of(twin)
    names = [layer.name for layer in found if layer.kind == "norm"]

    def vectors(do: Callable[[Leaves], Leaves]) -> Weights:
        return _changed(names, lambda name, leaves: do(leaves))

    if not names:
        return
    for eps in EPSILONS:
        yield Guess(
            _fault.EPSILON,
            f"epsilon {eps:g} in every norm",
            patch=lambda eps=eps: _patches.attributes([(modules[n], "eps", eps) for n in names]),
        )
    if any(f"{name}.weight" in dict(twin.named_parameters()) for name in names):
        yield Guess(_fault.SWAPPED, "gamma and beta of every norm swapped", vectors(lambda v: {"weight": v["bias"], "bias": v["weight"]}))
    swap = vectors(lambda v: {"running_mean": v["running_var"], "running_var": v["running_mean"]})
    yield Guess(_fault.MOMENTS, "mean and variance of every norm swapped", swap)
    norm: Any = modules[names[0]]
    eps = float(norm.eps)
    yield Guess(
        _fault.SPREAD, "every variance taken for a standard deviation", vectors(lambda v: {"running_var": v["running_var"] ** 2 - eps})
    )
    inverse = vectors(lambda v: {"running_var": v["running_var"] ** -2 - eps})
    yield Guess(_fault.SPREAD, "every variance taken for one over a standard deviation", inverse)


def _bottlenecks(found: list[Layer], modules: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Find a 1x1 convolution and the larger one that follows it in the same block, of which exactly one has a stride."""
    convolutions = [layer.name for layer in found if layer.kind in ("conv", "depthwise")]
    pairs: list[tuple[Any, Any]] = []
    for first, second in pairwise(convolutions):
        a, b = modules[first], modules[second]
        together = first.rpartition(".")[0] == second.rpartition(".")[0] or first.split(".")[:-2] == second.split(".")[:-2]
        if together and set(a.kernel_size) == {1} and max(b.kernel_size) > 1 and (max(a.stride) > 1) != (max(b.stride) > 1):
            pairs.append((a, b))
    return pairs
