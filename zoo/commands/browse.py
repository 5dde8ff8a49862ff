"""`zoo browse`: every checkpoint on one page."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from weights.places import cache_folder
from weights.whole import write_whole
from weights.wording import clause, counted, escape
from zoo.browsing.measured import Measured, merged, read_record, remembered, shipped
from zoo.browsing.page import MADE_BY, page
from zoo.browsing.rows import rows
from zoo.commands.console import CannotWrite, err, out, sentence, writable

SUFFIXES = (".html", ".htm")


def html(place: Path | None) -> Path | None:
    """Refuse a page that no browser would show as one, that can't be written, or that would replace something else."""
    if place is None or str(place) == "-":
        return place
    if place.suffix.lower() not in SUFFIXES:
        raise typer.BadParameter(f"a page is an HTML file, not '{place.name}'; name it '{place.stem or 'zoo'}.html'")
    writable(place)
    if place.exists() and not _ours(place):
        raise CannotWrite(f"'{place}' is there already and is no page of `zoo browse`; name another file")
    return place


def browse(
    mine: Annotated[
        bool,
        typer.Option("--mine", help="Mark what this machine has: in the cache, installed by pip, added, measured by zoo bench --save."),
    ] = False,
    bench: Annotated[
        list[Path] | None, typer.Option("--bench", metavar="FILE", help="Offer the speeds of this record of zoo bench; may be repeated.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", callback=html, help="Write the page there, - prints it; into the cache if left out."),
    ] = None,
    show: Annotated[bool, typer.Option("--open/--no-open", help="Whether to open the page in a browser.")] = True,
) -> None:
    """Compare all checkpoints on one page: accuracy against speed, size or multiply-adds, with filters, search and a table.

    The page is one HTML file. It needs no server and fetches nothing.
    """
    own = _measured(bench or [], mine)
    text = page(rows(mine=mine, measured=own), [*shipped(), *own], mine=mine, version=_version())
    if to is not None and str(to) == "-":
        sys.stdout.write(text)
        return
    place = _write(text, to, "mine.html" if mine or bench else "zoo.html")
    out.print(f"wrote '{escape(str(place))}'", soft_wrap=True)
    if show and not _open(place):
        err.print("No browser can be opened here: open that file in one, or copy it to a machine that has one.", soft_wrap=True)


def _measured(named: list[Path], mine: bool) -> list[Measured]:
    """Read the user's records: those that were named, which must be right, and those that `zoo bench` saved, of which a bad one is told."""
    found: list[Measured] = []
    for path in remembered() if mine else ():
        try:
            found += read_record(path)
        except (ValueError, OSError) as error:
            why = clause(sentence(error) if isinstance(error, OSError) else error)
            err.print(f"[yellow]warning:[/yellow] {escape(why)}; its speeds are left out", soft_wrap=True)
    for path in named:
        found += read_record(path)
    if mine and not found:
        err.print("[dim]No measurement of this machine is at hand: zoo bench --save FILE makes one.[/dim]", soft_wrap=True)
    elif mine or named:
        networks = {name for one in found for name in one.rates}
        err.print(f"[dim]{counted(len(networks), 'network')} measured by you.[/dim]", soft_wrap=True)
    return merged(found)


def _write(text: str, to: Path | None, name: str) -> Path:
    """Write the page where it was asked for; else into the cache, or a new folder for temporary files where that takes none."""
    if to is not None:
        write_whole(to, text)
        return to.absolute()
    place = cache_folder() / "pages" / name
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, text)
    except OSError as error:
        place = Path(tempfile.mkdtemp(prefix="zoo-browse-")) / name
        err.print(f"The cache takes no file ({escape(sentence(error))}), so the page is a temporary file.", soft_wrap=True)
        write_whole(place, text)
    return place


def _open(place: Path) -> bool:
    """Open the page, and say whether a browser took it. A terminal without a screen has none, and one of text would fill the terminal."""
    if sys.platform == "linux" and not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")):
        return False
    try:
        return webbrowser.open(place.as_uri())
    except (webbrowser.Error, OSError):
        return False


def _ours(place: Path) -> bool:
    with place.open("rb") as file:
        return MADE_BY.encode() in file.read(1000)


def _version() -> str:
    from zoo import __version__

    return __version__
