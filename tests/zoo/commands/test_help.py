"""The help: groups, an example of each command, -h, and one word for one thing."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from zoo.commands.app import EXAMPLES, GROUPS, PLACES, command, main
from zoo.commands.console import in_shell_words

PARAMETERS = [(name, parameter) for name in PLACES for parameter in command(name).params]


def test_commands_stand_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(GROUPS) == ["Use", "Vectors", "Training", "Convert", "Weights", "Team", "Look"]
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"─ {group} ─") for group in GROUPS]
    assert places == sorted(places)
    assert shown.index("─ Weights ─") < shown.index("│ cache ") < shown.index("─ Team ─")


def test_a_letter_asks_for_help_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-h"]) == 0
    assert "Commands" in (shown := capsys.readouterr().out) or "─ Use ─" in shown
    assert main(["gc", "-h"]) == 0
    assert "--keep-days" in capsys.readouterr().out


@pytest.mark.parametrize("name", PLACES)
def test_each_command_shows_an_example_that_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"Example: {EXAMPLES[name]}" in " ".join(capsys.readouterr().out.split())
    program, called, *arguments = shlex.split(EXAMPLES[name])
    assert (program, called) == ("zoo", name)
    command(name).make_context(name, arguments, resilient_parsing=True)  # an option that isn't there is an error


def test_a_picture_that_is_drawn_has_one_name_in_all_commands() -> None:
    drawn = {(name, parameter.opts[0]) for name, parameter in PARAMETERS if "PNG" in (parameter.help or "") and not parameter.is_flag}
    assert drawn == {(name, "--picture") for name in ("predict", "segment", "explain", "demo", "search", "bench", "recommend")}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("embed", "restart=True computes it anew, or fast=False", "--restart computes it anew, or --no-fast"),
        ("embed", "take batch_size=8 or dtype='float32'", "take --batch-size 8 or --dtype float32"),
        ("convert", "say it with kernel_convention= and spatial=.", "say it with --kernel-convention and --spatial."),
        ("convert", "model=mymodule:Class, or framework='keras'", "--model mymodule:Class, or --from keras"),
        ("embed", "calibration=... again", "calibration=... again"),
        ("embed", "weights=./mine", "weights=./mine"),
        ("embed", "https://h/a?at= and /d/at= is there", "https://h/a?at= and /d/at= is there"),
        ("embed", "needs calibration=.", "needs --calibration."),
        ("search", "say which with --at (at=…)", "say which with --at (at=…)"),
        ("finetune", "Try lr=0.0001, clip=1", "Try --lr 0.0001, --clip 1"),
        ("embed", "embed() needs preprocessing that crops", "zoo embed needs preprocessing that crops"),
        ("embed", "colour=3 and x.strict=True and strict=False stay", "colour=3 and x.strict=True and strict=False stay"),
        ("finetune", "resume=True goes on", "resume=True goes on"),  # --resume takes a folder
        ("gc", "restart=True", "restart=True"),
    ],
)
def test_a_message_speaks_the_shells_language(name: str, text: str, said: str) -> None:
    assert in_shell_words(text, command(name)) == said


def test_a_message_without_a_command_stays_as_it_is() -> None:
    nobody: Any = None
    assert in_shell_words("restart=True", nobody) == "restart=True"


@pytest.mark.parametrize(
    ("typed", "told"), [("pul", "did you mean pull?"), ("Predict", "did you mean predict?"), ("qqqq", "zoo -h lists them")]
)
def test_a_misspelt_command_is_told_the_right_one(typed: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([typed, "resnet20"]) == 2
    assert f"there is no command {typed!r}; {told}" in " ".join(capsys.readouterr().err.split())
