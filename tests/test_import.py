"""`import zoo` is cheap and quiet."""

from __future__ import annotations

import subprocess
import sys

TIMES = """
import time
start = time.process_time()
import torch
between = time.process_time()
import zoo
print((time.process_time() - between) / (between - start))
"""

QUIET = """
import socket, sys
def refuse(*a, **k):
    raise RuntimeError("a socket was opened")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
import zoo, zoo.labels, zoo.predict
heavy = {"torchvision", "huggingface_hub", "httpx2", "h5py", "onnx", "rich", "typer", "PIL", "timm", "skimage"}
print(sorted(heavy & set(sys.modules)))
zoo.ResNet20()
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_adds_less_than_an_eighth_to_torch() -> None:
    """About a quarter of a second; as a share, for a busy machine takes longer for both."""
    assert any(float(run(TIMES)) < 1 / 8 for _ in range(3))


def test_import_opens_no_socket_and_loads_nothing_heavy() -> None:
    assert run(QUIET) == "[]"
