"""How a converted network's images are prepared: what the file says, what is only guessed, and what photographs decide.

A network's arithmetic can be proven and its images prepared wrongly all the same: BGR for RGB costs ten points and more. So this is kept
apart from the proof of the arithmetic, and a guess is called one wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from convert import evidence
from weights import Preprocessing
from weights.errors import BadRecord
from weights.wording import counted
from zoo.conversion.foreign import Foreign
from zoo.conversion.notes import notes
from zoo.conversion.proof_images import Pictures, prepared, steps
from zoo.images.preprocess import at_size
from zoo.networks.model import Model

Status = Literal["stated", "guessed", "decided"]
DIMENSIONS = ("channel order", "range and mean", "size", "interpolation")
FIRST, THEN = 100, 400
"""Labelled images on which readings are compared first, and those that are left then; the last few are compared on all."""
CHANCE = 2.0
"""How many times better than chance the best reading must be, or the labels are of other classes."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PIXEL = 1 / 255
RANGES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "0..1": ((0.0,) * 3, (1.0,) * 3),
    "0..255": ((0.0,) * 3, (PIXEL,) * 3),
    "-1..1": ((0.5,) * 3, (0.5,) * 3),
    "ImageNet's mean and deviation": (IMAGENET_MEAN, IMAGENET_STD),
    "ImageNet's mean on 0..255": ((123.68 / 255, 116.779 / 255, 103.939 / 255), (PIXEL,) * 3),
    "ImageNet's mean times 0.017": ((123.68 / 255, 116.78 / 255, 103.94 / 255), (PIXEL / 0.017,) * 3),
    "CIFAR-10's mean and deviation": (CIFAR_MEAN, CIFAR_STD),
    "CIFAR-10's mean on 0..255": (CIFAR_MEAN, (PIXEL,) * 3),
    "CIFAR-10's mean on 0..1": (CIFAR_MEAN, (1.0,) * 3),
}
"""What networks are trained with, mean and deviation in RGB on 0..1; the commonest first."""


@dataclass(frozen=True, slots=True)
class Pixels:
    """How images are prepared, and how well that is known.

    Attributes:
        steps: of the preparation.
        status: "stated" by the file, a record, its notes or the caller; "guessed"; or "decided" by evidence, in part at least.
        by: who states it, what the guess follows, or what decided.
        decided: the dimensions that evidence decided, of `DIMENSIONS`.
        table: what was measured for each reading that was tried to the end: a part of images, or a distance.
    """

    steps: Preprocessing
    status: Status
    by: str
    decided: tuple[str, ...] = ()
    table: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def said(self) -> str:
        """Say it in a few words: "pixels GUESSED: …"."""
        if self.status != "guessed":
            return f"pixels {self.status} by {self.by}"
        return f"pixels GUESSED: {', '.join(_part(self.steps, one) for one in DIMENSIONS[:2])}, {self.by}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "said": self.said}


def told_by_user(
    network: Model,
    *,
    channel_order: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    scale: float | None = None,
    size: int | None = None,
) -> dict[str, Any]:
    """Bring what the caller says of images into the fields of `weights.Preprocessing`.

    Args:
        network: whose images they are.
        channel_order: "rgb" or "bgr".
        mean, std: a number for each channel in that order, or one for all, on 0..1; with `scale` the mean is on 0..255.
        scale: what a pixel of 0..255 less the mean is multiplied with, as Caffe and Keras say it.
        size: side of the square images in pixels.

    Raises:
        BadRecord: two of them contradict, or a number can't be.
    """
    found: dict[str, Any] = {}
    if channel_order is not None:
        found["channel_order"] = channel_order
    if scale is not None and (std is not None or not scale > 0):
        raise BadRecord(
            f"scale={scale:g} multiplies pixels and is positive" if std is None else "scale and std say the same: leave one of them out"
        )
    per = 255 if scale is not None else 1
    for name, values in (("mean", mean), ("std", std)):
        if values is not None:
            spread = tuple(float(value) for value in values) * (network.in_channels if len(values) == 1 else 1)
            if len(spread) != network.in_channels:
                raise BadRecord(f"{name} has {len(spread)} numbers, and the network reads {counted(network.in_channels, 'channel')}")
            if per == 1 and max(map(abs, spread)) > 2:
                raise BadRecord(f"{name} is on 0..1, not {values}: divide by 255, or give scale too, with which the mean is on 0..255")
            found[name] = tuple(value / per for value in spread)
    if scale is not None:
        found["std"] = (1 / (255 * scale),) * network.in_channels
        found.setdefault("mean", (0.0,) * network.in_channels)
    if size is not None:
        found["size"] = size
    return found


