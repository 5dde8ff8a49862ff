"""A picture painted strip by strip, with the same numbers as at once, in a fraction of the memory.

Most memory goes to the layers that work at the picture's own size, before the first and behind the last change of size. Between their norms
they see a few pixels, and a norm needs two numbers a channel. So these layers run on strips, once more for each norm: each pass knows the
norms before, and sums up what the next one needs. What lies between runs on the whole picture, at half its size and less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn

from zoo.stylizing.networks import Step, StyleNetwork, moments, walk

BORDER = 16
"""Rows of the picture that a strip has more on either side than it computes, for 9x9 and 3x3 convolutions."""


class Known:
    """The statistics of norms that were summed up before."""

    def __init__(self) -> None:
        self.found: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def of(self, norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what was found for a norm; of others what their map says."""
        return self.found[norm] if norm in self.found else moments(x)


class Sums:
    """Mean and variance of a map that comes in strips, added up in float64."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, x: Tensor) -> None:
        """Take one strip, (1, C, H, W). Source: Chan, Golub & LeVeque 1983, equation 2.1."""
        variance, mean = (one.double() for one in torch.var_mean(x.float(), dim=(0, 2, 3), correction=0))
        n, m = self.count, x.shape[2] * x.shape[3]
        if not n:
            self.count, self.mean, self.squares = m, mean, variance * m
            return
        apart = mean - self.mean
        self.mean = self.mean + apart * (m / (n + m))
        self.squares = self.squares + variance * m + apart.square() * (n * m / (n + m))
        self.count = n + m

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance, float32."""
        return self.mean.float(), (self.squares / self.count).float()


@torch.no_grad()
def paint_in_strips(network: StyleNetwork, picture: Callable[[int, int], Tensor], height: int, rows: int, out: Tensor) -> None:
    """Paint a picture into `out`.

    Args:
        network: in eval or train mode, which are the same.
        picture: returns rows from the first number to before the second one, (1, 3, rows, W) of 0..255, on the network's device.
        height: of the picture, a multiple of 4, as its width is.
        rows: of a strip, rounded up to a multiple of 4.
        out: (3, H, W), on any device, of float or uint8; of uint8 it is rounded and clamped.
    """
    known, rows = Known(), max(4, -(-rows // 4) * 4)
    entering, leaving = network.entering(), network.leaving()
    parts: list[Tensor] = []
    _pass(entering, known, lambda cut: _strips(picture, height, rows, 1, cut), parts.append)
    half = torch.cat(parts, 2)
    parts.clear()
    half = network.middle(half, known)
    done = 0

    def keep(strip: Tensor) -> None:
        nonlocal done
        count = strip.shape[2]
        painted = strip[0] if out.dtype.is_floating_point else strip[0].clamp(0, 255).round()
        out[:, done : done + count] = painted.to(out.device, out.dtype)
        done += count

    _pass(leaving, known, lambda cut: _strips(lambda a, b: half[:, :, a:b], height // 2, rows // 2, 2, cut), keep)


Strips: TypeAlias = Callable[[Callable[[Tensor], Tensor]], Iterator[Tensor]]
"""Takes what computes one strip, and computes all of them."""


def _pass(steps: tuple[Step, ...], known: Known, strips: Strips, keep: Callable[[Tensor], None]) -> None:
    """Run steps on strips, first for the statistics of each norm, then for the result."""
    for number, (local, norm, _) in enumerate(steps):
        if norm is None:
            continue
        sums, before = Sums(), steps[:number]

        def unnormed(x: Tensor, local: Callable[[Tensor], Tensor] = local, before: tuple[Step, ...] = before) -> Tensor:
            return local(walk(x, before, known))

        for strip in strips(unnormed):
            sums.add(strip)
        known.found[norm] = sums.moments()
    for strip in strips(lambda x: walk(x, steps, known)):
        keep(strip)


def _strips(
    rows_of: Callable[[int, int], Tensor], height: int, rows: int, scale: int, compute: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Compute strips with a border, and cut the border off, whatever the change of size on the way is."""
    border = BORDER // scale
    for start in range(0, height, rows):
        end = min(height, start + rows)
        first, last = max(0, start - border), min(height, end + border)
        y = compute(rows_of(first, last))
        top, bottom = (y.shape[2] * (n - first) // (last - first) for n in (start, end))
        yield y[:, :, top:bottom]
