"""What every sub-command shares: where it prints, and how its options read."""

from __future__ import annotations

import errno
import inspect
import json
import logging
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weights import SourceUnavailable
from weights.addresses import redacted
from weights.documents import read_json
from weights.errors import MalformedFile
from weights.screen import Screen
from weights.wording import printable
from zoo.commands.completion import files, names, tags

if TYPE_CHECKING:
    import torch

PIPE_WIDTH = 400
"""Columns of a line that goes into a file or a pipe: nothing is cut there."""


class CannotWrite(OSError):
    """An output can't be written where it was asked for."""


out = Screen(width=None if sys.stdout.isatty() else PIPE_WIDTH)
err = Screen(stderr=True)


ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", autocompletion=names, help="A network's name, VGG19 for example.")]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        "--weights", "-w", autocompletion=tags, help="A tag, hf://org/repo, https://… or a file. Default: the network's default checkpoint."
    ),
]
CHECKPOINT = "NAME or NAME:TAG, ResNet50:imagenet1k_v1"
WeightsOfOption = Annotated[
    str | None,
    typer.Option(metavar="SET", help="Which weights of a file with several sets: raw, ema, or the name in the file."),
]
BuildOption = Annotated[list[str] | None, typer.Option("--option", help="A constructor keyword, activation=leaky_relu_0.1. Repeatable.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
DEVICES = re.compile(r"cpu|cuda(:\d+)?")


def device(name: str | None) -> str | None:
    """Refuse the name of a device that there is none of on any machine."""
    if name is not None and not DEVICES.fullmatch(name):
        raise typer.BadParameter(f"a device is cpu, cuda or cuda:1, not {name!r}")
    return name


def on_device(name: str | None, otherwise: str | None = None) -> torch.device:
    """Return a device of this machine; what is left out is `otherwise`, else the GPU where there is one."""
    import torch

    there = torch.cuda.is_available()
    try:
        place = torch.device(name or otherwise or ("cuda" if there else "cpu"))
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cuda", "cpu"):
        raise typer.BadParameter(f"a device is cpu, cuda or cuda:1, not {name!r}", param_hint="--device")
    if place.type == "cuda" and not (there and (place.index or 0) < torch.cuda.device_count()):
        raise typer.BadParameter(f"there is no {str(place)!r} on this machine; take --device cpu", param_hint="--device")
    return place


ImagesArgument = Annotated[
    list[str],
    typer.Argument(metavar="IMAGE", autocompletion=files, help="Pictures, folders, .tar shards, .parquet files, or lists of these."),
]
BatchSizeOption = Annotated[int, typer.Option(min=1, help="Images at once.")]
DeviceOption = Annotated[str | None, typer.Option(callback=device, help="cpu, cuda or cuda:1. Default: cuda if available.")]


@contextmanager
def naming_what_is_here(wanted: bool) -> Generator[None]:
    """Let an error of default weights that can't be had name those that are on this machine, where nobody asked for others."""
    from zoo.pretrained.offline import here

    try:
        yield
    except SourceUnavailable as error:
        if wanted and (found := here()):
            error.args = (f"{error}\nOn this machine: {', '.join(found)}; model=NAME takes one of them.",)
        raise


def writable(place: Path | None) -> Path | None:
    """Refuse an output that can't be written, before anything is computed for it; its folder must be there, for none is made.

    Raises:
        CannotWrite: it is a folder, its own isn't there, or takes no file.
    """
    if place is None or str(place) == "-":
        return place
    folder = place.absolute().parent
    if place.is_dir():
        raise CannotWrite(f"'{place}' can't be written: it is a folder; name a file in it")
    if not folder.is_dir():
        raise CannotWrite(f"'{place}' can't be written: there is no folder '{folder}'; make it first: mkdir -p {shlex.quote(str(folder))}")
    _try(folder, place)
    return place


def unused(place: Path, replace: bool) -> None:
    """Refuse an output that is there already, which may be anything, unless it is to be replaced.

    Raises:
        CannotWrite: it is there.
    """
    if not replace and str(place) != "-" and place.exists():
        raise CannotWrite(f"'{place}' is there already; --replace puts the new one in its place")


def spares_inputs(place: Path | None, inputs: Iterable[str | Path]) -> None:
    """Refuse an output that is one of the files that are read.

    Raises:
        CannotWrite: it is one of them.
    """
    if place is None or not place.is_file():
        return
    its = place.stat()
    for one in inputs:
        try:
            read = Path(one).stat()
        except (OSError, ValueError):  # an address, or nothing
            continue
        if (read.st_dev, read.st_ino) == (its.st_dev, its.st_ino):
            raise CannotWrite(f"'{place}' is read here, and would be lost; write into another file")


def png(place: Path | None) -> Path | None:
    """Refuse a picture that is no PNG, and one that can't be written."""
    if place is not None and place.suffix.lower() != ".png":
        raise typer.BadParameter(f"a picture is a PNG file, not '{place.name}'; name it '{place.stem}.png'")
    return writable(place)


def makeable(folder: Path) -> Path:
    """Refuse a folder that a command is to make and can't, with those above it.

    Raises:
        CannotWrite: it is a file, or lies where nothing can be made.
    """
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise CannotWrite(f"'{folder}' can't be made: '{there}' is a file; name another folder")
    _try(there, folder)
    return folder


def _try(folder: Path, place: Path) -> None:
    """Make a file without a name in a folder: only the system knows whether it takes one."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CannotWrite(
            f"'{place}' can't be written: the folder '{folder}' takes no file ({error.strerror}); name another place"
        ) from error


@contextmanager
def value_of(option: str | None) -> Generator[None]:
    """Tell what refuses an option's value, whatever the value of others, as the command's own parser does."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


TODO = {
    errno.ENOSPC: "free some room on that disk, or name another",
    errno.EACCES: "ask who owns it, or name another place",
    errno.EPERM: "ask who owns it, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.ENAMETOOLONG: "name it shorter",
    errno.ENOENT: "check the path",
}
"""By error of the system: what a user can do."""


def sentence(error: OSError) -> str:
    """Write an error of the system as a sentence; ours are sentences already."""
    if error.errno is None or not error.strerror or not isinstance(error.filename, str | bytes):
        return str(error)
    place = error.filename if isinstance(error.filename, str) else error.filename.decode(errors="replace")
    todo = TODO.get(error.errno, "")
    return f"'{place}': {error.strerror[0].lower()}{error.strerror[1:]}{f'; {todo}' if todo else ''}"


FrozenOption = Annotated[bool, typer.Option("--frozen", help="Use only weights with a full hash in a record or lock, as ZOO_FROZEN=1.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]


def chosen(model: str | None, tag: str | None) -> tuple[str, str | None, str]:
    """Say which network and checkpoint --model and --weights mean: what was named, else the best that is here, and why that one."""
    from zoo.pretrained.names import named
    from zoo.pretrained.offline import usual

    if model is not None:
        return *named(model, tag), ""
    if tag is not None:
        raise typer.BadParameter("--weights names a checkpoint of a network: name that too, --model NETWORK")
    record, why = usual()
    return record.model, record.tag, why


def build_options(pairs: list[str] | None, cls: type[Any]) -> dict[str, Any]:
    """Read keyword=value; a value is a number, true or false where it looks like one, text otherwise."""
    known = inspect.signature(cls).parameters
    found: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise typer.BadParameter(f"a constructor keyword looks like activation=relu6, not {pair!r}", param_hint="--option")
        if not known:
            raise typer.BadParameter("it sets the zoo's networks; your own takes zoo convert --arguments depth=5", param_hint="--option")
        if name not in known:
            raise typer.BadParameter(f"{cls.__name__} has no {name!r}; it takes {', '.join(known)}", param_hint="--option")
        try:
            found[name] = read_json(value, name)
        except MalformedFile:
            found[name] = value
        usual = known[name].default
        if isinstance(found[name], list | dict) or (found[name] is None and usual is not None):
            raise typer.BadParameter(f"{cls.__name__}'s {name} is a number, true, false or a word, not {value!r}", param_hint="--option")
        kinds = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}.get(type(usual))
        if kinds is not None and type(found[name]) not in kinds:
            raise typer.BadParameter(
                f"{cls.__name__}'s {name} is {usual!r} by default; {value!r} is nothing of the kind", param_hint="--option"
            )
        if name in ("num_classes", "in_channels") and found[name] < 1:
            raise typer.BadParameter(f"{name} is at least 1, not {value}", param_hint="--option")
    return found


def out_of_memory_or_gpu(error: BaseException, options: Collection[str]) -> str:
    """Say what to do about memory that is full or a GPU that failed, by `options` that the command has; "" of any other error, which is
    nobody's mistake but ours.
    """
    first = next(iter(str(error).splitlines()), "")
    ways = {"--batch-size": "a smaller --batch-size", "--accumulate": "parts of a step by --accumulate"}
    ways |= {"--batches": "smaller --batches"}
    smaller = f"take {', or '.join([way for option, way in ways.items() if option in options] + ['smaller images'])}"
    if isinstance(error, MemoryError) or "can't allocate memory" in first:
        fewer = ", or fewer --workers" if "--workers" in options else ""
        return f"the memory is full ({first or 'no more is given'}): {smaller}{fewer}"
    torch: Any = sys.modules.get("torch")  # without it no GPU was asked for anything
    if torch is None:
        return ""
    if isinstance(error, torch.OutOfMemoryError):
        return f"the GPU's memory is full: {smaller}; other programs may hold some of it too, nvidia-smi lists them. {first}"
    if isinstance(error, getattr(torch, "AcceleratorError", ())) or any(
        word in first for word in ("CUDA error", "CUDA driver", "cuDNN error", "NCCL error")
    ):
        other = ", or --device cpu" if "--device" in options else ""
        return f"the GPU failed: {first}. Try once more, with a smaller batch{other}; nvidia-smi says whether it is well"
    return ""


def in_shell_words(text: str, command: Any) -> str:
    """Put the Python words of a message, `restart=True`, into those of the command that its reader called, `--restart`.

    Args:
        text: of the message.
        command: the sub-command, with its `name` and `params`; None leaves the text as it is.
    """
    if command is None:
        return text
    options = {parameter.name: parameter for parameter in command.params if any(one.startswith("--") for one in parameter.opts)}

    def shell(match: re.Match[str]) -> str:
        option, value = options.get(match[1]), (match[2] or "").strip("'\"")
        if option is None:
            return match[0]
        yes, no = (next((one for one in words if one.startswith("--")), "") for words in (option.opts, option.secondary_opts))
        if not value:  # `size=` alone
            return yes
        if value in ("True", "False"):
            return ((yes if value == "True" else no) if option.is_flag else "") or match[0]
        return f"{yes} {value}"

    text = re.sub(rf"\b{command.name}\(\)", f"zoo {command.name}", text)
    if "--weights" in [one for parameter in command.params for one in parameter.opts]:
        text = re.sub(r"\btrained\((\w+), FILE\)", r"--model \1 --weights FILE", text)
    return re.sub(r"(?<![\w.\-/?&])([a-z_]+)=('[^']*'|\"[^\"]*\"|-?[\w.+-]*\w|(?=[\s,;)]|\.?(?:\s|$)))", shell, text)


def numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """Read an option's numbers with commas between them."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"numbers with commas between them, 0.485,0.456,0.406, not {text!r}", param_hint=option) from None


def print_json(value: Any) -> None:
    """Print for machines."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def fail(error: Exception | str, code: int, command: Any = None) -> int:
    """Show an error in the words of the sub-command that met it, and return the exit code."""
    _tell("[red]error:[/red]", sentence(error) if isinstance(error, OSError) else str(error), command)
    return code


class ErrorLog(logging.Handler):
    """Shows log lines as the command shows errors, in the words of the sub-command that `called` returns."""

    def __init__(self, level: int, called: Callable[[], Any] = lambda: None) -> None:
        super().__init__(level)
        self.called = called

    def emit(self, record: logging.LogRecord) -> None:
        _tell(f"[yellow]{record.levelname.lower()}:[/yellow]", record.getMessage(), self.called())


def in_words_of(command: Any, text: str) -> str:
    """Return a message in a sub-command's words, without control characters and without secrets of addresses."""
    return printable(in_shell_words(redacted(text), command), lines=True)


def _tell(kind: str, text: str, command: Any) -> None:
    err.print(f"{kind} ", end="")
    err.print(in_words_of(command, text), markup=False, highlight=False, soft_wrap=True)
