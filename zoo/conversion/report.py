"""The HTML report of a conversion: what `convert.report` draws, gathered."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from convert.report import Facts, Sample, Transform, render
from weights.whole import write_whole
from zoo.conversion.proof_images import Pictures
from zoo.conversion.result import Conversion, origin
from zoo.images.preprocess import BadImage, open_image, preprocess
from zoo.labels import TABLES, labels

SAMPLES = 8
THUMBNAIL = 96


def write_report(made: Conversion, path: Path, images: Path | None = None) -> None:
    """Write the report of a conversion that succeeded or failed, whole or not at all.

    Args:
        made: the conversion; its network must still be there.
        path: the HTML file.
        images: a folder of photographs to show predictions on.
    """
    facts = Facts(
        title=f"{made.model.__name__} from {made.source.path.name}",
        source={
            **origin(made),
            "kernels": made.kernels,
            "options": made.options,
            "preprocessing": asdict(made.preprocessing),
            **({} if made.pixels is None else {"pixels": made.pixels.said, "pixels, tried": dict(made.pixels.table)}),
            **made.source.facts,
        },
        certificate=made.certificate.to_json(),
        transforms=[
            Transform(
                name,
                told["from"],
                told["becomes"],
                told["shape"],
                told.get("steps", []),
                told.get("trained_as", ""),
                told.get("exact", True),
            )
            for name, told in made.transforms.items()
        ],
        filters=made.filters,
        samples=_samples(made, images),
        decision="" if made.decision is None else str(made.decision),
        diagnosis={} if made.diagnosis is None else asdict(made.diagnosis),
        notes=made.notes,
    )
    write_whole(path, render(facts))


def _samples(made: Conversion, images: Path | None) -> list[Sample]:
    """Run the converted network on a few photographs."""
    network = made.network
    if images is None or network is None:
        return []
    known = next((names for table in sorted(TABLES.glob("*.tsv")) if len(names := labels(table.stem)) == network.num_classes), None)
    found: list[Sample] = []
    files = Pictures.of(images).files
    for file in files[:: max(1, len(files) // SAMPLES)][:SAMPLES]:
        try:
            with torch.no_grad():
                chances = network(preprocess(file, made.preprocessing)).softmax(1)[0]
            small = open_image(file)
        except (BadImage, ValueError):
            continue
        small.thumbnail((THUMBNAIL, THUMBNAIL))
        values, indices = chances.topk(min(3, len(chances)))
        said = [(known[int(i)].name if known else f"class {int(i)}", float(v)) for v, i in zip(values, indices, strict=True)]
        found.append(Sample(file.name, np.asarray(small.convert("RGB")), said))
    return found
