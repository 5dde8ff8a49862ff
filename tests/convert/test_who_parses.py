"""Only a process that may do nothing else parses a foreign file: at no door does the one that asks call a parser, ours or another's."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import sys
import types
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile import seeds

import convert as converting
from convert import _framework, formats, sandbox
from convert.formats._hdf5 import Hdf5
from convert.formats._picklemachine import Machine
from convert.inspect import inspect
from weights import ReaderCrashed, WeightsError
from zoo import MobileNetV1_025, Model, ResNet20, trained
from zoo.commands.app import main
from zoo.conversion.convert import convert
from zoo.variants import OPTIONAL, SHAPES

FOREIGN = sorted(set(formats.formats()) - {"safetensors"})
LIBRARIES = (
    "keras",
    "onnxruntime",
    "onnx",
    "h5py",
    "scipy.io",
    "tensorstore",
    "tensorflow",
    "flax",
    "msgpack",
    "bson",
    "openvino",
    "ai_edge_litert",
    "ncnn",
)
FUNCTIONS = ((torch, "load"), (torch.jit, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (np, "load"))
WRITTEN = {"bson": "a.bson", "darknet": "a.weights", "jld2": "a.jld2", "keras": "a.keras", "matconvnet": "a.mat", "npz": "a.npz"}
WRITTEN |= {"onnx": "a.onnx", "openvino": "a.xml", "pytorch": "a.pth", "flax": "a.msgpack"}


AS_KERAS: dict[str, Any] = {"padding": "even", "norm_eps": 1e-3, "activation": "relu6"}


def network(format: str) -> type[Model]:
    """Choose a small network; Keras's files hold a whole one, which it must have itself."""
    return MobileNetV1_025 if format == "keras" else ResNet20


LACKING = (
    sandbox.START.removesuffix("main()\n")
    + """
import convert._framework as f
def prepare(_): raise ImportError
f.prepare = prepare
main()
"""
)
"""A process that has no framework to run files with, which others need seconds to import."""


class Absent(types.ModuleType):
    """Stands for a library in this process: it seems to be installed, and whoever asks for anything in it is noted."""

    def __init__(self, name: str, parsed: list[tuple[str, int]]) -> None:
        super().__init__(name)
        self.__dict__.update(__spec__=ModuleSpec(name, None), _parsed=parsed)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):  # which are asked of every module by who looks for its source
            self.__dict__["_parsed"].append((f"{self.__name__}.{name}", os.getpid()))
        raise AttributeError(name)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[str, int]]]:
    """Begin to note every call of a parser in this process, by name and process."""
    noted: list[tuple[str, int]] = []

    def noting(owner: Any, name: str, *, reads: Callable[..., bool] = lambda *_, **__: True) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            if reads(*arguments, **keywords):
                noted.append((f"{getattr(owner, '__name__', owner)}.{name}", os.getpid()))
            return real(*arguments, **keywords)

        monkeypatch.setattr(owner, name, call)

    def is_archive(_: Any, file: Any, mode: str = "r", *__: Any, **___: Any) -> bool:
        ours = (".whl", ".egg", f"python{sys.version_info.major}{sys.version_info.minor}.zip", str(SHAPES), str(OPTIONAL))
        return mode == "r" and not str(file).endswith(ours)

    def begin() -> list[tuple[str, int]]:
        for name in LIBRARIES:
            monkeypatch.setitem(sys.modules, name, Absent(name, noted))
        for owner, name in (*FUNCTIONS, (Hdf5, "__init__"), (Machine, "run"), (_framework, "run")):
            noting(owner, name)
        noting(zipfile.ZipFile, "__init__", reads=is_archive)
        for name, module in formats.formats().items():
            if name != "safetensors":
                noting(module, "read")
        return noted

    return begin


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give a good file of each format: a network of the zoo where the format is written by its ending, else one of the fuzzer's seeds."""
    folder, made = tmp_path_factory.mktemp("good"), dict[str, Path]()

    def file(format: str) -> Path:
        if format not in made:
            if format in WRITTEN:
                torch.manual_seed(0)
                made[format], model = folder / WRITTEN[format], network(format)
                formats.formats()["safetensors"].save(model().state_dict(), folder / "ours.safetensors")
                with pytest.MonkeyPatch.context() as lacking:
                    lacking.setattr(sandbox, "START", LACKING)
                    convert(folder / "ours.safetensors", made[format], model, prove=False, **(AS_KERAS if format == "keras" else {}))
            else:
                (folder / format).mkdir()
                made[format] = seeds(format, folder / format)[0]
        return made[format]

    file("npz")  # torch loads more of itself when a network is first run, and takes what seems to be installed for what is
    return file


THROUGH_ALL = ("keras", "npz", "onnx", "pytorch")
"""Formats that go through every door always, one whose framework runs it among them: the doors ask no format anything of its own."""


