"""The sub-commands on weight files of any framework: inspect, convert, diff."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from weights import ConvertError
from weights.wording import escape
from zoo.commands.completion import names
from zoo.commands.console import (
    BuildOption,
    JsonOption,
    QuietOption,
    WeightsOfOption,
    build_options,
    err,
    numbers,
    out,
    print_json,
    spares_inputs,
    unused,
    value_of,
    writable,
)
from zoo.variants import CLASSIFICATION

if TYPE_CHECKING:
    from weights import Preprocessing
    from zoo.conversion.result import Conversion

OF_DETECTORS = ("source", "destination", "model", "cfg", "option", "replace", "unproven", "require_proof", "quiet", "as_json", "framework")
"""Parameters that the conversion of a Darknet detector takes."""
Convention = Literal["auto", "correlation", "convolution"]
Spatial = Literal["auto", "hw", "wh"]

FromOption = Annotated[str, typer.Option("--from", help="The file's format, or the naming of its tensors: keras, kerashub …")]
NamingOption = Annotated[str, typer.Option("--naming", help="The naming of its tensors, if --from names a format: keras, flax, caffe …")]
MatchOption = Annotated[
    bool, typer.Option("--match", help="Derive which tensor is which from topology, shapes and names, without a table.")
]
ConventionOption = Annotated[
    Convention,
    typer.Option(
        "--kernel-convention",
        help="What its framework's convolutions compute. auto: as the file says, or else by evidence.",
    ),
]
SpatialOption = Annotated[
    Spatial, typer.Option("--spatial", help="Order of the kernels' spatial axes, height or width first. auto: as the file says.")
]
ChannelOrderOption = Annotated[
    Literal["rgb", "bgr"] | None, typer.Option(help="Channel order of its images. Default: decided by --images, or guessed.")
]
MeanOption = Annotated[str | None, typer.Option(help="Mean per channel on 0..1: 0.485,0.456,0.406. With --scale on 0..255: 104,117,123.")]
StdOption = Annotated[str | None, typer.Option(help="Deviation per channel on 0..1: 0.229,0.224,0.225.")]
ScaleOption = Annotated[
    float | None, typer.Option(help="Factor of pixels on 0..255 less the mean, as in Caffe and Keras; instead of --std.")
]
SizeOption = Annotated[int | None, typer.Option(min=1, help="Side of its square images in pixels.")]
FormatOption = Annotated[str, typer.Option("--from", help="The file's format, if its content doesn't tell: keras, npz …")]


def inspect(
    file: Annotated[Path, typer.Argument(help="A weight file of any framework, or a folder.")],
    format: FormatOption = "auto",
    tensors: Annotated[bool, typer.Option("--tensors", "-t", help="List every tensor, not only the tree of modules.")] = False,
    weights_of: WeightsOfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a weight file of any framework holds, and which network of the zoo it probably is."""
    from convert.formats import formats
    from zoo.conversion.inspect import inspect as look
    from zoo.conversion.inspect import show

    if format != "auto" and format not in formats():
        raise typer.BadParameter(f"no format {format!r}; there are {', '.join(formats())}", param_hint="--from")
    found = look(file, format, weights_of=weights_of)
    if as_json:
        print_json(found.to_json())
    else:
        show(found, out, tensors=tensors)


