"""docs/cli.md: every command of `zoo` with its arguments and options, as the command itself knows them."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from making.tables import generated, page, table
from zoo.commands.app import EXAMPLES, EXIT_CODES, GROUPS, PLACES, app, command

PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
"""What stands for a value of a type, where the command names nothing better."""
TYPERS_OWN = ("install_completion", "show_completion")
"""Options that typer adds, with words of its own that change with its version."""
HEAD = """\
# The command `zoo`

`zoo COMMAND -h` shows a command's help. `zoo --install-completion` lets TAB complete networks, tags and files in your shell.

{groups}

{codes}
"""
OFTEN = 3
"""Commands that an option must have in the same words to be explained once for all."""
SHARED = """\
## Shared options

These options mean the same in every command that has them. Each command names those that it has.
"""


def commands() -> dict[str, Any]:
    """Return every command by its name, in the order of the help: objects with `params` and `help`, as the parser has them."""
    return {name: command(name) for name in PLACES}


def write() -> dict[str, str]:
    """Return the text of the page by its name in docs/."""
    group: Any = typer.main.get_command(app)
    found = commands()
    parts = [
        generated("zoo/commands/app.py"),
        HEAD.format(codes=EXIT_CODES, groups=_groups()),
        "## zoo",
        *_parameters("", group, {}),
        SHARED,
        table(["option", "meaning", "default"], (shared := _shared(found)).values()),
    ]
    for name, one in found.items():
        shown = f"```console\n$ {_usage(name, one)}\n$ {EXAMPLES[name]}\n```"
        parts += [f"## zoo {name}", *_words(one.help), shown, *_parameters(name, one, shared)]
    return {"cli.md": page(*parts)}


def _groups() -> str:
    """Return the groups of the help with links to their commands."""
    links = {group: ", ".join(f"[{name}](#zoo-{name})" for name in members) for group, members in GROUPS.items()}
    return table(["group", "commands"], [[group, of] for group, of in links.items()])


def _usage(name: str, command: Any) -> str:
    options = any(parameter.param_type_name == "option" for parameter in command.params)
    arguments = [_argument(parameter) for parameter in command.params if parameter.param_type_name == "argument"]
    return " ".join([f"zoo {name}", *(["[OPTIONS]"] if options else []), *arguments])


def _options(name: str, command: Any) -> dict[str, list[str]]:
    """Return a row for each option of a command that its help shows, by its first name."""
    types = get_type_hints(_function(name)) if name else {}
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden and p.name not in TYPERS_OWN]
    return {_names(p)[0]: [_spelling(p, types), _help(p), _default(p)] for p in options}


def _shared(found: dict[str, Any]) -> dict[str, list[str]]:
    """Return the options that several commands have in the same words, the most frequent first; one row for each name."""
    rows = Counter((option, *row) for name, one in found.items() for option, row in _options(name, one).items())
    often = [row for row, count in rows.most_common() if count >= OFTEN]
    return {option: next([*row] for first, *row in often if first == option) for option in dict.fromkeys(row[0] for row in often)}


def _parameters(name: str, command: Any, shared: dict[str, list[str]]) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = _options(name, command)
    if arguments:
        yield table(["argument", "meaning"], [[f"`{_argument(p)}`", _help(p)] for p in arguments])
    if own := [row for option, row in options.items() if shared.get(option) != row]:
        yield table(["option", "meaning", "default"], own)
    if others := [row[0] for option, row in options.items() if shared.get(option) == row]:
        yield f"[Shared](#shared-options): {', '.join(others)}."


def _function(name: str) -> Callable[..., Any]:
    """Return the function of a command, whose annotations say what its options take."""
    _, file, function = PLACES[name]
    return getattr(importlib.import_module(f"zoo.commands.{file}"), function)


def _argument(parameter: Any) -> str:
    shown = parameter.metavar or parameter.name.upper()
    shown = shown if parameter.nargs == 1 or "..." in shown else f"{shown}..."
    return shown if parameter.required or shown.startswith("[") else f"[{shown}]"


def _spelling(parameter: Any, types: dict[str, Any]) -> str:
    value = "" if parameter.is_flag else f" {parameter.metavar or _placeholder(types[parameter.name])}"
    names = _names(parameter)
    long = [name for name in names if name.startswith("--")] or names
    return " ".join(f"`{name}{value if name in long else ''}`" for name in names)


def _names(parameter: Any) -> list[str]:
    """Return how an option may be spelt, its long name first."""
    return sorted([*parameter.opts, *parameter.secondary_opts], key=lambda name: not name.startswith("--"))


def _placeholder(annotation: Any) -> str:
    """Return what stands for one value of `list[Path] | None`; of a literal its words."""
    inner = [part for part in get_args(annotation) if part is not type(None)]
    if inner and isinstance(inner[0], str):
        return "|".join(inner)
    return _placeholder(inner[0]) if inner else PLACEHOLDERS[annotation]


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    return "" if parameter.is_flag or value is None or value in ((), [], "") else f"`{value}`"


def _help(parameter: Any) -> str:
    return " ".join(_words(parameter.help))


def _words(text: str | None) -> list[str]:
    """Return help as paragraphs of Markdown; rich's marks, which are for terminals, are left out."""
    paragraphs = inspect.cleandoc(text or "").split("\n\n")
    return [re.sub(r"\[/?(?:bold|dim|red|green|yellow)\]", "", " ".join(part.split())) for part in paragraphs if part.strip()]
