"""What the search for a fault passes around: the layer under suspicion, a hypothesis that was tried, and what each cause means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations, product
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from convert import _probe
from convert._windows import Pads
from convert.graph import Node
from convert.source import Source

if TYPE_CHECKING:
    from torch import nn

FLIPPED = "kernels flipped"
TRANSPOSED = "kernels transposed"
FLATTEN = "flatten order"
EPSILON = "BN epsilon"
SWAPPED = "BN gamma/beta swapped"
MOMENTS = "BN mean/var swapped"
VECTORS = "BN vectors in another order"
SPREAD = "BN std as variance"
FACTOR = "BN factor"
STRIDE = "stride v1/v1.5"
STRIDE_ALONE = "stride"
BGR = "BGR"
RANGE = "0..255"
MEAN = "mean/std"
SAME = "SAME padding"
PADDING = "padding"
CEIL = "ceil mode"
BORDER = "average pool border"
HEAD = "old head"
CONCAT = "concat order"
CHANNELS = "channel order"
ACTIVATION = "wrong activation"
BIAS = "conv bias missing"
ABSENT = "layer missing"
OTHER = "other weights"

MEANING: dict[str, tuple[str, str]] = {
    FLIPPED: (
        "the kernels lie the wrong way round: one side computes the true convolution, the other cross-correlation",
        "zoo convert again with the other --kernel-convention",
    ),
    TRANSPOSED: ("the kernels have height and width swapped", "the file's first spatial axis is the other one: settle `spatial`"),
    FLATTEN: ("the dense layer reads the flattened map in another order", "reorder its inputs to C, H, W"),
    EPSILON: ("the norm adds another epsilon to its variance", "build our network with the source's, norm_eps"),
    SWAPPED: ("gamma and beta are swapped", "map weight to gamma and bias to beta"),
    MOMENTS: ("mean and variance are swapped", "map running_mean to the mean and running_var to the variance"),
    VECTORS: ("the four vectors of the norm are in another order", "map them by name"),
    SPREAD: ("what the file keeps of the spread is no variance, and was taken for one", "turn it into a variance first"),
    FACTOR: ("mean and variance are sums, to be divided by the layer's factor", "divide both by the factor that the file keeps"),
    STRIDE: (
        "the stride is on another convolution of the bottleneck",
        'build our network with the other stride_on, "1x1" (v1) or "3x3" (v1.5)',
    ),
    STRIDE_ALONE: ("the stride is another one", "build our layer with the source's stride"),
    BGR: (
        "the input channels are in the other order: BGR against RGB",
        "feed the other order, or reverse the first kernels' input channels",
    ),
    RANGE: ("the pixels have another range", "feed pixels in the range that the network was trained on"),
    MEAN: ("the pixels are centred or scaled otherwise", "feed pixels with the mean and std that the network was trained on"),
    SAME: (
        "TensorFlow's SAME padding stands against symmetric padding",
        'build our network with the source\'s, padding="same" or "symmetric"',
    ),
    PADDING: ("the layer is padded otherwise", "build our layer with the source's padding"),
    CEIL: ("a pool rounds its size the other way", "give our pool the source's ceil_mode"),
    BORDER: ("an average pool counts its padding, or doesn't", "give our pool the source's count_include_pad"),
    HEAD: ("everything up to the head agrees, and the head is another one", "take the head of this file, or map its classes"),
    CONCAT: ("maps are concatenated in another order", "concatenate in the source's order, or permute the inputs of the next layer"),
    CHANNELS: ("the channels are in another order", "permute them, or the weights that read them"),
    ACTIVATION: ("the activation is another one", "build our network with the source's activation"),
    BIAS: ("the convolution's bias was lost", "keep it, or subtract it from the mean of the BatchNorm behind"),
    ABSENT: ("a layer of the source is missing in our network", "add it"),
    OTHER: ("the layer holds other weights than the file's", "map this layer to the file's module again"),
}
"""What each cause says, and what helps."""


MOST_TRIALS = 500
"""Of one number of changes at once; what is more is not tried."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A hypothesis and how far from the source's numbers it left ours."""

    hypothesis: str
    error: float


@dataclass(frozen=True, slots=True)
class Fault:
    """A hypothesis that reproduces the numbers.

    Attributes:
        causes: keys of `MEANING`.
        said: what exactly, for people.
        error: what is left of the difference.
    """

    causes: tuple[str, ...]
    said: str
    error: float


@dataclass(slots=True)
class Site:
    """The first layer that diverges.

    Attributes:
        source, node: theirs.
        name, module: ours.
        target: what theirs returned.
        ours: what ours returned.
        fed: what theirs read, as our layer takes it.
        read: what ours read.
        before: the relative error.
        limit: the relative error that a hypothesis has to reach.
        pads: what theirs pads, all in all.
        grid: the map that it flattens.
        order: the order in which it does.
        blocks: channels of the maps whose concatenation it reads.
        last: whether no layer with weights comes behind it.
        shifted: whether the stride of a neighbour differs the other way.
        tried: filled by the search.
    """

    source: Source
    node: Node
    name: str
    module: nn.Module
    target: np.ndarray
    ours: np.ndarray
    fed: np.ndarray
    read: np.ndarray
    before: float
    limit: float
    pads: Pads = (0, 0, 0, 0)
    grid: tuple[int, int, int] | None = None
    order: str = "chw"
    blocks: tuple[int, ...] = ()
    last: bool = False
    shifted: bool = False
    tried: list[Trial] = field(default_factory=list[Trial])

    def error(self, values: np.ndarray | None, target: np.ndarray | None = None) -> float:
        """Measure a hypothesis's values; None are those that could not be computed."""
        return float("inf") if values is None else _probe.relative(values, self.target if target is None else target)


@dataclass(frozen=True, slots=True)
class Change:
    """One hypothesis about one aspect: the cause it means, what it says, and what it needs to be tried."""

    cause: str
    said: str
    how: Any


def search(
    site: Site, aspects: Iterable[list[Change]], attempt: Callable[[tuple[Change, ...], np.ndarray], np.ndarray], deepest: int = 3
) -> Fault | None:
    """Try every change alone, then two of different aspects, then three, and take the best of the first size that reaches the limit.

    Args:
        site: where; its `tried` grows.
        aspects: the changes, of which at most one an aspect is made.
        attempt: computes our layer with some changes, on some input.
        deepest: how many changes to make at once.
    """
    groups = [group for group in aspects if group]
    inputs = [site.fed] if _probe.relative(site.read, site.fed) == 0 else [site.fed, site.read]
    for size in range(1, deepest + 1):
        best: Fault | None = None
        if size > 1 and sum(prod(map(len, chosen)) for chosen in combinations(groups, size)) > MOST_TRIALS:
            break
        for chosen in combinations(groups, size):
            for changes in product(*chosen):
                said = " and ".join(change.said for change in changes)
                error = min(site.error(_attempted(attempt, changes, x)) for x in inputs)
                site.tried.append(Trial(said, error))
                if error <= site.limit and (best is None or error < best.error):
                    best = Fault(tuple(dict.fromkeys(change.cause for change in changes)), said, error)
        if best is not None:
            return best
    return None


def _attempted(
    attempt: Callable[[tuple[Change, ...], np.ndarray], np.ndarray], changes: tuple[Change, ...], x: np.ndarray
) -> np.ndarray | None:
    try:
        with np.errstate(all="ignore"):
            return attempt(changes, x)
    except (RuntimeError, ValueError, IndexError):  # this hypothesis has another shape, and so is no explanation
        return None
