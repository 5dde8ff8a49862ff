"""The images of each step: in memory where they are small, decoded by worker processes where they aren't."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from weights import Preprocessing
from zoo.finetuning.augment import SMALL, Augment, exact, kind_of, mixed, normalised, seed_for, shifted
from zoo.finetuning.chance import order_of, uniform
from zoo.finetuning.distributed import World
from zoo.finetuning.settings import Settings
from zoo.finetuning.splits import Split
from zoo.images import BadImage, decode

MEMORY = 4 << 30
"""Bytes of images that are kept decoded at most."""
ALWAYS = 3
"""Unreadable images that any data may have."""
TRIES = 100
"""Unreadable images one after the other that stand for data that are no images at all."""


class TooManyUnreadable(ValueError):
    """More images can't be read than `max_unreadable` allows."""


class Target(NamedTuple):
    """What the images of a batch shall be taken for, on the device.

    Attributes:
        classes: int64 (B,).
        weights: float32 (B,), how much each counts.
        partners: for mixed images the places of the others, (B,); else None.
        share: for mixed images what counts of its own class, (B,); else None.
    """

    classes: Tensor
    weights: Tensor
    partners: Tensor | None = None
    share: Tensor | None = None


class Batch(NamedTuple):
    """Part of a step, on the device.

    Attributes:
        images: float32 (B, C, H, W).
        target: theirs.
    """

    images: Tensor
    target: Target


class Unreadable:
    """The images that could not be read, and why."""

    def __init__(self, of: int, share: float) -> None:
        self.reasons: dict[str, str] = {}
        self._of, self._allowed = of, max(ALWAYS, int(share * of))

    def add(self, key: str, reason: str) -> None:
        """Note one.

        Raises:
            TooManyUnreadable: there are more than are allowed.
        """
        self.reasons.setdefault(key, reason)
        if len(self.reasons) > self._allowed:
            shown = "".join(f"\n  {reason}" for reason in list(self.reasons.values())[:5])
            raise TooManyUnreadable(
                f"{len(self.reasons)} of {self._of} images can't be read, more than max_unreadable allows ({self._allowed}):{shown}\n"
                "Mend or delete them, or raise max_unreadable."
            )


class Pictures(Dataset[tuple[Tensor, int, list[tuple[str, str]]]]):
    """Torch's view of a split: (epoch, position) gives an image, its position, and what could not be read on the way.

    In place of an unreadable image stands the next one, so that a step has as many images as any other, or, where nothing is
    augmented because it is measured, nothing: position -1.
    """

    def __init__(self, part: Split, steps: Preprocessing, settings: Settings, augment: bool) -> None:
        self._part, self._steps, self._settings = part, steps, settings
        self._augment = Augment(settings, steps) if augment else None

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, what: tuple[int, int]) -> tuple[Tensor, int, list[tuple[str, str]]]:
        epoch, position = what
        bad: list[tuple[str, str]] = []
        for place in range(position, position + min(TRIES, len(self))):
            found = place % len(self)
            key = self._part.key(found)
            try:
                image = decode(self._part.source.read(self._part.indices[found]), key)
            except (BadImage, OSError) as error:
                bad.append((key, str(error)))
                if self._augment is None:
                    side = self._steps.crop or 0
                    return torch.zeros(len(self._steps.mean), side, side, dtype=torch.uint8), -1, bad
                continue
            if self._augment is None:
                return exact(image, key, self._steps), found, bad
            return self._augment(image, key, seed_for(self._settings, epoch, position)), found, bad
        raise TooManyUnreadable(f"{len(bad)} images one after the other can't be read; the last: {bad[-1][1]}")


def _stack(rows: list[tuple[Tensor, int, list[tuple[str, str]]]]) -> tuple[Tensor, Tensor, list[tuple[str, str]]]:
    return torch.stack([r[0] for r in rows]), torch.tensor([r[1] for r in rows]), [one for r in rows for one in r[2]]


class _Ahead:
    """The steps' positions for torch's DataLoader, which asks for them ahead; `begun` keeps what else is known of each."""

    def __init__(self, parts: Iterator[tuple[int, int, Tensor, slice]]) -> None:
        self._parts = parts
        self.begun: deque[tuple[int, slice]] = deque()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step, epoch, positions, places in self._parts:
            self.begun.append((step, places))
            yield [(epoch, position) for position in positions.tolist()]


def in_memory(part: Split, steps: Preprocessing, settings: Settings, unreadable: Unreadable) -> tuple[Split, Tensor] | None:
    """Decode all images of a split at once, if they are small and change by shifts and mirrors only.

    Returns:
        The split without what can't be read, and uint8 (N, C, H, W) on the CPU; None where they don't fit.

    Raises:
        TooManyUnreadable: as it says.
    """
    side, channels = steps.crop or 0, len(steps.mean)
    by_chance = settings.randaugment or settings.rotate or kind_of(settings, steps) == "resized"
    if side > SMALL or by_chance or len(part) * channels * side * side > MEMORY:
        return None

    def read(position: int) -> Tensor | str:
        key = part.key(position)
        try:
            return exact(decode(part.source.read(part.indices[position]), key), key, steps)
        except (BadImage, OSError) as error:
            return str(error)

    images = torch.empty(len(part), channels, side, side, dtype=torch.uint8)
    kept: list[int] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for position, found in enumerate(pool.map(read, range(len(part)))):
            if isinstance(found, str):
                unreadable.add(part.key(position), found)
            else:
                images[position] = found
                kept.append(position)
    if len(kept) < len(part):
        part, images = without(part, kept), images[kept]
    return part, images