def convert(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(metavar="IN", help="A weight file of any framework.")],
    destination: Annotated[Path, typer.Argument(metavar="OUT", callback=writable, help="The file to write; its ending is its format.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            autocompletion=names,
            help="The network. mypackage.mymodule:DnCNN imports your own: its code runs. Default: recognised.",
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Option(help="An argument of your own network's class or function, depth=17. Repeatable.")
    ] = None,
    example: Annotated[str | None, typer.Option(help="The shape of one input of your own network, channels first: 1x64x64.")] = None,
    cfg: Annotated[Path | None, typer.Option(metavar="FILE", help="The .cfg of a Darknet detector. Default: the one beside IN.")] = None,
    framework: FromOption = "auto",
    naming: NamingOption = "auto",
    to: Annotated[str, typer.Option("--to", help="OUT's format, or the naming of its tensors.")] = "auto",
    match: MatchOption = False,
    kernel_convention: ConventionOption = "auto",
    to_convention: Annotated[Convention, typer.Option(help="The convention of OUT's kernels, if its framework has both.")] = "auto",
    spatial: SpatialOption = "auto",
    weights_of: WeightsOfOption = None,
    reference: Annotated[Path | None, typer.Option(help="An .npz with `inputs` and `outputs` of the original network.")] = None,
    images: Annotated[Path | None, typer.Option(help="A folder of photographs. Names that begin with the class label them.")] = None,
    channel_order: ChannelOrderOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    scale: ScaleOption = None,
    size: SizeOption = None,
    report: Annotated[
        Path | None, typer.Option(callback=writable, help="Write an HTML report: every layer's error, filters, predictions.")
    ] = None,
    fold_input: Annotated[
        bool, typer.Option("--fold-input", help="Fold channel order and scale into the first convolution, so that OUT takes RGB.")
    ] = False,
    headless: Annotated[bool, typer.Option("--headless", help="IN may lack the classifier; OUT then lacks it too.")] = False,
    preprocessing_inside: Annotated[
        bool, typer.Option("--preprocessing-inside", help="An ONNX or OpenVINO OUT takes uint8 RGB pixels and normalises them itself.")
    ] = False,
    option: BuildOption = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace OUT if it is there.")] = False,
    unproven: Annotated[bool, typer.Option("--unproven", help="Write OUT even if the proof fails.")] = False,
    require_proof: Annotated[bool, typer.Option("--require-proof", help="Write nothing that stays UNPROVEN.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert weights between frameworks, and prove that every number arrived.

    The strongest possible proof is used: outputs of the original network (--reference, or its framework if installed), or the
    file's own graph, executed in float64. Without one the result is UNPROVEN. If a proof fails, OUT is not written, and the exit
    code is 1.
    """
    from convert.formats import for_writing
    from zoo.conversion.convert import convert as carry_over
    from zoo.conversion.convert import destination_words, source_words
    from zoo.conversion.inspect import chosen
    from zoo.conversion.report import write_report
    from zoo.conversion.result import NotProven

    with value_of("--from" if naming == "auto" else "--naming"):
        source_words(framework, naming, source)
    with value_of("--to"):
        written = destination_words(to, destination)[0]
    with value_of("OUT"):
        for_writing(destination, written)
    own = _is_own(model)
    if (arguments or example) and not own:
        raise typer.BadParameter(
            "it is of a network of your own, --model mypackage.mymodule:DnCNN; --option sets the zoo's",
            param_hint="--arguments" if arguments else "--example",
        )
    if report is not None and report.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"the report is a page: name it '{report.stem}.html', not '{report.name}'", param_hint="--report")
    if cfg is not None and model is not None:
        raise typer.BadParameter("the .cfg names the network already; leave --model out", param_hint="--cfg")
    spares_inputs(report, [source, *([reference] if reference else [])])
    if not own and (detector := _detector(source, model, cfg)):
        _refuse_others(context)
        _convert_detector(detector, source, destination, option, replace, unproven, require_proof, as_json)
        return
    cls = _own(model, arguments, example) if own and model is not None else chosen(source, model, framework, weights_of)
    means, deviations = numbers(mean, "--mean"), numbers(std, "--std")
    with _steps(quiet or as_json) as step:
        try:
            made = carry_over(
                source,
                destination,
                cls,
                framework=framework,
                naming=naming,
                to=to,
                match=match,
                kernel_convention=kernel_convention,
                to_convention=to_convention,
                spatial=spatial,
                weights_of=weights_of,
                reference=reference,
                images=images,
                channel_order=channel_order,
                mean=means,
                std=deviations,
                scale=scale,
                size=size,
                fold_input=fold_input,
                headless=headless,
                preprocessing_inside=preprocessing_inside,
                replace=replace,
                unproven=unproven,
                require_proof=require_proof,
                progress=step,
                **build_options(option, cls),
            )
        except NotProven as error:
            if report is not None and error.conversion is not None:
                write_report(error.conversion, report, images)
            raise
        if report is not None:
            step("writing the report")
            write_report(made, report, images)
    if as_json:
        print_json(made.to_json())
        return
    _show(made)
    if report is not None:
        out.print(f"[dim]report: '{escape(str(report))}'[/dim]", soft_wrap=True)


def _is_own(model: str | None) -> bool:
    """Tell a network of the user's own, mypackage.mymodule:DnCNN, from NAME:TAG."""
    from weights import UnknownWeights
    from zoo.variants import of_all_tasks, spelt

    name, colon, _ = (model or "").partition(":")
    try:
        return bool(colon) and not spelt(name, of_all_tasks())
    except UnknownWeights:
        return True


def _own(place: str, arguments: list[str] | None, example: str | None) -> type[Any]:
    """Import a network of the user's own."""
    from zoo.conversion.own import arguments_of, imported, shape_of

    with value_of("--arguments"):
        given = arguments_of(arguments or [])
    with value_of("--example"):
        shape = None if example is None else shape_of(example)
    with value_of("--model"):
        return imported(place, given, shape)


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A weight file of any framework.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    all_tensors: Annotated[bool, typer.Option("--all", help="Equal tensors too.")] = False,
    weights_of: WeightsOfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two weight files of any formats, tensor by tensor; exit 1 if they differ by more than named steps."""
    from convert import sandbox
    from convert.diff import ALL
    from convert.diff import diff as compare

    with sandbox.read(first, weights_of=ALL) as a, sandbox.read(second, weights_of=ALL) as b:
        found = compare(a, b, weights_of)
        if as_json:
            print_json(found.to_json())
        else:
            out.print(found.render(equal=all_tensors))
    if not found.same:
        raise typer.Exit(1)


@contextmanager
def _steps(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is being done, where somebody looks."""
    if quiet or not err.is_terminal:
        yield lambda _: None
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=err, transient=True) as bar:
        task = bar.add_task("")
        yield lambda text: bar.update(task, description=text)


def _show(made: Conversion) -> None:
    proven = made.certificate.proven
    colour = "green" if proven or made.certificate.chained else "yellow"
    out.print(f"[bold]{made.model.__name__}[/bold] from '{escape(str(made.source.path))}': {escape(made.source.framework)}", soft_wrap=True)
    out.print(f"  sha256 {made.sha256}", soft_wrap=True)
    for name, sha256 in made.beside.items():
        out.print(f"  sha256 {sha256} of '{escape(name)}' beside it", soft_wrap=True)
    facts = {
        "naming": made.naming,
        "kernels": made.kernels,
        "options": ", ".join(f"{key}={value!r}" for key, value in made.options.items()),
        "preprocessing": "" if made.pixels is None else _shown(made.preprocessing),
    }
    for name, value in facts.items():
        if value:
            out.print(f"  {name:14}{escape(value)}", soft_wrap=True)
    if made.decision is not None:
        out.print(escape(str(made.decision), lines=True))
    for note in made.notes:
        out.print(f"  [dim]{escape(note)}[/dim]", soft_wrap=True)
    for each in made.certificate.evidence:
        mark = "[green]✓[/green]" if each.proven else "[yellow]·[/yellow]"
        out.print(f"  {mark} {escape(each.kind)}: {escape(each.detail)}", soft_wrap=True)
    out.print(f"[{colour}]{escape(made.verdict)}[/{colour}]", soft_wrap=True)
    out.print(f"wrote '{escape(str(made.destination))}': {made.destination.stat().st_size:,} bytes", soft_wrap=True)


def _shown(steps: Preprocessing) -> str:
    sides = ("squash" if steps.squash else "resize", steps.resize), ("crop", steps.crop)
    size = "".join(f"{name} {side}, " for name, side in sides if side)
    mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (steps.mean, steps.std))
    return f"{size}{steps.channel_order.upper()}, mean {mean}, std {std} of 0..1"


def _detector(source: Path, model: str | None, cfg: Path | None) -> Any:
    """Find the detector that a file is to be of: what is named, or for a .weights the one that its .cfg describes; None for others."""
    from zoo.catalogue import any_class
    from zoo.detection import Darknet, darknet
    from zoo.variants import of_all_tasks, spelt

    if cfg is not None:
        return darknet(cfg)
    if model is not None:
        name = model.partition(":")[0]
        known = of_all_tasks()
        if known[spelt(name, known)].task == CLASSIFICATION:
            return None
        cls = any_class(name)
        if not issubclass(cls, Darknet):
            ways = {
                "segmentation": f"zoo segment PHOTO --model {cls.__name__} --weights FILE",
                "detection": f"zoo detect PHOTO --model {cls.__name__} --weights FILE",
            }
            raise typer.BadParameter(f"{cls.__name__}'s files need no conversion: {ways[cls.task]} takes them")
        return cls
    beside = source.with_suffix(".cfg")
    if source.suffix == ".weights" and beside.is_file():
        try:
            return darknet(beside)
        except ConvertError:  # a classifier's, which has no heads
            return None
    return None


def _refuse_others(context: typer.Context) -> None:
    """Refuse options that the conversion of a detector has no use for, rather than not to heed them."""
    for parameter in context.command.params:
        origin = context.get_parameter_source(parameter.name or "")
        if origin is not None and origin.name == "COMMANDLINE" and parameter.name not in OF_DETECTORS:
            raise typer.BadParameter("a Darknet detector's file is converted without it", param_hint=parameter.opts[0])


def _convert_detector(
    cls: Any, source: Path, destination: Path, option: list[str] | None, replace: bool, unproven: bool, require_proof: bool, as_json: bool
) -> None:
    """Write a Darknet detector's file as safetensors, and say what proves it."""
    from zoo.detection.conversion import convert_darknet
    from zoo.pretrained.trained import trained

    if destination.suffix != ".safetensors":
        raise typer.BadParameter(f"a detector is written as .safetensors, not '{destination.name}'", param_hint="OUT")
    unused(destination, replace)
    network = trained(cls, source, **build_options(option, cls))
    found = convert_darknet(network, source, destination, replace=replace, unproven=unproven, require_proof=require_proof)
    proven = found.worst is not None and not found.why
    if as_json:
        print_json({"written": str(destination), "network": cls.__name__, "tensors": found.tensors, "proven": proven, **asdict(found)})
        return
    told = f"{found.by} computes the same maps, to {found.worst:.1e} of their largest number" if proven else found.why
    out.print(f"[{'green' if proven else 'yellow'}]{'PROVEN' if proven else 'UNPROVEN'}[/]: {escape(told)}", soft_wrap=True)
    out.print(f"{found.tensors} tensors of {cls.__name__}: '{escape(str(destination))}'", soft_wrap=True)
