"""The Ray engine on a cluster of two nodes on this machine; one cluster for all tests of this file."""

import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import numpy as np
import pytest
import torch

from zoo.embedding import cluster, embed, read
from zoo.embedding.run import make_plan
from zoo.images import open_source
from zoo.images.folder import Folder
from zoo.networks.model import Model

pytestmark = [pytest.mark.filterwarnings("ignore")]
PLAIN: dict[str, Any] = {"fast": False, "batch_size": 16, "progress": False}


class Slow(Folder):
    """A folder that takes its time, so that there is a midway, and tells who reads it."""

    seen: Path

    def read(self, index: int) -> bytes:
        unfinished = self.seen.with_name(f"{os.getpid()}")
        unfinished.write_text(f"{os.getpid()}")
        unfinished.replace(self.seen)
        time.sleep(0.03)
        return super().read(index)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from ray.cluster_utils import Cluster

        os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        made.add_node(num_cpus=2)
        ray.init(address=made.address, log_to_driver=False, logging_level="error")
        yield ray
        ray.shutdown()
        made.shutdown()


@pytest.fixture(autouse=True)
def small_ray_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PART_ROWS", 16)


@pytest.mark.long  # half a minute alone, five beside other tests: Ray starts a dozen processes
def test_a_worker_killed_midway_costs_no_row(two_nodes: Any, network: Model, photos: Path, tmp_path: Path) -> None:
    embed(network, photos, tmp_path / "local.parquet", workers=0, **PLAIN)
    out = tmp_path / "ray"
    victims: list[int] = []
    source = Slow(str(photos))
    source.seen = tmp_path / "reader"

    def kill() -> None:
        while not list(tmp_path.glob("ray.parts/part-*")):
            time.sleep(0.01)
        victims.append(int(source.seen.read_text()))
        os.kill(victims[0], signal.SIGKILL)

    killer = Thread(target=kill)
    killer.start()
    report = embed(network, source, out, engine="ray", **PLAIN)
    killer.join()
    assert len(two_nodes.nodes()) == 2
    assert victims != [os.getpid()]
    assert int(source.seen.read_text()) != victims[0]
    assert (report.rows, report.computed, report.unreadable) == (120, 120, [])
    assert [path.name for path in sorted(out.iterdir())] == [f"part-{start:012d}.parquet" for start in range(0, 120, 16)]
    one, other = read(out), read(tmp_path / "local.parquet")
    assert (one.keys, one.labels, one.index.tolist()) == (other.keys, other.labels, list(range(120)))
    assert np.allclose(one.vectors["embedding"], other.vectors["embedding"], atol=1e-5)
    assert one.about == other.about


@pytest.mark.long
def test_finished_parts_are_kept_and_unreadable_images_and_copies_listed(
    two_nodes: Any, network: Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(photos, tmp_path / "p")
    files = sorted((tmp_path / "p").rglob("*.jpg"))
    files[3].write_text("no image")
    files[100].write_bytes(files[20].read_bytes())
    out = tmp_path / "o"

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(cluster, "_settle", stop)
        with pytest.raises(KeyboardInterrupt):
            embed(network, tmp_path / "p", out, engine="ray", dedupe=True, **PLAIN)
    (tmp_path / "o.parts/part-000000000032.parquet").unlink()
    report = embed(network, tmp_path / "p", out, engine="ray", dedupe=True, workers=2, **PLAIN)
    assert (report.resumed, report.computed, report.rows) == (104, 16, 118)
    assert [e.index for e in report.unreadable] == [3]
    assert [(e.index, e.copy_of) for e in report.copies] == [(100, files[20].relative_to(tmp_path / "p").as_posix())]
    assert read(out).index.tolist() == [i for i in range(120) if i not in (3, 100)]
    assert [json.loads(line)["index"] for line in (tmp_path / "o.left-out.jsonl").read_text().splitlines()] == [3, 100]
    with pytest.raises(FileExistsError, match="is there already"):
        embed(network, tmp_path / "p", out, engine="ray", **PLAIN)


def test_what_a_cluster_cant_do_is_said(network: Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"Ray writes a folder of Parquet files, so the output can't be 'o.npy'"):
        embed(network, photos, tmp_path / "o.npy", engine="ray", device="cpu", **PLAIN)
    with pytest.raises(ValueError, match=r"workers is how many of Ray's tasks decode at a time, at least 1; got 0"):
        embed(network, photos, tmp_path / "o", engine="ray", device="cpu", workers=0, **PLAIN)
    store = fsspec.filesystem("memory")
    store.pipe("/here/1.jpg", next(photos.rglob("*.jpg")).read_bytes())
    try:
        with pytest.raises(ValueError, match=r"memory://here lies in this process's memory"):
            embed(network, "memory://here", tmp_path / "o", engine="ray", device="cpu", **PLAIN)
    finally:
        store.rm("/here", recursive=True)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"needs Ray, which is not installed: pip install 'kernelzoo\[ray\]'"):
        embed(network, photos, tmp_path / "o", engine="ray", **PLAIN)


def test_the_plan_is_the_same_whoever_computes_it_and_a_gpu_decodes_on_the_cluster_too(network: Model, photos: Path) -> None:
    source, device = open_source(photos), torch.device("cpu")
    told = ("embedding", 16, device, None, False, "cpu", False)
    assert make_plan(network, source, *told) == make_plan(network, source, *told, engine="ray")
    plan = make_plan(network, source, *told)
    assert not cluster.Decoding(source, plan).decoder.gpu
    assert cluster.Decoding(source, replace(plan, decode="gpu")).decoder.gpu
