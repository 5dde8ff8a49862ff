"""Every command of the page on networks of one's own runs, and says what the page says that it does."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import documents
import own_network_files
import pytest
import torch
from documents import DOCS

from convert.formats import safetensors
from weights.reading import read_file
from zoo.commands import app

PAGE = DOCS / "own-network.md"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands() -> list[tuple[str, list[str]]]:
    """List the page's commands, each with the lines that it is to print."""
    found: list[tuple[str, list[str]]] = []
    for block in documents.blocks(PAGE, "console"):
        for line in block.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line.strip():
                found[-1][1].append(line)
    return found


def test_every_command_of_the_page_runs_and_prints_what_it_says(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    networks = own_network_files.write(place)
    assert len(commands()) >= 7
    for command, lines in commands():
        program, *arguments = shlex.split(command)
        assert program == "zoo"
        try:
            code = app.main(arguments)
        finally:
            sys.modules.pop("mynets", None)
        said = capsys.readouterr()
        assert lines, command
        assert code == (1 if lines[0].startswith("error:") else 0), f"{command}: {said.err}"
        for line in lines:
            assert line in said.out + said.err, f"{command}: {line!r} is not in {said.out}{said.err}"
    images = torch.rand(2, 1, 28, 28)
    for name in ("digits", "proven", "from-onnx"):
        found = own_network_files.code(place)["Digits"]()
        found.load_state_dict(safetensors.tensors(read_file(place / f"{name}.safetensors")[1]))
        torch.testing.assert_close(found(images), networks["digits"](images), rtol=0, atol=1e-5)
    found = own_network_files.code(place)["DnCNN"](own_network_files.DEPTH, own_network_files.WIDTH, eps=1e-3).eval()
    found.load_state_dict({**found.state_dict(), **safetensors.tensors(read_file(place / "from-keras.safetensors")[1])})
    torch.testing.assert_close(found(images), networks["denoiser"](images), rtol=0, atol=1e-5)
    assert not (place / "wrong.safetensors").exists()
