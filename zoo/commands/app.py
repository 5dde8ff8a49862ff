"""The command `zoo`: which sub-command lies where, and what becomes of errors.

Each sub-command is a thin function that calls one public function and shows what it returns. Its file is imported when it is called
or when its help is asked for. No file imports torch at its top.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from importlib import import_module
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperGroup
from typer.models import ArgumentInfo

from weights import NoPretrainedWeights, SourceUnavailable, UnknownWeights, WeightsError
from weights.arguments import did_you_mean
from zoo.commands.completion import files, rejoin_colons
from zoo.commands.console import ErrorLog, FrozenOption, fail, in_words_of, out, out_of_memory_or_gpu
from zoo.commands.interrupts import say_interrupted, start_torch

EXIT_CODES = """Exit codes: 0 is success. 1: a check failed, or an input or output can't be used. 2: a command, option or value is wrong. 3:
no network, checkpoint or file has that name. 4: no source could deliver. 130: interrupted."""

GROUPS = {
    "Use": {
        "predict": ("predict:predict", "zoo predict cat.jpg dog.jpg"),
        "explain": ("explain:explain", "zoo explain cat.jpg --target tabby --picture why.png"),
        "detect": ("detect:detect", "zoo detect street.jpg --model YOLOv3Tiny --weights yolov3-tiny.weights --picture found.png"),
        "segment": ("segment:segment", "zoo segment photo.jpg --picture classes.png"),
        "evaluate": ("detect:evaluate", "zoo evaluate annotations/instances_val2017.json --model YOLOv3Tiny --weights yolov3-tiny.weights"),
        "demo": ("predict:demo", "zoo demo"),
        "dream": ("dream:dream", "zoo dream photo.jpg -o dream.png"),
        "stylize": ("stylize:stylize", "zoo stylize photo.jpg --style embers"),
    },
    "Vectors": {
        "embed": ("embed:embed", "zoo embed photos -o vectors.parquet"),
        "search": ("embed:search", "zoo search vectors.parquet cat.jpg --picture found.png"),
        "knn": ("embed:knn", "zoo knn vectors.parquet"),
    },
    "Training": {
        "recommend": ("recommend:recommend", "zoo recommend photos --max-ms 20 --picture choice.png"),
        "finetune": ("finetune:finetune", "zoo finetune photos --out runs/photos"),
        "train-style": ("stylize:train_style", "zoo train-style photos starry.jpg -o starry"),
    },
    "Convert": {
        "inspect": ("convert:inspect", "zoo inspect model.h5"),
        "convert": ("convert:convert", "zoo convert model.h5 model.safetensors"),
        "diff": ("convert:diff", "zoo diff old.safetensors new.safetensors"),
    },
    "Weights": {
        "pull": ("cache:pull", "zoo pull ResNet50"),
        "add": ("cache:add", "zoo add model.pth ResNet50:mine"),
        "remove": ("cache:remove", "zoo remove ResNet50:mine"),
        "cache": ("cache:cache", "zoo cache"),
        "verify": ("cache:verify", "zoo verify"),
        "gc": ("cache:gc", "zoo gc --dry-run"),
    },
    "Team": {
        "lock": ("lock:lock", "zoo lock ResNet50 VGG19"),
        "bundle": ("share:bundle", "zoo bundle ResNet50 VGG19 -o zoo.tar"),
        "unbundle": ("share:unbundle", "zoo unbundle zoo.tar"),
        "mirror": ("share:mirror", "zoo mirror /srv/zoo ResNet50 VGG19"),
        "sign": ("share:sign", "zoo sign zoo.tar --key KEY.pem"),
        "sbom": ("share:sbom", "zoo sbom -o sbom.json"),
    },
    "Look": {
        "list": ("networks:list_models", "zoo list '*resnet*' --sort accuracy"),
        "info": ("networks:info", "zoo info ResNet50"),
        "browse": ("browse:browse", "zoo browse --mine"),
        "bench": ("bench:bench", "zoo bench --models ResNet50,VGG19 --device cpu"),
        "doctor": ("doctor:doctor", "zoo doctor"),
    },
}
"""Each group of the help: a sub-command's name, its file in this folder and function there, and an example of its help."""
PLACES = {name: (group, *place.split(":")) for group, members in GROUPS.items() for name, (place, _) in members.items()}
EXAMPLES = {name: example for members in GROUPS.values() for name, (_, example) in members.items()}
FAILURES = (
    ((UnknownWeights, NoPretrainedWeights, FileNotFoundError), 3),
    ((SourceUnavailable,), 4),
    ((WeightsError, ValueError, OSError, FloatingPointError), 1),
)
"""Errors that are a user's to mend, and their exit codes."""
HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


