"""The command `zoo`: each sub-command calls one public function and shows what it returns."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

import weights
from weights import Checkpoint, NoPretrainedWeights, SourceUnavailable, UnknownWeights, WeightsError
from weights.cache import Cache
from weights.pinning import admit
from weights.wording import counted
from zoo.commands import bench as cli_bench
from zoo.commands import cache as cli_cache
from zoo.commands import convert as cli_convert
from zoo.commands import embed as cli_embed
from zoo.commands import finetune as cli_finetune
from zoo.commands import lock as cli_lock
from zoo.commands import share as cli_share
from zoo.pretrained.add_file import add_file
from zoo.commands.convert import ConventionOption, FromOption, MatchOption, SpatialOption
from zoo.commands.console import (
    BuildOption,
    FrozenOption,
    JsonOption,
    ModelArgument,
    QuietOption,
    WeightsOption,
    build_options,
    err,
    names,
    numbers,
    out,
    out_of_memory_or_gpu,
    png,
    print_json,
    printable,
    sentence,
)
from zoo.pretrained.resolve import find_record, nearest_with_weights, to_safetensors
from zoo.networks.model import CATALOGUE
from zoo.prediction.predict import Prediction
from zoo.images.preprocess import BadImage
from zoo.pretrained.run_folder import named
from zoo.pretrained.search import Entry, model_class, search
from zoo.pretrained.trained import trained
from zoo_command import say_interrupted

EXIT_CODES = """Exit codes: 0 done; 1 a check failed, an input can't be used or an output not be written; 2 the command, an option or
its value was misspelt; 3 a network, checkpoint or file of that name is not known; 4 no source could deliver; 130 interrupted."""

app = typer.Typer(
    help="Vision networks with proven pretrained weights.\n\n" + EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
PREDICTS = "The network, or a run's folder; ResNet20, of CIFAR-10's ten classes, comes with the package and needs no download."
TagOption = Annotated[str | None, typer.Option("--weights", "-w", help="A tag, hf://org/repo or https://…; the default if left out.")]


def _version(wanted: bool) -> None:
    if wanted:
        import zoo

        out.print(zoo.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")] = False,
    frozen: FrozenOption = False,
) -> None:
    del version  # the callback has answered
    if frozen:
        os.environ["ZOO_FROZEN"] = "1"  # for all that this command starts, its processes too


@app.command("list")
def list_models(
    family: Annotated[str | None, typer.Option(help="Only this family: VGG, ResNet, MobileNetV2 …")] = None,
    min_top1: Annotated[float | None, typer.Option(help="Only checkpoints with at least this top-1 accuracy in percent.")] = None,
    max_params: Annotated[str | None, typer.Option(help="Only networks with at most this many parameters: 10M, 500k, 25557032.")] = None,
    licence: Annotated[
        str | None, typer.Option("--licence", "--license", help='Only checkpoints of this licence: "MIT", "unstated" …')
    ] = None,
    data: Annotated[str | None, typer.Option(help="Only accuracies on these images: ImageNet, CIFAR-10 …")] = None,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", "-c", help="A line for every checkpoint, not only the default.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the networks and their default checkpoints."""
    try:
        found = search(family=family, min_top1=min_top1, max_params=max_params, license=licence, data=data, all_checkpoints=checkpoints)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        print_json([_entry(e) for e in found])
        return
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for heading, width in (("network", 18), ("params", 7), ("top-1", 5), ("top-5", 5), ("on", 8), ("px", 3)):
        right = heading in ("params", "top-1", "top-5", "px")
        table.add_column(heading, no_wrap=True, min_width=width, justify="right" if right else "left")
    table.add_column("weights", no_wrap=True)
    table.add_column("licence", no_wrap=True)
    for e in found:
        c = e.checkpoint
        row = [e.name, f"{e.model.params / 1e6:.2f}M"]
        row += [f"{c.metrics[m]:.2f}" if c and m in c.metrics else "" for m in ("top1", "top5")]
        row += [(c.metrics_data or "").partition(" ")[0].partition("-1k")[0].rstrip(",") if c and c.metrics else ""]
        row += [str(c.preprocessing.crop or e.model.input_size) if c else str(e.model.input_size)]
        table.add_row(*row, escape(c.tag) if c else "[dim]none[/dim]", escape(c.license) if c else "")
    out.print(table)
    noun = "checkpoint" if checkpoints else "network"
    out.print(f"[dim]{counted(len(found), noun)}. An accuracy holds for its images and its preprocessing: zoo info NETWORK.[/dim]")
    if not found:
        raise typer.Exit(1)


