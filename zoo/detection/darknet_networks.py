"""Darknet's detectors: a network from the sections of a .cfg, by name or of one's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from convert.formats import _darknet_cfg as cfg
from weights.errors import ConvertError, LimitExceeded, MalformedFile
from weights.places import at_home
from weights.regular import open_regular
from zoo.detection.darknet_layers import EPS, layer, pjreddie_variance
from zoo.detection.decoding import Head, decoded, head
from zoo.detection.detections import Detections
from zoo.detection.detector import Detector
from zoo.detection.fitting import Fit, fit, fitted, unfitted
from zoo.detection.greedy import suppress
from zoo.networks.model import check_images

HEADS = ("yolo", "region")
MOST_SIDE = 8192
"""Pixels of a side that a network's image may have."""


class Step(NamedTuple):
    """A section that computes.

    Attributes:
        number: of the section.
        feeds: numbers of the sections that it reads; -1 is the image.
        drops: numbers of those that nobody reads behind it.
    """

    number: int
    feeds: tuple[int, ...]
    drops: tuple[int, ...]


class Darknet(Detector):
    """Redmon, Farhadi, Bochkovskiy, Wang and others: networks that a .cfg describes, section by section.

    Its layers are called after their sections, `layers.3.conv`, `layers.3.norm`. It gives the maps before its heads; `answer` decodes them.

    Attributes:
        image_size: height and width in pixels of the images that `answer` makes.
        heads: the heads, in order.
    """

    cfg: ClassVar[str]
    """The text of the .cfg, without what is of training."""
    labels: ClassVar[str | None] = "coco"
    letterbox: ClassVar[bool] = True
    """Whether photographs keep their shape, where no record says it."""
    size_multiple: ClassVar[int]
    """Both sides of an image are a multiple of this many pixels: the longest stride of its maps."""
    paper: ClassVar[str] = "https://arxiv.org/abs/1804.02767"

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        if "cfg" in vars(cls):
            cls.size_multiple = cls.min_size = stride_of(cfg.parse(cls.cfg))

    def __init__(
        self,
        num_classes: int | None = None,
        image_size: int | Sequence[int] | None = None,
        batch_norm: str = "alexeyab",
        nms: str = "iou",
    ) -> None:
        """Build it.

        Args:
            num_classes: other than the .cfg's.
            image_size: side in pixels of the images that `answer` makes, or height and width; the .cfg's if left out.
            batch_norm: whose Darknet's BatchNorm it computes, "alexeyab" or "pjreddie"; a .weights says whose it is.
            nms: which overlap makes a box go: "iou", or "cfg", the one that the .cfg names by nms_kind, which may forgive distance.

        Raises:
            ValueError: an argument is none of these, or the strides don't allow the size.
            ConvertError: the .cfg is damaged, or needs what nobody here computes.
        """
        super().__init__()
        if batch_norm not in EPS:
            raise ValueError(f'batch_norm is "alexeyab" or "pjreddie", got {batch_norm!r}')
        if nms not in ("iou", "cfg"):
            raise ValueError(f'nms is "iou" or "cfg", got {nms!r}')
        sections = parsed(self.cfg, num_classes)
        self.nms = nms
        self.batch_norm = batch_norm
        self.in_channels = sections[0].makes[0]
        self.layers = nn.ModuleDict()
        self.heads, self.ends = self._build(sections)
        self.num_classes = self.heads[0].classes
        asked = sections[0].makes[1:] if image_size is None else _sides(image_size)
        self.check_size(*asked)
        self.image_size = asked

    def _build(self, sections: Sequence[cfg.Section]) -> tuple[tuple[Head, ...], tuple[int, ...]]:
        maps = {-1: sections[0].makes} | {section.index: section.makes for section in sections[1:]}
        real = {-1: -1}
        computed: list[tuple[int, tuple[int, ...]]] = []
        heads: list[Head] = []
        ends: list[int] = []
        for section in sections[1:]:
            feeds = tuple(real[index] for index in section.feeds)
            if section.kind in HEADS:
                heads.append(head(section))
                ends.append(feeds[0])
                real[section.index] = feeds[0]  # nobody reads a head; a route may only count over it
                continue
            self.layers[str(section.index)] = layer(section, [maps[index] for index in section.feeds], self.batch_norm)
            computed.append((section.index, feeds))
            real[section.index] = section.index
        if len({one.classes for one in heads}) != 1:
            raise MalformedFile(
                f"a detector has [yolo] or [region] sections of one number of classes; here are {[h.classes for h in heads]}"
            )
        last = {feed: index for index, feeds in computed for feed in feeds}
        self._steps = [
            Step(index, feeds, tuple(feed for feed in dict.fromkeys(feeds) if last[feed] == index and feed not in ends))
            for index, feeds in computed
            if index <= max(ends)
        ]
        return tuple(heads), tuple(ends)

    @property
    def classifiers(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Names of the convolutions before the heads."""
        return tuple(f"layers.{index}" for index in self.ends)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute the maps before the heads, in their order.

        Args:
            x: floating point (B, channels, H, W), prepared as `fitting.fitted` does; H and W are multiples of `size_multiple`.

        Returns:
            (B, anchors (5 + classes), H / stride, W / stride) of each head.

        Raises:
            ValueError: the tensor is no such batch; the message names the nearest size.
        """
        check_images(x, _Takes(self), type(self).__name__)
        if not torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            self.check_size(int(x.shape[2]), int(x.shape[3]))
        maps = {-1: x}
        for index, feeds, drops in self._steps:
            maps[index] = self.layers[str(index)](*(maps[feed] for feed in feeds))
            for feed in drops:
                del maps[feed]
        return tuple(maps[index] for index in self.ends)

    def check_size(self, height: int, width: int) -> None:
        """Raise ValueError, naming the nearest size, where the strides don't allow an image of these sides in pixels."""
        step = self.size_multiple
        if height % step or width % step or min(height, width) < step or max(height, width) > MOST_SIDE:
            near = [min(max(step, round(side / step) * step), MOST_SIDE // step * step) for side in (height, width)]
            raise ValueError(
                f"{type(self).__name__} takes images whose sides are multiples of {step} pixels, {step} to {MOST_SIDE}, got "
                f"{height}x{width}; the nearest are {near[0]}x{near[1]}"
            )

    def answer(self, photographs: Sequence[Tensor], threshold: float, overlap: float) -> list[Detections]:
        """Find the things on photographs; see `Detector.answer`."""
        return self.answer_by(self, photographs, threshold, overlap)

    def answer_by(
        self, network: Callable[[Tensor], Any], photographs: Sequence[Tensor], threshold: float, overlap: float
    ) -> list[Detections]:
        """Find the things on photographs, the maps computed by `network`; see `Detector.answer_by`."""
        keeps = self.letterbox if self.checkpoint is None else self.checkpoint.preprocessing.letterbox
        height, width = self.image_size
        fits = [fit((int(one.shape[2]), int(one.shape[1])), (width, height), keeps) for one in photographs]
        like = next(self.parameters()) if network is self else torch.empty(0, device=getattr(network, "device", "cpu"))
        return self.read(network(fitted(photographs, fits, like)), fits, threshold, overlap)

    def read(self, maps: Sequence[Tensor], fits: Sequence[Fit], threshold: float, overlap: float) -> list[Detections]:
        """Turn the maps before the heads into the things on each photograph: decode, choose, suppress, undo the fitting."""
        found = [decoded(one, by, fits[0].image) for one, by in zip(maps, self.heads, strict=True)]
        boxes, thing, classes = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        probable = torch.where(thing > threshold, thing, torch.zeros_like(thing))[..., None] * classes
        place, row, label = (probable > threshold).nonzero(as_tuple=True)
        chosen, scores = boxes[place, row], probable[place, row, label]
        corners = torch.cat([chosen[:, :2] - chosen[:, 2:] / 2, chosen[:, :2] + chosen[:, 2:] / 2], 1)
        power = self.heads[-1].power if self.nms == "cfg" else None
        stays = suppress(corners, scores, place * self.num_classes + label, overlap, power)
        place, label, scores = place[stays], label[stays], scores[stays]
        corners = unfitted(corners[stays], place, fits)
        where, named = place.tolist(), label.tolist()
        answers: list[Detections] = []
        for number, one in enumerate(fits):
            rows = [at for at, photograph in enumerate(where) if photograph == number]
            names = self.names_of([named[at] for at in rows])
            answers.append(Detections(corners[rows], scores[rows], label[rows], names, one.size))
        return answers

    @classmethod
    def usual_classes(cls) -> int:
        """Return the number of the .cfg's classes."""
        return next(one.number("classes", 20) for one in cfg.parse(cls.cfg)[1:] if one.kind in HEADS)

    @classmethod
    def description(cls, format: str) -> tuple[str, str] | None:
        """Return the .cfg, which the reader of a .weights needs."""
        return (".cfg", cls.cfg) if format == "darknet" else None

    @classmethod
    def told_by(cls, facts: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return whose BatchNorm a .weights needs, by its revision, and how photographs are fitted."""
        lineage = {"batch_norm": facts["kernelzoo.batch_norm"]} if facts.get("kernelzoo.batch_norm") in EPS else {}
        if facts.get("format") == "darknet":
            lineage = {"batch_norm": "alexeyab" if facts.get("version") == "0.2.5" else "pjreddie"}
        net = cfg.parse(cls.cfg)[0]
        side = max(net.makes[1:])
        how = {"letterbox" if cls.letterbox else "squash": True}
        return lineage, {"resize": side, "crop": None, "interpolation": "bilinear", "mean": (0.0,) * 3, "std": (1.0,) * 3, **how}

    def adopt(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a .weights' tensors, called after sections, under this network's names; a variance as its BatchNorm takes it."""
        if any(name.startswith("layers.") for name in tensors):
            return dict(tensors)
        given = {f"layers.{name}": tensor for name, tensor in tensors.items()}
        if self.batch_norm == "pjreddie":
            given |= {name: pjreddie_variance(tensor) for name, tensor in given.items() if name.endswith("running_var")}
        return given


class _Takes(NamedTuple):
    """What `check_images` asks of a network; sizes are looked at by `check_size`, which knows the nearest."""

    network: Darknet
    min_size: int = 1
    size_multiple: int = 1
    fixed_size: bool = False

    @property
    def in_channels(self) -> int:
        return self.network.in_channels

    @property
    def input_size(self) -> int:
        return self.network.input_size


def darknet(
    path: str | os.PathLike[str], *, letterbox: bool | None = None, names: str | os.PathLike[str] | Sequence[str] | None = None
) -> type[Darknet]:
    """Make a class of a network of your own from its .cfg; `trained(darknet("x.cfg"), "x.weights")` gives it its weights.

    Args:
        path: of the .cfg.
        letterbox: whether photographs keep their shape; left out, as the .cfg's letter_box says, and AlexeyAB's Darknet stretches them
            without it.
        names: of the classes: a list of them, or the path of Darknet's .names, one a line; left out, they are "class 0" and so on.

    Returns:
        The class; it is in no catalogue.

    Raises:
        FileNotFoundError: there is no such file.
        ConvertError: it is damaged or too long, or needs what nobody here computes; the message names the section.

    Example:
        >>> model = trained(darknet("mine.cfg"), "mine.weights")  # doctest: +SKIP
    """
    file, text = at_home(path), _text(path)
    name = "".join(part for part in Path(file).stem.title() if part.isalnum()) or "Network"
    try:
        made = type(name if name[0].isalpha() else f"Darknet{name}", (Darknet,), {"cfg": text, "labels": None})
        net = parsed(text, None)[0]
        made.input_size = max(net.makes[1:])
        made.letterbox = bool(net.number("letter_box")) if letterbox is None else letterbox
        with torch.device("meta"):
            classes = made().num_classes
    except ConvertError as error:
        raise type(error)(f"{file}: {error}") from error
    except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError) as error:  # numbers that make no layer
        raise MalformedFile(f"{file}: {error}") from error
    if names is not None:
        called = [line.strip() for line in _text(names).splitlines()] if isinstance(names, str | os.PathLike) else list(names)
        made.called = tuple(name for name in called if name)
        if len(made.called) != classes:
            raise ValueError(f"{len(made.called)} names are given, and {file} has {classes} classes")
    return made


def _text(path: str | os.PathLike[str]) -> str:
    file = at_home(path)
    with os.fdopen(open_regular(file, follow=True), "rb") as opened:
        data = opened.read(cfg.MAX_BYTES + 1)
    if len(data) > cfg.MAX_BYTES:
        raise LimitExceeded(f"{file} has more than {cfg.MAX_BYTES} bytes, which no description of a network has")
    return data.decode("utf-8", errors="replace")


def parsed(text: str, num_classes: int | None) -> list[cfg.Section]:
    """Read a description, for another number of classes if it is given."""
    sections = cfg.parse(text)
    if num_classes is None:
        return sections
    for section in sections[1:]:
        if section.kind in HEADS:
            before = sections[section.feeds[0] + 1]
            anchors = section.number("num", 1) if section.kind == "region" else len(section.numbers("mask")) or section.number("num", 1)
            section.settings["classes"] = str(num_classes)
            before.settings["filters"] = str(anchors * (5 + num_classes))
    lines = [line for one in sections for line in (f"[{one.kind}]", *(f"{name}={value}" for name, value in one.settings.items()))]
    return cfg.parse("\n".join(lines))


def stride_of(sections: Sequence[cfg.Section]) -> int:
    """Return the longest stride of a network's maps in pixels, which sides of its images are multiples of."""
    strides: dict[int, int] = {-1: 1}
    for section in sections[1:]:
        stride = strides[section.feeds[-1] if section.kind == "scale_channels" else section.feeds[0]]
        if section.kind in ("convolutional", "maxpool", "local_avgpool"):
            stride *= max(section.stride)
        elif section.kind == "reorg":
            stride *= section.number("stride", 1)
        elif section.kind == "upsample":
            stride = max(1, stride // max(1, section.number("stride", 2)))
        strides[section.index] = stride
    return max(strides.values())


def _sides(image_size: Any) -> tuple[int, int]:
    sides = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in sides):
        raise ValueError(f"image_size is a number of pixels, or height and width, got {image_size!r}")
    return sides