STARTS_TORCH = {
    "add",
    "bench",
    "convert",
    "demo",
    "detect",
    "dream",
    "embed",
    "evaluate",
    "explain",
    "finetune",
    "knn",
    "predict",
    "recommend",
    "search",
    "segment",
    "stylize",
    "train-style",
}


def _with_torch(called: Callable[..., object]) -> Callable[..., object]:
    @wraps(called)
    def run(*args: Any, **kwargs: Any) -> object:
        start_torch()
        return called(*args, **kwargs)

    return run


def _with_options(called: Callable[..., object], name: str) -> Callable[..., object]:
    """Tell an error that names an argument of the call as one of the option's value, where the option was given."""

    @wraps(called)
    def run(*args: Any, **kwargs: Any) -> object:
        try:
            return called(*args, **kwargs)
        except ValueError as error:
            argument = getattr(error, "argument", None)
            if not isinstance(argument, str) or kwargs.get(argument) is None:  # what nobody gave is no option's fault
                raise
            option = next(parameter.opts[0] for parameter in command(name).params if parameter.name == argument)
            raise typer.BadParameter(str(error), param_hint=option) from None

    return run


def _with_files(called: Callable[..., object]) -> Callable[..., object]:
    """Let TAB complete files wherever a path is taken and nothing else is offered."""
    hints = get_type_hints(called, include_extras=True)
    for name, hint in hints.items():
        base, *about = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        if about and "Path" in str(base) and about[0].autocompletion is None:
            about[0].autocompletion = files
        if about and isinstance(about[0], ArgumentInfo) and about[0].metavar is None:
            about[0].metavar = name.upper().replace("_", "-")
    called.__annotations__ = hints
    return called


@cache
def command(name: str) -> Any:
    """Load one sub-command."""
    group, file, function = PLACES[name]
    called = _with_files(getattr(import_module(f"zoo.commands.{file}"), function))
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    register = single.command(name, rich_help_panel=group, epilog=f"Example: {EXAMPLES[name]}", context_settings=HELP)
    register(_with_options(_with_torch(called) if name in STARTS_TORCH else called, name))
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

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the sub-command that a line begins with; a misspelt one is told the right one."""
        if args and args[0] not in PLACES and not args[0].startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"there is no command {args[0]!r}{did_you_mean(args[0], PLACES) or '; zoo -h lists them'}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=SubCommands,
    help="Vision networks with proven pretrained weights.\n\n" + EXIT_CODES,
    no_args_is_help=True,
    context_settings=HELP,
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
    rejoin_colons()
    logging.basicConfig(
        handlers=[ErrorLog(logging.WARNING, partial(_called, sys.argv[1:] if arguments is None else arguments))], force=True
    )
    try:
        code = app(args=arguments, prog_name="zoo", standalone_mode=False)
        sys.stdout.flush()
        return say_interrupted() if code == 130 else code if isinstance(code, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        return say_interrupted()
    except BrokenPipeError:  # `zoo list | head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _failed(error, _called(sys.argv[1:] if arguments is None else arguments))


def _failed(error: Exception, called: Any) -> int:
    """Show what went wrong, and return the exit code; what is nobody's mistake but ours is raised again."""
    for kinds, code in FAILURES:
        if isinstance(error, kinds):
            return fail(error, code, called)
    if isinstance(error, RuntimeError | MemoryError):
        options = {option for parameter in called.params for option in parameter.opts} if called else set()
        if why := out_of_memory_or_gpu(error, options):
            return fail(why, 1)
        raise error
    misspelt: Any = error  # typer's own errors: their base class has no public name, and they know how to show themselves
    if not hasattr(misspelt, "exit_code"):
        raise error
    if isinstance(message := getattr(misspelt, "message", None), str):
        misspelt.message = in_words_of(called, message)
    misspelt.show()
    return misspelt.exit_code


def _called(arguments: list[str]) -> Any:
    """Return the sub-command that was given, None where none was."""
    named = next((word for word in arguments if word in PLACES), None)
    return command(named) if named else None