@app.command()
def info(model: ModelArgument, as_json: JsonOption = False) -> None:
    """Show a network and every checkpoint that is known of it."""
    cls = model_class(model)
    rows = weights.checkpoints(cls.__name__)
    if as_json:
        print_json(
            {
                "network": cls.__name__,
                "params": cls.params,
                "paper": cls.paper,
                "min_size": cls.min_size,
                "checkpoints": [asdict(c) for c in rows],
            }
        )
        return
    out.print(
        f"[bold]{cls.__name__}[/bold]  {cls.params:,} parameters, {cls.input_size} px images, at least {cls.min_size} px; {cls.paper}"
    )
    out.print((cls.family().__doc__ or "").strip().splitlines()[0])
    if not rows:
        near = ", ".join(c.model for c in nearest_with_weights(cls))
        out.print(
            f"No pretrained weights are known. Nearest with weights: {near}. Your own: zoo add FILE --model {cls.__name__} --tag mine"
        )
    for c in rows:
        out.print()
        out.print(f"[bold]{c.tag}[/bold]{'  (default)' if c.default else ''}")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in _facts(c).items():
            table.add_row(name, escape(value))
        out.print(table)


@app.command()
def pull(
    model: ModelArgument, tag: TagOption = None, frozen: FrozenOption = False, quiet: QuietOption = False, as_json: JsonOption = False
) -> None:
    """Download a checkpoint into the cache and check it."""
    cls = model_class(model)
    record = find_record(cls, tag)
    installed = weights.get(record, to_safetensors=to_safetensors, progress=not quiet, frozen=frozen or None)
    if as_json:
        print_json({"network": cls.__name__, "tag": record.tag, **asdict(installed), "proof": _proof(record)})
        return
    out.print(f"{cls.__name__} {record.tag}: {installed.size_bytes:,} bytes, from {escape(installed.source)}", soft_wrap=True)
    out.print(
        f"sha256 {installed.source_sha256} ({_proof(record)})\nsha256 {installed.sha256} (as stored)\n{escape(str(installed.path))}",
        soft_wrap=True,
    )


def _proof(record: Checkpoint) -> str:
    """Say what the hash of a download was compared with; a prefix is no proof."""
    if record.sha256:
        return "as published"
    _, pin = admit(Cache(), record)
    held = f"as pinned in {pin.path}" if pin else "in no lock, so another time it may be another"
    return f"{held}; published is {f'only {record.sha256_prefix}…' if record.sha256_prefix else 'none'}"


