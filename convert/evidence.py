"""Which of several networks made of one file is the right one, where the file doesn't say: reference outputs, labels, or photographs.

The candidates differ in what no shape shows: whether the kernels are flipped, whether their first axis is the height.
docs/notes/converting.md says how the thresholds came about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from convert.conversion import Undecided
from convert.network import modules_of

if TYPE_CHECKING:
    from torch import Tensor, nn

BATCH = 32

MATCHES = 0.01
"""Largest relative error at which reference outputs count as reproduced. On real networks float32 is 4e-6 from float64 at most, the
nearest of the wrong ones that were measured (another epsilon) 0.29, the nearest wrong orientation 0.56."""
REFERENCE_MARGIN = 10.0
"""By what factor the second best must be worse."""
LABEL_SIGMAS = 3.0
"""By how many standard deviations of a coin thrown for each image that only one of the two gets right."""
STATISTICS_MARGIN = 1.25
"""By what factor the second best's statistics must be farther away. Flips give 6 to 8.5 on
photographs like those of the training, exchanged axes 1.35 and 1.64: it was chosen below these, from two networks."""
STATISTICS_LEVEL = 0.1
"""How far the best may be. Above it the images are not like those of the training (CIFAR as JPEG: 0.18 to 0.21), and what they say of two
candidates is chance: there, a wrong one was ahead by a factor of up to 1.09."""
PARTS = 4
"""Shares of the photographs; whichever of them is left out, the best must stay the best."""
CONFIDENCE_SIGMAS = 4.0
"""By how many standard errors the best must gain more from upright photographs than the second best."""


Moments = tuple[int, Any, Any]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the evidence says.

    Attributes:
        winner: name of a candidate.
        margin: how clear it is, in the measure's own unit: a factor, or standard deviations.
        measure: what was measured, in words.
        table: of each measure that was taken, in the order of its strength, a number for each candidate.
    """

    winner: str
    margin: float
    measure: str
    table: Mapping[str, Mapping[str, float]]

    def __str__(self) -> str:
        return f"{self.winner}, by {self.measure} (margin {self.margin:.3g})\n{_printed(self.table)}"


def batchnorm_mismatch(network: nn.Module, images: Tensor) -> float:
    """Measure how far the statistics that BatchNorms have stored are from those that these images produce.

    Of each layer: the mean over its channels of (m - rm)² / rv + (ln v - ln rv)², where m and v are mean and variance of what comes
    in, and rm and rv are those stored; then the mean over the layers. Each layer's epsilon is added to every variance, so that
    channels that are always zero don't count. The network is run in eval mode and not changed.

    Args:
        network: with at least one BatchNorm.
        images: (B, C, H, W), preprocessed; some dozens of photographs.

    Raises:
        ValueError: the network has no BatchNorm, or a batch of no images came.
    """
    return float(np.mean(list(mismatch_by_layer(network, images).values())))


def mismatch_by_layer(network: nn.Module, images: Tensor) -> dict[str, float]:
    """Measure `batchnorm_mismatch` of each BatchNorm, in the order in which they compute."""
    return _distances(network, [_observed(network, images)])


