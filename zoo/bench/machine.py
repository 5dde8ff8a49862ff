"""What a measurement belongs to: the device, its driver, the date and the versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import subprocess
import time
from typing import Any

import torch

from zoo.kernels.tuning.choices import processor

LIBRARIES = ("torch", "torchvision", "timm", "triton", "onnxruntime", "openvino")


def versions() -> str:
    """Name the machine's processor and threads, the date, and the versions that a timing belongs to."""
    import torchvision

    libraries = f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    return f"{today()}, {processor()}, {torch.get_num_threads()} threads, {libraries}"


def today() -> str:
    """Return the date, 2026-11-21."""
    return time.strftime("%Y-%m-%d")


def facts(device: torch.device) -> dict[str, Any]:
    """Describe a device and what runs on it, for a record that is kept.

    Args:
        device: a CPU or a CUDA device.

    Returns:
        `type`, `device` (its name), `driver` and `memory_mib` of a GPU, `threads` of a CPU, and `versions` by library.
    """
    found: dict[str, str] = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["torch"] = torch.__version__  # with its CUDA, which the package's metadata may leave out
    if device.type == "cuda":
        found["cudnn"] = _dotted(torch.backends.cudnn.version())
        properties = torch.cuda.get_device_properties(device)
        own: dict[str, Any] = {"device": properties.name, "driver": _driver(), "memory_mib": properties.total_memory // 2**20}
    else:
        own = {"device": processor(), "threads": torch.get_num_threads()}
    return {"type": device.type, **own, "versions": found}


def _dotted(cudnn: int | None) -> str:
    return "none" if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        if answer:
            return answer[0]
    return "unknown"