@pytest.mark.parametrize(
    ("format", "doors"),
    [
        *((format, "all" if format in THROUGH_ALL else "few") for format in FOREIGN),
        *(pytest.param(format, "all", marks=pytest.mark.long) for format in FOREIGN if format not in THROUGH_ALL),
    ],
)
def test_the_asking_process_parses_no_foreign_file_at_any_door(
    format: str,
    doors: str,
    files: Callable[[str], Path],
    tmp_path: Path,
    watched: Callable[[], list[tuple[str, int]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, out, model = files(format), tmp_path / "out.safetensors", network(format)
    parsed = watched()
    with converting.read(path) as found:
        assert (found.format, bool(found.reader)) == (format, True)
    with suppress(WeightsError):  # seeds are of no network of the zoo, and some files don't say how they are to be read
        trained(model, path, progress=False)
    if doors == "few":
        assert parsed == []
        return
    assert inspect(path).format == format
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == format
    converted = main(["convert", str(path), str(out), "-m", model.__name__, "--json"])
    assert (converted == 0) == out.exists()
    proof = capsys.readouterr().out
    monkeypatch.setattr(sandbox, "START", LACKING)  # the framework has been at work once
    added = main(["add", str(path), f"{model.__name__}:mine"])
    assert (added == 0) == (converted == 0)
    assert main(["diff", str(path), str(path)]) == 0
    assert parsed == []
    if format in WRITTEN and format in _framework.LIBRARIES:  # and yet its own framework ran it
        kinds = {one["kind"]: one for one in json.loads(proof)["parity"]["evidence"]}
        assert kinds["source outputs"]["detail"].startswith(f"{_framework.LIBRARIES[format]} ")
        assert kinds["source outputs"]["proven"]


def test_a_reference_is_parsed_elsewhere_too(
    files: Callable[[str], Path], tmp_path: Path, watched: Callable[[], list[tuple[str, int]]]
) -> None:
    path = files("pytorch")
    network = trained(ResNet20, path, progress=False)
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        np.savez(tmp_path / "r.npz", inputs=images.numpy(), outputs=network(images).numpy())
    parsed = watched()
    made = convert(path, tmp_path / "out.safetensors", ResNet20, reference=tmp_path / "r.npz")
    assert made.certificate.verdict.startswith("PROVEN by source outputs")
    assert parsed == []


@pytest.mark.parametrize(
    ("code", "words"),
    [("ctypes.string_at(0)", "died of SIGSEGV"), ("os._exit(3)", "ended with exit code 3")],
)
def test_a_file_that_brings_its_framework_down_is_a_typed_error_and_nothing_is_written(
    code: str, words: str, files: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files("onnx")
    falls = f"import os, ctypes\nimport convert._framework as f\ndef run(*_, **__): {code}\nf.run = run\nmain()\n"
    monkeypatch.setattr(sandbox, "START", sandbox.START.removesuffix("main()\n") + falls)
    with pytest.raises(ReaderCrashed, match=rf"onnxruntime, which ran .*a\.onnx, {words}: .*Nothing was kept of it\. .*--reference"):
        convert(path, tmp_path / "out.safetensors", ResNet20)
    assert list(tmp_path.iterdir()) == []


def test_a_framework_that_does_not_start_is_said_and_no_word_against_the_file(
    files: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files("onnx")
    monkeypatch.setattr(sandbox, "START", LACKING)
    made = convert(path, tmp_path / "out.safetensors", ResNet20)
    assert any("ended with exit code 1 before it was ready" in note for note in made.notes)
    assert made.certificate.verdict.startswith("PROVEN by float64 execution")


@pytest.mark.parametrize(
    "words", ["{'made': 5, 'by': 'x'}", "{'made': packed(np.zeros((3, 10))), 'by': 'x'}", "{'made': packed(np.zeros((2, 10))), 'by': 5}"]
)
def test_outputs_that_no_framework_gives_are_believed_in_nothing(
    words: str, files: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files("onnx")
    lies = "import convert._reader as r, numpy as np\nfrom convert._manifest import packed\ngood = r._answer\n"
    lies += f"r._answer = lambda to, told: good(to, told if 'protections' in told else {words})\nmain()\n"
    monkeypatch.setattr(sandbox, "START", sandbox.START.removesuffix("main()\n") + lies)
    with pytest.raises(ReaderCrashed, match="nonsense"):
        sandbox.run(path, "onnx", np.zeros((2, 3, 32, 32), np.float32), last=False)


def test_a_framework_is_confined_as_a_reader_is(files: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it may not do is tried; where the kernel has no such protection, it is not named among those in force."""
    (tmp_path / "secret").write_text("secret")
    path = files("onnx")
    tries = f"""
import os, socket, convert._reader as r
import convert._framework as f
active = []
closed = r._closed
def remember(asked, made): told = closed(asked, made); active.extend(made.held); return told
def attempt(what):
    try: what()
    except OSError: return "refused"
    return "done"
def run(*_, **__):
    found = [attempt(socket.socket), attempt(os.fork), attempt(lambda: open({str(tmp_path / "secret")!r}).read()),
        attempt(lambda: open({str(tmp_path / "new")!r}, "w"))]
    return " ".join(found + ["seccomp" * any("seccomp" in a for a in active), "Landlock" * any("Landlock" in a for a in active)])
r._closed, f.run = remember, run
main()
"""
    monkeypatch.setattr(sandbox, "START", sandbox.START.removesuffix("main()\n") + tries)
    said = sandbox.run(path, "onnx", np.zeros((1, 3, 32, 32), np.float32), last=False)
    assert isinstance(said, str)
    made = said.split()
    assert "seccomp" not in made or made[:2] == ["refused", "refused"]
    assert "Landlock" not in made or made[2:4] == ["refused", "refused"]
    assert importlib.util.find_spec("onnxruntime") is not None
    assert not (tmp_path / "new").exists() or "Landlock" not in made
