"""Commands whose disk is full, or whose folder may not be written: one message, and what was there is there; the kernel refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from preloaded import python

from zoo import ResNet20

CONVERTS = """
import ctypes, os, resource, sys
from zoo.commands.app import main
source, destination, *limits = sys.argv[1:]
folder = os.path.dirname(destination)

def convert():
    code = main(["convert", source, destination, "--model", "ResNet20", "--replace"])
    left = open(destination, "rb").read() == b"as it was", os.listdir(folder) == ["out.safetensors"]
    print(code, *left, file=sys.stderr, flush=True)

main(["convert", source, source + ".safetensors", "--model", "ResNet20"])  # what is imported late has a disk
for limit in map(int, limits):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    convert()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0  # root may do what modes forbid
os.chmod(folder, 0o555)
convert()
os.chmod(folder, 0o755)
convert()
"""


def test_a_conversion_that_can_not_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    torch.save(ResNet20().state_dict(), tmp_path / "x.pth")
    (tmp_path / "out").mkdir()
    destination = tmp_path / "out" / "out.safetensors"
    destination.write_bytes(b"as it was")
    command = [*python(), "-c", CONVERTS, str(tmp_path / "x.pth"), str(destination), "0", "1000", "1000000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.endswith("True")] == ["1 True True"] * 4 + ["0 False True"]
    assert done.stderr.count("File too large") == 3
    assert done.stderr.count("Permission denied") == 1
    assert "Traceback" not in done.stderr


def test_what_is_written_to_a_full_disk_is_one_message() -> None:
    command = [sys.executable, "-m", "zoo", "list"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")