@app.command()
def verify(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="With --signature: what was signed, a file or a folder.")] = None,
    signature: Annotated[Path | None, typer.Option(metavar="SIG", help="Verify this signature of FILE instead of the cache.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="PUB.pem", help="The signer's public key.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Hash every cached file again and compare, exit 1 if one changed; or verify a file's signature."""
    if file or signature or key:
        cli_share.verify_signature(file, signature, key, as_json)
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


@app.command()
def predict(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Pictures to classify.")],
    model: Annotated[str, typer.Option("--model", "-m", autocompletion=names, help=PREDICTS)] = "ResNet20",
    tag: WeightsOption = None,
    option: BuildOption = None,
    top: Annotated[int, typer.Option(min=1, help="How many labels to show.")] = 5,
    frozen: FrozenOption = False,
    sheet: Annotated[Path | None, typer.Option(callback=png, help="Also draw the pictures with their labels into this PNG.")] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Classify pictures."""
    from zoo.prediction.predict import predict as classify

    model, tag = named(model, tag)
    cls = model_class(model)
    network = trained(cls, tag, progress=not quiet, frozen=frozen or None, **build_options(option, cls))
    record = network.checkpoint
    called = f"{type(network).__name__} {record.tag if record else ''}".strip()
    found: list[tuple[Path, list[Prediction]]] = []
    failed: list[BadImage] = []
    try:
        found = list(zip(images, classify(network, list(images), top=top), strict=True))
    except BadImage:  # one bad picture does not spoil the others
        for path in images:
            try:
                found.append((path, classify(network, path, top=top)))
            except BadImage as error:
                failed.append(error)
    if sheet is not None and found:
        from zoo.prediction.contact_sheet import contact_sheet

        contact_sheet(found, sheet, titles=[p.name for p, _ in found], heading=called)
    if as_json:
        print_json([{"image": str(p), "network": called, "predictions": [asdict(x) for x in row]} for p, row in found])
    else:
        _print_predictions(found, f"{called}, which knows {counted(network.num_classes, 'class', 'classes')}", sheet if found else None)
    codes = {_fail(error, 3 if isinstance(error, FileNotFoundError) else 1) for error in failed}
    if codes:
        raise typer.Exit(min(codes))


def _print_predictions(found: list[tuple[Path, list[Prediction]]], by: str, sheet: Path | None) -> None:
    for path, row in found:
        out.print(f"[bold]{escape(str(path))}[/bold]", soft_wrap=True)
        for x in row:
            out.print(f"  {100 * x.probability:6.2f} %  {escape(x.label)}{f'  [dim]{x.wnid}[/dim]' if x.wnid else ''}")
    if found:
        out.print(f"[dim]by {escape(by)}; another: --model NETWORK[/dim]", soft_wrap=True)
    if sheet is not None:
        out.print(f"[dim]drawn in {escape(str(sheet))}[/dim]", soft_wrap=True)


@app.command()
def add(
    file: Annotated[Path, typer.Argument(help="A weight file of any framework.")],
    model: Annotated[str, typer.Option("--model", "-m", autocompletion=names, help="The network that it is for.")],
    tag: Annotated[str, typer.Option(help="The name to give it: trained(MODEL, TAG).")],
    license: Annotated[str | None, typer.Option("--licence", "--license", help="SPDX identifier of the weights' licence.")] = None,
    labels: Annotated[str | None, typer.Option(help='The list of its labels: "imagenet1k" or "cifar10".')] = None,
    resize: Annotated[int | None, typer.Option(help="Side in pixels that the shorter edge is resized to.")] = None,
    crop: Annotated[int | None, typer.Option(help="Side in pixels of the centre crop.")] = None,
    interpolation: Annotated[str | None, typer.Option(help="nearest, bilinear or bicubic.")] = None,
    mean: Annotated[str | None, typer.Option(help="Of each channel on 0..1: 0.485,0.456,0.406.")] = None,
    std: Annotated[str | None, typer.Option(help="Of each channel on 0..1: 0.229,0.224,0.225.")] = None,
    framework: FromOption = "auto",
    match: MatchOption = False,
    kernel_convention: ConventionOption = "auto",
    spatial: SpatialOption = "auto",
    option: BuildOption = None,
    default: Annotated[
        bool | None, typer.Option(help="Whether trained(MODEL) takes it; if left out, only where there is no other.")
    ] = None,
    replace: Annotated[bool, typer.Option(help="Replace your own checkpoint of the same tag.")] = False,
) -> None:
    """Register a file of your own: checked against the network, copied into the cache, usable by its tag.

    What is left out is taken from the record of the same bytes, if there is one, the preprocessing else from the default checkpoint.
    Another framework's file is converted first, as zoo convert does it; what proves it is printed, and stands in zoo info.
    """
    steps = {"resize": resize, "crop": crop, "interpolation": interpolation, "mean": numbers(mean), "std": numbers(std)}
    facts = {"license": license, "labels": labels, "default": default, "replace": replace, "preprocessing": steps}
    facts |= {"framework": framework, "match": match, "kernel_convention": kernel_convention, "spatial": spatial}
    cls = model_class(model)
    record = add_file(cls, file, tag, **facts, **build_options(option, cls))
    if record.provenance != "added by the user":
        out.print(escape(record.provenance), soft_wrap=True)
    out.print(
        f'added. In code: trained({record.model}, "{record.tag}"); here: zoo predict IMAGE -m {record.model} -w {record.tag}',
        soft_wrap=True,
    )


@app.command()
def remove(model: ModelArgument, tag: Annotated[str, typer.Argument(help="The tag that `zoo add` gave it.")]) -> None:
    """Forget a checkpoint of your own; its bytes stay in the cache."""
    path = weights.remove(model_class(model).__name__, tag)
    out.print(f"removed {escape(str(path))}", soft_wrap=True)


@app.command()
def demo(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[IMAGE...]", help="Pictures of your own, besides the bundled ones.")
    ] = None,
    sheet: Annotated[Path, typer.Option("--sheet", callback=png, help="Where the contact sheet goes.")] = Path("demo.png"),
) -> None:
    """Classify pictures with the embedded checkpoint, offline, and draw a contact sheet."""
    from zoo.bench import load
    from zoo.commands.demo import HEADING, classify, pictures
    from zoo.prediction.contact_sheet import contact_sheet

    network = trained(CATALOGUE["ResNet20"])
    shown = classify(network, [*pictures(required=not files), *(files or [])])
    table = Table(box=None, header_style="bold")
    for heading in ("picture", "label", "%", "then"):
        table.add_column(heading, justify="right" if heading == "%" else "left")
    for title, _, row in shown:
        rest = ", ".join(f"{x.label} {100 * x.probability:.0f}" for x in row[1:])
        table.add_row(escape(title), row[0].label, f"{100 * row[0].probability:.1f}", f"[dim]{rest}[/dim]")
    out.print(table)
    contact_sheet([(view, row) for _, view, row in shown], sheet, titles=[t for t, _, _ in shown], heading=HEADING, columns=4)
    top1 = network.checkpoint.metrics["top1"] if network.checkpoint else 0
    out.print(f"\n{HEADING}. It has {top1:.2f} % of CIFAR-10's test images right.", soft_wrap=True)
    out.print("\nA ResNet50 from its file, ready to use (random weights, warm cache):")
    for timing in load(CATALOGUE["ResNet50"], rounds=3, with_timm=False):
        out.print(f"  {1000 * timing.seconds:7.1f} ms  {timing.way}{f', {timing.ratio:.1f}x faster' if timing.ratio > 1 else ''}")
    command = escape("zoo" if shutil.which("zoo") else sys.argv[0])
    out.print(f"\nDrawn in [bold]{escape(str(sheet))}[/bold].", soft_wrap=True)
    out.print(f"Next: {command} list, {command} info VGG19, {command} predict PHOTO --model ResNet50", soft_wrap=True)


app.command()(cli_bench.bench)
app.command("inspect")(cli_convert.inspect)
app.command()(cli_convert.convert)
app.command()(cli_convert.diff)
app.command()(cli_embed.embed)
app.command()(cli_embed.search)
app.command()(cli_embed.knn)
app.command()(cli_finetune.finetune)
app.command()(cli_cache.gc)
app.command()(cli_lock.lock)
app.command()(cli_share.bundle)
app.command()(cli_share.unbundle)
app.command()(cli_share.mirror)
app.command()(cli_share.sign)
app.command()(cli_share.sbom)
app.command()(cli_share.doctor)


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "network": entry.name,
        "family": entry.family,
        "params": entry.model.params,
        "input_size": entry.model.input_size,
        "checkpoint": asdict(entry.checkpoint) if entry.checkpoint else None,
    }