def known_pixels(foreign: Foreign, told: Mapping[str, Any]) -> Pixels:
    """Say how a file's images are prepared, and who says so; what nobody says is guessed, and two guesses are not joined.

    Args:
        foreign: the file and the network.
        told: what the caller says, from `told_by_user`; it wins.
    """
    known = dict(foreign.preprocessing)
    noted = notes(foreign.source.facts, foreign.model)
    recorded = foreign.known is not None and foreign.known.model == foreign.model.variant().__name__
    status: Status = "stated"
    before: dict[str, Any] = noted.get("pixels") or {}
    if noted:
        by = str(before.get("by", "its notes"))[:300]
        status = before["status"] if before.get("status") in ("stated", "guessed", "decided") else "stated"
    elif recorded and foreign.known is not None:
        by = f"the record {foreign.known.model}:{foreign.known.tag}"
    else:
        known, status, by = _guess(foreign, known)
    made = steps(foreign.network, known)
    given = {name: value for name, value in told.items() if name != "size"}
    made = replace(made, **given) if given else made
    made = at_size(made, told["size"]) if "size" in told else made
    if given.keys() >= {"channel_order", "mean", "std"}:
        status, by = "stated", "you"
    elif told and status != "stated":
        by = f"{by}; {', '.join(sorted(told))} as you say"
    elif told:
        by = f"{by} and you"
    return Pixels(made, status, by, tuple(map(str, before.get("decided", ()))))


def _guess(foreign: Foreign, known: dict[str, Any]) -> tuple[dict[str, Any], Status, str]:
    """Tell what the file itself says from what is only the habit of its framework, its naming or the network."""
    said = {name for name in ("mean", "std", "channel_order") if name in foreign.source.preprocessing}
    if foreign.beside is not None:
        said |= {name for name in ("mean", "std", "channel_order") if name in foreign.beside.preprocessing}
    habit = foreign.source.format in ("caffe", "deepcompression", "theano")  # whose files never say the order of channels
    said -= {"channel_order"} if habit else set()
    if foreign.takes_pixels or ({"mean", "std"} <= said and not habit):
        return known, "stated", "the file"
    named = foreign.customs
    if {"mean", "std"} <= said:
        return known, "guessed", f"channel order {known.get('channel_order', 'rgb').upper()}, as {foreign.source.format} mostly has it"
    if "mean" in known and "std" in known:
        return known, "guessed", f"what {named}'s own networks want"
    if "mean" not in known and "channel_order" in known:  # a mean in RGB is no guess for channels in BGR
        known = {name: value for name, value in known.items() if name not in ("channel_order", "std")}
    usual = f"the usual of {foreign.model.__name__}"
    if "mean" in said:
        usual = f"mean {', '.join(f'{value:.3g}' for value in known['mean'])} by the file, the rest {usual}"
    return known, "guessed", usual


def searched(
    network: Model, guess: Pixels, pictures: Pictures, fixed: Mapping[str, Any], progress: Callable[[str], None] = lambda _: None
) -> Pixels:
    """Search the preparation of images as the orientation of kernels is: every usual reading is tried on the photographs.

    Args:
        network: with the converted weights, in eval mode.
        guess: what is assumed; it stays where the evidence is too close.
        pictures: photographs; labelled ones, or for networks with BatchNorm any.
        fixed: what the caller says, which is not searched.
        progress: told what is being done.

    Returns:
        The reading that is right, with what decided; the guess with the numbers, where nothing decided.
    """
    if network.in_channels != 3 or not pictures.files:
        return guess
    trials = _Trials(network, guess.steps, pictures, progress)
    if trials.measure == "":
        return guess
    readings = {(order, name): _ranged(guess.steps, order, mean, std) for order in ("rgb", "bgr") for name, (mean, std) in RANGES.items()}
    if "channel_order" in fixed:
        readings = {key: value for key, value in readings.items() if value.channel_order == fixed["channel_order"]}
    if {"mean", "std"} & fixed.keys():
        readings = {(order, "as you say"): replace(guess.steps, channel_order=order) for order in ("rgb", "bgr")}
        readings = {key: value for key, value in readings.items() if value.channel_order == fixed.get("channel_order", value.channel_order)}
    best = trials.best([guess.steps, *readings.values()])
    if "size" not in fixed and trials.sized:
        best = trials.best([best, *_sizes(best, network)])
        best = trials.best([best, *(replace(best, interpolation=one) for one in ("bilinear", "bicubic", "nearest"))])
    return trials.verdict(guess, best)


