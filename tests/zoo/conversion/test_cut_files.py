"""A file that another process cuts short under our hands is an error, and never the end of this process."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from preloaded import python
from roundtrips import built

from convert import sandbox
from convert.formats import safetensors
from weights.errors import ConvertError, MalformedFile, ReaderCrashed
from zoo.conversion.convert import convert
from zoo.networks.model import Model

ROOT = Path(__file__).parents[3]
CUT = """
import json, os, sys
from pathlib import Path
from zoo.conversion.convert import convert

for source, destination, victim, when in json.loads(sys.argv[1]):
    left = [True]

    def cut(said):
        if said.startswith(when) and left:
            left.clear()
            os.truncate(victim if victim == source else next(Path(destination).parent.glob(victim)), 5000)

    try:
        convert(Path(source), Path(destination), "ResNet20", progress=cut)
    except Exception as error:
        print(type(error).__name__, getattr(error, "signal", None), str(error).replace(chr(10), " "))
    print("cut" if not left else "never cut", Path(destination).exists(), flush=True)
"""
KINDS = {"safetensors": "MalformedFile None", **dict.fromkeys(("h5", "npz", "onnx", "pth"), "ReaderCrashed ")}


@pytest.fixture(scope="module")
def network() -> Model:
    return built("ResNet20")


@pytest.fixture
def ours(network: Model, tmp_path: Path) -> Path:
    safetensors.save(network.state_dict(), tmp_path / "ours.safetensors")
    return tmp_path / "ours.safetensors"


def converted(*jobs: tuple[Path, Path, str, str]) -> list[str]:
    """Convert, one after the other, in a process of its own, which a signal may end: an error and a state of each."""
    told = json.dumps([[str(part) for part in job] for job in jobs])
    done = subprocess.run(
        [*python(), "-c", CUT, told], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300
    )
    assert done.returncode == 0, f"ended by {done.returncode}: {done.stderr}"
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(jobs), done.stdout
    return lines


def test_a_source_that_is_cut_while_it_is_converted_is_an_error(network: Model, ours: Path) -> None:
    sources = [ours.with_name(f"source.{ending}") for ending in KINDS]
    for source in sources:
        if source.suffix == ".pth":
            torch.save(network.state_dict(), source)
        else:
            convert(ours, source, "ResNet20", prove=False)
    said = converted(
        *((source, source.with_name(f"out-{source.suffix[1:]}.safetensors"), str(source), "writing out") for source in sources)
    )
    for source, error, state in zip(sources, said[::2], said[1::2], strict=True):
        assert error.startswith(KINDS[source.suffix[1:]])
        assert "was cut short while it was read" in error
        assert str(source) in error
        assert (source.name, state) == (source.name, "cut False")
    assert not list(ours.parent.glob(".out*"))


def test_what_is_written_and_cut_while_it_is_proven_is_not_kept(ours: Path) -> None:
    written = {"out.safetensors": "out.safetensors", "out.npz": "out.npz.network"}
    said = converted(*((ours, ours.with_name(out), f".{out}.*/{first}", "proving") for out, first in written.items()))
    for (out, first), error, state in zip(written.items(), said[::2], said[1::2], strict=True):
        assert error.startswith(f"ConvertError None {first} was changed in {ours.parent}/.{out}.")
        assert "Nothing was kept. Convert it into a folder of your own." in error
        assert (first, state) == (first, "cut False")


@pytest.mark.parametrize("ending", ["npz", "onnx"])
def test_another_frameworks_file_that_is_cut_while_it_is_read_back_is_not_kept(
    ending: str, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = sandbox.read

    def cut_first(path: Path, *how: str, **more: bool) -> object:
        if path.name == f"out.{ending}":
            source = read(path, *how, **more)
            os.truncate(path, 5000)
            return source
        return read(path, *how, **more)

    monkeypatch.setattr("zoo.conversion.convert.sandbox.read", cut_first)
    with pytest.raises(ConvertError, match=rf"out\.{ending} was changed in .* while it was being proven, by another program"):
        convert(ours, ours.with_name(f"out.{ending}"), "ResNet20")
    assert {path.name for path in ours.parent.iterdir()} == {ours.name}


def test_a_readers_process_that_dies_of_a_cut_file_says_so(network: Model, tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    torch.save({"a": torch.zeros(3000), "b": torch.zeros(1000, 3000).T}, path)
    with sandbox.read(path) as source:
        os.truncate(path, 5000)
        with pytest.raises(ReaderCrashed, match="died of SIGBUS: the file was cut short while it was read") as crash:
            source.tensors["b"].array()  # not contiguous, so the reader itself touches it
    assert crash.value.signal == "SIGBUS"


def test_a_safetensors_file_holds_no_map_and_is_closed(ours: Path) -> None:
    with sandbox.read(ours) as source:
        first, *_, last = source.tensors.values()
        assert torch.equal(torch.from_numpy(last.array()), safetensors.tensors(ours.read_bytes())[last.origin])
        assert str(ours) not in Path("/proc/self/maps").read_text()
        os.truncate(ours, 20)
        said = f"{ours} was cut short while it was read, in the tensor '{first.origin}': is somebody writing it"
        with pytest.raises(MalformedFile, match=re.escape(said)):
            first.array()
    with pytest.raises(ConvertError, match="is closed; its tensors can't be read any more"):
        first.array()
