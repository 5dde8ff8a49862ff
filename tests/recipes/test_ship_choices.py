"""What is not measured is said by name."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import pytest

from recipes import ship_choices


def options(claims: Path, seconds: float) -> argparse.Namespace:
    return argparse.Namespace(claims=claims, until=time.monotonic() + seconds, out=claims / "found.json")


def test_what_another_run_has_begun_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "ResNet18@1").touch()
    assert ship_choices.measure("ResNet18@1", options(tmp_path, 100.0)) == "ResNet18@1: another process has it"
    assert not (tmp_path / "found.json").exists()


def test_what_no_time_is_left_for_is_said_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ship_choices.py", "measure", "--seconds", "-1", "--out", str(tmp_path / "found.json"), "ResNet18@1,8", "VGG11@32"]
    monkeypatch.setattr(sys, "argv", command)
    ship_choices.main(command[1:])
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{cell}: not begun, for time was over" for cell in ("ResNet18@1", "ResNet18@8", "VGG11@32")]
    assert not (tmp_path / "found.json").exists()
