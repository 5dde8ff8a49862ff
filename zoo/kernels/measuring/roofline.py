"""What a device could do at best: its arithmetic rate and its memory bandwidth, and the time no kernel beats."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from zoo.kernels.measuring.timing import graph_time_us


@dataclass(frozen=True)
class Limits:
    """A device's ceilings.

    Attributes:
        flops: floating-point operations per second by "bfloat16", "float16", "tf32" or "float32"; a multiply-add counts as two.
        bytes_per_s: bytes read plus bytes written per second, device memory.
        source: "measured", or "datasheet", which is more than anybody measures.
    """

    flops: dict[str, float]
    bytes_per_s: float
    source: str = "measured"


def _rates(half: float, tf32: float, single: float) -> dict[str, float]:
    return {"bfloat16": half, "float16": half, "tf32": tf32, "float32": single}


KNOWN: dict[str, Limits] = {
    # A product of random 8192 x 8192 matrices and a copy of 4.3 GB; tf32 is half of bfloat16 by construction, float32 the datasheet's.
    "NVIDIA H200": Limits(_rates(790e12, 395e12, 67e12), 4.3e12),
    "NVIDIA H100 80GB HBM3": Limits(_rates(989e12, 494e12, 67e12), 3.35e12, "datasheet"),
    "NVIDIA H100 PCIe": Limits(_rates(756e12, 378e12, 51e12), 2.0e12, "datasheet"),
    "NVIDIA A100-SXM4-80GB": Limits(_rates(312e12, 156e12, 19.5e12), 2.039e12, "datasheet"),
    "NVIDIA A100-SXM4-40GB": Limits(_rates(312e12, 156e12, 19.5e12), 1.555e12, "datasheet"),
    "NVIDIA A100 80GB PCIe": Limits(_rates(312e12, 156e12, 19.5e12), 1.935e12, "datasheet"),
}
"""Ceilings by `torch.cuda.get_device_name()`."""


def limits(device: torch.device | str | int | None = None) -> Limits:
    """Return a CUDA device's ceilings: those known by its name, else measured once a process.

    Args:
        device: the device; the current one if left out.

    Returns:
        The ceilings.
    """
    index = torch.cuda.current_device() if device is None else torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    return KNOWN.get(torch.cuda.get_device_name(index)) or measure(index)


@functools.cache
def measure(index: int) -> Limits:
    """Measure a CUDA device's ceilings: a large map read and written, and a large product of random matrices in every precision.

    Args:
        index: the device's number.

    Returns:
        The ceilings.
    """
    with torch.cuda.device(index):
        size = min(2**31, torch.cuda.get_device_properties(index).total_memory // 8)
        bytes_per_s = _traffic(size)
        flops = {
            "bfloat16": _product(torch.bfloat16),
            "float16": _product(torch.float16),
            "tf32": _product(torch.float32, tf32=True),
            "float32": _product(torch.float32),
        }
    torch.cuda.empty_cache()
    return Limits(flops, bytes_per_s)


def _traffic(size: int) -> float:
    source = torch.randint(2**31 - 1, (size // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)  # no `copy_`: of 2 GiB it once showed 2.7 TB/s on an H200
    return 2 * size / graph_time_us(lambda: torch.bitwise_not(source, out=target), repeats=2, target_ms=20) * 1e6


def _product(dtype: torch.dtype, tf32: bool = False) -> float:
    n = 8192 if dtype != torch.float32 or tf32 else 4096
    a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        return 2 * n**3 / graph_time_us(lambda: torch.mm(a, b, out=out), repeats=2, target_ms=20) * 1e6
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def floor_us(flop: float, moved: float, dtype: torch.dtype, ceilings: Limits, *, tf32: bool = False) -> float:
    """Return the time in microseconds that no kernel beats: the larger of arithmetic and memory traffic at their ceilings.

    Args:
        flop: floating-point operations, two a multiply-add.
        moved: bytes that must be read and written, each once.
        dtype: the operands' dtype.
        ceilings: the device's.
        tf32: float32 operands go through the matrix units as TF32.

    Returns:
        Microseconds.
    """
    rate = "tf32" if tf32 and dtype == torch.float32 else str(dtype).removeprefix("torch.")
    return 1e6 * max(flop / ceilings.flops[rate], moved / ceilings.bytes_per_s)
