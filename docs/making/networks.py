"""zoo/data/networks.json, tasks.json, shapes.zip and optional_shapes.zip: what commands know of every network without building it."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import cache

import torch

from convert.inspect import WITH
from zoo.bench.floor import work
from zoo.catalogue import CATALOGUE
from zoo.conversion.fitting import choices, said
from zoo.detection import catalogue as _detectors  # noqa: F401  (its class lines fill the catalogue)
from zoo.detection.detector import DETECTORS
from zoo.networks.model import Model
from zoo.networks.published import Published
from zoo.segmentation import catalogue as _segmenters  # noqa: F401
from zoo.segmentation.segmenter import SEGMENTERS
from zoo.variants import OPTIONAL, SHAPES, TABLE, TASKS, described

OTHERS: tuple[Mapping[str, type[Published]], ...] = (DETECTORS, SEGMENTERS)
"""The catalogues of tasks other than classification, in the order of `zoo list`."""
LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The time of every member, so that the same shapes are the same file."""


def table(count: Callable[[type[Model]], int]) -> str:
    """Return the text of the table; `count` gives a network's multiply-adds for one image."""
    alike = ("task", "home")  # of all classifiers
    rows = ({k: v for k, v in asdict(described(cls, count(cls))).items() if k not in alike} for cls in CATALOGUE.values())
    return lines(rows)


def tasks() -> str:
    """Return the text of the table of networks for other tasks."""
    return lines(asdict(described(cls)) for catalogue in OTHERS for cls in catalogue.values())


def lines(rows: Iterable[Mapping[str, object]]) -> str:
    """Write rows as JSON, one a line."""
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"


def built(cls: type[Model]) -> Mapping[str, tuple[int, ...]]:
    """Build a network for the shapes of its state dict."""
    with torch.device("meta"):
        return {key: tuple(tensor.shape) for key, tensor in cls().state_dict().items()}


def shapes(of: Callable[[type[Model]], Mapping[str, tuple[int, ...]]] = built) -> bytes:
    """Return the archive of every network's shapes, which are those that `of` gives."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, cls in CATALOGUE.items():
            archive.writestr(zipfile.ZipInfo(f"{name}.json", LONG_AGO), json.dumps(of(cls)), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def optional_shapes() -> bytes:
    """Return the archive of the shapes of networks with constructor keywords that give them other tensors.

    An option that changes nothing in a family's smallest network changes nothing in the others.
    """
    families: dict[type[Model], list[type[Model]]] = {}
    for cls in CATALOGUE.values():
        families.setdefault(cls.family(), []).append(cls)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for members in families.values():
            if not choices(min(members, key=lambda cls: cls.params)):
                continue
            for cls in members:
                for options, tensors in choices(cls):
                    name = f"{cls.__name__}{WITH}{said(options)}.json"
                    archive.writestr(zipfile.ZipInfo(name, LONG_AGO), json.dumps(tensors), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


@cache
def multiply_adds(cls: type[Model]) -> int:
    """Count a network's multiply-adds for one image of its size."""
    return sum(one.flop for one in work(cls, 1)) // 2


def write(count: Callable[[type[Model]], int] = multiply_adds) -> dict[str, str | bytes]:
    """Return the contents of the files by their paths from docs/."""
    made: dict[str, str | bytes] = {TABLE.name: table(count), TASKS.name: tasks()}
    made |= {SHAPES.name: shapes(), OPTIONAL.name: optional_shapes()}
    return {f"../zoo/data/{name}": content for name, content in made.items()}
