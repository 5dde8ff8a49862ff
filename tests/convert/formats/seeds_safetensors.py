"""Small safetensors files, for the fuzzer."""

from __future__ import annotations

from pathlib import Path

import torch

from convert.formats import safetensors


def seeds(folder: Path) -> list[Path]:
    draw = torch.Generator().manual_seed(0)
    tensors = {
        "conv.weight": torch.randn(4, 3, 3, 3, generator=draw),
        "conv.bias": torch.randn(4, generator=draw).bfloat16(),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "count": torch.tensor(7),
    }
    made = [folder / "plain.safetensors", folder / "noted.safetensors"]
    safetensors.save(tensors, made[0])
    safetensors.save(tensors, made[1], {"format": "pt", "kernelzoo": "{}"})
    return made
