"""What is known of every network without building it, from generated tables in `zoo/data`: it needs no torch.

`make docs-pages` writes the tables from the catalogues, `networks.json` and `shapes.zip` of classifiers, `tasks.json` of networks for
other tasks; a test holds them to it.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from weights.arguments import did_you_mean, forgiving
from weights.errors import UnknownWeights

CLASSIFICATION = "classification"
TABLE = Path(__file__).parent / "data" / "networks.json"
TASKS = TABLE.with_name("tasks.json")
"""Networks that answer something else than a class: detectors and segmenters."""
SHAPES = TABLE.with_name("shapes.zip")
OPTIONAL = TABLE.with_name("optional_shapes.zip")
"""A JSON file for each network: the shape of each tensor of its state dict."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One network of the catalogue.

    Attributes:
        name: the class's name.
        family: the name of the family's class.
        about: the first line of the family's docstring.
        params: published number of trainable parameters.
        multiply_adds: of convolutions and products for one image of `input_size`; None of a network that was registered outside of the zoo.
        input_size: side in pixels of the images that it was published with.
        min_size: smallest side in pixels that it takes.
        num_classes: number of classes that it is built with where nothing is said.
        paper: link to the paper whose table it comes from.
        lineage: names of the class and of its bases, which tell `convert.names` how its tensors are called elsewhere.
        task: what its answers are: "classification", "detection", "segmentation".
        home: the module that defines it. `zoo.catalogue.any_class` imports that when the network is asked for, so that rooms below a
            detector's need not know it.
    """

    name: str
    family: str
    about: str
    params: int
    multiply_adds: int | None
    input_size: int
    min_size: int
    num_classes: int
    paper: str
    lineage: tuple[str, ...]
    task: str = CLASSIFICATION
    home: str = "zoo.catalogue"


def variants(task: str = CLASSIFICATION) -> dict[str, Variant]:
    """Return every network of a task by name, in the catalogue's order; behind them those that the running program has registered itself.

    Example:
        >>> variants()["VGG19"].params
        143667240

    Args:
        task: "classification", "detection" or "segmentation".
    """
    known = {name: one for name, one in _read().items() if one.task == task}
    published = sys.modules.get("zoo.networks.published")
    base = None if published is None else published.Published.tasks.get(task)
    own = {} if base is None else {name: described(cls) for name, cls in base.catalogue.items() if name not in known}
    return {**known, **own}


def of_all_tasks() -> dict[str, Variant]:
    """Return every network of every task by name, classifiers first."""
    tasks = dict.fromkeys([CLASSIFICATION, *(one.task for one in _read().values())])
    published = sys.modules.get("zoo.networks.published")
    tasks |= {} if published is None else dict.fromkeys(published.Published.tasks)
    return {name: one for task in tasks for name, one in variants(task).items()}


def described(cls: Any, multiply_adds: int | None = None) -> Variant:
    """Describe a network's class, or the variant that it derives from, as the table does; one that nobody published has 0 parameters."""
    cls = cls.variant()
    family = cls.family()
    return Variant(
        name=cls.__name__,
        family=family.__name__,
        about=(family.__doc__ or "").strip().partition("\n")[0],
        params=getattr(cls, "params", 0),
        multiply_adds=multiply_adds,
        input_size=cls.input_size,
        min_size=cls.min_size,
        num_classes=cls.usual_classes(),
        paper=getattr(cls, "paper", ""),
        lineage=tuple(base.__name__ for base in cls.__mro__ if base.__module__.startswith("zoo.") and base.__name__ != "Published"),
        task=cls.task,
        home="zoo.catalogue" if cls.task == CLASSIFICATION else cls.__module__,
    )


def spelt(name: str, known: Iterable[str] | None = None) -> str:
    """Return a network's name as the catalogue spells it, whatever its case and what is between its parts: "resnet-50", "vgg16_bn".

    Raises:
        UnknownWeights: there is no such network; the message names the nearest ones.
    """
    there = list(of_all_tasks() if known is None else known)
    folded = {_folded(one): one for one in there} | {one.lower(): one for one in there}
    for asked in (name.strip().lower(), _folded(name)):
        if asked in folded:
            return folded[asked]
    folded = {one.lower(): one for one in there}
    hint = did_you_mean(name, folded.values(), count=3) or "."
    raise UnknownWeights(f"no network {name!r}{hint} `zoo list` shows all {len(folded)}.")


def _folded(name: str) -> str:
    """Return a name in small letters, without what separates its parts, but for digits from digits: RegNetX_1_6GF is not RegNetX_16GF."""
    return re.sub(r"(?<!\d)_|_(?!\d)", "", re.sub(r"[\s_.-]+", "_", name.strip().lower()))


@forgiving
def networks(pattern: str = "*", task: str = CLASSIFICATION) -> list[str]:
    """List the networks whose names a pattern means, in any case and in the catalogue's order.

    Example:
        >>> networks("*net50")
        ['ResNet50', 'SEResNet50']

    Args:
        pattern: with wildcards of the shell, `*`, `?` and `[…]`; without any it is a part of the name.
        task: what the networks' answers are: "classification", "detection" or "segmentation".
    """
    asked = pattern.lower()
    wanted = asked if any(sign in asked for sign in "*?[") else f"*{asked}*"
    return [name for name in variants(task) if fnmatchcase(name.lower(), wanted)]


@cache
def _read() -> dict[str, Variant]:
    rows = [row for table in (TABLE, TASKS) for row in json.loads(table.read_text(encoding="utf-8"))]
    return {row["name"]: Variant(**row | {"lineage": tuple(row["lineage"])}) for row in rows}


@cache
def optional() -> tuple[str, ...]:
    """List the networks with constructor keywords that give them other tensors, "ResNet20 with shortcut='B'", as `shapes` knows them."""
    with zipfile.ZipFile(OPTIONAL) as packed:
        return tuple(name.removesuffix(".json") for name in packed.namelist())


def shapes(names: Iterable[str]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shape of each tensor of the state dict of each network that is named; networks that no table has are left out.

    Example:
        >>> shapes(["ResNet20"])["ResNet20"]["conv1.weight"]
        (16, 3, 3, 3)
    """
    names, read = set(names), {}
    for archive in (SHAPES, OPTIONAL):
        with zipfile.ZipFile(archive) as packed:
            there = [name for name in packed.namelist() if name.removesuffix(".json") in names]
            read |= {name.removesuffix(".json"): json.loads(packed.read(name)) for name in there}
    return {name: {key: tuple(shape) for key, shape in tensors.items()} for name, tensors in read.items()}
