"""`python -m zoo.commands.bench_embedding`: how fast timm and `zoo embed` make vectors of the same images."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from zoo.commands.console import err, out, print_json

if TYPE_CHECKING:
    from zoo.bench.embedding import Way


def main(
    model: Annotated[str, typer.Option("--model", "-m", help="A network that timm has too.")] = "ResNet50",
    folder: Annotated[Path | None, typer.Option(help="Class folders of images; generated if left out.")] = None,
    images: Annotated[int | None, typer.Option(min=2, help="Of a run, the folder's repeated; what takes 10 s if left out.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="256 on a GPU, 32 on a CPU.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Decoding processes of every way.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Embed one folder by timm's inference and by ours, in turns; print medians, and the rates that limit ours."""
    import torch

    from zoo.bench import embedding
    from zoo.bench.embedding_rates import decoder_rate, guessed_decoder_rate, job, network_rate
    from zoo.bench.machine import versions
    from zoo.bench.photographs import photographs, repeated
    from zoo.catalogue import model_class
    from zoo.embedding.decoding import processes
    from zoo.images import open_source
    from zoo.pretrained.records import find_record

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cls = model_class(model)
    torch.manual_seed(0)
    network = cls().eval()
    network.checkpoint = find_record(cls.__name__)
    with tempfile.TemporaryDirectory(prefix="zoo-bench-") as scratch:
        first = folder or Path(scratch) / "photographs"
        if folder is None:
            photographs(first, min(embedding.DISTINCT, images or embedding.DISTINCT))
        source = open_source(first)
        count = batch_size or (256 if place.type == "cuda" else 32)
        hands = workers or processes(place, source)
        plan = job(network, source, count, place)
        computing = network_rate(network, plan, place)
        total = images or embedding.enough(guessed_decoder_rate(source, plan, hands), computing, count)
        where = repeated(first, Path(scratch) / "repeated", total)
        source = open_source(where)
        ways, report = embedding.compare(
            network,
            where,
            batch_size=count,
            workers=hands,
            device=place,
            rounds=rounds,
            say=lambda line: err.print(line, style="dim", markup=False),
        )
        decoding = decoder_rate(source, job(network, source, count, place), hands)
    about = {"images": total, "model": model, "batch_size": count, "workers": hands, "device": str(place), "machine": versions()}
    rates = {"decoding_alone": decoding, "network_alone": computing, "pipeline": report.images_s, "limit": report.limit}
    if as_json:
        print_json({"about": about, "ways": [asdict(way) for way in ways], "rates": rates})
    else:
        _show(ways, about, rates)
    if (shortest := min(way.flowed for way in ways)) < embedding.SECONDS / 2:
        err.print(f"[yellow]warning:[/yellow] a run lasted {shortest:.1f} s, too short to be believed; give more with --images")


def _show(ways: Sequence[Way], about: dict[str, Any], rates: dict[str, Any]) -> None:
    table = Table(box=None, header_style="bold")
    for heading in ("way", "images/s", "slowest to fastest", "times the first", "s", "whole run s"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for way in ways:
        table.add_row(
            way.name,
            f"{way.images_s:,.1f}",
            f"{way.low:,.1f}-{way.high:,.1f}",
            f"{way.images_s / ways[0].images_s:.2f}",
            f"{way.flowed:.1f}",
            f"{way.seconds:.1f}",
        )
    out.print(table)
    flowing, decoding, computing = rates["pipeline"], rates["decoding_alone"], rates["network_alone"]
    out.print(f"decoding alone {decoding:,.1f} images/s in {about['workers']} processes, the network alone {computing:,.1f}, by fast()")
    shares = f"{flowing / decoding:.2f} of the decoder's rate, {flowing / computing:.2f} of the network's"
    out.print(f"zoo embed in its last round {flowing:,.1f} images/s: {shares}", soft_wrap=True)
    out.print(f"[dim]{json.dumps(about)}[/dim]", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
