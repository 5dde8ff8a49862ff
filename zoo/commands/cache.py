"""`zoo pull`, `cache`, `verify`, `add`, `remove`, `gc`: checkpoints in the cache."""

from __future__ import annotations

import time
from dataclasses import asdict
from getpass import getuser
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit

import typer
from rich.table import Table

import weights
from weights import Checkpoint
from weights.cache import Cache
from weights.collecting import KEEP_DAYS
from weights.registry import located
from weights.wording import counted, escape
from zoo.commands.completion import names, own_names, tags
from zoo.commands.console import (
    CHECKPOINT,
    BuildOption,
    FrozenOption,
    JsonOption,
    QuietOption,
    WeightsOfOption,
    build_options,
    numbers,
    out,
    print_json,
)
from zoo.commands.convert import (
    ChannelOrderOption,
    ConventionOption,
    FromOption,
    MatchOption,
    MeanOption,
    NamingOption,
    ScaleOption,
    SizeOption,
    SpatialOption,
    StdOption,
)
from zoo.commands.share import verify_signature
from zoo.pretrained.names import named
from zoo.pretrained.records import find_record, restriction, to_safetensors
from zoo.stylizing.named import UNSTATED, styles
from zoo.variants import spelt

if TYPE_CHECKING:
    from weights.inventory import Held

TagOption = Annotated[
    str | None,
    typer.Option("--weights", "-w", autocompletion=tags, help="A tag, hf://org/repo or https://…. Default: the default checkpoint."),
]


def pull(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", autocompletion=names, help=f"{CHECKPOINT}; or a style of zoo stylize.")],
    tag: TagOption = None,
    frozen: FrozenOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Download checkpoints into the cache and check them."""
    from weights.containers import get_any

    if tag is not None and len(models) > 1:
        raise typer.BadParameter("it is of one network, and several are named: NAME:TAG names each one's", param_hint="--weights")
    found = [styles().get(model) or find_record(*named(model, tag)) for model in models]  # all names are right before anything is fetched
    records = {(record.model, record.tag): record for record in found}.values()
    done: list[dict[str, object]] = []
    for each in records:
        record, installed = get_any(each, to_safetensors=to_safetensors, progress=not quiet, frozen=frozen or None)
        done.append({"network": record.model, "tag": record.tag, **asdict(installed), "proof": _proof(record)})
        done[-1]["licence"] = record.license
        if not as_json:
            _show_pulled(record, installed)
    if as_json:
        print_json(done if len(models) > 1 else done[0])


def _show_pulled(record: Checkpoint, installed: weights.Installed) -> None:
    out.print(f"{record.model}:{record.tag}: {installed.size_bytes:,} bytes, from {escape(installed.source)}", soft_wrap=True)
    out.print(
        f"sha256 {installed.source_sha256} ({_proof(record)})\nsha256 {installed.sha256} (as stored)\n{escape(str(installed.path))}",
        soft_wrap=True,
    )
    if told := UNSTATED if record is styles().get(record.tag) and record.license == "unstated" else restriction(record):
        out.print(f"[yellow]licence {'not stated' if told == UNSTATED else escape(record.license)}: {told}[/yellow]", soft_wrap=True)


def _proof(record: Checkpoint) -> str:
    """Say what the hash of a download was compared with; a prefix is no proof."""
    from weights.pinning import admit

    if record.sha256:
        return "as its record says"
    _, pin = admit(Cache(), record)
    held = f"as pinned in {pin.path}" if pin else "in no lock, so another time it may be another"
    reported = f"; reported as {record.sha256_reported[:8]}… by {record.reported_by}" if record.sha256_reported else ""
    published = f"only {record.sha256_prefix}…" if record.sha256_prefix else f"only {record.digest}" if record.digest else "none"
    return f"{held}; published is {published}{reported}"


def verify(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="With --signature: what was signed, a file or a folder.")] = None,
    signature: Annotated[Path | None, typer.Option(metavar="SIG", help="Verify this signature of FILE instead of the cache.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="PUB.pem", help="The signer's public key.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Hash every cached file again, and exit with 1 if one changed; or verify a signature."""
    if file or signature or key:
        verify_signature(file, signature, key, as_json)
        return
    results = weights.verify_all()
    if as_json:
        print_json([{"name": name, "ok": ok, "detail": detail} for name, ok, detail in results])
    else:
        for name, ok, detail in results:
            out.print(
                f"{'[green]ok[/green]     ' if ok else '[red]CHANGED[/red]'} {escape(name)}  [dim]{escape(detail)}[/dim]", soft_wrap=True
            )
        out.print(f"[dim]{counted(len(results), 'file')}, {sum(not ok for _, ok, _ in results)} changed.[/dim]")
    if not all(ok for _, ok, _ in results):
        raise typer.Exit(1)


def add(
    file: Annotated[Path, typer.Argument(help="A weight file of any framework.")],
    name: Annotated[
        str, typer.Argument(metavar="NAME:TAG", autocompletion=names, help="The network that it is for, and the tag to give it.")
    ],
    license: Annotated[str | None, typer.Option("--licence", "--license", help="SPDX identifier of the weights' licence.")] = None,
    labels: Annotated[str | None, typer.Option(help='The list of its labels: "imagenet1k" or "cifar10".')] = None,
    resize: Annotated[int | None, typer.Option(help="Side in pixels that the shorter edge is resized to.")] = None,
    crop: Annotated[int | None, typer.Option(help="Side in pixels of the centre crop.")] = None,
    interpolation: Annotated[str | None, typer.Option(help="nearest, bilinear or bicubic.")] = None,
    channel_order: ChannelOrderOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    scale: ScaleOption = None,
    size: SizeOption = None,
    framework: FromOption = "auto",
    naming: NamingOption = "auto",
    match: MatchOption = False,
    kernel_convention: ConventionOption = "auto",
    spatial: SpatialOption = "auto",
    weights_of: WeightsOfOption = None,
    option: BuildOption = None,
    default: Annotated[bool | None, typer.Option(help="Make it the default of trained(MODEL). Default: only if there is no other.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace your own checkpoint of the same tag.")] = False,
) -> None:
    """Register your own weights: check them against the network, copy them into the cache, and give them a tag.

    Omitted facts come from the record of the same bytes, if there is one. Otherwise the preprocessing is the default checkpoint's.
    Another framework's file is converted first, as by zoo convert. The verdict is printed, and is part of zoo info.
    """
    from zoo.catalogue import model_class
    from zoo.pretrained.add_file import add_file

    steps = {"resize": resize, "crop": crop, "interpolation": interpolation}
    facts = {"license": license, "labels": labels, "default": default, "replace": replace, "preprocessing": steps}
    facts |= {"channel_order": channel_order, "mean": numbers(mean, "--mean"), "std": numbers(std, "--std"), "scale": scale, "size": size}
    facts |= {"framework": framework, "naming": naming, "match": match, "kernel_convention": kernel_convention, "spatial": spatial}
    model, _, tag = name.partition(":")
    cls = model_class(model)
    if not tag:
        raise typer.BadParameter(f"it names no tag: {cls.__name__}:mine, for example", param_hint="NAME:TAG")
    facts["weights_of"] = weights_of
    record = add_file(cls, file, tag, **facts, **build_options(option, cls))
    if record.provenance != "added by the user":
        out.print(escape(record.provenance, lines=True), soft_wrap=True)
    out.print(
        f'added. In code: trained({record.model}, "{record.tag}"); here: zoo predict IMAGE -m {record.model}:{record.tag}',
        soft_wrap=True,
    )


def remove(
    checkpoints: Annotated[
        list[str], typer.Argument(metavar="NAME:TAG", autocompletion=own_names, help="The checkpoint, as named with `zoo add`.")
    ],
) -> None:
    """Forget checkpoints of your own; their bytes stay in the cache."""
    for checkpoint in checkpoints:
        model, _, tag = checkpoint.partition(":")
        model = spelt(model)
        if not tag:
            own = ", ".join(f"{model}:{one.row.tag}" for one in located(model) if one.rank == 0)
            raise typer.BadParameter(f"{checkpoint} names no tag; of your own there are: {own or 'none'}", param_hint="NAME:TAG")
        path = weights.remove(model, tag)
        out.print(f"removed '{escape(str(path))}'", soft_wrap=True)


def cache(as_json: JsonOption = False) -> None:
    """List the checkpoints on the disk: size, last use, who brought them and which lock keeps them."""
    from weights.inventory import inventory

    found = inventory()
    if as_json:
        print_json({**asdict(found), "size_bytes": found.size_bytes})
        return
    place = f"'{escape(str(found.root))}'"
    if not found.files:
        out.print(f"no checkpoint is in {place} yet; zoo pull NETWORK brings one", soft_wrap=True)
        return
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("checkpoint", "MB", "last used", "brought by", "kept by"):
        table.add_column(heading, justify="right" if heading == "MB" else "left", overflow="fold")
    for one in found.files:
        name = ", ".join(one.checkpoints) or f"sha256 {one.sha256[:12]}…"
        keepers = [*(["you"] if one.own else []), *(str(lock) for lock in one.kept_by)]
        row = (name, f"{one.size_bytes / 1e6:,.1f}", _day(one.used), _bringer(one), ", ".join(keepers))
        table.add_row(*map(escape, row))
    out.print(table)
    out.print(f"{counted(len(found.files), 'file')}, {found.size_bytes / 1e6:,.1f} MB, in {place}", soft_wrap=True)
    if found.others:
        rest = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in found.others.items())
        out.print(f"[dim]beside them: {rest}[/dim]", soft_wrap=True)
    out.print("[dim]zoo gc removes what nobody used for long and nobody keeps; zoo verify hashes every file again[/dim]", soft_wrap=True)


