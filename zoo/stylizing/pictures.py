"""The photographs that a style is trained on: decoded in threads, kept small in memory where there is room."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from zoo.images import BadImage, Source, decode
from zoo.stylizing.crops import ALIKE, crops

log = logging.getLogger("zoo")

MEMORY = 4 << 30
"""Bytes of decoded photographs that are kept at most; beyond, each is decoded anew when it is drawn."""
AHEAD = 4
"""Steps whose photographs are made ready beforehand."""
TRIES = 100
"""Unreadable photographs one after the other that stand for a folder that holds none."""


class Pictures:
    """Photographs of a source by number, reduced to what crops need.

    Attributes:
        unreadable: reasons by the names of photographs that can't be read; the next one takes their place.
    """

    def __init__(self, source: Source, size: int) -> None:
        """Take a source, and the side of the crops in pixels."""
        self.source, self.short = source, round(ALIKE * size)
        self.unreadable: dict[str, str] = {}
        self._kept: dict[int, Tensor] = {}
        self._room = MEMORY
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.source)

    def __call__(self, number: int) -> Tensor:
        """Return a photograph, uint8 (3, H, W); any thread may ask.

        Raises:
            BadImage: a hundred one after the other can't be read.
        """
        for tried in range(min(TRIES, len(self.source))):
            at = (number + tried) % len(self.source)
            if (kept := self._kept.get(at)) is not None:
                return kept
            key = self.source[at].key
            if key in self.unreadable:
                continue
            try:
                pixels = self._decoded(at, key)
            except (BadImage, OSError) as error:
                with self._lock:
                    if key not in self.unreadable:
                        self.unreadable[key] = str(error)
                        log.warning("left out: %s", error)
                continue
            with self._lock:
                if pixels.numel() <= self._room and at not in self._kept:
                    self._kept[at] = pixels
                    self._room -= pixels.numel()
            return pixels
        raise BadImage(f"none of {min(TRIES, len(self.source))} photographs of '{self.source.where}' one after the other can be read")

    def _decoded(self, at: int, key: str) -> Tensor:
        from PIL.Image import Resampling

        image = decode(self.source.read(at), key)
        share = self.short / min(image.size)
        if share < 1:
            image = image.resize([max(self.short, round(share * side)) for side in image.size], Resampling.BILINEAR)
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).contiguous()


def steps_of(pictures: Pictures, first: int, last: int, *, batch: int, size: int, seed: int, device: str) -> Iterator[Tensor]:
    """Yield each step's photographs, (B, 3, H, W) of 0..255, made ready by threads some steps ahead."""
    draw = partial(crops, pictures, len(pictures), batch=batch, size=size, seed=seed, vary_colours=False)
    with ThreadPoolExecutor(AHEAD) as pool:
        waiting: deque[Future[Tensor]] = deque()
        try:
            for step in range(first, min(last, first + AHEAD)):
                waiting.append(pool.submit(draw, step=step))
            for step in range(first, last):
                ready = waiting.popleft().result()
                if step + AHEAD < last:
                    waiting.append(pool.submit(draw, step=step + AHEAD))
                yield ready.to(device, non_blocking=True)
        finally:
            for one in waiting:
                one.cancel()
