"""No public door runs what a file says: files with code in them are refused at each, and nothing half-done is left."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weights
from convert import sandbox
from convert.formats import safetensors
from weights import Installed, ReaderCrashed, UnsafeFormat, adhoc
from zoo import ResNet20, trained
from zoo.commands.app import main
from zoo.pretrained.records import to_safetensors

CRASH = sandbox.START.removesuffix("main()\n")
CRASH += "import ctypes\nimport convert._reader as r\nr._opened = lambda *_: ctypes.string_at(0)\nmain()\n"


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return ResNet20().state_dict()


def trap(kind: str, folder: Path, state: dict[str, torch.Tensor]) -> Path:
    """Write good weights with code among them."""
    code, path = Code(folder / "canary"), folder / f"trap.{kind}"
    match kind:
        case "pth" | "th":
            torch.save({"state_dict": state, "hook": code}, path, _use_new_zipfile_serialization=kind == "pth")
        case "npy":
            np.save(path, np.array([code], dtype=object), allow_pickle=True)
        case "npz":
            np.savez(path, a=np.array([code], dtype=object))
        case "pkl":
            path.write_bytes(pickle.dumps({"values": [code]}, protocol=2))
        case "safetensors":  # a pickle under a better name
            torch.save({"state_dict": state, "hook": code}, path)
    return path


def installs(path: Path) -> Installed:
    return weights.get(adhoc("ResNet20", str(path), format="pytorch"), to_safetensors=to_safetensors)


DOORS: dict[str, Callable[[Path], Any]] = {
    "trained": lambda path: trained(ResNet20, path, progress=False),
    "trained, told": lambda path: trained(ResNet20, path, progress=False, kernel_convention="correlation"),
    "trained, file://": lambda path: trained(ResNet20, path.as_uri(), progress=False),
    "weights.get": installs,
    "to_safetensors": lambda path: to_safetensors(path, path.with_name("out.safetensors")),
    "convert.read": sandbox.read,
}
COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "FILE"),
    "convert": ("convert", "FILE", "OUT", "--model", "ResNet20"),
    "convert, recognised": ("convert", "FILE", "OUT"),
    "diff": ("diff", "FILE", "FILE"),
    "add": ("add", "FILE", "ResNet20:trap"),
    "predict": ("predict", "PICTURE", "--model", "ResNet20", "--weights", "FILE"),
}


@pytest.mark.parametrize(
    "kind", ["pth", "npy", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("th", "npz", "pkl", "safetensors"))]
)
def test_code_in_a_file_runs_at_no_door(
    kind: str, tmp_path: Path, state: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    path = trap(kind, tmp_path, state)
    for name, door in DOORS.items():
        with pytest.raises(weights.WeightsError) as refused:
            door(path)
        if "get" not in name and "to_" not in name and "file" not in name:
            assert isinstance(refused.value, UnsafeFormat), name
    for name, words in COMMANDS.items():
        places = {"FILE": str(path), "OUT": str(tmp_path / "out.safetensors"), "PICTURE": str(tmp_path / "none.png")}
        assert main([places.get(word, word) for word in words]) != 0, name
        assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name]
    pickle.loads(pickle.dumps(Code(tmp_path / "canary")))  # the trap does work
    assert (tmp_path / "canary").exists()


def test_weights_load_by_their_path_as_torch_loads_them(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save({"state_dict": state}, tmp_path / "good.pth")
    found = trained(ResNet20, tmp_path / "good.pth").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_crash_at_install_is_typed_and_leaves_nothing(
    tmp_path: Path, own_cache: Path, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(state, tmp_path / "x.pth")
    with monkeypatch.context() as broken:
        broken.setattr(sandbox, "START", CRASH)
        with pytest.raises(ReaderCrashed, match="SIGSEGV") as crash:
            installs(tmp_path / "x.pth")
        assert crash.value.signal == "SIGSEGV"
        assert "x.pth" in str(crash.value)
    left = [path for kind in ("blobs", "partial", "quarantine", "refs") for path in (own_cache / kind).rglob("*") if path.is_file()]
    assert left == []
    assert installs(tmp_path / "x.pth").path.exists()  # the next try needs no help


def test_a_crash_in_a_conversion_leaves_the_old_file(
    tmp_path: Path, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(state, tmp_path / "x.pth")
    (tmp_path / "out.safetensors").write_bytes(b"as it was")
    monkeypatch.setattr(sandbox, "START", CRASH)
    assert main(["convert", str(tmp_path / "x.pth"), str(tmp_path / "out.safetensors"), "--model", "ResNet20", "--replace"]) == 1
    said = capsys.readouterr().err
    assert "SIGSEGV" in said
    assert "Traceback" not in said
    assert (tmp_path / "out.safetensors").read_bytes() == b"as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "x.pth"]


def test_a_reader_that_dies_between_tensors_leaves_no_half_file(
    tmp_path: Path, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(state, tmp_path / "x.pth")
    dies = "import convert._reader as r\ngive, left = r._give, [5]\n"
    dies += "def _give(*a):\n    left[0] -= 1\n    return give(*a) if left[0] else r.os.abort()\nr._give = _give\nmain()\n"
    monkeypatch.setattr(sandbox, "START", sandbox.START.removesuffix("main()\n") + dies)
    with pytest.raises(ReaderCrashed, match="SIGABRT"):
        installs(tmp_path / "x.pth")
    assert main(["convert", str(tmp_path / "x.pth"), str(tmp_path / "out.safetensors"), "--model", "ResNet20"]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["x.pth"]


def test_a_full_disk_in_a_conversion_leaves_the_old_file(
    tmp_path: Path, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(state, tmp_path / "x.pth")
    (tmp_path / "out.safetensors").write_bytes(b"as it was")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors, "save_stored", full)
    assert main(["convert", str(tmp_path / "x.pth"), str(tmp_path / "out.safetensors"), "--model", "ResNet20", "--replace"]) == 1
    assert "No space left" in capsys.readouterr().err
    assert (tmp_path / "out.safetensors").read_bytes() == b"as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "x.pth"]
