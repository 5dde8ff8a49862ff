"""Messages advise only options that the command has: the one that prints them, or the one that they name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zoo.commands.app import PLACES, command

ROOT = Path(__file__).parents[3]
COMMANDS: dict[str, Any] = {name: command(name) for name in PLACES}
OPTIONS = {
    name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for name, command in COMMANDS.items()
}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+[a-z]")
NAMED = re.compile(rf"\bzoo ({'|'.join(OPTIONS)})\b")
SPEAKS_IN = {
    "convert/formats": ("convert",),  # of writing
    "convert/_guard.py": ("convert",),
    "convert/evidence.py": ("convert",),
    "convert/sandbox.py:_Reader": ("convert",),  # who runs a framework there
    "weights/sbom.py": ("sbom",),
    "zoo/conversion/namings.py:_misfit": ("convert",),  # which --option and --match are of
    "weights/serving.py": ("mirror",),
    "zoo/bench": ("bench",),
    "zoo/commands/bench.py": ("bench",),
    "zoo/commands/convert.py": ("convert",),
    "zoo/commands/detect.py": ("detect", "evaluate"),
    "zoo/commands/segment.py": ("segment",),
    "zoo/commands/detect.py:_shown": ("detect",),
    "zoo/commands/detect.py:_folder": ("detect",),
    "zoo/commands/detect.py:detect": ("detect",),
    "zoo/commands/detect.py:detector": ("detect", "evaluate"),
    "zoo/commands/detect.py:evaluate": ("evaluate",),
    "zoo/commands/dream.py": ("dream",),
    "zoo/commands/explain.py": ("explain",),
    "zoo/commands/finetune.py": ("finetune",),
    "zoo/commands/int8.py": ("embed", "predict", "detect"),
    "zoo/commands/predict.py:_print_predictions": ("predict",),
    "zoo/commands/predict.py:demo": ("predict",),
    "zoo/commands/console.py:chosen": ("predict", "explain", "dream"),
    "zoo/commands/console.py:in_shell_words": ("predict", "explain", "dream", "segment", "detect", "embed"),
    "zoo/commands/console.py:on_device": ("bench", "dream", "detect", "evaluate", "explain", "predict", "segment"),
    "zoo/commands/console.py:unused": ("bundle", "sbom"),
    "zoo/commands/pictures.py:tell_by": ("predict", "explain", "detect", "segment"),
    "zoo/commands/embed.py:_draw": ("search",),
    "zoo/pretrained/add_file.py": ("add",),
    "zoo/commands/share.py:_signed": ("unbundle",),
    "zoo/conversion/result.py": ("convert",),
    "zoo/conversion/convert.py": ("convert",),
    "zoo/conversion/export.py": ("convert",),
    "zoo/embedding/cluster.py": ("embed",),
    "zoo/embedding/flow.py": ("embed",),
    "zoo/embedding/neighbours.py": ("search",),
    "zoo/embedding/parts.py": ("embed",),
    "zoo/embedding/prepare.py": ("embed",),
    "zoo/embedding/probing.py": ("knn",),
    "zoo/embedding/reading.py": ("search", "knn"),
    "zoo/embedding/shelf.py": ("embed",),
    "zoo/finetuning": ("finetune",),
    "zoo/commands/recommend.py": ("recommend",),
    "zoo/recommendation": ("recommend",),
    "zoo/sharing/golden_outputs.py": ("unbundle",),
    "zoo/conversion/inspect.py": ("convert",),
}
"""Rooms whose messages only these commands print; what is said anywhere else has to name a command."""
OTHERS = {"--upgrade": "pip install", "--nproc-per-node": "torchrun", "--shm-size": "docker run", "--local-dir": "hf download"}
"""Options of other programs, with the words before them."""
CHOSEN = ("out_of_memory_or_gpu",)
"""Functions that name only options which the command has; what they say is tested where they are."""
NOT_SAID = (
    "zoo/kernels/__main__.py",
    "zoo/commands/bench_embedding.py",
    "zoo/bench/machine.py",
    "convert/report.py",
    "zoo/finetuning/report.py",
)
"""Other programs' own options, what is asked of other programs, and style sheets."""


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """List the strings of a file with the functions that they are in, without docstrings and the names by which options are declared."""
    source = path.read_text()
    if not OPTION.search(source):
        return  # parsing takes seconds for all files, before any test runs
    tree = ast.parse(source)
    left_out: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.add(node.value)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "Option":
            left_out.update(argument for argument in node.args if isinstance(argument, ast.Constant))
        if isinstance(node, ast.JoinedStr):
            left_out.update(node.values)
    for outer in tree.body:
        for node in ast.walk(outer):
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
                yield getattr(outer, "name", ""), "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
                yield getattr(outer, "name", ""), node.value


def advice() -> Iterator[tuple[str, str, str]]:
    """List each option that a message names, with the place and the whole text."""
    for room in ("zoo", "weights", "convert"):
        for path in sorted((ROOT / room).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            for function, text in () if place in NOT_SAID else texts(path):
                for option in OPTION.findall(text):
                    if text != option and OTHERS.get(option, "\0") not in text and function not in CHOSEN:
                        yield f"{place}:{function}", option, text


def wrong(place: str, option: str, text: str) -> str:
    """Say what is wrong with an advice; "" if nothing is."""
    named = NAMED.findall(text)
    if any(option in OPTIONS[command] for command in named):
        return ""
    file, _, function = place.partition(":")
    rooms = [commands for room, commands in SPEAKS_IN.items() if file == room or file.startswith(f"{room}/")]
    own = tuple(name for name, command in COMMANDS.items() if getattr(command.callback, "__name__", "") == function)
    commands = SPEAKS_IN.get(place) or own or (rooms[0] if rooms else ())
    if named and not commands:
        return f"none of zoo {', zoo '.join(named)} has {option}"
    lacking = [command for command in commands if option not in OPTIONS[command]]
    return f"{', '.join(lacking)} lacks {option}" if lacking else "" if commands else f"{option} of which command?"


ADVICE = list(advice())


def test_the_walk_sees_messages() -> None:
    found = {(place.partition(":")[0], option) for place, option, _ in ADVICE}
    assert {
        ("convert/conversion.py", "--kernel-convention"),
        ("zoo/conversion/namings.py", "--headless"),
        ("zoo/sharing/golden_outputs.py", "--no-check"),
    } <= found
    assert len(ADVICE) > 40


@pytest.mark.parametrize(
    ("place", "text", "said"),
    [
        ("zoo/conversion/namings.py:f", "try --match", "--match of which command?"),
        ("zoo/conversion/namings.py:f", "try zoo predict --match", "none of zoo predict has --match"),
        ("zoo/conversion/namings.py:f", "try zoo add --match", ""),
        ("zoo/commands/convert.py:convert", "or --match", ""),
        ("zoo/commands/predict.py:predict", "or --match", "predict lacks --match"),
        ("zoo/sharing/golden_outputs.py:f", "or --match", "unbundle lacks --match"),
    ],
)
def test_an_option_that_is_not_there_is_found(place: str, text: str, said: str) -> None:
    assert wrong(place, "--match", text) == said


@pytest.mark.parametrize(("place", "option", "text"), ADVICE, ids=[f"{place}{option}" for place, option, _ in ADVICE])
def test_an_advised_option_is_one_of_the_command(place: str, option: str, text: str) -> None:
    assert wrong(place, option, text) == "", text
