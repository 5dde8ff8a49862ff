"""Pictures for proofs: photographs of the user's, labelled or not, outputs of the source network, or a picture that is computed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import weights
from weights import Preprocessing
from zoo.conversion.own import OwnNetwork
from zoo.images.folder import image_files
from zoo.images.kinds import SUFFIXES
from zoo.images.preprocess import BadImage, pixels_of, preprocess, with_channels
from zoo.labels import TABLES, labels
from zoo.networks.model import Model

MOST = 1000
"""Photographs that are taken from a folder, evenly over all of them."""
PROOF_IMAGES = 2
"""Images that a network is run on layer by layer."""


@dataclass(slots=True)
class Pictures:
    """What there is to run networks on.

    Attributes:
        files: photographs.
        reference: inputs and outputs of the source network, as NumPy arrays.
    """

    files: list[Path] = field(default_factory=list)
    reference: tuple[np.ndarray, np.ndarray] | None = None

    @classmethod
    def of(cls, folder: Path | None, reference: tuple[np.ndarray, np.ndarray] | None = None) -> Pictures:
        """Collect the photographs below a folder; ValueError where there are none, FileNotFoundError where there is no folder."""
        files: list[Path] = []
        if folder is not None:
            if not Path(folder).is_dir():
                raise FileNotFoundError(f"there is no folder {folder}, which was to hold photographs")
            files = sorted(image_files(Path(folder)))
            if not files:
                raise ValueError(f"{folder} holds no pictures ({', '.join(SUFFIXES)})")
            files = [files[i * len(files) // MOST] for i in range(MOST)] if len(files) > MOST else files
        return cls(files, reference)

    def __bool__(self) -> bool:
        return bool(self.files) or self.reference is not None

    def evidence(self, network: Model, trained_on: Preprocessing, takes_pixels: bool) -> dict[str, Any]:
        """Give `convert.evidence.decide` the strongest that there is: reference outputs, labelled photographs, photographs."""
        if self.reference is not None:
            ours = self.referenced(network, trained_on, trained_on, takes_pixels)[1]
            return {"reference": (ours, torch.from_numpy(self.reference[1]).float())}
        labelled = self.labelled(network, trained_on)
        if labelled is not None:
            return {"labelled": labelled}
        return {"images": self._batch(trained_on, self.files[:200])}

    def inputs(
        self, network: Model, trained_on: Preprocessing, wanted: Preprocessing, takes_pixels: bool, side: int | None = None
    ) -> tuple[np.ndarray, Tensor]:
        """Prepare a few pictures for both networks.

        Args:
            network: ours.
            trained_on: what the source network's images are prepared by.
            wanted: what ours are prepared by; another only after a fold.
            takes_pixels: whether the source network prepares them itself.
            side: of the images in pixels, where the source network takes no other; else the crop's.

        Returns:
            What the source network takes, float64, and what ours takes, float32; both (B, C, H, W).
        """
        if self.files:
            plain = replace(trained_on, channel_order="rgb", mean=(0.0,) * network.in_channels, std=(1.0,) * network.in_channels)
            if side is not None:
                plain = replace(plain, resize=max(side, plain.resize or side), crop=side)
            unit = self._batch(plain, self.files[:PROOF_IMAGES]).double()
        else:
            unit = natural(PROOF_IMAGES, *image_shape(network, side or wanted.crop)).double() / 255
        theirs = 255 * unit if takes_pixels else prepared(unit, trained_on)
        return theirs.numpy(), prepared(unit, wanted).float()

    def referenced(self, network: Model, trained_on: Preprocessing, wanted: Preprocessing, takes_pixels: bool) -> tuple[np.ndarray, Tensor]:
        """Prepare the reference's inputs, which are as the source network took them, for both networks; as `inputs`."""
        if self.reference is None:
            raise ValueError("there is no reference")
        theirs = self.reference[0]
        if theirs.shape[1] != network.in_channels and theirs.shape[3] == network.in_channels:
            theirs = np.ascontiguousarray(theirs.transpose(0, 3, 1, 2))
        given = torch.from_numpy(theirs.astype(np.float64))
        if not takes_pixels and wanted == trained_on:
            return theirs.astype(np.float64), given.float()
        unit = given / 255 if takes_pixels else unprepared(given, trained_on)
        return theirs.astype(np.float64), prepared(unit, wanted).float()

    def labels(self, classes: int, wanted: Preprocessing) -> tuple[Tensor | None, list[Path]]:
        """Tell the classes of the photographs that have some and can be opened, and which those are; None where there are too few."""
        named = self._named(classes)
        if named is None:
            return None, []
        opened = self.readable([path for path, _ in named], wanted)
        there = set(opened)
        return torch.tensor([which for path, which in named if path in there]), opened

    def readable(self, files: Sequence[Path], wanted: Preprocessing) -> list[Path]:
        """List the pictures that can be opened."""
        found: list[Path] = []
        for path in files:
            with suppress(BadImage):
                pixels_of(path, wanted, str(path))
                found.append(path)
        return found

    def pixels(self, wanted: Preprocessing, files: Sequence[Path]) -> Tensor:
        """Read, resize and crop pictures that end in one size: uint8 (B, C, H, W) in RGB; those that can't be opened are left out."""
        made: list[np.ndarray] = []
        for path in files:
            with suppress(BadImage):
                made.append(pixels_of(path, wanted, str(path)))
        _check_alike(made)
        return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)

    def _named(self, count: int) -> list[tuple[Path, int]] | None:
        """List the photographs whose class their file or folder names; None where there are too few."""
        classes = _classes(count)
        if self.files and all(_numbered(path, count) is not None for path in self.files):
            classes = {str(number): number for number in range(count)}
        named = [(path, which) for path in self.files if (which := _class_of(path, classes)) is not None]
        return None if len(named) < max(10, len(self.files) // 2) else named

    def labelled(self, network: Model, wanted: Preprocessing) -> tuple[Tensor, Tensor] | None:
        """Prepare the photographs whose class their file or folder names; None where there are none."""
        named = self._named(network.num_classes)
        if named is None:
            return None
        batch, opened = self._opened(wanted, [path for path, _ in named])
        return batch, torch.tensor([named[index][1] for index in opened])

    def _batch(self, wanted: Preprocessing, files: list[Path]) -> Tensor:
        return self._opened(wanted, files)[0]

    def _opened(self, wanted: Preprocessing, files: list[Path]) -> tuple[Tensor, list[int]]:
        """Prepare the pictures that can be opened, and say which of them those are."""
        made, opened = [], []
        for index, path in enumerate(files):
            try:
                made.append(preprocess(path, wanted))
            except BadImage:
                continue
            opened.append(index)
        _check_alike(made)
        return torch.cat(made), opened


def _check_alike(pictures: Sequence[np.ndarray | Tensor]) -> None:
    if not pictures:
        raise BadImage("none of the pictures can be opened")
    if len({one.shape for one in pictures}) > 1:
        raise BadImage("the pictures end in different sizes; zoo convert --size SIDE cuts squares out of all of them")


def steps(network: Model, known: Mapping[str, Any]) -> Preprocessing:
    """Complete what is known of the preprocessing by that of the default checkpoint, or else ImageNet's usual one."""
    if isinstance(network, OwnNetwork):
        plain = Preprocessing(None, None, "bilinear", (0.0,) * network.in_channels, (1.0,) * network.in_channels)
        return replace(plain, **{f.name: known[f.name] for f in fields(Preprocessing) if f.name in known})
    name = type(network).variant().__name__
    default = next((c for c in weights.checkpoints(name) if c.default), None)
    base = default.preprocessing if default is not None else weights.adhoc(name, "file:///none").preprocessing
    if default is None and network.input_size < 64:
        base = replace(base, resize=network.input_size, crop=network.input_size)
    told = {f.name: known[f.name] for f in fields(Preprocessing) if f.name in known}
    told |= {key: tuple(float(v) for v in told[key]) for key in ("mean", "std") if key in told}
    made = replace(base, **told)
    return made if len(made.mean) == network.in_channels else with_channels(made, network.in_channels)


def image_shape(network: Model, side: int | None = None) -> tuple[int, ...]:
    """Return the shape of one input: (channels, side, side), or what the user said of a network of their own."""
    if isinstance(network, OwnNetwork) and (side is None or len(network.image_shape) == 1 or not network.assumed_shape):
        return network.image_shape
    return (network.in_channels, side or network.input_size, side or network.input_size)


def natural(count: int, channels: int, height: int = 0, width: int = 0, seed: int = 0) -> Tensor:
    """Compute pictures with the statistics of photographs: smooth light, edges, shapes and grain, never symmetric.

    Returns:
        float32 (count, channels, height, width) of whole numbers, 0..255; a square without `width`; without `height` (count, channels),
        values that have nothing to do with each other.
    """
    random = np.random.default_rng(seed)
    if not height:
        return torch.from_numpy(random.integers(0, 256, (count, channels))).float()
    width = width or height
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    pictures = np.empty((count, channels, height, width))
    for picture in pictures:
        light = 110 + 70 * x * random.uniform(0.3, 1) + 40 * y * random.uniform(-1, 1)
        tint = random.uniform(0.7, 1.2, channels)
        for _ in range(12):
            cx, cy, r = random.uniform(0, 1, 3) * (1, 1, 0.3)
            inside = (abs(x - cx) < r) & (abs(y - cy) < r / 2) if random.random() < 0.5 else (x - cx) ** 2 + (y - cy) ** 2 < r * r
            light = np.where(inside, random.uniform(0, 255), light)
        picture[:] = light * tint[:, None, None] + random.normal(0, 6, (channels, height, width))
    return torch.from_numpy(pictures.clip(0, 255).round()).float()


def prepared(unit: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Bring RGB pixels, 0..1, to what a network was trained on."""
    mean, std = (_along(values, unit) for values in (preprocessing.mean, preprocessing.std))
    return ((unit.flip(1) if preprocessing.channel_order == "bgr" else unit) - mean) / std


def unprepared(images: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Undo `prepared`."""
    mean, std = (_along(values, images) for values in (preprocessing.mean, preprocessing.std))
    unit = images * std + mean
    return unit.flip(1) if preprocessing.channel_order == "bgr" else unit


def _along(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(1, -1, *(1 for _ in like.shape[2:]))


def _classes(count: int) -> dict[str, int]:
    """Map wnids and unique names to classes, by the list of labels that has as many."""
    for table in sorted(TABLES.glob("*.tsv")):
        known = labels(table.stem)
        if len(known) == count:
            named = {label.wnid: index for index, label in enumerate(known) if label.wnid}
            often = Counter(label.name.lower() for label in known)  # ImageNet has two cranes
            return named | {label.name.lower(): index for index, label in enumerate(known) if often[label.name.lower()] == 1}
    return {}


def _words(path: Path) -> tuple[str, str]:
    return path.parent.name.lower(), re.split(r"[_\-. ]", path.stem)[0].lower()


def _class_of(path: Path, classes: Mapping[str, int]) -> int | None:
    """Find the class in the name of a picture's folder or, before a `_`, of its file."""
    return next((classes[word] for word in _words(path) if word in classes), None)


def _numbered(path: Path, count: int) -> int | None:
    return next((int(word) for word in _words(path) if word.isdigit() and len(word) < 6 and int(word) < count), None)