def _observed(network: nn.Module, images: Tensor) -> dict[str, Moments]:
    """Run the images, and sum up what comes into each BatchNorm: numbers per channel, their sum and the sum of their squares."""
    import torch

    norms = {name: module for name, module in modules_of(network).items() if _has_statistics(module)}
    if not norms or not len(images):
        raise ValueError("there is no BatchNorm to compare with" if not norms else "there are no images to compare with")
    sums: dict[str, Moments] = {}

    def before(name: str, module: Any, arguments: tuple[Tensor, ...]) -> None:
        del module
        x = arguments[0]
        axes = [axis for axis in range(x.dim()) if axis != 1]
        total, squares = x.sum(axes, dtype=torch.float64), x.square().sum(axes, dtype=torch.float64)
        moments = (x.numel() // x.shape[1], total, squares)
        sums[name] = _added(sums[name], moments) if name in sums else moments

    handles = [module.register_forward_pre_hook(partial(before, name)) for name, module in norms.items()]
    try:
        _run(network, images)
    finally:
        for handle in handles:
            handle.remove()
    return sums


def _added(before: Moments, more: Moments) -> Moments:
    return (before[0] + more[0], before[1] + more[1], before[2] + more[2])


def _distances(network: nn.Module, observed: Sequence[Mapping[str, Moments]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, first in observed[0].items():
        count, total, squares = reduce(_added, (share[name] for share in observed[1:]), first)
        norm: Any = network.get_submodule(name)
        mean = total / count
        variance = (squares / count - mean.square()).clamp_min(0) + norm.eps
        stored = norm.running_var.double() + norm.eps
        far = (mean - norm.running_mean.double()).square() / stored + (variance.log() - stored.log()).square()
        found[name] = float(far.mean())
    return found


def decide(
    candidates: Mapping[str, nn.Module],
    *,
    reference: tuple[Tensor, Tensor] | None = None,
    labelled: tuple[Tensor, Tensor] | None = None,
    images: Tensor | None = None,
) -> Decision:
    """Find the right one among networks made of the same file, by the strongest evidence there is.

    Reference outputs settle it alone. Else labelled images are asked, then the statistics of BatchNorm, and of networks that have
    none, or whose statistics can't tell, the confidence on upright photographs against the same ones upside down; a weaker one
    speaks only where all stronger ones are silent.

    Args:
        candidates: networks by what was assumed, in the order in which a tie is printed.
        reference: preprocessed inputs (B, C, H, W) and the outputs (B, ...) that the network gave at home, logits or probabilities.
        labelled: preprocessed images and the indices of their classes.
        images: preprocessed photographs, upright; those of `labelled` if left out.

    Raises:
        Undecided: the evidence is absent or too weak; the message holds all numbers.
        ValueError: there is no candidate.
    """
    if not candidates:
        raise ValueError("there is no candidate to decide on")
    table: dict[str, Mapping[str, float]] = {}
    tests: list[tuple[str, Callable[[], tuple[dict[str, float], str | None, float, str]]]] = []
    if reference is not None:
        inputs, outputs = reference
        tests.append(("relative error against the reference outputs", lambda: _by_reference(candidates, inputs, outputs)))
    if labelled is not None:
        pictures, labels = labelled
        images = pictures if images is None else images
        tests.append(("accuracy on the labelled images", lambda: _by_labels(candidates, pictures, labels)))
    if images is not None:
        photographs = images
        if all(any(_has_statistics(module) for module in network.modules()) for network in candidates.values()):
            tests.append(("distance of the BatchNorm statistics", lambda: _by_statistics(candidates, photographs)))
        tests.append(("confidence gained by upright photographs, the weakest evidence", lambda: _by_confidence(candidates, photographs)))
    weak: list[str] = []
    for measure, test in tests:
        table[measure], winner, margin, why = test()
        if winner is not None:
            return Decision(winner, margin, measure, table)
        weak.append(f"{measure}: {why}")
        if measure.startswith("relative error"):  # what contradicts the network's own outputs can't be outvoted by weaker evidence
            break
    if not tests:
        raise Undecided(
            f"nothing tells {', '.join(candidates)} apart: give reference=outputs.npz, or images=FOLDER with photographs, "
            "labelled ones if there are, or say it with kernel_convention= and spatial=."
        )
    said = "; ".join(weak)
    raise Undecided(
        f"the evidence does not tell {', '.join(candidates)} apart. {said}.\n{_printed(table)}\nGive more or stronger evidence."
    )


def hits(network: nn.Module, images: Tensor, labels: Tensor) -> np.ndarray:
    """Tell of each labelled image whether the network names its class: bool (B,).

    Args:
        network: gives a row of numbers for each class.
        images: (B, C, H, W), as the network takes them.
        labels: the index of each image's class.
    """
    return (_run(network, images).flatten(1).argmax(1) == labels).numpy()


def sigmas(best: np.ndarray, other: np.ndarray) -> float:
    """Say how far one network is ahead of another, by McNemar's test: only images that one alone gets right can tell them apart.

    Args:
        best, other: what `hits` says of each.

    Returns:
        Standard deviations of a coin that is thrown for each such image; 0 where there is none.
    """
    gained, lost = int((best & ~other).sum()), int((other & ~best).sum())
    return (gained - lost) / math.sqrt(gained + lost) if gained + lost else 0.0


def statistics(network: nn.Module, images: Tensor) -> list[float]:
    """Measure `batchnorm_mismatch` on all images, and then with each of `PARTS` shares of them left out."""
    shares = [_observed(network, share) for share in images.chunk(PARTS)]
    kept = [shares, *([s for i, s in enumerate(shares) if i != part] for part in range(len(shares)) if len(shares) > 1)]
    return [float(np.mean(list(_distances(network, seen).values()))) for seen in kept]


def _by_reference(candidates: Mapping[str, nn.Module], inputs: Tensor, outputs: Tensor) -> tuple[dict[str, float], str | None, float, str]:
    wanted = outputs.double().flatten(1)
    probabilities = bool((wanted >= 0).all()) and bool(((wanted.sum(1) - 1).abs() < 1e-3).all())
    errors: dict[str, float] = {}
    for name, network in candidates.items():
        got = _run(network, inputs).double().flatten(1)
        if got.shape != wanted.shape:
            raise Undecided(f"the reference outputs are {tuple(wanted.shape)}, and those of {name} {tuple(got.shape)}")
        if probabilities and not bool(((got.sum(1) - 1).abs() < 1e-3).all()):
            got = got.softmax(1)
        error = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))
        errors[name] = error if math.isfinite(error) else math.inf
    best, second = _two(errors)
    margin = second / max(errors[best], 1e-12)
    if errors[best] > MATCHES:
        return errors, None, margin, f"none is within {MATCHES:g} of them, so something else is wrong"
    why = f"the best two differ by a factor of {margin:.3g}, not {REFERENCE_MARGIN:g}"
    return errors, best if margin >= REFERENCE_MARGIN else None, margin, why


def _by_labels(candidates: Mapping[str, nn.Module], images: Tensor, labels: Tensor) -> tuple[dict[str, float], str | None, float, str]:
    right = {name: hits(network, images, labels) for name, network in candidates.items()}
    accuracy = {name: float(hits.mean()) for name, hits in right.items()}
    best, _ = _two({name: -value for name, value in accuracy.items()})
    ahead = min((sigmas(right[best], other) for name, other in right.items() if name != best), default=math.inf)
    why = f"the best is ahead by {ahead:.3g} standard deviations, not {LABEL_SIGMAS:g}"
    return accuracy, best if ahead >= LABEL_SIGMAS else None, ahead, why


def _by_statistics(candidates: Mapping[str, nn.Module], images: Tensor) -> tuple[dict[str, float], str | None, float, str]:
    shares = {name: [_observed(network, share) for share in images.chunk(PARTS)] for name, network in candidates.items()}

    def measured(*left_out: int) -> dict[str, float]:
        return {
            name: float(np.mean(list(_distances(candidates[name], [s for i, s in enumerate(seen) if i not in left_out]).values())))
            for name, seen in shares.items()
        }

    distance = measured()
    best, second = _two(distance)
    margin = second / max(distance[best], 1e-12)
    if distance[best] > STATISTICS_LEVEL:
        return distance, None, margin, f"the best is {distance[best]:.3g} away, so these are not images like those of the training"
    if margin < STATISTICS_MARGIN:
        return distance, None, margin, f"the second is farther by a factor of {margin:.3g}, not {STATISTICS_MARGIN:g}"
    parts = len(shares[best])
    for part in range(parts) if parts > 1 else ():
        if (other := _two(measured(part))[0]) != best:
            return distance, None, margin, f"without a share of {len(images) // parts} of the {len(images)} images it is {other}"
    return distance, best, margin, ""


def _by_confidence(candidates: Mapping[str, nn.Module], images: Tensor) -> tuple[dict[str, float], str | None, float, str]:
    gains = {
        name: (_confidence(network, images) - _confidence(network, images.flip(-2, -1))).numpy() for name, network in candidates.items()
    }
    gain = {name: float(values.mean()) for name, values in gains.items()}
    best, _ = _two({name: -value for name, value in gain.items()})
    ahead = min((_sigmas(gains[best] - values) for name, values in gains.items() if name != best), default=math.inf)
    ahead = min(ahead, 2 * _sigmas(gains[best]))
    why = f"the best gains {ahead:.3g} standard errors more, not {CONFIDENCE_SIGMAS:g}"
    return gain, best if ahead >= CONFIDENCE_SIGMAS else None, ahead, why


def _confidence(network: nn.Module, images: Tensor) -> Tensor:
    outputs = _run(network, images).double().flatten(1)
    sums_to_one = bool((outputs >= 0).all()) and bool(((outputs.sum(1) - 1).abs() < 1e-3).all())
    return (outputs if sums_to_one else outputs.softmax(1)).amax(1)


def _run(network: nn.Module, images: Tensor) -> Tensor:
    """Run it in eval mode, in small batches, and leave it in the mode that it was in."""
    import torch

    training = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.inference_mode():
            shares = cast("tuple[Tensor, ...]", images.split(BATCH))  # pyright: ignore[reportUnknownMemberType]  # its argument is untyped
            return torch.cat([network(share) for share in shares]).clone()
    finally:
        for module, mode in training.items():
            module.training = mode


def _has_statistics(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None and getattr(module, "running_var", None) is not None


def _two(values: Mapping[str, float]) -> tuple[str, float]:
    """Name the smallest, and tell the second smallest; a value that is no number counts as the largest."""
    ranked = sorted(values, key=lambda name: values[name] if not math.isnan(values[name]) else math.inf)
    return ranked[0], values[ranked[1]] if len(ranked) > 1 else math.inf


def _sigmas(values: np.ndarray) -> float:
    error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(values.mean()) / error if error else 0.0


def _printed(table: Mapping[str, Mapping[str, float]]) -> str:
    return "\n".join(f"  {measure}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()) for measure, row in table.items())
