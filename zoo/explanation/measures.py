"""How far a method's maps can be trusted on a network: what happens when the pixels that they name go, and when the weights do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weights.arguments import forgiving
from zoo.explanation.apart import apart
from zoo.explanation.program import CannotExplain
from zoo.explanation.result import Explanation
from zoo.explanation.run import Explainer
from zoo.explanation.targets import Target
from zoo.images.preprocess import BadImage
from zoo.kernels import plain
from zoo.networks.model import Model

BLOCKS, STEPS, BLUR = 8, 16, 0.1
"""Blocks a side that pixels are hidden by; steps from none to all; the blur's deviation as a share of the image's side."""
TOLERANCE = 15
"""Pixels that the map's maximum may lie outside of a box in the pointing game (Zhang et al. 2016, https://arxiv.org/abs/1608.00507)."""
NAMES = ("method", "centre", "random")


@dataclass(frozen=True, slots=True)
class Measured:
    """What `measure` found, each number the mean over the images.

    Attributes:
        method: as its authors write it.
        images: how many there were.
        deletion: area under the class's probability while the blocks that the map puts first are blurred: the lower, the better. By
            "method", "centre" (blocks from the middle outwards) and "random".
        insertion: the same while they are uncovered from a blurred image: the higher, the better.
        classifier_randomised: rank correlation of the maps with the network's with its classifier's weights shuffled; near 1, the map
            doesn't depend on what tells the classes apart. None where the network's classifier isn't known.
        all_randomised: the same, with the weights of every convolution and dense layer shuffled.
        pointing: share of images whose maximum lies in a box, by "method" and "centre"; None without boxes.
    """

    method: str
    images: int
    deletion: dict[str, float]
    insertion: dict[str, float]
    classifier_randomised: float | None
    all_randomised: float
    pointing: dict[str, float] | None

    @property
    def depends_on_weights(self) -> bool:
        """Whether shuffled weights give other maps: every rank correlation is below 0.5."""
        return max(self.all_randomised, self.classifier_randomised or -1.0) < 0.5

    def numbers(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return asdict(self) | {"depends_on_weights": self.depends_on_weights}

    def lines(self) -> list[str]:
        """Say it in lines of text."""
        width = max(9, len(self.method))
        found = [f"{'':26}{self.method:>{width}}{'centre':>9}{'random':>9}"]
        for title, row in (("deletion, lower better", self.deletion), ("insertion, higher better", self.insertion)):
            found.append(f"{title:26}{row['method']:>{width}.3f}{row['centre']:>9.3f}{row['random']:>9.3f}")
        if self.pointing is not None:
            found.append(f"{'pointing game':26}{self.pointing['method']:>{width}.3f}{self.pointing['centre']:>9.3f}")
        parts = [] if self.classifier_randomised is None else [f"{self.classifier_randomised:.2f} of the classifier"]
        parts.append(f"{self.all_randomised:.2f} of all layers")
        word = "yes" if self.depends_on_weights else "hardly"
        found.append(f"depends on the weights: {word} (rank correlation after shuffling: {', '.join(parts)})")
        return found


@forgiving
def measure(
    model: Any,
    images: Any,
    method: str | None = None,
    target: Any = None,
    at: str | None = None,
    boxes: Sequence[Sequence[Sequence[float]]] | None = None,
    batch_size: int = 32,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Measured:
    """Measure a method on a network and images of the user's own: deletion, insertion, randomised weights, pointing.

    Differences below 0.03 on 64 images mean little. Pixels are hidden in 8 by 8 blocks and by blur: single grey pixels break a network
    rather than an explanation, and rank random noise first.

    Example:
        >>> print(*measure(trained(EfficientNetLite0), ["a.jpg", "b.jpg"], "gradcam").lines(), sep="\\n")  # doctest: +SKIP

    Args:
        model: as in `explain`.
        images: as in `explain`; one or many.
        method: as in `explain`.
        target: one target for all images; None is the most probable class of each.
        at: as in `explain`.
        boxes: for each image the boxes of its class, left, top, right and bottom in the photograph's pixels, for the pointing game.
        batch_size: as in `explain`.
        seed: of the random order and of the shuffling.
        options: as in `explain`.

    Returns:
        `Measured`.

    Raises:
        CannotExplain: as in `explain`, or the target is a list, a difference or an embedding, which have no probability.
        ValueError: there are not as many lists of boxes as images.

    Source:
        Deletion and insertion: Petsiuk et al. 2018, section 4.2 (https://arxiv.org/abs/1806.07421). Randomisation: Adebayo et al. 2018
        (https://arxiv.org/abs/1810.03292). Pointing game: Zhang et al. 2016.
    """
    if isinstance(target, list | tuple):
        raise CannotExplain("measure() follows the probability of one class; give one target")
    explainer = Explainer(model, method, target, at, None, batch_size, seed, dict(options or {}))
    shown: list[Explanation] = []
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    generator = torch.Generator().manual_seed(seed)
    inputs: list[Tensor] = []
    with torch.inference_mode(False):
        for names, sources, x, views in explainer.batches(images):
            x = x.clone().to(explainer.device)
            rows = [row[0] for row in explainer.batch(names, sources, x, views)]
            goals = explainer.goals(x)
            if any(one.probability is None or one.label == "similarity" for one in rows):
                raise CannotExplain("measure() follows a class's probability, which a difference and an embedding have none of")
            shown += rows
            inputs.append(x)
            for index, one in enumerate(rows):
                chance = _chance(explainer, goals[index])
                orders = {
                    "method": order(one, x.shape[-2], x.shape[-1]),
                    "centre": _centre(),
                    "random": torch.randperm(BLOCKS**2, generator=generator),
                }
                for name, ranked in orders.items():
                    curves[name].append(curve(x[index], ranked, chance))
        if not shown:
            raise BadImage("there are no images to measure on")
        shuffled = _shuffled(explainer, inputs, shown, seed)
    if boxes is not None and len(boxes) != len(shown):
        raise ValueError(f"there are {len(shown)} images and boxes for {len(boxes)}; give one list of boxes for each image")
    means = {name: np.mean(curves[name], 0) for name in NAMES}
    return Measured(
        explainer.chosen.title, len(shown), {n: float(means[n][0]) for n in NAMES}, {n: float(means[n][1]) for n in NAMES}, *shuffled,
        None if boxes is None else _pointing(shown, boxes),
    )  # fmt: skip


def order(shown: Explanation, height: int, width: int) -> Tensor:
    """Rank the blocks of an image by a map's mean over each, the strongest first."""
    down = shown.rows.weights(shown.raw.shape[0], np.arange(height))
    across = shown.columns.weights(shown.raw.shape[1], np.arange(width))
    pixels = torch.from_numpy(down @ (shown.strength if shown.slope else shown.raw).astype(np.float32) @ across.T)
    return F.adaptive_avg_pool2d(pixels[None], BLOCKS)[0].flatten().argsort(descending=True, stable=True)


def _centre() -> Tensor:
    place = torch.arange(BLOCKS) - (BLOCKS - 1) / 2
    return (place[:, None] ** 2 + place[None] ** 2).flatten().argsort(stable=True)


def curve(image: Tensor, ranked: Tensor, chance: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Return the areas under deletion's and insertion's curve of one image (C, H, W), 0..1."""
    soft, size = blurred(image), image.shape[-2:]
    rank = torch.empty(BLOCKS**2, dtype=torch.long)
    rank[ranked] = torch.arange(BLOCKS**2)
    place = F.interpolate(rank.view(1, 1, BLOCKS, BLOCKS).float(), size=size, mode="nearest-exact")[0].to(image.device)
    first = torch.linspace(0, BLOCKS**2, STEPS + 1)
    hidden = [torch.where(place < count, soft, image) for count in first.tolist()]
    uncovered = [torch.where(place < count, image, soft) for count in first.tolist()]
    found = chance(torch.stack(hidden + uncovered)).cpu().double()
    return tuple(torch.trapezoid(part, dx=1 / STEPS).item() for part in found.split(STEPS + 1))  # pyright: ignore[reportReturnType]


def blurred(image: Tensor) -> Tensor:
    """Blur an image (C, H, W) by a Gaussian, mirrored at its border."""
    for axis in (1, 2):
        side = image.shape[axis]
        deviation = BLUR * side
        reach = min(side - 1, round(3 * deviation))
        place = torch.arange(-reach, reach + 1, device=image.device, dtype=torch.float32)
        kernel = torch.exp(-(place**2) / (2 * deviation**2))
        kernel = kernel / kernel.sum()
        moved = image.movedim(axis, 2)
        padded = F.pad(moved, (reach, reach), mode="reflect")
        image = F.conv1d(padded.flatten(0, 1)[:, None], kernel.view(1, 1, -1))[:, 0].unflatten(0, moved.shape[:2]).movedim(2, axis)
    return image


def _chance(explainer: Explainer, goal: Target) -> Callable[[Tensor], Tensor]:
    """Return what computes the probability of a target's classes."""

    def chance(x: Tensor) -> Tensor:
        parts = [explainer.infer(part).float().softmax(1)[:, list(goal.weights)].sum(1) for part in x.split(explainer.batch_size)]
        return torch.cat(parts)

    return chance


def _shuffled(explainer: Explainer, inputs: list[Tensor], shown: list[Explanation], seed: int) -> tuple[float | None, float]:
    """Return the rank correlations of the maps with those of shuffled networks."""
    network = plain(explainer.model)
    layers = [name for name, layer in network.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    heads = [n for n in layers if isinstance(network, Model) and any(n == c or n.startswith(f"{c}.") for c in network.classifiers)]
    found: list[float | None] = []
    for names in (heads, layers):
        if not names:
            found.append(None)
            continue
        twin = Explainer(
            shuffled(network, names, seed), explainer.method or explainer.chosen.name, None, explainer.at, None, explainer.batch_size,
            explainer.seed, explainer.options,
        )  # fmt: skip
        rest, correlations = iter(shown), []
        for x in inputs:
            rows = [next(rest) for _ in x]
            raws = twin.raws(x, explainer.goals(x))
            correlations += [spearman(one.raw, raw) for one, raw in zip(rows, raws, strict=True)]
        found.append(float(np.mean(correlations)))
    return found[0], found[1] if found[1] is not None else float("nan")


def shuffled(network: nn.Module, names: Sequence[str], seed: int) -> nn.Module:
    """Return a copy of a network in which the weights of some layers are in random order; the network itself keeps its own."""
    twin, generator = apart(network), torch.Generator().manual_seed(seed)
    layers = dict(twin.named_modules())
    for name in names:
        own = layers[name]._parameters
        for key, value in own.items():
            if value is not None:
                mixed = torch.randperm(value.numel(), generator=generator).to(value.device)
                own[key] = nn.Parameter(value.flatten()[mixed].view_as(value).clone(), requires_grad=False)
    return twin


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Return the rank correlation of two maps, ties by their mean rank; 0 where one is flat."""
    ranks = [_ranks(each.ravel()) for each in (one, other)]
    if min(rank.std() for rank in ranks) == 0:
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[place]


def _pointing(shown: Sequence[Explanation], boxes: Sequence[Sequence[Sequence[float]]]) -> dict[str, float]:
    hits: dict[str, list[bool]] = {"method": [], "centre": []}
    for one, own in zip(shown, boxes, strict=True):
        left, top, right, bottom = one.seen
        for name, (x, y) in (("method", one.peak), ("centre", ((left + right) / 2, (top + bottom) / 2))):
            hits[name].append(any(_in(x, y, box) for box in own))
    return {name: float(np.mean(found)) for name, found in hits.items()}


def _in(x: float, y: float, box: Sequence[float]) -> bool:
    left, top, right, bottom = box
    return left - TOLERANCE <= x <= right + TOLERANCE and top - TOLERANCE <= y <= bottom + TOLERANCE
