"""`zoo gc`: what the cache gives up."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

import weights
from weights.collecting import KEEP_DAYS
from zoo.commands.console import JsonOption, escape, out, print_json


def gc(
    keep_days: Annotated[float, typer.Option(min=0, help="How long ago the last use may be; 0: all that no lock names.")] = KEEP_DAYS,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove from the cache what nobody used for long, and what dead processes left; what a weights.lock names stays."""
    place = weights.Cache().root
    if not place.exists() and not as_json:
        out.print(f"there is no cache at {escape(str(place))}, so there is nothing to remove", soft_wrap=True)
        return
    found = weights.gc(keep_days, dry_run=dry_run)
    if as_json:
        print_json({"dry_run": dry_run, "freed_bytes": found.freed_bytes, **asdict(found)})
        return
    if found.removed:
        table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
        for heading in ("MB", "what", "why", "file"):
            table.add_column(heading, justify="right" if heading == "MB" else "left", no_wrap=True)
        for one in found.removed:
            table.add_row(f"{one.size_bytes / 1e6:.1f}", one.kind, one.why, escape(one.path.name))
        out.print(table)
    kept = f"{found.locked} locked or your own" if found.locked else "none of it locked"
    verb = "would be freed" if dry_run else "freed"
    out.print(f"{found.freed_bytes / 1e6:,.1f} MB {verb}; {found.kept_bytes / 1e6:,.1f} MB stay, {kept}.", soft_wrap=True)
    for path in found.locks:
        out.print(f"[dim]kept what {escape(str(path))} names[/dim]", soft_wrap=True)
    for path, note in found.unreachable:
        named = f"kept what {escape(str(path))} named, whose disk is not mounted; to let go of it: rm {escape(str(note))}"
        out.print(f"[dim]{named}[/dim]", soft_wrap=True)
