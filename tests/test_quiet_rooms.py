"""Library rooms neither print nor know the command: they log, return what they found, or call what their caller gave them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BARS = {
    "weights/progress.py",
    "zoo/finetuning/progress.py",
    "zoo/kernels/reports/progress_bar.py",
}
"""Bars that an argument `progress` promises on a terminal; the only places that write to standard error."""
PROTOCOLS = {"zoo/kernels/compilation/workers.py"}
"""Processes whose standard output is a pipe to ours."""
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for room in ("zoo", "weights", "convert")
    for path in (ROOT / room).rglob("*.py")
    if not path.is_relative_to(ROOT / "zoo" / "commands") and path.name != "__main__.py"
)


def loud(text: str) -> list[str]:
    """Name what a file does to print, or to be a command."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [module, *(f"{module}.{alias.name}" if module else alias.name for alias in node.names)]
            found += [name for name in names if f"{name}.".startswith(("typer.", "zoo.commands."))]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            found.append("print")
        if isinstance(node, ast.Call) and not any(k.arg == "file" for k in node.keywords):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found += ["Console"] if called.endswith("Console") else []
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("stdout", "stderr")
            and isinstance(node.value, ast.Name)
            and node.value.id == "sys"
        ):
            found.append(f"sys.{node.attr}")
    return found


def test_library_rooms_are_quiet() -> None:
    allowed = {file: {"Console", "sys.stderr"} for file in BARS} | {file: {"sys.stdout", "sys.stderr"} for file in PROTOCOLS}
    found = {file: set(loud((ROOT / file).read_text(encoding="utf-8"))) for file in FILES}
    assert found.keys() >= allowed.keys()
    assert not {file: what - allowed.get(file, set()) for file, what in found.items() if what - allowed.get(file, set())}


@pytest.mark.parametrize(
    "text",
    [
        "print(1)",
        "from zoo.commands.console import err",
        "from zoo import commands",
        "import zoo.commands.app",
        "def f():\n    import typer",
        "import rich\nrich.console.Console()",
        "import sys\nsys.stdout.write('x')",
    ],
)
def test_the_look_sees_what_is_loud(text: str) -> None:
    assert loud(text)