def _facts(c: Checkpoint) -> dict[str, str]:
    p = c.preprocessing
    steps = [
        f"resize the shorter side to {p.resize} px ({p.interpolation})" if p.resize else "",
        f"centre crop {p.crop} px" if p.crop else "",
    ]
    scale = f"mean {', '.join(f'{v:g}' for v in p.mean)}, std {', '.join(f'{v:g}' for v in p.std)} of {p.channel_order.upper()} 0..1"
    published = f"{c.sha256_prefix}… (prefix;" if c.sha256_prefix else "(none published;"
    known = c.sha256 or f"{published} the full hash is pinned on first sight in your lock)"
    facts = {
        "accuracy": ", ".join(f"{k} {v:g} %" for k, v in c.metrics.items()) + (f" on {c.metrics_data}" if c.metrics_data else ""),
        "preprocessing": "; ".join(s for s in (*steps, scale) if s),
        "sources": "\n".join(c.sources),
        "sha256": known,
        "licence": c.license,
        "options": ", ".join(f"{k}={v!r}" for k, v in c.options.items()),
        "recipe": c.recipe or "",
        "learnt from": c.provenance,
    }
    return {k: v for k, v in facts.items() if v}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; a user's mistake gets one clear message and an exit code, never a traceback."""
    logging.basicConfig(handlers=[_Log(logging.WARNING)], force=True)
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
        return _fail(error, 3)
    except SourceUnavailable as error:
        return _fail(error, 4)
    except (WeightsError, ValueError, OSError, FloatingPointError) as error:
        return _fail(error, 1)
    except (RuntimeError, MemoryError) as error:
        if not (why := out_of_memory_or_gpu(error, _options(sys.argv[1:] if arguments is None else arguments))):
            raise
        return _fail(why, 1)
    except Exception as error:
        misspelt: Any = error  # typer's own errors: their base class has no public name, and they know how to show themselves
        if not hasattr(misspelt, "exit_code"):
            raise
        misspelt.show()
        return misspelt.exit_code


def _options(arguments: list[str]) -> set[str]:
    """List the options of the command that was given."""
    commands: Any = typer.main.get_command(app)
    named = next((commands.commands[word] for word in arguments if word in commands.commands), commands)
    return {option for parameter in named.params for option in parameter.opts}


class _Log(logging.Handler):
    """Shows log lines as the command shows errors."""

    def emit(self, record: logging.LogRecord) -> None:
        err.print(f"[yellow]{record.levelname.lower()}:[/yellow] ", end="")
        err.print(printable(record.getMessage()), markup=False, highlight=False, soft_wrap=True)


def _fail(error: Exception | str, code: int) -> int:
    err.print("[red]error:[/red] ", end="")
    err.print(printable(sentence(error) if isinstance(error, OSError) else str(error)), markup=False, highlight=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
