"""Fast networks learn in two processes what eager ones learn there, copied or divided."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch
from preloaded import python

SCRIPT = Path(__file__).parents[1] / "training_over_processes.py"


def test_two_processes_learn_what_eager_ones_learn(tmp_path: Path) -> None:
    out, environment = tmp_path / "found", os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([*python(), str(SCRIPT), str(rank), str(tmp_path / "store"), str(out)], env=environment) for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=300) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
    for rank in range(2):
        found = torch.load(f"{out}.{rank}", weights_only=False)
        assert found.pop(("stepped", "unchanged")) == "a CPU has no CUDA graphs"
        assert "a hook of their own" in found.pop(("stepped as it is", "unchanged"))
        for name, (eager, quick, kernels, unchanged) in found.items():
            torch.testing.assert_close(quick, eager, msg=lambda text, name=name: f"{name}: {text}")
            norm = "shared_batch_norm" if name == "shared" else "batch_norm"
            assert kernels == [f"{norm} + relu", "depthwise 3x3", norm, f"{norm} + residual + relu"], name
            assert ("a hook of stem" in unchanged) == (name == "divided in parts"), unchanged
