"""The gradient of what a picture gives a layer, of the whole picture or tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.dreaming.cutting import Cut
from zoo.dreaming.guiding import channels_axis, guided, own, rows
from zoo.dreaming.tiles import Span, Tile, padded, tiles


class NothingToDream(ValueError):
    """No gradient reaches the picture from the layers to dream of; the message says why."""


@contextmanager
def differentiable(device: torch.device) -> Iterator[None]:
    """Let autograd work wherever the caller is: under inference mode, without gradients, under autocast."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        yield


@dataclass(frozen=True)
class Pull:
    """What pulls a picture, and how its numbers become the network's.

    Attributes:
        network: cut at the layers to dream of.
        units: how many levels of 0 to 255 are one unit of the picture's numbers: 1, or 255 std of each channel.
        zero: the level at which a picture's number is 0: 0, or 255 mean of each channel.
        guide: vectors (places, C) of each layer that another picture has; None for the picture's own.
        core: side of what a tile answers for; None keeps a picture whole.
    """

    network: Cut
    units: Tensor
    zero: Tensor
    guide: tuple[Tensor, ...] | None = None
    core: int | None = None

    @cached_property
    def _normal(self) -> tuple[Tensor, Tensor]:
        """A factor and a summand that make network's images of pictures."""
        how, cut = self.network.preprocessing, self.network
        mean, std = (_channel(numbers, cut, how.channel_order) for numbers in (how.mean, how.std))
        return self.units / (255 * std), (self.zero / 255 - mean) / std

    def images(self, x: Tensor) -> Tensor:
        """Turn pictures in RGB into the batch that the network takes."""
        if self.network.channels == 1:  # grey is the mean of the three
            x = x.mean(1, keepdim=True)
            factor, summand = (part.mean(1, keepdim=True) for part in self._normal)
        else:
            factor, summand = self._normal
        x = x * factor + summand
        return x.flip(1) if self.network.preprocessing.channel_order == "bgr" else x

    def vectors(self, picture: Tensor) -> tuple[Tensor, ...]:
        """Return what a guide has at the layers."""
        with differentiable(self.network.device), torch.no_grad():
            maps = self.network.run(self.images(self._fitted(picture)))
        return tuple(rows(a, axis) for a, axis in zip(maps, self.network.axes, strict=True))

    def _fitted(self, x: Tensor) -> Tensor:
        """Continue pictures at their other ends up to what the network takes."""
        multiple, (height, width) = self.network.reading.multiple, x.shape[2:]
        more = padded(width, multiple) - width, padded(height, multiple) - height
        return F.pad(x, (0, more[0], 0, more[1]), mode="circular") if any(more) else x

    def of_images(self, x: Tensor, tile: Tile | None = None) -> Tensor:
        """Compute the gradient of pictures (B, 3, H, W) that the network takes in one piece, in their shape."""
        cut = self.network
        layout = torch.channels_last if x.is_cuda else torch.contiguous_format
        with differentiable(cut.device):
            leaf = x.detach().clone(memory_format=layout).requires_grad_()
            maps = cut.run(self.images(self._fitted(leaf)))
            self._check(maps)
            with torch.no_grad():
                seeds = [self._seed(i, a, tile) for i, a in enumerate(maps)]
            (found,) = torch.autograd.grad(maps, leaf, seeds, allow_unused=True)
        if found is None:
            raise NothingToDream(f"no gradient reaches the picture from {self._named()}: its output does not depend on the picture")
        return found.detach()

    def _seed(self, i: int, a: Tensor, tile: Tile | None) -> Tensor:
        axis = self.network.axes[i]
        seed = own(a) if self.guide is None else guided(a, self.guide[i], axis)
        if tile is None or not tile.exact:
            return seed
        step = self.network.steps[i] or 1
        places = [other for other in range(1, a.dim()) if other != channels_axis(a, axis)]
        for place, span in zip(places, (tile.rows, tile.columns), strict=True):
            first, last = (edge // step - span.start // step for edge in (span.first, span.last))
            if span.last == span.stop:  # the picture ends here, and a map may have an element more
                last = a.shape[place]
            seed = seed.clone()
            seed.narrow(place, 0, first).zero_()
            seed.narrow(place, last, a.shape[place] - last).zero_()
        return seed

    def _check(self, maps: object) -> None:
        for name, a in zip(self.network.at, maps, strict=True):  # pyright: ignore[reportArgumentType]
            if not isinstance(a, Tensor):
                raise NothingToDream(f"{name!r} gives a {type(a).__name__}, and a dream needs a tensor: name a layer that gives one")
            if not a.is_floating_point() or not a.requires_grad:
                kind = str(a.dtype).removeprefix("torch.")
                raise NothingToDream(
                    f"no gradient reaches the picture from {name!r}: its {kind} output is cut off from it; name an earlier layer"
                )

    def _named(self) -> str:
        return " and ".join(repr(name) for name in self.network.at)

    def tiles(self, height: int, width: int) -> list[Tile]:
        """Cut a picture of this size."""
        multiple = self.network.reading.multiple
        return tiles(padded(height, multiple), padded(width, multiple), self.core, self.network.reading)

    def of_pictures(self, x: Tensor, offset: tuple[int, int], out: Tensor, told: Callable[[int], None] = lambda done: None) -> Tensor:
        """Compute the gradient of pictures of any size, rolled by `offset` rows and columns, and rolled back.

        Args:
            x: (B, 3, H, W).
            offset: rows and columns.
            out: where the gradient goes, of the shape of `x`.
            told: called with the number of tiles that were finished.
        """
        height, width = x.shape[2:]
        plan = self.tiles(height, width)
        if len(plan) == 1 and self.network.reading.side is None:
            found = self.of_images(torch.roll(x, offset, (2, 3)))
            out.copy_(torch.roll(found, (-offset[0], -offset[1]), (2, 3)))
            told(1)
            return out
        out.zero_()
        for tile in plan:
            seen = _window(x, tile.rows, tile.columns, offset)
            found = self.of_images(seen, tile)
            for rows_in, rows_out in _pieces(tile.rows, tile.exact, height, offset[0]):
                for columns_in, columns_out in _pieces(tile.columns, tile.exact, width, offset[1]):
                    out[:, :, rows_out, columns_out] += found[:, :, rows_in, columns_in]
            told(1)
        return out


def _channel(numbers: tuple[float, ...], cut: Cut, order: str) -> Tensor:
    """Put a record's numbers into the order of a picture in RGB."""
    if cut.channels == 1:
        numbers = numbers[:1] * 3
    found = torch.tensor(numbers, dtype=cut.dtype, device=cut.device)
    return (found.flip(0) if order == "bgr" else found).view(1, 3, 1, 1)


def _runs(start: int, stop: int, length: int, offset: int) -> Iterator[tuple[slice, slice]]:
    """Tell where the elements from `start` to `stop` of a rolled axis lie in the axis itself: slices of the part, and of the axis."""
    at = start
    while at < stop:
        source = (at - offset) % length
        count = min(stop - at, length - source)
        yield slice(at - start, at - start + count), slice(source, source + count)
        at += count


def _window(x: Tensor, rows: Span, columns: Span, offset: tuple[int, int]) -> Tensor:
    height, width = x.shape[2:]
    strips = [x[:, :, source] for _, source in _runs(rows.start, rows.stop, height, offset[0])]
    runs = list(_runs(columns.start, columns.stop, width, offset[1]))
    return torch.cat([torch.cat([strip[:, :, :, source] for _, source in runs], 3) for strip in strips], 2)


def _pieces(span: Span, exact: bool, length: int, offset: int) -> Iterator[tuple[slice, slice]]:
    """Tell which part of a tile's gradient goes where: all of it, or that of the tile's own pixels."""
    first, last = (span.start, span.stop) if exact else (span.first, span.last)
    shift = first - span.start
    for inside, outside in _runs(first, last, length, offset):
        yield slice(inside.start + shift, inside.stop + shift), outside
