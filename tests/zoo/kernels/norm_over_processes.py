"""What each of two processes runs: BatchNorm and a chain over both of them, uneven batches, by kernels and without."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import distributed as dist

from zoo.kernels.differentiable import batch_norm_act, norm_act_conv

SPLIT = 3
"""Images of the first process; the second has the rest."""


def data(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """What all processes draw alike."""
    draw = torch.Generator().manual_seed(1)
    shapes = {"x": (5, 6, 3, 4), "gradient": (5, 4, 3, 4), "weight": (6,), "bias": (6,), "kernel": (4, 6, 1, 1)}
    found = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    return found | {"mean": torch.zeros(6, dtype=dtype), "var": torch.ones(6, dtype=dtype)}


def step(given: dict[str, torch.Tensor], images: slice, group: Any, chain: bool) -> dict[str, torch.Tensor]:
    """Compute outputs, running statistics and gradients of some images."""
    leaves = {name: given[name].clone().requires_grad_() for name in ("weight", "bias", "kernel")}
    x, gradient = (given[name][images].contiguous(memory_format=torch.channels_last) for name in ("x", "gradient"))
    x.requires_grad_()
    running = (given["mean"].clone(), given["var"].clone())
    options: dict[str, Any] = {"act": "relu", "momentum": 0.1, "eps": 1e-5, "group": group}
    if chain:
        y, _ = norm_act_conv(x, leaves["weight"], leaves["bias"], *running, leaves["kernel"], **options)
    else:
        y = torch.nn.functional.conv2d(batch_norm_act(x, leaves["weight"], leaves["bias"], *running, **options), leaves["kernel"])
    y.backward(gradient)
    found = {"y": y.detach(), "x": x.grad, "mean": running[0], "var": running[1], **{name: leaf.grad for name, leaf in leaves.items()}}
    return {name: value for name, value in found.items() if value is not None}


def main(rank: int, store: str, out: str) -> None:
    """Run one process and keep what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    images = slice(0, SPLIT) if rank == 0 else slice(SPLIT, None)
    group, found = dist.group.WORLD, {}
    for name, dtype, chain in (("kernels", torch.float32, False), ("chain", torch.float32, True), ("plain", torch.float64, False)):
        found[name] = step(data(dtype), images, group, chain)
    torch.save(found, f"{out}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        import interpreting  # beside this file

        interpreting.install()
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
