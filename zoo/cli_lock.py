"""`zoo lock`: which bytes a project's names mean, written down, compared with what is here and with another lock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

import weights
from weights import Checkpoint, NotLocked, UnknownWeights
from weights.auditing import Difference
from weights.auditing import check as check_lock
from weights.auditing import diff as diff_locks
from weights.cache import Cache
from weights.install import obtain, renew
from weights.lock import NAME, Entry, Lock, find_locks, project_lock, user_lock
from weights.pinning import entry_of, frozen_by, key_of, update
from weights.shipped import write_shipped
from zoo.console import JsonOption, QuietOption, escape, out, print_json
from zoo.search import model_class
from zoo.trained import find_record, to_safetensors


def lock(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME...]",
            help="What the project uses: ResNet50, ResNet50:imagenet1k_v2, hf://org/repo, https://…; if left out, what the lock has. "
            "Or: diff OTHER [LOCK].",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare all locks with records and cache, offline; exit 1 if they differ.")
    ] = False,
    diff: Annotated[Path | None, typer.Option(metavar="OTHER", help="Show what another lock says differently; exit 1 if it does.")] = None,
    renewed: Annotated[bool, typer.Option("--update", help="Pin what the sources serve today instead of what was pinned.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take these names out of the lock.")] = False,
    file: Annotated[Path | None, typer.Option(help="The lock; the nearest weights.lock upwards, else ./weights.lock.")] = None,
    shipped: Annotated[Path | None, typer.Option(hidden=True, help="Write the lock that ships into this folder.")] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write down which bytes the project's weights are, in ./weights.lock, or compare: --check, diff OTHER."""
    if shipped is not None:
        made = write_shipped(shipped)
        out.print(f"{len(made.entries)} entries, serial {made.serial}")
    elif check:
        _check([file] if file else find_locks(), as_json)
    elif diff is not None or (names and names[0] == "diff"):
        places = [diff] if diff is not None else [Path(name) for name in (names or [])[1:]]
        if not 1 <= len(places) <= 2:
            raise typer.BadParameter("zoo lock diff OTHER, or zoo lock diff OTHER LOCK")
        _diff(places[1] if len(places) == 2 else _existing(file), places[0], as_json)
    else:
        held = user_lock() if (renewed or remove) and user_lock().is_file() else None  # where no project is, the pin stands there
        path = (file or project_lock() or held or Path(NAME)).absolute()
        if switch := frozen_by():
            raise NotLocked(f"{path} is not changed: {switch} admits no new entries; zoo lock --check compares.")
        old = Lock.read(path).entries if path.is_file() else {}
        if not (names or old):
            raise typer.BadParameter("name what the project uses: zoo lock ResNet50 hf://org/repo")
        new = _removed(path, names or [], old) if remove else _write(path, _whole(names or list(old), old, renewed), old, renewed, quiet)
        _show(path, old, new, as_json)


def _whole(names: list[str], old: Mapping[str, Entry], renewed: bool) -> list[str]:
    """Leave out what is in the lock by an address without its query, which nobody can ask for again; it stays as it is there."""
    hidden = [name for name in names if name in old and "://" in name and "?" in name]
    if hidden and renewed:
        todo = "name it as you first did, with the whole address"
        raise UnknownWeights(f"{hidden[0]} can't be renewed, since a lock holds of an address's query no more than its hash: {todo}.")
    return [name for name in names if name not in hidden]


def _write(path: Path, names: list[str], old: Mapping[str, Entry], renewed: bool, quiet: bool) -> Mapping[str, Entry]:
    """Install everything, then write: one name that fails leaves the lock as it was."""
    cache, found = Cache(), {}
    for record in map(_record, names):
        if all(source.startswith("file:") for source in record.sources) and not record.sha256:
            raise UnknownWeights(
                f"{record.sources[0]} is a file of this machine's; give it a record: zoo add FILE --model NETWORK --tag mine"
            )
        fetch = renew if renewed and not record.sha256 else obtain
        installed = fetch(record, to_safetensors=to_safetensors, progress=not quiet)
        entry = entry_of(cache, record, installed)
        before = old.get(entry.key)
        if before and before.sha256 == entry.sha256 and before.commit:  # seen at that commit first; a warm cache may not know it
            entry = replace(entry, sources=before.sources, size=entry.size or before.size)
        if before and before.sha256 == entry.sha256 and not entry.fingerprint:
            entry = replace(entry, tensors=before.tensors, fingerprint=before.fingerprint)
        found[entry.key] = entry
    if renewed and user_lock().is_file():  # its older pins would hold wherever there is no project
        update(cache, user_lock(), lambda entries: {**entries, **{key: found[key] for key in found.keys() & entries.keys()}})
    return update(cache, path, lambda entries: {**entries, **found}).entries


def _removed(path: Path, names: list[str], old: Mapping[str, Entry]) -> Mapping[str, Entry]:
    gone = {name if name in old else key_of(_record(name)) for name in names}
    if unknown := sorted(gone - old.keys()):
        raise UnknownWeights(f"{path} has no {', '.join(unknown)}; it has {', '.join(old) or 'nothing'}.")
    return update(Cache(), path, lambda entries: {key: entry for key, entry in entries.items() if key not in gone}).entries


def _record(name: str) -> Checkpoint:
    """Find the record of a name as locks have it: a network, a network and its tag, or a source."""
    if re.match(r"[a-z]+://", name):
        rows = (row for row in weights.checkpoints() if name in row.sources)
        return next(rows, None) or weights.adhoc("weights", name)
    model, _, tag = name.partition(":")
    return find_record(model_class(model), tag or None)


def _existing(file: Path | None) -> Path:
    path = file or project_lock()
    if path is None:
        raise FileNotFoundError(f"there is no {NAME} here or above; zoo lock NAME writes one")
    return path


def _check(paths: list[Path], as_json: bool) -> None:
    audits = [check_lock(path) for path in paths]
    if as_json:
        print_json([asdict(audit) for audit in audits])
    for audit in () if as_json else audits:
        if audit.differences:
            out.print(_table(audit.differences, "locked", "found"))
        counts = f"{len(audit.proven)} as locked, {len(audit.absent)} not in the cache"
        differ = len({one.key for one in audit.differences})
        out.print(f"[dim]{escape(str(audit.path))}: {audit.entries} entries, {counts}, {differ} differ[/dim]", soft_wrap=True)
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
        table.add_row(escape(one.key), one.what, *(escape(said) if said else "[dim]nothing[/dim]" for said in (one.locked, one.found)))
    return table


def _show(path: Path, old: Mapping[str, Entry], new: Mapping[str, Entry], as_json: bool) -> None:
    states = {key: "new" if key not in old else "as it was" if old[key] == entry else "changed" for key, entry in new.items()}
    states |= {key: "removed" for key in old if key not in new}
    if as_json:
        print_json({"path": str(path), "entries": {key: asdict(entry) | {"state": states[key]} for key, entry in new.items()}})
        return
    for key in sorted(states):
        entry = new.get(key) or old[key]
        out.print(f"{states[key]:10}{escape(key)}  [dim]sha256 {entry.sha256}[/dim]", soft_wrap=True)
    out.print(f"[dim]{escape(str(path))}: {len(new)} entries[/dim]", soft_wrap=True)
