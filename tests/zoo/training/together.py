"""A small training, for one process or a process of two: `python together.py FOLDER`, with the variables that torchrun sets."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist

from zoo.training.loop import LearningSettings, learn


class Line(nn.Module):
    """A network whose loss is a mean over photographs, so that parts of a batch add up to the whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.unused = nn.Parameter(torch.ones(()))

    def losses(self, numbers: Sequence[int], random: torch.Generator) -> dict[str, Tensor]:
        del random
        x = torch.tensor(numbers).float()[:, None] / 10 * torch.tensor([1.0, 2.0, 3.0])
        return {"square": (self.layer(x) - 1).square().mean()}


def learnt(folder: Path) -> list[float]:
    """Train, save the weights, and return the losses."""
    line = Line()
    settings = LearningSettings(epochs=3, batch_size=4, lr=0.1)
    found = learn(line, 9, line.losses, folder, settings, {"network": "Line"}, classes=["a"])
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(line.layer.state_dict(), folder / "weights.pt")
        (folder / "losses.json").write_text(json.dumps(found.losses))
    return list(found.losses)


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    learnt(Path(sys.argv[1]))
    dist.destroy_process_group()
