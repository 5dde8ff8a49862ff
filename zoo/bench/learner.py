"""A network that a way trains: its own weights, its own optimiser, always the same images."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.bench.subject import Subject
from zoo.networks.layers import StochasticDepth
from zoo.networks.model import Model

RATE, MOMENTUM, DECAY = 1e-3, 0.9, 1e-4


@dataclass(slots=True)
class Learner:
    """A network that a way trains, always on the same images: its own weights, its own optimiser.

    Attributes:
        network: in train mode, on the device, its convolutions channels_last.
        optimizer: SGD, fused on a GPU.
        images: (B, C, H, W), float32, channels_last.
        labels: (B,).
        dtype: of autocast, None for none.
    """

    network: nn.Module
    optimizer: torch.optim.SGD
    images: Tensor
    labels: Tensor
    dtype: torch.dtype | None

    def loss(self, outputs: Any, labels: Tensor) -> Tensor:
        """Return the cross-entropy of the first outputs."""
        return F.cross_entropy(outputs if isinstance(outputs, Tensor) else outputs[0], labels)

    def step(self, call: Callable[[Tensor], Any]) -> Tensor:
        """Do a step as people write it."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.images.device.type, self.dtype, self.dtype is not None):
            loss = self.loss(call(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def learner_of(s: Subject, module: nn.Module, dtype: torch.dtype | None) -> Learner:
    """Make a learner of a copy of a module; nothing is dropped out, for no two ways would drop the same."""
    network = copy.deepcopy(module).to(s.device).to(memory_format=torch.channels_last).train()  # pyright: ignore[reportCallIssue]
    for layer in network.modules():
        if isinstance(layer, nn.Dropout | StochasticDepth) or type(layer).__name__ == "StochasticDepth":
            layer.__dict__["p"] = 0.0
    fused = s.device.type == "cuda"
    optimizer = torch.optim.SGD(network.parameters(), RATE, momentum=MOMENTUM, weight_decay=DECAY, fused=fused)
    labels = torch.randint(cast(Model, s.own).num_classes, (s.batch,), generator=torch.Generator().manual_seed(4)).to(s.device)
    return Learner(network, optimizer, s.input(torch.float32, channels_last=True), labels, dtype)
