"""Programmatic dependent launch: the next kernel's blocks are placed while the last ones of this kernel still run.

Every kernel calls `begin` before it touches memory that another kernel writes: it waits there until the kernel before is complete and
its writes are visible. Whether it also lets the kernel behind be placed early is the caller's to say (`followed_by_ours`): a library's
kernel may be launched the same way and not wait, where it only prepares a workspace, and what comes behind that one would then read
what is still being written. So only kernels that are followed by one of ours let it in.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

_thread = threading.local()


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Wait for the kernel before; where OVERLAP is 2, then let the kernel behind be placed."""
    if OVERLAP >= 1:
        tl.extra.cuda.gdc_wait()  # pyright: ignore[reportAttributeAccessIssue]
    if OVERLAP == 2:
        tl.extra.cuda.gdc_launch_dependents()  # pyright: ignore[reportAttributeAccessIssue]


_assumed: bool | None = None


def assume(capable: bool) -> None:
    """Let this process compile for a GPU that it doesn't use, by tensors that lie elsewhere."""
    global _assumed
    _assumed = capable


def assumed() -> bool:
    """Tell whether this process only compiles, for a GPU that it doesn't use."""
    return _assumed is not None


def kernels_run(x: torch.Tensor) -> bool:
    """Tell whether kernels can work on `x`: it is on a GPU, or Triton interprets them, or they are only compiled."""
    return x.is_cuda or not isinstance(begin, triton.JITFunction) or assumed()


@functools.cache
def _capable(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


@contextmanager
def followed_by_ours(ours: bool) -> Iterator[None]:
    """Say for what this thread launches in the body whether the kernel behind it calls `begin` too."""
    before = getattr(_thread, "ours", False)
    _thread.ours = ours
    try:
        yield
    finally:
        _thread.ours = before


def overlap(x: torch.Tensor) -> dict[str, int | bool]:
    """Return the launch arguments `OVERLAP` and `launch_pdl` for a kernel on the device of `x`: none before Hopper.

    And `enable_fp_fusion`: products and sums may be one instruction, as they were when kernels were timed, whatever Triton says by default.
    """
    if not (_assumed if _assumed is not None else x.device.type == "cuda" and _capable(x.device.index or 0)):
        return {"OVERLAP": 0, "enable_fp_fusion": True}
    return {"OVERLAP": 2 if getattr(_thread, "ours", False) else 1, "launch_pdl": True, "enable_fp_fusion": True}
