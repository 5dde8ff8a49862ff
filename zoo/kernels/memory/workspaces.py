"""cuBLAS's scratch memory, which it keeps for every stream and thread that has ever multiplied: 32 MiB each on an H100."""

from __future__ import annotations

import torch


def clear_workspaces() -> None:
    """Give back cuBLAS's scratch memory, which would outlive what it was needed for; the next product makes its own anew.

    Before a capture, that product's lies in the graph's own memory, where nobody frees it under the graph.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def give_back(device: torch.device) -> None:
    """Free what only making plans needed: cuBLAS's workspaces of many streams, and what the allocator keeps."""
    torch.cuda.synchronize(device)
    clear_workspaces()
    torch.cuda.empty_cache()
