"""A bar is for a person at a terminal; everybody else gets silence, and does not even pay for rich."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from weights.progress import bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_bytes_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with bar("VGG19 imagenet1k_v1") as shown:
        shown(500_000, 2_000_000)
    assert "VGG19 imagenet1k_v1" in screen.getvalue()
    assert "0.5/2.0 MB" in screen.getvalue()


@pytest.mark.parametrize("screen", [io.StringIO(), None, Terminal()])
def test_others_see_nothing(monkeypatch: pytest.MonkeyPatch, screen: io.StringIO | None) -> None:
    monkeypatch.setattr(sys, "stderr", screen)
    with bar("VGG19", wanted=not isinstance(screen, Terminal)) as shown:
        shown(1, None)
    assert screen is None or screen.getvalue() == ""


def test_a_quiet_install_imports_neither_rich_nor_torch_nor_a_client(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(data)
    code = (
        "import sys, weights; weights.open_weights(weights.adhoc('Net', sys.argv[1])); "
        "print(*{'rich', 'torch', 'numpy', 'huggingface_hub', 'httpx2'} & set(sys.modules))"
    )
    run = [sys.executable, "-c", code, str(tmp_path / "w.safetensors")]
    assert subprocess.run(run, capture_output=True, check=True).stdout == b"\n"
