import itertools
import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from zoo import ResNet20, trained
from zoo.embedding import embed
from zoo.embedding.parts import Part
from zoo.networks.model import Model

PLAIN: dict[str, Any] = {"fast": False, "workers": 0, "batch_size": 16, "progress": False}

SLOW = """
import sys, time
from zoo import ResNet20, trained
from zoo.embedding import embed, plan
from zoo.images.folder import Folder
plan.PART_ROWS, plan.CHUNK = 32, 8

class Slow(Folder):
    def read(self, index):
        time.sleep(0.02)
        return super().read(index)

if __name__ == "__main__":
    embed(trained(ResNet20), Slow(sys.argv[1]), sys.argv[2], fast=False, workers=int(sys.argv[3]), batch_size=16, progress=False)
"""


def parts(out: Path) -> list[Path]:
    return sorted(out.with_name(f"{out.name}.parts").glob("part-*"))


def killed(photos: Path, script: Path, out: Path, at_least: int, workers: int = 0) -> None:
    """Run in a session of its own, and kill -9 the process as soon as so many parts are finished; nothing of the session may stay."""
    command = [sys.executable, str(script), str(photos), str(out), str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        while len(parts(out)) < at_least:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 300  # what lives on does so for ever
    while left := in_session(process.pid):
        assert time.monotonic() < deadline, f"processes {left} outlive the one that started them"
        time.sleep(0.05)


def in_session(session: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, owner = path.read_text().rpartition(")")[2].split()[:4]
            if int(owner) == session and state != "Z":
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("kills", [((2, 1),), pytest.param(((1, 0), (2, 1), (3, 0)), marks=pytest.mark.long)], ids=["once", "three times"])
def test_a_killed_run_ends_with_the_bytes_of_one_that_was_not(
    kills: tuple[tuple[int, int], ...], network: Model, photos: Path, tmp_path: Path
) -> None:
    """Each is killed when so many parts are finished, by so many processes that decode."""
    out, whole, script = tmp_path / "o.parquet", tmp_path / "whole.parquet", tmp_path / "slow.py"
    script.write_text(SLOW)
    for finished, workers in kills:
        killed(photos, script, out, finished, workers)
        assert not out.exists()
        assert len(parts(out)) in (finished, finished + 1)
    report = embed(network, photos, out, **PLAIN)
    embed(network, photos, whole, **PLAIN)
    assert report.resumed >= 32 * kills[-1][0]
    assert report.resumed + report.computed == 120
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(tmp_path.iterdir()) == [out, script, whole]


def stopped(network: Model, photos: Path, out: Path, monkeypatch: pytest.MonkeyPatch, after: int = 1) -> None:
    """Stop a run behind its first parts, as Ctrl-C does."""
    calls = itertools.count()  # each by a thread of its own, perhaps at the same time
    save = Part.save

    def interrupting(self: Part, path: Path) -> None:
        if next(calls) >= after:
            raise KeyboardInterrupt
        save(self, path)

    with monkeypatch.context() as patched:
        patched.setattr(Part, "save", interrupting)
        with pytest.raises(KeyboardInterrupt):
            embed(network, photos, out, **PLAIN)
    assert len(parts(out)) == after


def test_a_torn_file_of_a_killed_run_is_not_taken_for_a_part(
    network: Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "o.npy", tmp_path / "whole.npy"
    stopped(network, photos, out, monkeypatch)
    torn = parts(out)[0].with_name(".part-000000000032.safetensors")
    torn.write_bytes(b"torn")
    report = embed(network, photos, out, **PLAIN)
    embed(network, photos, whole, **PLAIN)
    assert report.resumed == 32
    assert out.read_bytes() == whole.read_bytes()


def test_a_job_that_finished_nothing_is_in_nobodys_way(
    network: Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.npy"
    stopped(network, photos, out, monkeypatch)
    for part in out.with_name("o.npy.parts").glob("part-*"):
        part.unlink()
    assert embed(network, photos, out, **{**PLAIN, "batch_size": 8}).rows == 120


def test_parts_of_another_job_are_refused_with_what_differs(
    network: Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.npy"
    stopped(network, photos, out, monkeypatch)
    other = trained(ResNet20)
    with torch.no_grad():
        next(other.parameters())[0] += 1
    with pytest.raises(ValueError, match=r"(?s)holds 1 finished parts of another job:\n  weights: .* then, .* now.*restart=True"):
        embed(other, photos, out, **PLAIN)
    with pytest.raises(ValueError, match=r"batch_size: 16 then, 8 now"):
        embed(network, photos, out, **{**PLAIN, "batch_size": 8})
    with pytest.raises(ValueError, match=r"source: .*photos.* then, .*circle\" now"):
        embed(network, photos / "circle", out, **PLAIN)
    with pytest.raises(ValueError, match=r'at: \["embedding"\] then, \["layer2"\] now'):
        embed(network, photos, out, "layer2", **PLAIN)
    assert len(parts(out)) == 1
    assert embed(other, photos, out, restart=True, **PLAIN).computed == 120


def test_a_network_of_other_last_bits_is_not_mixed_in(
    network: Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.npy"
    stopped(network, photos, out, monkeypatch)
    manifest = tmp_path / "o.npy.parts/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "probe": "other bits"}))
    with pytest.raises(ValueError, match=r"last bits are not those of the run that began .*o.npy.parts"):
        embed(network, photos, out, **PLAIN)


def test_a_finished_output_is_left_alone_unless_a_restart_is_asked_for(network: Model, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.npy"
    embed(network, photos / "circle", out, **PLAIN)
    first = out.read_bytes()
    with pytest.raises(FileExistsError, match=r"o.npy' is there already; restart=True"):
        embed(network, photos, out, **PLAIN)
    assert out.read_bytes() == first
    assert embed(network, photos, out, restart=True, **PLAIN).rows == 120


def test_an_interrupted_restart_keeps_the_old_output_until_it_is_finished(
    network: Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.npy"
    embed(network, photos / "circle", out, **PLAIN)
    first = out.read_bytes()
    monkeypatch.setitem(PLAIN, "restart", True)
    stopped(network, photos, out, monkeypatch)
    assert out.read_bytes() == first
    monkeypatch.delitem(PLAIN, "restart")
    assert embed(network, photos, out, **PLAIN).resumed == 32
    assert out.read_bytes() != first


def test_two_processes_cant_work_on_one_output(network: Model, photos: Path, tmp_path: Path) -> None:
    place = tmp_path / "o.npy.parts"
    place.mkdir()
    with FileLock(place / "lock"), pytest.raises(ValueError, match=r"another process is at work on .*o.npy"):
        embed(network, photos, tmp_path / "o.npy", **PLAIN)


def test_a_damaged_manifest_says_so(network: Model, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "o.npy.parts").mkdir()
    (tmp_path / "o.npy.parts/manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json is no JSON .*restart=True"):
        embed(network, photos, tmp_path / "o.npy", **PLAIN)


def test_parts_without_a_manifest_are_nobodys_and_a_restart_deletes_the_manifest_last(
    network: Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.npy"
    stopped(network, photos, out, monkeypatch)
    kept = parts(out)
    gone: list[str] = []
    unlink = Path.unlink

    def noted(self: Path, missing_ok: bool = False) -> None:
        gone.append(self.name)
        unlink(self, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", noted)
        embed(network, photos, out, restart=True, **PLAIN)
    assert gone.index("manifest.json") > max(gone.index(part.name) for part in kept)
    out.unlink()
    stopped(network, photos, out, monkeypatch)
    (tmp_path / "o.npy.parts/manifest.json").unlink()
    assert embed(network, photos, out, **PLAIN).resumed == 0


def test_weights_that_moved_are_the_same_job(network: Model, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "o.npy"
    stopped(network, photos, out, monkeypatch)
    manifest = tmp_path / "o.npy.parts/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "place": "elsewhere"}))
    assert embed(network, photos, out, **PLAIN).resumed == 32
