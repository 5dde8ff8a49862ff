"""The table of milliseconds: measured anew one by one, never of two machines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from recipes import cpu_milliseconds as recipe
from zoo import ResNet20
from zoo.commands.speeds import read


def test_figures_are_added_to_those_of_the_same_machine_in_the_catalogues_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cpu.json"
    costs = iter((9.0, 3.0, 5.0, 1.0))
    monkeypatch.setattr(recipe, "milliseconds", lambda cls: next(costs))
    monkeypatch.setattr(recipe, "facts", lambda device: {"threads": 2, "device": "a CPU", "versions": {"torch": "2.9.0+cpu"}})
    for names in (["resnet20", "VGG19"], ["ResNet20"]):
        monkeypatch.setattr("sys.argv", ["cpu_milliseconds.py", *names, "--out", str(out)])
        recipe.main()
    table = read(out)
    assert list(table.plain.items()) == [("VGG19", 3.0), ("ResNet20", 5.0)]
    assert table.machine == "2 threads of a CPU, torch 2.9.0"
    monkeypatch.setattr(recipe, "facts", lambda device: {"threads": 8, "device": "a CPU", "versions": {"torch": "2.9.0+cpu"}})
    recipe.main()
    assert asdict(read(out)) | {"date": ""} == {"machine": "8 threads of a CPU, torch 2.9.0", "date": "", "plain": {"ResNet20": 1.0}}


def test_a_network_is_timed_with_one_image() -> None:
    assert 0 < recipe.milliseconds(ResNet20, rounds=2) < 60_000
