"""Statistics over two processes with batches of different sizes are those of all images in one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch
from preloaded import python

from tests.zoo.kernels import norm_over_processes


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    """Outputs and gradients of the maps side by side, gradients of parameters added: DDP averages what each process has of them."""
    script = Path(norm_over_processes.__file__)
    out, environment = tmp_path / "found", os.environ | {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    running = [
        subprocess.Popen([*python(), str(script), str(rank), str(tmp_path / "store"), str(out)], env=environment) for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=300) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
    first, second = (torch.load(f"{out}.{rank}") for rank in range(2))
    exact = norm_over_processes.step(norm_over_processes.data(torch.float64), slice(None), None, chain=False)
    for way, allowed in (("kernels", 2e-6), ("chain", 2e-6), ("plain", 1e-13)):
        for name, wanted in exact.items():
            mine, theirs = first[way][name], second[way][name]
            joined = torch.cat([mine, theirs]) if name in ("x", "y") else mine if name in ("mean", "var") else mine + theirs
            assert (joined.double() - wanted).norm() <= allowed * wanted.norm(), (way, name)
            assert name not in ("mean", "var") or torch.equal(mine, theirs)
