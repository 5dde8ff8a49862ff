"""Ctrl-C has one line for an answer, from the first import on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from zoo.commands import entry_point, interrupts
from zoo.commands.interrupts import INTERRUPTED

ROOT = Path(__file__).parents[3]
SCRIPT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["zoo"].partition(":")
WAYS = {
    "module": ["-m", "zoo"],
    "script": ["-c", f"import sys\nfrom {SCRIPT[0]} import {SCRIPT[2]}\nsys.exit({SCRIPT[2]}())"],
}
INTERRUPTS_ITSELF = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n"
SAYS_WHEN = """
import os, sys, time

def heard(event, arguments):
    global left
    if event == "import" and arguments[0] == "weights" and left:
        left = False
        os.write(int(os.environ["TOLD"]), b".")
        for _ in range(30_000 if os.environ["HELD"] else 0):
            time.sleep(0.01)

left = True
sys.addaudithook(heard)
"""
"""Tells when the first of our packages is imported: before, Python is starting, and nothing of ours has run.

Held, it stays there, in short sleeps: a signal that comes right before a sleep is heard behind it.
"""


def command(way: str, *arguments: str) -> list[str]:
    return [sys.executable, *WAYS[way], *arguments]


def beside(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("library", ["blake3", "torch", "typer", "rich"])
def test_an_interrupt_while_a_library_is_imported_is_one_line(way: str, library: str, tmp_path: Path) -> None:
    (tmp_path / f"{library}.py").write_text(INTERRUPTS_ITSELF)
    arguments = ("predict", "x.jpg") if library == "torch" else ("list",)
    done = subprocess.run(command(way, *arguments), capture_output=True, text=True, env=beside(tmp_path), timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{INTERRUPTED}\n")


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_at_any_time_is_one_line(way: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SAYS_WHEN)
    codes = []
    for delay_s in (0, 0.02, 0.1, 0.4, 1.0, 2.0):
        hears, told = os.pipe()
        settings = {**beside(tmp_path), "TOLD": str(told), "HELD": "1" if delay_s < 0.1 else ""}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "pass_fds": (told,)}
        with subprocess.Popen(command(way, "list"), env=settings, **pipes) as running:
            os.close(told)
            assert os.read(hears, 1) == b"."
            os.close(hears)
            time.sleep(delay_s)
            running.send_signal(signal.SIGINT)
            out, said = running.communicate(timeout=300)
        codes.append(running.returncode)
        if running.returncode == 130:
            assert said == f"{INTERRUPTED}\n", delay_s
        else:  # it had done its work: Python was at its end, or behind it
            assert running.returncode in (0, -signal.SIGINT), (delay_s, said)
            assert (said, "networks." in out) == ("", True), delay_s
    assert codes[:2] == [130, 130]


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_that_is_ignored_from_outside_stays_ignored(way: str, tmp_path: Path) -> None:
    (tmp_path / "blake3.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit(7)\n")
    ignoring = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", *command(way, "list")]
    assert subprocess.run(ignoring, capture_output=True, env=beside(tmp_path), timeout=300).returncode == 7


def test_a_program_that_imports_the_zoo_keeps_its_own_interrupts(tmp_path: Path) -> None:
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").write_text("import zoo")
    (package / "__main__.py").write_text("import signal, zoo\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
    done = subprocess.run([sys.executable, "-m", "theirs"], capture_output=True, text=True, env=beside(tmp_path), cwd=tmp_path, check=True)
    assert done.stdout == "True\n"


def test_what_an_import_makes_of_an_interrupt_is_one_line_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A C module that is being imported turns KeyboardInterrupt into a TypeError or another error of its own."""

    def broken() -> int:
        try:
            interrupts._raise(signal.SIGINT, None)
        except KeyboardInterrupt:
            raise TypeError("expected a message argument") from None
        return 0

    monkeypatch.setattr("zoo.commands.app.main", broken)
    monkeypatch.setattr(interrupts, "_heard", [])
    assert entry_point.main() == 130
    assert capsys.readouterr().err == f"{INTERRUPTED}\n"


def test_an_error_without_an_interrupt_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise TypeError("expected a message argument")

    monkeypatch.setattr("zoo.commands.app.main", broken)
    with pytest.raises(TypeError):
        entry_point.main()


def test_an_interrupt_of_an_earlier_command_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise ValueError("an own fault")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("zoo.commands.app.main", broken)
    monkeypatch.setattr(interrupts, "_heard", [signal.SIGINT])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(ValueError, match="an own fault"):
            entry_point.main()
    finally:
        signal.signal(signal.SIGINT, before)
