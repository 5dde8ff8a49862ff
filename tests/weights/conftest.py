"""A local Hub, little patience, and files that are worth fetching."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hubserver import HubServer

from weights import Checkpoint, adhoc, patience

LITTLE = patience.Patience(
    connect_s=60, read_s=60, tries=3, backoff_s=0.01, longest_wait_s=1, window_s=60, least_bytes=1000, deadline_s=600, most_bytes=4 << 20
)
"""Few tries, and all the time that a busy machine takes."""
LATE = ("stall", "drip", "header_drip")
"""Faults of which nothing is seen but that time passes."""


class Server(HubServer):
    """A Hub that is waited for shortly where a test has it be late, and there alone."""

    def fail(self, kind: str, **how: Any) -> None:
        super().fail(kind, **how)
        if kind in LATE and patience.PATIENCE is LITTLE:
            patience.PATIENCE = replace(LITTLE, read_s=0.4, window_s=0.4)  # until the fixture below is over


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(patience, "PATIENCE", LITTLE)
    with Server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def safetensors() -> Callable[..., bytes]:
    """Make the bytes of a valid safetensors file, all different: (size of the tensor, seed) -> bytes."""

    def make(count: int = 300_000, seed: int = 0) -> bytes:
        header = json.dumps({"w": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}).encode()
        return struct.pack("<Q", len(header)) + header + random.Random(seed).randbytes(count)

    return make


@pytest.fixture
def data(safetensors: Callable[..., bytes]) -> bytes:
    return safetensors()


@pytest.fixture
def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def record() -> Callable[..., Checkpoint]:
    """Make a record of these sources, of a file that is already safetensors unless told otherwise."""

    def make(*sources: str, **facts: Any) -> Checkpoint:
        return adhoc("ResNet20", sources[0], **{"tag": "test", "sources": list(sources), "format": "safetensors"} | facts)

    return make


@pytest.fixture
def cached(own_cache: Path) -> Callable[[], dict[str, bytes]]:
    """Read every file of the cache that holds weights or pieces of them, by its path below the cache."""

    def read() -> dict[str, bytes]:
        kinds = ("blobs", "partial", "quarantine")
        found = [path for kind in kinds for path in (own_cache / kind).rglob("*") if path.is_file()]
        return {str(path.relative_to(own_cache)): path.read_bytes() for path in found}

    return read
