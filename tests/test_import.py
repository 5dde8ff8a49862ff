"""`import zoo` is cheap and quiet, and so are the commands that look at names, records and headers: none of them loads torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import weights

SHIPPED = Path(weights.__file__).parent / "embedded" / "resnet20_cifar10.safetensors"
QUIET = """
import socket, sys
def refuse(*a, **k):
    raise RuntimeError("a socket was opened")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
import zoo
light = sorted({"torch", "numpy", "weights", "typer"} & set(sys.modules))
zoo.ResNet20()
import zoo.labels, zoo.prediction.predict
heavy = {"torchvision", "huggingface_hub", "httpx2", "h5py", "onnx", "rich", "typer", "PIL", "timm", "skimage"}
print(light, sorted(heavy & set(sys.modules)))
"""
COMMAND = r"""
import json, os, re, sys, time
told, sys.stdout = sys.stdout, open(os.devnull, "w")
from zoo.commands.app import main
code = main(sys.argv[1:])
peak_kb = int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])  # getrusage tells of the parent, which forked this one
heavy = sorted({"torch", "torchvision", "triton", "huggingface_hub", "PIL"} & set(sys.modules))
json.dump({"code": code, "heavy": heavy, "cpu_s": time.process_time(), "peak_mb": peak_kb / 1024}, told)
"""
TORCH = "import time, torch\nprint(time.process_time())"
COMMANDS = {
    "help": ["--help"],
    "list": ["list"],
    "list of a pattern": ["list", "*resnet*", "--sort", "speed"],
    "info": ["info", "VGG19"],
    "info in full": ["info", "ResNet50", "--full"],
    "browse": ["browse", "--mine", "--no-open"],
    "cache": ["cache"],
    "inspect": ["inspect", str(SHIPPED)],
    "diff": ["diff", str(SHIPPED), str(SHIPPED)],
    "lock": ["lock", "ResNet20"],
    "verify": ["verify"],
    "gc": ["gc"],
    "doctor": ["doctor"],
    "mirror": ["mirror", "mirrored", "ResNet20"],
    "sbom": ["sbom", "--out", "sbom.json"],
    "list of a bundle": ["bundle", "--list", "zoo.tar"],
}


def run(code: str, *arguments: str, cwd: Path | None = None) -> str:
    settings = {**os.environ, "ZOO_OFFLINE": "1"}
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=settings, cwd=cwd).stdout.strip()


def test_import_opens_no_socket_and_loads_nothing_heavy() -> None:
    assert run(QUIET) == "[] []"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a lock and a bundle."""
    made = tmp_path_factory.mktemp("project")
    for arguments in (["lock", "ResNet20"], ["bundle", "ResNet20", "-o", "zoo.tar"]):
        assert json.loads(run(COMMAND, *arguments, cwd=made))["code"] == 0
    return made


@pytest.fixture(scope="module")
def torch_s() -> float:
    return float(run(TORCH))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_computes_nothing_loads_no_torch_and_is_small(name: str, folder: Path, torch_s: float) -> None:
    """Below 100 MB; its processor time is compared with that of importing torch, for a busy machine takes longer for both.

    Where it took more than half of that, both are measured again, beside each other.
    """
    found = json.loads(run(COMMAND, *COMMANDS[name], cwd=folder))
    assert (found["code"], found["heavy"]) == (0, [])
    assert found["peak_mb"] < 100
    again = (json.loads(run(COMMAND, *COMMANDS[name], cwd=folder))["cpu_s"] < float(run(TORCH)) / 2 for _ in range(3))
    assert found["cpu_s"] < torch_s / 2 or any(again)


def test_completion_of_a_networks_name_loads_neither_torch_nor_a_command_of_another_name() -> None:
    code = """
import os, sys
os.environ |= {"_ZOO_COMPLETE": "complete_bash", "COMP_WORDS": "zoo info VGG1", "COMP_CWORD": "2"}
from zoo.commands.app import main
told, sys.stdout = sys.stdout, sys.stderr
try:
    main([])
except SystemExit:
    pass
print(sorted({"torch", "numpy", "zoo.commands.bench", "zoo.commands.networks"} & set(sys.modules)), file=told)
"""
    assert run(code) == "['zoo.commands.networks']"
