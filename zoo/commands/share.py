"""`zoo bundle`, `unbundle`, `mirror`, `sign`, `sbom`, `doctor`: weights for machines without a network, for a team, for auditors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weights import MalformedFile
from weights.wording import counted, escape
from zoo.commands.completion import names
from zoo.commands.console import JsonOption, QuietOption, err, makeable, out, print_json, unused, writable
from zoo.commands.interrupts import start_torch

if TYPE_CHECKING:
    from weights.mirror import Report
    from weights.serving import Served


def bundle(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", autocompletion=names, help="Networks, ResNet50 or ResNet50:imagenet1k_v1.")
    ] = None,
    output: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", callback=writable, help="The file to write.")] = Path("zoo.tar"),
    replace: Annotated[bool, typer.Option("--replace", help="Replace FILE if it is there.")] = False,
    listed: Annotated[Path | None, typer.Option("--list", metavar="FILE", help="Show a bundle's content, and write none.")] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write checkpoints with labels, records, licences and golden outputs into one file for a machine without a network."""
    if listed is not None:
        if models:
            raise typer.BadParameter(f"it shows what '{listed}' holds; leave out {', '.join(models)}", param_hint="--list")
        _list_bundle(listed, as_json)
        return
    if not models:
        raise typer.BadParameter("which networks? ResNet50, or ResNet50:imagenet1k_v1; --list FILE shows a bundle", param_hint="MODEL...")
    start_torch()
    from zoo.sharing import bundles as sharing

    unused(output, replace)
    contents = sharing.bundle(models, output, progress=not quiet)
    size = output.stat().st_size
    if as_json:
        print_json({"file": str(output), "size_bytes": size, "weights": [asdict(one) for one in contents.weights]})
        return
    for one in contents.weights:
        out.print(f"{one.model}:{one.tag}: {one.size_bytes:,} bytes, sha256 {one.blob}", soft_wrap=True)
    out.print(f"wrote '{escape(str(output))}', {size:,} bytes. There: zoo unbundle {escape(output.name)}", soft_wrap=True)


def _list_bundle(file: Path, as_json: bool) -> None:
    from weights.unbundle import contents

    found = contents(file)
    if as_json:
        print_json({"file": str(file), "size_bytes": file.stat().st_size, "weights": [asdict(one) for one in found.weights]})
        return
    for one in found.weights:
        out.print(f"{escape(one.model)}:{escape(one.tag)}: {one.size_bytes:,} bytes, sha256 {one.blob}", soft_wrap=True)
    out.print(f"[dim]{counted(len(found.weights), 'checkpoint')}; the bytes are proven when they are installed: zoo unbundle[/dim]")


