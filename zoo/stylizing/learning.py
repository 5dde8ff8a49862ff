"""One step of training a style network, and what it is made of; it needs PyTorch alone."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.stylizing.losses import StyleLoss
from zoo.stylizing.networks import Johnson, StyleNetwork

log = logging.getLogger("zoo")


@dataclass(frozen=True)
class Weights:
    """How much each term of the loss counts; `zoo.stylizing.losses` says in which unit.

    Attributes:
        style: of the style picture's texture.
        content: of what the photograph shows.
        variation: of the differences between neighbouring pixels.
    """

    style: float = 10.0
    content: float = 1.0
    variation: float = 0.02


@dataclass(frozen=True)
class Terms:
    """What a step's loss was: style 1 is a photograph that nobody painted, content 1 another photograph."""

    loss: float
    style: float
    content: float
    variation: float


def seeded(make: type[StyleNetwork], seed: int, **options: int) -> StyleNetwork:
    """Build an untrained network whose weights depend on a seed alone, and leave PyTorch's random numbers as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = make(**options)
    if isinstance(network, Johnson):  # the first paintings are grey, not black
        torch.nn.init.constant_(network.deconv3.conv2d.bias, 127.5)  # pyright: ignore[reportArgumentType]
    return network


def rate(step: int, steps: int, highest: float) -> float:
    """Return the learning rate of a step, which falls as half a cosine over the last half of a run."""
    late = max(0.0, 2 * step / max(1, steps) - 1)
    return highest * (0.02 + 0.98 * (1 + math.cos(math.pi * late)) / 2)


class Learner:
    """A style network, its loss and its optimiser.

    Attributes:
        network: that learns.
        loss: the terms.
        optimizer: Adam, as Johnson et al. trained.
    """

    def __init__(
        self, network: StyleNetwork, loss: StyleLoss, weights: Weights, *, lr: float, steps: int, half: bool, compile: bool = False
    ) -> None:
        """Prepare a run.

        Args:
            network: on the device that it learns on.
            loss: on the same device, its scales measured.
            weights: of the terms.
            lr: the highest learning rate.
            steps: of the whole run.
            half: whether networks compute in bfloat16, by autocast.
            compile: whether torch.compile is to make the steps faster.
        """
        self.network, self.loss, self.weights, self.lr, self.steps, self.half = network, loss, weights, lr, steps, half
        self._memory = torch.channels_last if compile else torch.contiguous_format  # PyTorch's own instance norm copies channels_last maps
        for part, memory in ((network, self._memory), (loss.network, torch.channels_last)):
            if next(part.parameters()).is_cuda:
                part.to(memory_format=memory)  # pyright: ignore[reportCallIssue]
        self.optimizer = torch.optim.Adam(network.parameters(), lr=lr)
        self._terms = torch.compile(self._forward) if compile else self._forward
        self._tried = not compile

    def _forward(self, photographs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.autocast(photographs.device.type, torch.bfloat16, enabled=self.half):
            style, content, variation = self.loss(self.network(photographs), photographs)
        w = self.weights
        return w.style * style + w.content * content + w.variation * variation, style, content, variation

    def _computed(self, photographs: Tensor) -> tuple[Tensor, ...]:
        photographs = photographs.contiguous(memory_format=self._memory)
        if self._tried:
            return self._terms(photographs)
        self._tried = True
        try:
            return self._terms(photographs)
        except Exception as error:  # whatever a compiler stumbles over: a missing compiler of C, an operator that it doesn't know
            log.warning("torch.compile can't make the steps faster here, so they run as they are: %s", str(error).partition("\n")[0])
            self._terms = self._forward
            return self._terms(photographs)

    def step(self, step: int, photographs: Tensor) -> Tensor:
        """Learn from photographs, (B, 3, H, W) of 0..255.

        Returns:
            The loss, style, content and variation, (4,), on the device: reading them waits for it.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate(step, self.steps, self.lr)
        self.optimizer.zero_grad(set_to_none=True)
        loss, *terms = self._computed(photographs)
        loss.backward()
        self.optimizer.step()
        return torch.stack([loss.detach().float(), *(term.detach().float() for term in terms)])


def terms(values: Tensor) -> Terms:
    """Read what `Learner.step` returned."""
    return Terms(*values.tolist())