def _day(used: float) -> str:
    days = int((time.time() - used) // 86_400)
    ago = "today" if days < 1 else f"{counted(days, 'day')} ago"
    return f"{time.strftime('%Y-%m-%d', time.localtime(used))}, {ago}"


def _bringer(one: Held) -> str:
    """Say who brought a file: the user, a bundle, a package or a server; and whose it is on a disk that several share."""
    source = one.sources[0] if one.sources else ""
    parts = urlsplit(source)
    near = f"the file '{PurePosixPath(unquote(parts.path)).name}'" if parts.scheme == "file" else source.partition("@")[0]
    far = parts.netloc if parts.scheme in ("https", "http") else near
    by = f"bundle {one.bundle}" if one.bundle else "zoo add" if one.own else far or "nobody knows"
    return by if one.owner in ("", getuser()) else f"{by}, for {one.owner}"


def gc(
    keep_days: Annotated[
        float, typer.Option(min=0, help="Keep files used within so many days; 0 removes all that no lock names.")
    ] = KEEP_DAYS,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove from the cache what was not used for long. What a weights.lock names stays."""
    place = weights.Cache().root
    if not place.exists() and not as_json:
        out.print(f"there is no cache at '{escape(str(place))}', so there is nothing to remove", soft_wrap=True)
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
        out.print(f"[dim]kept what '{escape(str(path))}' names[/dim]", soft_wrap=True)
    for path, note in found.unreachable:
        named = f"kept what '{escape(str(path))}' named, whose disk is not mounted; to let go of it: rm {escape(str(note))}"
        out.print(f"[dim]{named}[/dim]", soft_wrap=True)