def _ranged(base: Preprocessing, order: str, mean: Sequence[float], std: Sequence[float]) -> Preprocessing:
    turned = slice(None, None, -1) if order == "bgr" else slice(None)
    return replace(base, channel_order=order, mean=tuple(mean)[turned], std=tuple(std)[turned])


def _sizes(base: Preprocessing, network: Model) -> list[Preprocessing]:
    """List other usual ways to a square image: the whole picture's shorter side, and squashed."""
    side = base.crop or network.input_size
    wider = [side, round(side * 256 / 224)]
    return [replace(base, resize=resize, crop=side, squash=squash) for resize in wider for squash in (False, True)]


class _Reading(nn.Module):
    """A network that prepares RGB images of 0..1 by one reading."""

    def __init__(self, network: nn.Module, reading: Preprocessing) -> None:
        super().__init__()
        self.network, self.reading = network, reading

    def forward(self, x: Tensor) -> Tensor:
        return self.network(prepared(x.double(), self.reading).float())


class _Trials:
    """Readings tried on photographs; what one was worth is remembered."""

    def __init__(self, network: Model, guess: Preprocessing, pictures: Pictures, progress: Callable[[str], None]) -> None:
        self.network, self.pictures, self.progress = network, pictures, progress
        self.batches: dict[tuple[Any, ...], Tensor] = {}
        self.hits: dict[Preprocessing, np.ndarray] = {}
        self.distances: dict[Preprocessing, list[float]] = {}
        self.dropped: set[Preprocessing] = set()
        self.labels, self.opened = pictures.labels(network.num_classes, guess) if network.num_classes else (None, [])
        norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules())
        self.measure = "labels" if self.labels is not None else "statistics" if norms else ""
        self.sized = network.input_size >= 64

    def images(self, reading: Preprocessing) -> Tensor:
        """Prepare the photographs but for channel order and range, once for each geometry: uint8 (B, 3, H, W)."""
        key = (reading.resize, reading.crop, reading.interpolation, reading.squash)
        if key not in self.batches:
            self.batches.clear()  # a thousand photographs take 150 MB
            files = self.opened if self.labels is not None else self.pictures.files[:200]
            self.batches[key] = self.pictures.pixels(reading, files)
        return self.batches[key]

    def best(self, readings: Sequence[Preprocessing]) -> Preprocessing:
        """Find the best of several readings."""
        left = list(dict.fromkeys(readings))
        self.progress(f"trying {len(left)} readings of the pixels")
        if self.labels is None:
            for reading in left:
                self._distance(reading)
            return min(left, key=lambda reading: self.distances[reading][0])
        for count in (FIRST, THEN, len(self.labels)):
            for reading in left:
                self._hit(reading, count)
            ranked = sorted(left, key=lambda reading: -int(self.hits[reading][:count].sum()))
            rivals = [next((one for one in ranked if one.channel_order == order), None) for order in ("rgb", "bgr")]
            kept = [one for one in ranked if evidence.sigmas(self.hits[ranked[0]][:count], self.hits[one][:count]) < evidence.LABEL_SIGMAS]
            self.dropped |= set(left) - set(kept)
            left = list(dict.fromkeys([*kept, *(one for one in rivals if one is not None)]))
        return max(left, key=lambda reading: int(self.hits[reading].sum()))

    def _hit(self, reading: Preprocessing, count: int) -> None:
        done = self.hits.get(reading, np.zeros(0, bool))
        if self.labels is not None and len(done) < count:
            images = self.images(reading)[len(done) : count]
            found = evidence.hits(_Scaled(_Reading(self.network, reading)), images, self.labels[len(done) : count])
            self.hits[reading] = np.concatenate([done, found])

    def _distance(self, reading: Preprocessing) -> None:
        if reading not in self.distances:
            self.distances[reading] = evidence.statistics(_Scaled(_Reading(self.network, reading)), self.images(reading))

    def clear(self, best: Preprocessing, other: Preprocessing) -> bool:
        """Tell whether the evidence rejects `other`."""
        if self.labels is None:
            pairs = list(zip(self.distances[best], self.distances[other], strict=True))
            near = pairs[0][1] < evidence.STATISTICS_MARGIN * pairs[0][0]
            return not near and all(ours < theirs for ours, theirs in pairs)
        if other in self.dropped:
            return True
        both = min(len(self.hits[best]), len(self.hits[other]))
        return evidence.sigmas(self.hits[best][:both], self.hits[other][:both]) >= evidence.LABEL_SIGMAS

    def worth(self, reading: Preprocessing) -> float:
        return self.distances[reading][0] if self.labels is None else float(self.hits[reading].mean())

    def verdict(self, guess: Pixels, best: Preprocessing) -> Pixels:
        """Say which dimensions are decided, and keep of the guess what is not."""
        tried = list(self.hits if self.labels is not None else self.distances)
        close = [one for one in tried if not self.clear(best, one)]
        chosen = max(close, key=lambda one: (_alike(one, guess.steps), -abs(self.worth(one) - self.worth(best))))
        decided = tuple(d for d in DIMENSIONS if self._rivals(tried, best, d) and all(_part(one, d) == _part(best, d) for one in close))
        finished = [one for one in tried if self.labels is None or len(self.hits[one]) == len(self.labels)]
        table = {shown(one): self.worth(one) for one in finished}
        count = len(self.labels) if self.labels is not None else min(200, len(self.pictures.files))
        what = f"{count:,} labelled images" if self.labels is not None else f"BatchNorm statistics of {count:,} photographs"
        if why := self._silent(best):
            return replace(guess, by=f"{guess.by}; {what} say nothing: {why}", table=table)
        order = "channel order" if "channel order" in decided else next(iter(decided), "channel order")
        rivals = [one for one in finished if _part(one, order) != _part(best, order)] or [one for one in finished if one != best]
        rival = (min if self.labels is None else max)(rivals, key=self.worth, default=None)
        kept = best if not decided else chosen
        against = f"{self._number(kept)} against {self._number(rival)} ({_part(rival, order)})" if rival is not None else self._number(kept)
        left = [d for d in DIMENSIONS if self._rivals(tried, best, d) and d not in decided]
        if not decided:
            return replace(guess, steps=guess.steps, by=f"{guess.by}; {what} are too close to decide, {against}", table=table)
        rest = f"; {' and '.join(left)} GUESSED, too close to decide" if left else ""
        return Pixels(chosen, "decided", f"{what}, {against}: {', '.join(decided)}{rest}", decided, table)

    def _rivals(self, tried: Sequence[Preprocessing], best: Preprocessing, dimension: str) -> bool:
        return any(_part(one, dimension) != _part(best, dimension) for one in tried)

    def _silent(self, best: Preprocessing) -> str:
        if self.labels is None:
            far = self.worth(best)
            near = far <= evidence.STATISTICS_LEVEL
            return "" if near else f"the best is {far:.3g} away, so these are not images like those of the training"
        least = CHANCE / self.network.num_classes
        return f"the best reading gets {self._number(best)} right, hardly more than chance" if self.worth(best) < least else ""

    def _number(self, reading: Preprocessing) -> str:
        return f"distance {self.worth(reading):.3g}" if self.labels is None else f"{100 * self.worth(reading):.2f} %"


