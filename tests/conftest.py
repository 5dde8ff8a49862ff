"""Every test has a cache of its own and no network but this machine's."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("KERAS_BACKEND", "torch")  # before anybody imports it: its own choice is TensorFlow, and slow to load
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton, which reads it once

REAL = Path(os.environ.get("ZOO_REAL", Path(__file__).parents[2] / "shared"))
"""Real checkpoints, photographs and CIFAR-10 as JPEG, where someone keeps them beside the checkout."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, not skip, what this machine has no device or no files for."""
    absent = set()
    if not torch.cuda.is_available():
        absent.add("gpu")
    if importlib.util.find_spec("keras_hub") is None:
        absent.add("kerashub")
    absent |= {name for name in ("long", "mounts") if name not in config.getoption("markexpr")}
    if not (REAL / "real" / "INDEX.md").is_file():
        absent.add("real")
    gone = [item for item in items if any(item.get_closest_marker(name) for name in absent)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]


@pytest.fixture
def real() -> Path:
    return REAL


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("home")
    ours, theirs = ("ZOO_OFFLINE", "ZOO_FROZEN", "ZOO_MIRROR", "ZOO_REGISTRY"), ("HF_HUB_OFFLINE", "HF_TOKEN")
    for name in (*ours, *theirs, "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("ZOO_CACHE", str(folder / "cache"))
    monkeypatch.setenv("ZOO_USER_REGISTRY", str(folder / "registry"))
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    monkeypatch.setenv("TORCH_HOME", str(folder / "torch"))
    return folder / "cache"


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test reached for {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
