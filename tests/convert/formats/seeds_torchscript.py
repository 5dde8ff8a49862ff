"""Small programs of TorchScript: scripted and traced, with modules that are held twice, buffers, lists and numbers beside the tensors."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Holds one convolution under two names, a buffer that is a view of another, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.again = self.first
        self.norm = nn.BatchNorm2d(3)
        table = torch.arange(12.0).reshape(3, 4)
        self.register_buffer("table", table)
        self.register_buffer("turned", table.T)
        self.scales, self.rate, self.count, self.name = [0.5, 2.0], 0.1, 70_000, "block"

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.again(self.first(x))) * self.scales[0] * self.rate


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(3, 2, bias=False).half()
        self.extra = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean((2, 3))


def seeds(folder: Path) -> list[Path]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).eval()
    made = [folder / name for name in ("script.ts", "trace.pt", "network.ts")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is being retired, and says so
        torch.jit.save(torch.jit.script(plain), str(made[0]))
        torch.jit.save(torch.jit.trace(plain, torch.zeros(1, 3, 4, 4)), str(made[1]))
        torch.jit.save(torch.jit.script(Network().eval()), str(made[2]))
    return made
