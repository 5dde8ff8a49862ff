"""`zoo cache`: what is on the disk, by whom it came and when it was used."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
import torch

from weights import Cache
from zoo import ResNet20
from zoo.commands.app import main


def test_an_empty_cache_says_what_fills_it(own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"no checkpoint is in '{own_cache}' yet; zoo pull NETWORK brings one\n"
    assert not own_cache.exists()


def test_what_is_on_the_disk_is_listed_with_who_brought_it_and_when_it_was_used(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(ResNet20().state_dict(), tmp_path / "mine.pth")
    assert main(["add", "mine.pth", "ResNet20:mine"]) == 0
    assert main(["pull", "EfficientNetLite0"]) == 0  # from its package, which is installed
    assert main(["lock", "EfficientNetLite0"]) == 0
    then = time.time() - 5.5 * 86_400
    for note in (Cache().root / "used").iterdir():
        os.utime(note, (then, then))
    blobs = [path for path in (own_cache / "blobs").rglob("*") if path.is_file()]
    when = time.strftime("%Y-%m-%d", time.localtime(then))
    monkeypatch.setattr("weights.inventory.used", lambda cache, path: (then, path.stat().st_size))
    capsys.readouterr()
    assert main(["cache"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in shown.splitlines()}
    assert lines["ResNet20:mine"] == f"1.1 {when}, 5 days ago zoo add you"
    name = next(name for name in lines if name.startswith("EfficientNetLite0:"))
    assert re.fullmatch(rf"[\d.]+ {when}, 5 days ago the file '.*\.pth' {re.escape(str(tmp_path / 'weights.lock'))}", lines[name])
    assert f"2 files, {sum(path.stat().st_size for path in blobs) / 1e6:,.1f} MB, in '{own_cache}'" in shown
    assert main(["cache", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["path"] for one in found["files"]} == {str(path) for path in blobs}
    assert found["size_bytes"] == sum(path.stat().st_size for path in blobs)


def test_a_file_that_was_used_now_was_used_today(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(ResNet20().state_dict(), tmp_path / "mine.pth")
    assert main(["add", str(tmp_path / "mine.pth"), "ResNet20:mine"]) == 0
    capsys.readouterr()
    assert main(["cache"]) == 0
    assert ", today zoo add" in " ".join(capsys.readouterr().out.split())