class _Scaled(nn.Module):
    """A reading that takes bytes."""

    def __init__(self, reading: _Reading) -> None:
        super().__init__()
        self.reading = reading

    def forward(self, x: Tensor) -> Tensor:
        return self.reading(x.double() / 255)


def _alike(one: Preprocessing, other: Preprocessing) -> int:
    """Count the dimensions in which two readings are the same."""
    return sum(_part(one, dimension) == _part(other, dimension) for dimension in DIMENSIONS)


def _part(reading: Preprocessing | None, dimension: str) -> str:
    """Write what a reading says in one dimension."""
    if reading is None:
        return ""
    if dimension == "channel order":
        return reading.channel_order.upper()
    if dimension == "interpolation":
        return reading.interpolation
    if dimension == "size":
        return f"{'squashed to' if reading.squash else 'resized to'} {reading.resize}, crop {reading.crop}"
    turned = slice(None, None, -1) if reading.channel_order == "bgr" else slice(None)
    return _range_name(reading.mean[turned], reading.std[turned])


def _range_name(mean: Sequence[float], std: Sequence[float]) -> str:
    near = (name for name, values in RANGES.items() if len(mean) == 3 and np.allclose((mean, std), values, rtol=1e-2, atol=2e-3 * min(std)))
    return next(near, f"mean {', '.join(f'{v:.4g}' for v in mean)}, std {', '.join(f'{v:.4g}' for v in std)}")


def shown(reading: Preprocessing) -> str:
    """Name a reading: "RGB, 0..1, resized to 256, crop 224, bilinear"."""
    return ", ".join(_part(reading, dimension) for dimension in DIMENSIONS)
