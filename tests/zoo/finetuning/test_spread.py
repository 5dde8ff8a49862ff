"""Two processes with the same images a step end where one ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import python
from safetensors.torch import load_file
from small import Tiny
from torch import distributed as dist

from zoo.finetuning import finetune
from zoo.finetuning.distributed import _who, world

DRIVER = Path(__file__).with_name("small.py")


def start(told: dict[str, Any]) -> None:
    """Do what torchrun does, without its half a minute of imports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared.pop("TRITON_INTERPRET", None)  # as on users' processors; kernels over processes have a test of their own
    launch = [*python(), "-W", "error", str(DRIVER), json.dumps(told)]
    both = [
        subprocess.Popen(launch, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    errors = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(errors)


def test_two_processes_end_where_one_ends_copied_or_divided(photos: Path, tmp_path: Path) -> None:
    told: dict[str, Any] = {
        "data": str(photos),
        "from_scratch": True,
        "batch_size": 12,
        "epochs": 2,
        "lr": 0.05,
        "head_epochs": 1,
        "device": "cpu",
    }
    told |= {"mixup": 0.2, "ema": 0.9, "balance": True, "clip": 1.0, "label_smoothing": 0.1, "accumulate": 1, "warmup": 0.2}
    (photos / "cat" / "003.png").write_bytes(b"")
    folders = [{"out": str(tmp_path / name), option: True} for name, option in (("divided", "fsdp"), ("stepped", "fast"))]
    other = {"randaugment": 4, "workers": 0, "batch_size": 16, "accumulate": 2}
    decoded = [{"out": str(tmp_path / name), "fast": name == "stepped-decoded", **other} for name in ("decoded", "stepped-decoded")]
    start({**told, "runs": [{"out": str(tmp_path / "copied")}, *folders, *decoded]})
    for name, more in (("alone", {}), ("alone-decoded", other)):
        finetune(Tiny, out=tmp_path / name, **{**told, **more})
    for alone, others in (("alone", ["copied", "divided", "stepped"]), ("alone-decoded", ["decoded", "stepped-decoded"])):
        wanted = load_file(tmp_path / alone / "last.safetensors")
        for other in others:
            found = load_file(tmp_path / other / "last.safetensors")
            assert found.keys() == wanted.keys()
            far = {key: (found[key].double() - wanted[key].double()).abs().max().item() for key in wanted}
            assert max(far.values()) < 1e-5, (other, far)
            rows = [json.loads((tmp_path / run / "metrics.json").read_text()) for run in (alone, other)]
            assert rows[0]["confusion"] == rows[1]["confusion"]
            page = (tmp_path / other / "report.html").read_text()
            assert ("what each layer ran on" in page) is other.startswith("stepped")
    torch.testing.assert_close(
        load_file(tmp_path / "copied" / "model.safetensors"), load_file(tmp_path / "alone" / "model.safetensors"), rtol=0, atol=1e-5
    )


def test_who_a_process_is_comes_from_its_group_first_then_from_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert _who() == (0, 1, 0)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match=r"RANK is 1 and WORLD_SIZE is not set.*start them with torchrun"), world("cpu"):
        pass
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(ValueError, match="are no numbers; start the processes with torchrun"), world("cpu"):
        pass
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with world("cpu") as here:  # a group that the caller made, without torchrun's variables
        assert (here.rank, here.size, here.first) == (3, 4, False)
