"""The time that no implementation beats: every convolution and product at the device's ceilings, and what must be read beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.networks.model import Model

CONVOLUTIONS = ("convolution", "_convolution")
PRODUCTS = ("addmm", "mm", "bmm", "baddbmm")
ATTENTION = "_scaled_dot_product"
"""What the names of attention's kernels begin with."""
POOLS = ("max_pool2d_with_indices", "avg_pool2d", "mean", "_adaptive_avg_pool2d")


@dataclass(slots=True)
class Work:
    """What one kernel must do: floating-point operations, two a multiply-add, and elements read and written, each once."""

    op: str
    flop: int
    elements: int


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if name in CONVOLUTIONS:
            image, weight = tensors[:2]
            self.found.append(Work(name, 2 * out.numel() * math.prod(weight.shape[1:]), image.numel() + weight.numel() + out.numel()))
        elif name in PRODUCTS:
            left, right = tensors[-2:]
            self.found.append(Work(name, 2 * left.numel() * right.shape[-1], left.numel() + right.numel() + out.numel()))
        elif name.startswith(ATTENTION):
            query, key, value = tensors[:3]
            pairs = query.numel() // query.shape[-1] * key.shape[-2]  # of a place that asks and one that answers, in each head
            elements = 2 * query.numel() + key.numel() + value.numel()
            self.found.append(Work(name, 2 * pairs * (query.shape[-1] + value.shape[-1]), elements))
        elif name in POOLS:
            out_map = out[0] if isinstance(out, tuple) else out
            if out_map.shape != tensors[0].shape:
                self.found.append(Work(name, 0, tensors[0].numel() + out_map.numel()))
        elif (
            name in ("add", "add_") and self.found and len(tensors) == 2 and tensors[0].dim() == 4 and tensors[0].shape == tensors[1].shape
        ):
            self.found[-1].elements += out.numel()  # the convolution before it adds, and has to read the shortcut
        return out


def work(cls: type[Model], batch: int) -> list[Work]:
    """Count a network's kernels, on the meta device: what is fused into them is free, but a shortcut has to be read.

    Args:
        cls: a network of the catalogue.
        batch: images in a call.

    Returns:
        A `Work` for every convolution, product and pool.
    """
    with torch.device("meta"):
        network = cls().eval()
        images = torch.empty(batch, network.in_channels, cls.input_size, cls.input_size)
        with torch.no_grad(), _Count() as count:
            network(images)
    return count.found


def floor_us(cls: type[Model], batch: int, device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the sum of the kernels' floors in microseconds; None on a CPU, whose ceilings nobody has measured.

    Activations are taken to come from memory, as they must at a large batch; at a small one the cache holds some of them, and this
    is no strict limit.
    """
    if device.type != "cuda":
        return None
    from zoo.kernels.measuring.roofline import floor_us as kernel_floor_us
    from zoo.kernels.measuring.roofline import limits

    ceilings = limits(device)
    return sum(kernel_floor_us(w.flop, w.elements * dtype.itemsize, dtype, ceilings) for w in work(cls, batch))
