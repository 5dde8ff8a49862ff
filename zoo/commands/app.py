"""The command `zoo`: which sub-command lies where, and what becomes of errors.

Each sub-command is a thin function that calls one public function and shows what it returns. Its file is imported when it is called
or when its help is asked for. No file imports torch at its top.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weights import NoPretrainedWeights, SourceUnavailable, UnknownWeights, WeightsError
from zoo.commands.console import ErrorLog, FrozenOption, fail, out, out_of_memory_or_gpu
from zoo.commands.interrupts import say_interrupted, start_torch

EXIT_CODES = """Exit codes: 0 done; 1 a check failed, an input can't be used or an output not be written; 2 the command, an option or
its value was misspelt; 3 a network, checkpoint or file of that name is not known; 4 no source could deliver; 130 interrupted."""

GROUPS = {
    "Networks and checkpoints": {
        "list": "networks:list_models",
        "info": "networks:info",
        "pull": "cache:pull",
        "verify": "cache:verify",
        "add": "cache:add",
        "remove": "cache:remove",
        "gc": "cache:gc",
    },
    "Images": {
        "predict": "predict:predict",
        "demo": "predict:demo",
        "embed": "embed:embed",
        "search": "embed:search",
        "knn": "embed:knn",
        "finetune": "finetune:finetune",
    },
    "Other frameworks' files": {"inspect": "convert:inspect", "convert": "convert:convert", "diff": "convert:diff"},
    "Teams and machines without a network": {
        "lock": "lock:lock",
        "bundle": "share:bundle",
        "unbundle": "share:unbundle",
        "mirror": "share:mirror",
        "sign": "share:sign",
        "sbom": "share:sbom",
    },
    "This machine": {"bench": "bench:bench", "doctor": "doctor:doctor"},
}
"""Each group of the help: a sub-command's name, and its file in this folder and function there."""
PLACES = {name: (group, *place.split(":")) for group, members in GROUPS.items() for name, place in members.items()}


STARTS_TORCH = {"add", "bench", "convert", "demo", "embed", "finetune", "knn", "predict", "search"}


def _with_torch(called: Callable[..., object]) -> Callable[..., object]:
    @wraps(called)
    def run(*args: Any, **kwargs: Any) -> object:
        start_torch()
        return called(*args, **kwargs)

    return run


@cache
def command(name: str) -> Any:
    """Load one sub-command."""
    group, file, function = PLACES[name]
    called = getattr(import_module(f"zoo.commands.{file}"), function)
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name, rich_help_panel=group)(_with_torch(called) if name in STARTS_TORCH else called)
    return typer.main.get_command(single)


class SubCommands(TyperGroup):
    """Loads sub-commands one by one, when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Name all of them, in the order of the help."""
        del ctx
        return list(PLACES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Load one of them; None where there is none of that name."""
        del ctx
        return command(cmd_name) if cmd_name in PLACES else None


app = typer.Typer(
    cls=SubCommands,
    help="Vision networks with proven pretrained weights.\n\n" + EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        from zoo import __version__

        out.print(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")] = False,
    frozen: FrozenOption = False,
) -> None:
    del version  # the callback has answered
    if frozen:
        os.environ["ZOO_FROZEN"] = "1"  # for all that this command starts, its processes too


def main(arguments: list[str] | None = None) -> int:
    """Run the command; a user's mistake gets one clear message and an exit code, never a traceback."""
    logging.basicConfig(handlers=[ErrorLog(logging.WARNING)], force=True)
    try:
        code = app(args=arguments, prog_name="zoo", standalone_mode=False)
        sys.stdout.flush()
        return say_interrupted() if code == 130 else code if isinstance(code, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        return say_interrupted()
    except BrokenPipeError:  # `zoo list | head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UnknownWeights, NoPretrainedWeights, FileNotFoundError) as error:
        return fail(error, 3)
    except SourceUnavailable as error:
        return fail(error, 4)
    except (WeightsError, ValueError, OSError, FloatingPointError) as error:
        return fail(error, 1)
    except (RuntimeError, MemoryError) as error:
        if not (why := out_of_memory_or_gpu(error, _options(sys.argv[1:] if arguments is None else arguments))):
            raise
        return fail(why, 1)
    except Exception as error:
        misspelt: Any = error  # typer's own errors: their base class has no public name, and they know how to show themselves
        if not hasattr(misspelt, "exit_code"):
            raise
        misspelt.show()
        return misspelt.exit_code


def _options(arguments: list[str]) -> set[str]:
    """List the options of the sub-command that was given."""
    named = next((word for word in arguments if word in PLACES), None)
    return {option for parameter in command(named).params for option in parameter.opts} if named else set()