def unbundle(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What zoo bundle wrote.")],
    check: Annotated[bool, typer.Option(help="Run each network on the bundle's images and compare its outputs.")] = True,
    signature: Annotated[Path | None, typer.Option(metavar="SIG", help="Verify this signature first.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="PUB.pem", help="The signer's public key.")] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Install a bundle, everything or nothing, after every byte is checked."""
    from zoo.sharing import bundles as sharing

    sha256 = _signed(file, signature, key)
    done = sharing.unbundle(file, check=check, sha256=sha256, progress=not quiet)
    if as_json:
        print_json([asdict(one) for one in done])
        return
    for one in done:
        out.print(f"{one.model}:{one.tag}: {'installed' if one.new else 'was here already'}, sha256 {one.sha256}", soft_wrap=True)
        out.print(f"  {escape(one.proof)}", soft_wrap=True)
        if one.converted:
            whose = (
                "whose signature was verified" if sha256 else "whose word it is: zoo sign there and zoo unbundle --signature here prove it"
            )
            out.print(f"  [dim]converted from the published file by the machine that wrote the bundle, {whose}[/dim]", soft_wrap=True)
        if one.registered:
            out.print(f"  registered in '{escape(str(one.registered))}'", soft_wrap=True)


def _signed(file: Path, signature: Path | None, key: Path | None) -> str | None:
    """Verify a signature where one is given; returns the SHA-256 that it proves."""
    if (signature is None) != (key is None):
        raise typer.BadParameter("a signature is verified with a key: --signature SIG --key PUB.pem", param_hint="--signature")
    if signature is None or key is None:
        return None
    from weights.signing import verify_signature

    if file.is_dir():
        raise MalformedFile(f"'{file}' is no file, and a bundle is one: name what zoo bundle wrote.")
    return verify_signature(file, signature, key)[file.name]


def mirror(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The mirror's folder. With --serve also the word cache.")],
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", autocompletion=names, help="Networks to add. Without any, the mirror is verified."),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the folder, or the cache, until Ctrl-C.")] = False,
    host: Annotated[str, typer.Option(help="With --serve: the address to serve on; 127.0.0.1 is this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --serve; 0 takes a free one.")] = 8642,
    forget: Annotated[bool, typer.Option("--forget", help="Forget missing files, and delete damaged ones that were moved aside.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write or verify a mirror, a folder for any web server or bucket; or serve one in the local network."""
    if serve:
        if models:
            raise typer.BadParameter("write the mirror first, then serve it: --serve takes no networks", param_hint="--serve")
        if forget:
            raise typer.BadParameter("verify the mirror first, then serve it: --serve forgets nothing", param_hint="--serve")
        _serve(None if str(folder) == "cache" else folder, host, port)
        return
    from weights.mirror import mirror as write
    from zoo.sharing.bundles import records

    if models:
        makeable(folder)
    report = write(folder, records(models or []), progress=not quiet, forget=forget)
    gone = [one.name for one in report.missing]
    gone += [name for name in report.aside if name not in {*gone, *(one.name for one in report.files)}]  # as an earlier version left them
    if as_json:
        print_json(asdict(report))
    else:
        for one in report.files:
            out.print(
                f"{'new ' if one.name in report.new else 'ok  '} {one.name}  {one.size_bytes:,} bytes  {', '.join(one.weights)}",
                soft_wrap=True,
            )
        use = f"Use it: ZOO_MIRROR={escape(str(folder.absolute()))}"
        lost = f", {len(gone)} missing" if gone else ""
        out.print(f"{counted(len(report.files), 'file')} in '{escape(str(folder))}'{lost}. {use}", soft_wrap=True)
    _tell_of_damage(folder, report, gone)
    if gone:
        raise typer.Exit(1)


def _tell_of_damage(folder: Path, report: Report, gone: list[str]) -> None:
    """Say what changed, what is missing and what to do, at every call until it is done."""
    for name in report.damaged:
        where = f"was moved to .damaged.{escape(name)}" if name in report.aside else "could not be moved away"
        err.print(f"[red]CHANGED[/red] {escape(name)} {where}", soft_wrap=True)
    weights = {one.name: one.weights for one in report.missing}
    for name in gone:
        of = " ".join(weights.get(name) or ("MODEL",))
        again = f"fetch it again by zoo mirror {escape(str(folder))} {escape(of)}"
        err.print(f"[red]MISSING[/red] {escape(name)}: {again}, or give it up by zoo mirror {escape(str(folder))} --forget", soft_wrap=True)
    for name in sorted({*report.aside} - {*gone, *report.damaged}):
        before = f"{escape(name)} is whole again; what it was lies in .damaged.{escape(name)}"
        err.print(f"[dim]{before}: look at it, or delete it[/dim]", soft_wrap=True)


def _serve(folder: Path | None, host: str, port: int) -> None:
    from weights.serving import Server, files_of
    from weights.sources import LOOPBACK

    with Server(files_of(folder), host, port) as server:
        count = len(server.files())
        out.print(
            f"serving {counted(count, 'file')} of {escape(str(folder or 'the cache'))} on {server.url}; Ctrl-C ends it", soft_wrap=True
        )
        out.print(f"There: export ZOO_MIRROR={server.url}", soft_wrap=True)
        if host not in LOOPBACK:
            _tell_of_prefixes(server.files())
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            out.print("stopped")


def _tell_of_prefixes(files: Mapping[str, Served]) -> None:
    """Warn of the files that no client asks an http:// server for: those of which no record has a full hash, unless a lock has it."""
    import weights

    rows = {f"{row.model}:{row.tag}": row for row in weights.checkpoints()}
    served = {row: one for one in files.values() for row in one.about.get("weights", ())}
    unasked = sorted(name for name in served if name in rows and not rows[name].sha256)
    if unasked:
        some = ", ".join(unasked[:5]) + (f" and {len(unasked) - 5} more" if len(unasked) > 5 else "")
        todo = "put it in a weights.lock for the clients (zoo lock), or put this server behind https://"
        err.print(
            f"[yellow]warning:[/yellow] over http:// nobody asks for {escape(some)}, of which no full SHA-256 is published: {todo}",
            soft_wrap=True,
        )


def sign(
    what: Annotated[Path, typer.Argument(metavar="FILE", help="A bundle, any other file, or a folder with everything in it.")],
    key: Annotated[Path, typer.Option(metavar="KEY.pem", help="Your private elliptic-curve key, P-256 for example.")],
    output: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="SIG", callback=writable, help="The signature. Default: FILE.sig.")
    ] = None,
    password: Annotated[
        str | None, typer.Option(envvar="ZOO_KEY_PASSWORD", help="Password of an encrypted key; better in ZOO_KEY_PASSWORD.")
    ] = None,
) -> None:
    """Sign a bundle, a file or a folder with your key, by OpenSSF model-signing, offline."""
    from weights.signing import sign as write

    place = write(what, key, output, password)
    out.print(f"signed. There: zoo verify --signature {escape(place.name)} --key PUB.pem {escape(what.name)}", soft_wrap=True)


def verify_signature(file: Path | None, signature: Path | None, key: Path | None, as_json: bool) -> None:
    """Verify a signature for `zoo verify --signature SIG --key PUB.pem FILE`."""
    if file is None or signature is None or key is None:
        raise typer.BadParameter("a signature is verified by: zoo verify --signature SIG --key PUB.pem FILE", param_hint="--signature")
    from weights.signing import verify_signature as verified

    found = verified(file, signature, key)
    if as_json:
        print_json({"file": str(file), "signature": str(signature), "key": str(key), "sha256": found})
        return
    for name, sha256 in found.items():
        out.print(f"[green]signed[/green] {escape(name)}  [dim]sha256 {sha256}[/dim]", soft_wrap=True)


def sbom(
    output: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", callback=writable, help="The file to write; - prints it.")] = Path(
        "sbom.json"
    ),
    replace: Annotated[bool, typer.Option("--replace", help="Replace FILE if it is there.")] = False,
    lock: Annotated[Path | None, typer.Option(metavar="FILE", help="The lock. Default: the nearest weights.lock upwards.")] = None,
) -> None:
    """Write the bill of materials of what a lock uses: hashes, licences, origins, as CycloneDX 1.6."""
    import sys

    from weights.archive import atomic
    from weights.sbom import lock_entries
    from weights.sbom import sbom as write
    from zoo import __version__

    unused(output, replace)
    path, entries = lock_entries(lock)
    text = write(path.absolute().parent.name or "project", entries, __version__)
    if str(output) == "-":
        sys.stdout.write(text)
        return
    with atomic(output) as file:
        file.write(text.encode())
    out.print(f"wrote '{escape(str(output))}': {counted(len(entries), 'set')} of weights of '{escape(str(path))}'", soft_wrap=True)
    unknown = [entry.key for entry in entries if entry.license == "unstated"]
    if unknown:
        err.print(
            f"without a stated licence: {escape(', '.join(unknown[:5]))}{f' and {len(unknown) - 5} more' if len(unknown) > 5 else ''}",
            soft_wrap=True,
        )
