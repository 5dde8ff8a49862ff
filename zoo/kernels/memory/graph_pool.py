"""The memory of CUDA graphs: as much as lives at once, not as much as the pieces that an allocator cuts of it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch

NAME = "expandable_segments"
_turn = threading.RLock()


@contextmanager
def growing(grows: bool = True) -> Iterator[None]:
    """Let PyTorch's allocator grow segments in the body, where a graph is captured, instead of adding one for each size of map.

    A graph keeps its pool for ever, so what is cut badly while it is captured stays lost: a fifth of ResNet50's step of training, a
    quarter of MobileNetV2's, 40 % of VGG19's (256 images, H200). Other settings stay as they are, and so does this one where the
    user has chosen it, either way. It holds for the whole process, so that one body runs after the other.

    Args:
        grows: False to leave the allocator as it is, and keep others from changing it meanwhile.
    """
    with _turn:
        settings = _settings() if grows else None
        if settings is None or NAME in settings:
            yield
            return
        tell = torch._C._accelerator_setAllocatorSettings  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with suppress(ValueError, RuntimeError):  # it saves room, and is worth no graph
                tell(_joined(settings, "True"))
            yield
        finally:
            tell(_joined(settings, "False"))
            tell(settings)


def _joined(settings: str, value: str) -> str:
    """Return the settings and this one; what PyTorch takes may end with a comma, and empty parts it does not take."""
    return ",".join([*filter(None, (part.strip() for part in settings.split(","))), f"{NAME}:{value}"])


def _settings() -> str | None:
    """Return what the allocator was told; None where segments can't grow, or nobody can be told."""
    if sys.platform != "linux" or torch.version.hip or not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        return None
    if not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "native":
        return None
    ask = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if ask is not None:
        return ask()
    told: Any = cast("Any", torch.cuda.memory._snapshot())["allocator_settings"]  # torch 2.11 says it there alone
    return told.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
