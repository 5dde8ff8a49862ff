"""Programmatic dependent launch: the next kernel's blocks are placed while the last ones of this kernel still run.

Every kernel calls `begin` before it touches memory that another kernel writes: it waits there until the kernel before is
complete and its writes are visible. Only then is overlapping safe, so a kernel that doesn't call it is launched without `launch_pdl`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Wait for the kernel before, then let the kernel behind be placed."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def _capable(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


def overlap(x: torch.Tensor) -> dict[str, bool]:
    """Return the launch arguments `OVERLAP` and `launch_pdl` for a kernel on the device of `x`: both on from Hopper on."""
    if x.device.type != "cuda" or not _capable(x.device.index or 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}