def without(part: Split, kept: list[int]) -> Split:
    """Keep only these positions of a split."""
    groups, strata = ([names[i] for i in kept] if names else None for names in (part.groups, part.strata))
    return replace(part, indices=[part.indices[i] for i in kept], targets=part.targets[kept], groups=groups, strata=strata)


class Batches:
    """The batches of a split for one process, step after step or once through.

    Args:
        part: the images.
        steps: their preprocessing, of a definite size.
        settings: of the run.
        here: the processes; each gets its part of a step.
        weights: float32 (N,), how much each image counts.
        unreadable: where unreadable images are noted.
        images: what `in_memory` gave, or None to decode each time.
    """

    def __init__(
        self,
        part: Split,
        steps: Preprocessing,
        settings: Settings,
        here: World,
        weights: np.ndarray,
        unreadable: Unreadable,
        images: Tensor | None,
    ) -> None:
        self.part, self._steps, self._settings, self._here, self.unreadable = part, steps, settings, here, unreadable
        self._images = None if images is None else images.to(here.device)
        self._mean, self._std = (torch.tensor(v, device=here.device).view(-1, 1, 1) for v in (steps.mean, steps.std))
        self._targets, self._weights = (torch.from_numpy(values).to(here.device) for values in (part.targets, weights))

    def __len__(self) -> int:
        return len(self.part)

    @property
    def side(self) -> int:
        """Height and width of the images, pixels."""
        return self._steps.crop or 0

    def training(self, start: int, stop: int, batch: int) -> Iterator[Batch]:
        """Give this process's parts of the steps `start` to `stop`, of `batch` images over all processes, one after the other."""
        parts = self._parts(start, stop, batch)
        if self._images is not None:
            yield from (self._remembered(*part, batch) for part in parts)
            return
        ahead = _Ahead(parts)
        for images, found, bad in self._loader(ahead, augment=True):
            step, places = ahead.begun.popleft()
            self._note(bad)
            x = self._normalised(images.to(self._here.device, non_blocking=True))
            yield self._batch(x, found.to(self._here.device), step, places, batch)

    def measuring(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Give this process's share of all images, once: the images, and their positions, -1 for padding.

        Every process gets as many batches as any other: divided networks exchange their weights in each.
        """
        rank, size = self._here.rank, self._here.size
        each = -(-len(self) // size)
        mine = [p if p < len(self) else -1 for p in range(rank, each * size, size)]
        chunks = [mine[i : i + batch] for i in range(0, each, batch)]
        if self._images is not None:
            for chunk in chunks:
                places = torch.tensor(chunk, device=self._here.device)
                yield self._normalised(self._images[places.clamp(min=0)]), places
            return
        loaded = self._loader([[(0, max(0, p)) for p in chunk] for chunk in chunks], augment=False)
        for chunk, (images, found, bad) in zip(chunks, loaded, strict=True):
            self._note(bad)
            places = torch.where(torch.tensor(chunk) < 0, -1, found)
            yield self._normalised(images.to(self._here.device, non_blocking=True)), places.to(self._here.device)

    def _parts(self, start: int, stop: int, batch: int) -> Iterator[tuple[int, int, Tensor, slice]]:
        """Divide the steps: (step, epoch, positions of the images, their places in the step)."""
        per_epoch = len(self) // batch
        order, known = torch.empty(0), -1
        size = batch // (self._here.size * self._settings.accumulate)
        for step in range(start, stop):
            epoch, place = divmod(step, per_epoch)
            if epoch != known:
                order, known = order_of(len(self), self._settings.seed, "order", epoch), epoch
                order = order if self._images is None else order.to(self._here.device)
            for turn in range(self._settings.accumulate):
                first = (turn * self._here.size + self._here.rank) * size
                yield step, epoch, order[place * batch :][first : first + size], slice(first, first + size)

    def _remembered(self, step: int, epoch: int, positions: Tensor, places: slice, batch: int) -> Batch:
        assert self._images is not None
        if getattr(self, "_epoch", None) != epoch:
            self._epoch, fate = epoch, uniform(len(self), 3, self._settings.seed, "fate", epoch)
            self._fate = fate.to(self._here.device)
        x = self._normalised(self._images[positions])
        if kind_of(self._settings, self._steps) == "pad":
            x = shifted(x, self._fate[positions], self._settings.flip)
        elif self._settings.flip:
            x = torch.where((self._fate[positions, 2] < 0.5).view(-1, 1, 1, 1), x.flip(3), x)
        return self._batch(x, positions, step, places, batch)

    def _batch(self, x: Tensor, positions: Tensor, step: int, places: slice, batch: int) -> Batch:
        targets, weights = self._targets[positions], self._weights[positions]
        if not self._settings.mixes:
            return Batch(x, Target(targets, weights))
        x, share = mixed(x, places, batch // 2, self._settings, step)
        partners = torch.arange(len(x), device=x.device).view(-1, 2).flip(1).flatten()
        return Batch(x, Target(targets, weights, partners, share))

    def _normalised(self, x: Tensor) -> Tensor:
        return normalised(x, self._mean, self._std)

    def _loader(self, wanted: Iterable[list[tuple[int, int]]], augment: bool) -> Any:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        usual = min(8, max(1, cores // self._here.size))
        workers = usual if self._settings.workers is None else self._settings.workers
        pictures = Pictures(self.part, self._steps, self._settings, augment)
        loader = DataLoader(
            pictures,
            batch_sampler=wanted,
            num_workers=workers,
            collate_fn=_stack,
            pin_memory=self._here.device.type == "cuda",
            prefetch_factor=4 if workers else None,
        )
        with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads, and torch's workers are forks
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            return iter(loader)

    def _note(self, bad: list[tuple[str, str]]) -> None:
        for key, reason in bad:
            self.unreadable.add(key, reason)
