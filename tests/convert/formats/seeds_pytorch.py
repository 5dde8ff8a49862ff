"""Small PyTorch files of both kinds, for the fuzzer."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import nn


def seeds(folder: Path) -> list[Path]:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    torch.manual_seed(0)
    state = network.state_dict()
    made = [folder / name for name in ("zip.pth", "stream.th", "nested.tar", "whole.pth", "whole.th")]
    torch.save(state, made[0])
    torch.save(state, made[1], _use_new_zipfile_serialization=False)
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}, "epoch": 3}, made[2])
    torch.save(network, made[3])  # a module saved whole, which names its classes
    torch.save({"model": network}, made[4], _use_new_zipfile_serialization=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is being retired, and says so
        torch.jit.save(torch.jit.script(network.eval()), str(folder / "program.ts"))
    return [*made, folder / "program.ts"]
