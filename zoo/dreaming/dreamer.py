"""Pictures of one size through their octaves, by one network and one set of settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from weights.progress import Show
from zoo.dreaming.cutting import Cut
from zoo.dreaming.gradients import NothingToDream, Pull
from zoo.dreaming.keeping import Kept
from zoo.dreaming.octaves import centre, fitting, sizes, zoomed
from zoo.dreaming.pictures import Picture, rounded
from zoo.dreaming.stepping import CapturedSteps, Steps, steps

SIDE = 224
"""Pixels of pictures in DeepDream.jl, whatever they were."""
GUIDE = 512
"""Pixels of a guide's longer side at most: more places of the same objects change little."""
WHOLE = {"cpu": 2.5e9, "cuda": 16e9}
"""Bytes that the maps of a picture take at most that is not cut into tiles."""
TILE = {"cpu": 6e8, "cuda": 8e9}
"""Bytes that the maps of a tile take, its halo included."""
CORE = 128
"""Side of what a tile answers for at least."""
OCTAVES = 4


@dataclass(frozen=True, slots=True)
class Way:
    """A way to dream: its numbers where nobody names others, and what they are counted in."""

    octaves: int
    scale: float
    steps: int
    rate: float
    jitter: int
    normalised: bool
    """Whether the rate is in the network's normalised numbers, and nothing is clipped while dreaming; else in levels of 0 to 255."""


WAYS = {"original": Way(OCTAVES, 1.4, 10, 1.5, 32, False), "deepdream.jl": Way(3, 2.0, 10, 0.03, 0, True)}


@dataclass(frozen=True, slots=True)
class Asked:
    """A dream's settings: what was asked for, and the numbers of the way where nothing was."""

    like: str
    way: Way
    octaves: int | None
    scale: float
    steps: int
    rate: float
    jitter: int
    seed: int
    tile: int | None
    guide: Picture | None = None

    def facts(self) -> dict[str, Any]:
        """Return the settings that a dream's numbers depend on, besides the network and the pictures."""
        return {name: getattr(self, name) for name in ("like", "octaves", "scale", "steps", "rate", "jitter", "seed", "tile")}

    def offsets(self, octaves: int, frame: int) -> list[list[tuple[int, int]]]:
        """Draw the rolls of every step of every octave of a frame."""
        drawn = torch.randint(
            -self.jitter, self.jitter + 1, (octaves, self.steps, 2), generator=torch.Generator().manual_seed((self.seed << 24) + frame)
        )
        return [[(int(y), int(x)) for y, x in row] for row in drawn.tolist()]


