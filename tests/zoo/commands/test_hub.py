"""The main job against a Hub: the real huggingface_hub client, a server of this test's own, and processes, one as users start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hubserver import HubServer
from preloaded import python

from convert.formats import safetensors
from weights import HashMismatch
from zoo import MobileNetV3Small, ResNet20, trained
from zoo.commands.app import main

LOAD = """
import json, sys, torch, zoo
model = zoo.trained(zoo.ResNet20, sys.argv[1])
total = sum(float(p.detach().double().sum()) for p in model.parameters())
print(json.dumps(dict(total=total, source=model.checkpoint.sources[0])))
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def blob(model: torch.nn.Module, path: Path) -> bytes:
    safetensors.save(model.state_dict(), path)
    return path.read_bytes()


def total(model: torch.nn.Module) -> float:
    return sum(float(p.detach().double().sum()) for p in model.parameters())


def load(hub: HubServer, source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "HF_ENDPOINT": hub.url, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([*python(), "-c", LOAD, source], capture_output=True, text=True, env=settings)


def test_a_hub_repository_loads_once_and_then_without_network(hub: HubServer, tmp_path: Path) -> None:
    model = ResNet20()
    hub.repo("acme/wheels", {"model.safetensors": blob(model, tmp_path / "w"), "README.md": b"# wheels"})
    first = load(hub, "hf://acme/wheels")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["total"] == pytest.approx(total(model))
    asked = len(hub.log)
    assert sum(r.sent > 100_000 for r in hub.log) == 1
    again = load(hub, "hf://acme/wheels", ZOO_OFFLINE="1")
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert len(hub.log) == asked


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.long)])  # eight without torch are in tests/weights/test_sources.py
def test_processes_share_one_download(hub: HubServer, tmp_path: Path, count: int) -> None:
    hub.repo("acme/wheels", {"model.safetensors": blob(ResNet20(), tmp_path / "w")})
    with ThreadPoolExecutor(count) as pool:
        runs = list(pool.map(lambda _: load(hub, "hf://acme/wheels"), range(count)))
    assert [r.returncode for r in runs] == [0] * count, runs[0].stderr
    assert len({r.stdout for r in runs}) == 1
    assert sum(r.sent > 100_000 for r in hub.log) == 1


def test_a_cut_download_goes_on_where_it_was_cut(hub: HubServer, tmp_path: Path) -> None:
    data = blob(ResNet20(), tmp_path / "w")
    hub.repo("acme/wheels", {"model.safetensors": data})
    hub.fail("cut", after=400_000)
    trained(ResNet20, "hf://acme/wheels")
    bodies = [r for r in hub.log if r.sent > 100_000]
    assert len(bodies) == 2
    assert bodies[1].range is not None
    assert sum(r.sent for r in bodies) < len(data) + 70_000


def test_flipped_bytes_are_never_loaded(hub: HubServer, tmp_path: Path, own_cache: Path) -> None:
    hub.repo("acme/wheels", {"model.safetensors": blob(ResNet20(), tmp_path / "w")})
    hub.fail("flip", after=500_000, times=-1)
    with pytest.raises(HashMismatch):
        trained(ResNet20, "hf://acme/wheels")
    assert not [p for p in (own_cache / "blobs").rglob("*") if p.is_file()]
    hub.faults.clear()
    assert trained(ResNet20, "hf://acme/wheels").checkpoint


def test_timms_names_and_a_new_head_work_from_the_hub(hub: HubServer, tmp_path: Path) -> None:
    from convert import names
    from convert.source import in_memory
    from convert.writing import parts

    model = MobileNetV3Small()
    ours = model.state_dict()
    rows = names.rows("timm", MobileNetV3Small, {name: tuple(tensor.shape) for name, tensor in ours.items()})
    tensors = {name: in_memory(name, tensor.numpy()) for name, tensor in ours.items()}
    theirs = {f"{part.name}.{leaf}": torch.from_numpy(s.array()) for part in parts(rows, (), tensors) for leaf, s in part.leaves.items()}
    assert theirs.keys() != ours.keys()
    safetensors.save(theirs, tmp_path / "t")
    hub.repo("timm/small", {"model.safetensors": (tmp_path / "t").read_bytes()})
    assert trained(MobileNetV3Small, "hf://timm/small", num_classes=3).num_classes == 3


def test_the_command_pulls_and_verifies(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repo("acme/wheels", {"model.safetensors": blob(ResNet20(), tmp_path / "w")})
    command = [sys.executable, "-m", "zoo", "pull", "ResNet20", "-w", "hf://acme/wheels", "--json"]
    pulled = subprocess.run(command, capture_output=True, text=True)
    assert pulled.returncode == 0, pulled.stderr
    assert "acme/wheels" in json.loads(pulled.stdout)["source"]
    assert main(["verify"]) == 0
    assert main(["pull", "ResNet20", "-w", "hf://acme/none"]) == 4
    complaint = capsys.readouterr().err
    assert "acme/none" in complaint
    assert "Traceback" not in complaint
