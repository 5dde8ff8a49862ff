"""The network of a job, made ready, and the proof that it computes the bits of the run that began the job."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from zoo.embedding.decoding import Chunk
from zoo.embedding.extracting import extractor
from zoo.embedding.feeding import Feeder
from zoo.embedding.plan import Plan
from zoo.networks.model import Model


@dataclass(frozen=True, slots=True)
class Int8:
    """What int8 needs.

    Attributes:
        calibration: preprocessed images, (N, C, H, W), half of them to compare on.
        tolerance: as `fast` takes it.
        name: for the plan, so that other images are another job.
    """

    calibration: Tensor
    tolerance: Any
    name: str


def prepared(model: Model, plan: Plan, device: torch.device, dtype: torch.dtype | None, int8: Int8 | None = None) -> nn.Module:
    """Return the network that computes {tap: (B, D)} on the device, fast if the plan says so."""
    network = extractor(model, plan.at)
    if plan.kernels == "fast":
        from zoo.kernels import fast

        side = plan.preprocessing.crop or 0
        if int8 is not None:
            made = fast(network, "cpu", "int8", calibration=int8.calibration, tolerance=int8.tolerance)
            made.prepare((torch.zeros(plan.batch_size, model.in_channels, side, side),))
            return made
        return fast(network, device, dtype, example=torch.zeros(plan.batch_size, model.in_channels, side, side, device=device))
    twin = copy.deepcopy(network).to(device, dtype or next(model.parameters()).dtype).eval()
    return _Casting(twin)


class _Casting(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.dtype = next(network.parameters()).dtype

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.network(x.to(self.dtype))


def probe(feeder: Feeder, plan: Plan) -> str:
    """Run a batch of fixed noise; return the BLAKE3 of what the network makes of it, and of the GPU's name."""
    side, channels = plan.preprocessing.crop or 0, len(plan.preprocessing.mean)
    noise = torch.randint(0, 256, (plan.batch_size, side, side, channels), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = feeder.finish(feeder.start([Chunk(range(plan.batch_size), noise, np.empty(0))]))
    digest = blake3(torch.cuda.get_device_name(feeder.device).encode() if feeder.gpu else b"")
    for tap in plan.at:
        digest.update(found[tap].contiguous().numpy().tobytes())
    return digest.hexdigest()


def check_probe(found: str, begun: str, where: object) -> None:
    """Compare a probe with that of the run which began the job.

    Raises:
        ValueError: the bits differ, so the rows of this run would not be those of the first.
    """
    if found != begun:
        raise ValueError(
            f"the network's last bits are not those of the run that began {where}: another machine, other libraries, or fast() chose "
            "other kernels. Go on where it was begun, or begin anew with restart=True; fast=False chooses nothing"
        )
