"""A network that trains in milliseconds, pictures for it, and a command that a test starts as processes of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zoo.networks.model import Model


class Tiny(Model):
    """Two convolutions with BatchNorm and a dense layer."""

    paper = "none"
    input_size = 16
    first_layer = "features.0"
    classifiers = ("fc",)

    def __init__(self, num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(16, num_classes)
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        return self.features(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(self.dropout(x.mean((2, 3))))


class Outputs(NamedTuple):
    """What a network with an auxiliary head returns in train mode."""

    logits: Tensor
    aux_logits: Tensor


class Forked(Tiny):
    """A network with an auxiliary head, which helps in training only."""

    classifiers = ("fc", "aux")

    def __init__(self, num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__(num_classes, in_channels, dropout)
        self.aux = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Any:
        x = self.features[:3](x)
        logits = self.forward_head(self.features[3:](x))
        return Outputs(logits, self.aux(x.mean((2, 3)))) if self.training else logits


class Moody(Tiny):
    """A network whose way depends on values, which can't be recorded."""

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_body(x if float(x.detach().sum()) > 0 else x.flip(3)))


def draw(folder: Path, counts: dict[str, int], side: int = 20, seed: int = 0) -> Path:
    """Write PNG files, a folder a class; a class is brighter than the one before it."""
    chance = np.random.default_rng(seed)
    for index, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = np.clip(40 + 70 * index + chance.normal(0, 25, (side, side, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:03d}.png")
    return folder


def main() -> None:
    """Train as the JSON on the command line says; "die_at" kills the process after so many of its optimiser's steps."""
    torch.set_num_threads(1)
    told: dict[str, Any] = json.loads(sys.argv[1])
    if die_at := told.pop("die_at", None):
        done = 0

        def counted(self: Any, args: Any, kwargs: Any) -> None:
            nonlocal done
            done += 1
            if done > die_at:
                os.kill(os.getpid(), signal.SIGKILL)

        register_optimizer_step_pre_hook(counted)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    from zoo.finetuning import finetune

    for run in told.pop("runs", [{}]):
        finetune(Tiny, **{**told, **run})
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
