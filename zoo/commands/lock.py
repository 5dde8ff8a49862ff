"""`zoo lock`: which bytes a project's names mean, written down, compared with what is here and with another lock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from weights import NoSuchFile, NotLocked
from weights.auditing import Audit, Difference
from weights.auditing import diff as diff_locks
from weights.lock import NAME, Entry, Lock, find_locks, project_lock, user_lock
from weights.pinning import frozen_by
from weights.shipped import write_shipped
from weights.wording import counted, escape
from zoo.commands.completion import names as completed_names
from zoo.commands.console import JsonOption, QuietOption, err, out, print_json, writable
from zoo.sharing import locks as locking
from zoo.sharing.locks import Written


def lock(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=completed_names,
            help="ResNet50, ResNet50:imagenet1k_v2, hf://org/repo, https://…. Default: every entry. Or: diff OTHER [LOCK].",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Compare locks, or these names in them, with records and cache, offline. Exit 1 if they differ."),
    ] = False,
    diff: Annotated[Path | None, typer.Option(metavar="OTHER", help="Show differences to another lock. Exit 1 if there are any.")] = None,
    renewed: Annotated[bool, typer.Option("--update", help="Pin what the sources serve today instead of what was pinned.")] = False,
    ask_hub: Annotated[
        bool, typer.Option("--ask-hub", help="Pin what the Hub announces for these names, or all, without downloading.")
    ] = False,
    contribute: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write hashes that this machine has seen and the registry lacks. Needs --by."),
    ] = None,
    by: Annotated[str, typer.Option(metavar="WHO", help="Who contributes, for --contribute: a name or an address.")] = "",
    remove: Annotated[bool, typer.Option("--remove", help="Take these names out of the lock.")] = False,
    file: Annotated[Path | None, typer.Option(help="The lock. Default: the nearest weights.lock upwards, or else ./weights.lock.")] = None,
    shipped: Annotated[Path | None, typer.Option(hidden=True, help="Write the lock that ships into this folder.")] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Pin the exact weights that your project uses in ./weights.lock, or compare: --check [NAME...], diff OTHER."""
    names = names or []
    command, others = (names[0], names[1:]) if names[:1] == ["diff"] else ("", names)
    given = {"--check": check, "--diff": diff is not None, "diff": bool(command), "--update": renewed, "--remove": remove}
    given |= {"--ask-hub": ask_hub, "--contribute": contribute is not None}
    asked = [option for option, there in (given | {"--shipped": shipped is not None}).items() if there]
    if len(asked) > 1:
        raise typer.BadParameter(f"{' and '.join(asked)} are different things to do: one at a time")
    if shipped is not None:
        if names or file:
            raise typer.BadParameter("--shipped FOLDER writes the lock of the registry, all of it")
        made = write_shipped(shipped)
        out.print(f"{counted(len(made.entries), 'entry', 'entries')}, serial {made.serial}")
    elif contribute is not None:
        if names or not by.strip():
            raise typer.BadParameter("--contribute FILE takes no names, and --by says who saw it: --by 'Ada Lovelace'")
        writable(contribute)
        count = locking.contribute(contribute, by.strip())
        out.print(f"{counted(count, 'checkpoint')} in '{escape(str(contribute))}'", soft_wrap=True)
    elif check:
        _check(locking.check([file] if file else find_locks(), names), as_json)
    elif diff is not None or command:
        places = [*([] if diff is None else [diff]), *map(Path, others), *([] if file is None else [file])]
        if not 1 <= len(places) <= 2:
            raise typer.BadParameter("zoo lock diff OTHER, or zoo lock diff OTHER LOCK")
        _diff(places[1] if len(places) == 2 else _existing(), places[0], as_json)
    else:
        held = user_lock() if (renewed or remove) and user_lock().is_file() else None  # where no project is, the pin stands there
        path = (file or project_lock() or held or Path(NAME)).absolute()
        if switch := frozen_by():
            raise NotLocked(f"'{path}' is not changed: {switch} admits no new entries; zoo lock --check compares.")
        writable(path)
        old = Lock.read(path).entries if path.exists() else {}
        if not names and not ask_hub and (remove or not old):
            raise typer.BadParameter(f"name what the project {'no longer ' * remove}uses: ResNet50, hf://org/repo, https://…")
        if ask_hub:
            written = locking.ask_hub(path, names)
        else:
            written = locking.remove(path, names) if remove else locking.write(path, names, renewed=renewed, progress=not quiet)
        _show(path, old, written, as_json)


def _existing() -> Path:
    path = project_lock()
    if path is None:
        raise NoSuchFile(f"there is no {NAME} here or above; zoo lock NAME writes one")
    return path


def _check(audits: list[Audit], as_json: bool) -> None:
    if as_json:
        print_json([asdict(audit) for audit in audits])
    for audit in () if as_json else audits:
        if audit.differences:
            out.print(_table(audit.differences, "locked", "found"))
        counts = f"{len(audit.proven)} as locked, {len(audit.absent)} not in the cache"
        differ = len({one.key for one in audit.differences})
        counts += f", {differ} differ{'s' if differ == 1 else ''}"
        out.print(f"[dim]'{escape(str(audit.path))}': {counted(audit.entries, 'entry', 'entries')}, {counts}[/dim]", soft_wrap=True)
    if any(audit.differences for audit in audits):
        raise typer.Exit(1)


def _diff(path: Path, other: Path, as_json: bool) -> None:
    differences = diff_locks(Lock.read(path), Lock.read(other))
    if as_json:
        print_json([asdict(one) for one in differences])
    elif differences:
        out.print(_table(differences, str(path), str(other)))
    else:
        out.print("[dim]They say the same.[/dim]")
    if differences:
        raise typer.Exit(1)


def _table(differences: list[Difference], left: str, right: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("name", "what", left, right):
        table.add_column(escape(heading), overflow="fold")
    for one in differences:
        said = (escape(text, lines=True) if text else "[dim]nothing[/dim]" for text in (one.locked, one.found))
        table.add_row(escape(one.key), escape(one.what), *said)
    return table


def _show(path: Path, old: Mapping[str, Entry], written: Written, as_json: bool) -> None:
    new, failed = written.entries, written.failed
    states = {key: "new" if key not in old else "as it was" if old[key] == entry else "changed" for key, entry in new.items()}
    states |= {key: "removed" for key in old if key not in new} | dict.fromkeys(failed, "failed")
    if as_json:
        entries = {key: asdict(entry) | {"state": states[key]} for key, entry in new.items()}
        print_json({"path": str(path), "entries": entries, "failed": failed})
    else:
        for key in sorted(states.keys() & (new.keys() | old.keys())):
            entry = new.get(key) or old[key]
            out.print(f"{states[key]:10}{escape(key)}  [dim]sha256 {entry.sha256}[/dim]", soft_wrap=True)
        out.print(f"[dim]'{escape(str(path))}': {counted(len(new), 'entry', 'entries')}[/dim]", soft_wrap=True)
    for why in failed.values():
        err.print(f"[red]failed[/red] {escape(why, lines=True)}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)
