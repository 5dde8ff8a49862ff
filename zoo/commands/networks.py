"""`zoo list`, `zoo info`: the networks and what is known of their checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

import weights
from weights import Checkpoint
from weights.wording import counted
from zoo.commands.console import JsonOption, ModelArgument, out, print_json
from zoo.pretrained.records import nearest_with_weights
from zoo.pretrained.search import Entry, search
from zoo.variants import spelt, variants


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
        row = [e.name, f"{e.variant.params / 1e6:.2f}M"]
        row += [f"{c.metrics[m]:.2f}" if c and m in c.metrics else "" for m in ("top1", "top5")]
        row += [(c.metrics_data or "").partition(" ")[0].partition("-1k")[0].rstrip(",") if c and c.metrics else ""]
        row += [str(c.preprocessing.crop or e.variant.input_size) if c else str(e.variant.input_size)]
        table.add_row(*row, escape(c.tag) if c else "[dim]none[/dim]", escape(c.license) if c else "")
    out.print(table)
    noun = "checkpoint" if checkpoints else "network"
    out.print(f"[dim]{counted(len(found), noun)}. An accuracy holds for its images and its preprocessing: zoo info NETWORK.[/dim]")
    if not found:
        raise typer.Exit(1)


def info(model: ModelArgument, as_json: JsonOption = False) -> None:
    """Show a network and every checkpoint that is known of it."""
    known = variants()[spelt(model)]
    rows = weights.checkpoints(known.name)
    if as_json:
        print_json(
            {
                "network": known.name,
                "params": known.params,
                "multiply_adds": known.multiply_adds,
                "paper": known.paper,
                "min_size": known.min_size,
                "checkpoints": [asdict(c) for c in rows],
            }
        )
        return
    out.print(
        f"[bold]{known.name}[/bold]  {known.params:,} parameters, {known.input_size} px images, at least {known.min_size} px; {known.paper}"
    )
    out.print(known.about)
    if not rows:
        near = ", ".join(c.model for c in nearest_with_weights(known))
        out.print(f"No pretrained weights are known. Nearest with weights: {near}. Your own: zoo add FILE --model {known.name} --tag mine")
    for c in rows:
        out.print()
        out.print(f"[bold]{c.tag}[/bold]{'  (default)' if c.default else ''}")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in _facts(c).items():
            table.add_row(name, escape(value))
        out.print(table)


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "network": entry.name,
        "family": entry.family,
        "params": entry.variant.params,
        "input_size": entry.variant.input_size,
        "checkpoint": asdict(entry.checkpoint) if entry.checkpoint else None,
    }


def _facts(c: Checkpoint) -> dict[str, str]:
    p = c.preprocessing
    steps = [
        f"resize the shorter side to {p.resize} px ({p.interpolation})" if p.resize else "",
        f"centre crop {p.crop} px" if p.crop else "",
    ]
    scale = f"mean {', '.join(f'{v:g}' for v in p.mean)}, std {', '.join(f'{v:g}' for v in p.std)} of {p.channel_order.upper()} 0..1"
    published = f"{c.sha256_prefix}… (prefix;" if c.sha256_prefix else "(none recorded;"
    known = c.sha256 or f"{published} the full hash is pinned on first sight in your lock)"
    known += f"\n{c.sha256_reported} reported by {c.reported_by}" if c.sha256_reported else ""
    facts = {
        "accuracy": ", ".join(f"{k} {v:g} %" for k, v in c.metrics.items()) + (f" on {c.metrics_data}" if c.metrics_data else ""),
        "preprocessing": "; ".join(s for s in (*steps, scale) if s),
        "sources": "\n".join(c.sources),
        "else": "\n".join(f"{other.source} ({other.format})" for other in c.alternatives),
        "sha256": known,
        "licence": c.license,
        "options": ", ".join(f"{k}={v!r}" for k, v in c.options.items()),
        "recipe": c.recipe or "",
        "learnt from": c.provenance,
    }
    return {k: v for k, v in facts.items() if v}
