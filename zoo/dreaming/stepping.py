"""A step of a dream: up the gradient, which is divided by the mean of its absolute values."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from zoo.dreaming.gradients import NothingToDream, Pull
from zoo.kernels.measuring.timing import release_generator

log = logging.getLogger("zoo")
STRIP = 512
"""Rows whose absolute values are summed at once: a large picture has no second copy."""
WARM_UP = 2


class Steps:
    """Takes steps on pictures of one size, which it keeps.

    A step is ``x += rate * g / mean(abs(g))``, the mean over each picture, then x is clipped to `low` .. `high`.

    Attributes:
        x: the pictures (B, 3, H, W).
        taken: how many steps.
        whole: whether `x` is what a number of whole steps made; False while it is being changed.
    """

    def __init__(self, pull: Pull, x: Tensor, rate: float, low: float | None, high: float | None) -> None:
        self.pull, self.x, self.rate, self.low, self.high = pull, x, rate, low, high
        self.taken, self.whole = 0, True
        self._gradient = torch.empty_like(x)

    def take(self, offset: tuple[int, int], told: Callable[[int], None]) -> None:
        """Take one step with the picture rolled by `offset` rows and columns.

        Raises:
            NothingToDream: the gradient is zero.
            FloatingPointError: it is NaN or infinite.
        """
        gradient = self.pull.of_pictures(self.x, offset, self._gradient, told)
        means = mean_abs(gradient)
        _refuse(means, self.pull)
        self.whole = False
        for x, g, mean in zip(self.x, gradient, means.tolist(), strict=True):
            x.add_(g, alpha=self.rate / mean)
        if self.low is not None or self.high is not None:
            self.x.clamp_(self.low, self.high)
        self.taken, self.whole = self.taken + 1, True


class CapturedSteps:
    """The same on a GPU as one CUDA graph: the whole step is launched at once.

    The graph reads `x`, and the rows and columns that a roll moves, from places of its own.
    """

    def __init__(self, pull: Pull, x: Tensor, rate: float, low: float | None, high: float | None) -> None:
        self.pull, self.x, self.low, self.high = pull, x, low, high
        self.taken, self.whole = 0, True
        height, width = x.shape[2:]
        self._counted = [torch.arange(length, device=x.device) for length in (height, width)]
        self._there, self._back = ([line.clone() for line in self._counted] for _ in range(2))
        self._rate = torch.zeros((), dtype=x.dtype, device=x.device)
        self.means = torch.ones(x.shape[0], dtype=x.dtype, device=x.device)
        with torch.cuda.device(x.device), torch.inference_mode(False):
            begin = x.clone()  # pictures that are scaled up go beyond the limits until their first step
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):  # at rate 0, which only clips
                    self._step()
                self.x.copy_(begin)
            torch.cuda.current_stream().wait_stream(side)
            _refuse(self.means, pull)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step()
        self._rate.fill_(rate)

    def begin(self, x: Tensor, rate: float) -> None:
        """Take steps on other pictures of the same size from now on."""
        self.x.copy_(x)
        self._rate.fill_(rate)
        self.taken, self.whole = 0, True

    def _step(self) -> None:
        rolled = self.x.index_select(2, self._there[0]).index_select(3, self._there[1])
        found = self.pull.of_images(rolled)
        gradient = found.index_select(2, self._back[0]).index_select(3, self._back[1])
        self.means.copy_(gradient.abs().mean((1, 2, 3)))
        self.x.add_(gradient * (self._rate / self.means).view(-1, 1, 1, 1)).clamp_(self.low, self.high)

    def take(self, offset: tuple[int, int], told: Callable[[int], None]) -> None:
        """Take one step; whether its gradient is finite is not asked for, which would wait for the GPU: `check` asks."""
        for there, back, line, shift in zip(self._there, self._back, self._counted, offset, strict=True):
            there.copy_(torch.roll(line, shift))
            back.copy_(torch.roll(line, -shift))
        self.whole = False
        with torch.cuda.device(self.x.device):
            self._graph.replay()
        self.taken, self.whole = self.taken + 1, True
        told(1)

    def check(self) -> None:
        """Raise as `Steps.take` does, of the last step."""
        _refuse(self.means, self.pull)


def mean_abs(gradient: Tensor) -> Tensor:
    """Return the mean of the absolute values of each of (B, C, H, W), summed in double precision strip by strip."""
    sums = sum(strip.abs().sum((1, 2, 3), dtype=torch.float64) for strip in gradient.split(STRIP, 2))
    return torch.as_tensor(sums) / gradient[0].numel()


def steps(pull: Pull, x: Tensor, rate: float, low: float | None, high: float | None) -> Steps | CapturedSteps:
    """Choose how to take steps on pictures: as a CUDA graph on a GPU where they are in one piece, else one call after the other."""
    alone = len(pull.tiles(*x.shape[2:])) == 1 and pull.network.reading.side is None
    if x.is_cuda and alone:
        try:
            return CapturedSteps(pull, x, rate, low if low is not None else -float("inf"), high if high is not None else float("inf"))
        except (NothingToDream, FloatingPointError):
            raise
        except RuntimeError as error:  # of a layer that asks the GPU for a number, or copies one to it
            why = str(error).partition("\n")[0]
            release_generator(x.device)
            log.warning("%s can't be captured in a CUDA graph, so its steps run one by one: %s", pull.network.called, why)
    return Steps(pull, x, rate, low, high)


def _refuse(means: Tensor, pull: Pull) -> None:
    for mean in means.tolist():
        if mean == 0:
            named = " and ".join(repr(name) for name in pull.network.at)
            raise NothingToDream(
                f"the gradient of {named} of {pull.network.called} is zero everywhere: it finds nothing in this picture; name another "
                "layer, at=…"
            )
        if not mean < float("inf"):
            raise FloatingPointError(f"the gradient of {pull.network.called} is NaN or infinite; check its weights, or take a smaller rate")