class Dreamer:
    """Dreams on pictures with one network and one set of settings."""

    def __init__(self, network: Cut, asked: Asked) -> None:
        self.network, self.asked = network, asked
        self._captured: dict[tuple[int, ...], CapturedSteps] = {}

    @property
    def facts(self) -> dict[str, Any]:
        """All that its dreams depend on, besides the network's numbers and the pictures."""
        how = self.network.preprocessing
        return self.asked.facts() | {"at": self.network.at, "normalised": (how.mean, how.std, how.channel_order)}

    @property
    def guide_levels(self) -> list[Tensor]:
        """The guide's picture, if there is one."""
        return [self.asked.guide.levels] if self.asked.guide else []

    def _levels(self, levels: Sequence[Tensor]) -> Tensor:
        """Put pictures of uint8 on the device, as the numbers that are dreamed in."""
        x = torch.stack(list(levels)).to(self.network.device)
        if not self.asked.way.normalised:
            return x  # large pictures stay small until they are needed
        return (x.to(self.network.dtype) - self._zero) / self._units

    @cached_property
    def _record(self) -> tuple[Tensor, Tensor]:
        how = self.network.preprocessing
        mean, std = (
            torch.tensor(numbers[:1] * 3 if self.network.channels == 1 else numbers, dtype=self.network.dtype, device=self.network.device)
            for numbers in (how.mean, how.std)
        )
        if how.channel_order == "bgr":
            mean, std = mean.flip(0), std.flip(0)
        return 255 * mean.view(1, 3, 1, 1), 255 * std.view(1, 3, 1, 1)

    @property
    def _zero(self) -> Tensor:
        """The level that a number of 0 means."""
        return self._record[0] if self.asked.way.normalised else torch.zeros_like(self._record[0])

    @property
    def _units(self) -> Tensor:
        """The levels that a number of 1 means."""
        return self._record[1] if self.asked.way.normalised else torch.ones_like(self._record[1])

    def octaves(self, picture: Picture) -> int:
        """Return how many octaves a picture gets.

        Raises:
            ValueError: it is too small for the network, or for so many.
        """
        least, asked, name = self.network.reading.least, self.asked, self.network.called
        height, width = picture.levels.shape[1], picture.levels.shape[2]
        if self.network.sizes_unknown:
            least = self._least(height, width)
        if asked.way.normalised:
            if least > SIDE:
                raise ValueError(f'like="deepdream.jl" dreams at {SIDE}x{SIDE} pixels, and {name} needs {least}: use like="original"')
            return asked.octaves or asked.way.octaves
        room = fitting(height, width, asked.scale, least)
        at = " and ".join(map(repr, self.network.at))
        if not room:
            raise ValueError(
                f"{picture.name} is {width}x{height} pixels, and {at} of {name} needs {least} on the shorter side: enlarge it, or name an "
                "earlier layer, at=…"
            )
        if asked.octaves is not None and asked.octaves > room:
            raise ValueError(
                f"{picture.name} is {width}x{height} pixels, which is too small for {asked.octaves} octaves: {at} of {name} needs {least} "
                f"pixels on the shorter side; octaves={room} fits, or an earlier layer, at=…"
            )
        return asked.octaves or min(room, OCTAVES)

    def _least(self, height: int, width: int) -> int:
        """Find the shorter side of the smallest octave that a network of unknown needs takes.

        Raises:
            ValueError: it takes none, the picture itself included; the message has the network's own words.
        """
        count, why = self.asked.octaves or self.asked.way.octaves, ""
        for size in reversed(sizes(height, width, count, self.asked.scale)):
            if (why := self.network.refuses(*size)) is None:
                return min(size)
        todo = "if it takes one size, resize the picture to that"
        raise ValueError(f"{self.network.called} can't take a picture of {width}x{height} pixels: {why.removesuffix('.')}; {todo}")

    @cached_property
    def pull(self) -> Pull:
        """What pulls the pictures."""
        pull = Pull(self.network, self._units, self._zero)
        if self.asked.guide is None:
            return pull
        picture = self.asked.guide
        height, width = picture.levels.shape[1:]
        if self.asked.way.normalised:
            size = (SIDE, SIDE)
        else:
            least = self.network.reading.least
            ratio = max(min(1.0, GUIDE / max(height, width)), least / min(height, width))
            size = (max(round(height * ratio), least), max(round(width * ratio), least))
        if (side := self.network.reading.side) is not None:
            size = (side, side)
        small = F.interpolate(picture.levels[None].to(self.network.device, self.network.dtype), size, mode="bilinear", antialias=True)
        return replace(pull, guide=pull.vectors((small - self._zero) / self._units))

    def dream(self, pictures: list[Picture], kept: Kept, show: Show, frame: int = 0, fade: float = 1.0) -> Tensor:
        """Dream on pictures of one size together; returns their levels, uint8 (B, 3, H, W)."""
        with torch.inference_mode(False), torch.no_grad():
            if self.asked.way.normalised:
                return self._like_julia(pictures, kept, show, frame, fade)
            return self._original(pictures, kept, show, frame)

    def _original(self, pictures: list[Picture], kept: Kept, show: Show, frame: int) -> Tensor:
        base, count = self._levels([p.levels for p in pictures]), self.octaves(pictures[0])
        dtype, wanted = self.network.dtype, sizes(base.shape[2], base.shape[3], count, self.asked.scale)

        def at(octave: int) -> Tensor:
            """Make the picture at an octave's size anew, out of each larger one: to keep them all takes as much room as the dream."""
            x = base
            for size in wanted[1 : count - octave]:
                x = zoomed(x.to(dtype), *size)
            return x.to(dtype) if x is base else x

        def begin(octave: int, before: Tensor | None) -> Tensor:
            size = wanted[count - 1 - octave]
            if before is None:
                return at(octave)
            detail = zoomed(before.sub_(at(octave - 1)), *size)
            return detail.add_(at(octave))

        x = self._through(wanted[::-1], begin, kept, show, frame, self.asked.rate, (0.0, 255.0))
        return rounded(x)

    def _like_julia(self, pictures: list[Picture], kept: Kept, show: Show, frame: int, fade: float) -> Tensor:
        height, width = pictures[0].levels.shape[1:]
        levels = torch.stack([p.levels for p in pictures]).to(self.network.device, self.network.dtype)
        small = F.interpolate(levels, (SIDE, SIDE), mode="bilinear", align_corners=False)
        count = self.octaves(pictures[0])
        base = [(small - self._zero) / self._units]
        for _ in range(count - 1):
            base.append(centre(self._shown(base[-1]), self.asked.scale))

        def begin(octave: int, before: Tensor | None) -> Tensor:
            own = base[count - 1 - octave]
            return own.clone() if before is None else own + self._shown(before - base[count - octave])

        x = self._through([(SIDE, SIDE)] * count, begin, kept, show, frame, self.asked.rate * fade, (None, None))
        shown = self._shown(x) * self._units + self._zero
        return rounded(F.interpolate(shown, (height, width), mode="bilinear", align_corners=False))

    def _shown(self, x: Tensor) -> Tensor:
        """Clip numbers to what a picture can show, as DeepDream.jl does on every way through a picture, differences included."""
        return ((x * self._units + self._zero).clamp(0, 255) - self._zero) / self._units

    def _through(
        self,
        shapes: Sequence[tuple[int, int]],
        begin: Callable[[int, Tensor | None], Tensor],
        kept: Kept,
        show: Show,
        frame: int,
        rate: float,
        limits: tuple[float | None, float | None],
    ) -> Tensor:
        """Go through the octaves, of these heights and widths, from where a kept dream was."""
        count = len(shapes)
        offsets = self.asked.offsets(count, frame)
        found = kept.found()
        octave, step, x = found if found else (0, 0, None)
        if x is None:
            x = begin(0, None)
        x = x.to(self.network.device)
        sized = [len(replace(self.pull, core=self._core(*shape)).tiles(*shape)) for shape in shapes]
        with show("dreaming", sum(sized) * self.asked.steps, self.asked.steps * sum(sized[:octave]) + sized[octave] * step) as advance:
            while True:
                taker = self._steps(x, rate, limits)
                del x
                self._octave(taker, offsets[octave], octave, step, kept, advance)
                x = taker.x.clone() if isinstance(taker, CapturedSteps) else taker.x  # a graph's place is its own
                del taker
                if octave == count - 1:
                    break
                x, octave, step = begin(octave + 1, x), octave + 1, 0
        kept.done()
        return x

    def _octave(
        self,
        taker: Steps | CapturedSteps,
        offsets: list[tuple[int, int]],
        octave: int,
        step: int,
        kept: Kept,
        advance: Callable[[int], None],
    ) -> None:
        """Take the steps of an octave from `step` on; whatever ends them early, those that were taken are kept."""
        try:
            for offset in offsets[step:]:
                taker.take(offset, advance)
                if kept.due():
                    kept.keep(octave, step + taker.taken, taker.x)
        except (NothingToDream, FloatingPointError):  # it would end there again
            kept.done()
            raise
        except BaseException:
            if taker.whole:
                kept.keep(octave, step + taker.taken, taker.x)
            raise
        if isinstance(taker, CapturedSteps):
            taker.check()

    def _steps(self, x: Tensor, rate: float, limits: tuple[float | None, float | None]) -> Steps | CapturedSteps:
        """Take steps on `x`; pictures of a size that were captured before run the same graph."""
        known = self._captured.get(tuple(x.shape))
        if known is not None:
            known.begin(x, rate)
            return known
        made = steps(replace(self.pull, core=self._core(*x.shape[2:])), x, rate, *limits)
        if isinstance(made, CapturedSteps):
            self._captured[tuple(x.shape)] = made
        return made

    def together(self, height: int, width: int) -> int:
        """Return how many pictures of a size are dreamed at once: as many as have the memory of the largest that is not cut."""
        return max(1, int(WHOLE[self._place] / (height * width * self.network.weight)))

    @property
    def _place(self) -> str:
        return "cuda" if self.network.device.type == "cuda" else "cpu"

    def _core(self, height: int, width: int) -> int | None:
        """Return the side of tiles for a picture, None for none."""
        if self.asked.tile is not None:
            return self.asked.tile or None
        if height * width * self.network.weight <= WHOLE[self._place]:
            return None
        reading, side = self.network.reading, math.sqrt(TILE[self._place] / self.network.weight)
        return max(CORE, int(side) - reading.before - reading.after - 2 * reading.step)


@contextmanager
def silent(name: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Show nothing."""
    del name, total, done
    yield lambda steps: None
