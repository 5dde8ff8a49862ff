"""Find networks and checkpoints by what one needs of them."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import weights
from weights import Checkpoint
from weights.arguments import did_you_mean, forgiving
from weights.record import PERMISSIVE
from zoo.variants import Variant, of_all_tasks, variants

log = logging.getLogger("zoo")
FREE = "permissive"
"""Stands for every licence of `weights.record.PERMISSIVE`."""
IMAGENET = "ImageNet"


@dataclass(frozen=True, slots=True)
class Entry:
    """A network of the catalogue, with one of its checkpoints or None."""

    variant: Variant
    checkpoint: Checkpoint | None

    @property
    def name(self) -> str:
        """The network's name."""
        return self.variant.name

    @property
    def family(self) -> str:
        """The name of the family's class."""
        return self.variant.family


def count(text: str) -> int:
    """Read a number of parameters: "10M", "500k", "1.2B" or "25557032"."""
    match = re.fullmatch(r"\s*([\d_,]*\.?\d+)\s*([kKmMbBgG]?)\s*", text)
    if not match:
        raise ValueError(f"a number of parameters looks like 10M, 500k or 25557032, not {text!r}")
    scale = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}[match[2].lower()]
    return int(float(match[1].replace("_", "").replace(",", "")) * scale)


@forgiving
def search(
    *,
    family: str | None = None,
    min_top1: float | None = None,
    max_params: str | int | None = None,
    max_gmacs: float | None = None,
    license: str | None = None,
    data: str | None = None,
    all_checkpoints: bool = False,
) -> list[Entry]:
    """List networks with their default checkpoint, in the catalogue's order.

    Args:
        family: name of the family's class, in any case: "ResNet"; or the start of variants' names.
        min_top1: least top-1 accuracy in percent, under the checkpoint's own preprocessing.
        max_params: most parameters, 10_000_000 or "10M".
        max_gmacs: most multiply-adds of one image of the network's own size, in 10⁹.
        license: SPDX identifier in any case, "unstated", or "permissive" for all that allow every use. Where a network's default
            checkpoint has another, its most accurate one of this licence stands for it.
        data: what the accuracy was measured on, by its first letters in any case: "ImageNet", "CIFAR-10". With `min_top1` it is
            ImageNet unless named: accuracies on different images don't compare.
        all_checkpoints: every checkpoint, not only the default one.

    Returns:
        Networks without weights too, unless `min_top1`, `license` or `data` asks for something of the weights.

    Raises:
        ValueError: `max_params` is no number, or no row has such a `family`, `license` or `data`; the message lists those that there are.
    """
    known_networks = variants()
    if family is not None and not any(_belongs(one, family) for one in known_networks.values()):
        families = dict.fromkeys(one.family for one in known_networks.values())
        raise ValueError(f"no family {family!r}; there are {', '.join(families)}")
    known_rows = weights.checkpoints()
    most = count(max_params) if isinstance(max_params, str) else max_params
    if license is not None and license.lower() != FREE:
        _known("has the licence", license, {c.license for c in known_rows}, whole=True)
    if data is not None:
        _known("was measured on", data, {c.metrics_data for c in known_rows if c.metrics_data}, whole=False)
    if min_top1 is not None and data is None:
        data = IMAGENET
    rows: dict[str, list[Checkpoint]] = {}
    for c in known_rows:
        rows.setdefault(c.model, []).append(c)
    for name in rows.keys() - of_all_tasks().keys():
        log.warning("a registry names weights of %s, and there is no such network", name)
    found = []
    for name, one in known_networks.items():
        if family is not None and not _belongs(one, family):
            continue
        if most is not None and one.params > most:
            continue
        if max_gmacs is not None and (one.multiply_adds is None or one.multiply_adds > max_gmacs * 1e9):
            continue
        known = [c for c in rows.get(name, []) if all_checkpoints or c.default]
        if license is not None and not all_checkpoints and not any(_licensed(c, license) for c in known):
            licensed = [c for c in rows.get(name, []) if _licensed(c, license)]
            known = [max(licensed, key=_top1)] if licensed else known
        wanted = [
            c
            for c in known
            if (min_top1 is None or c.metrics.get("top1", -1) >= min_top1)
            and (license is None or _licensed(c, license))
            and (data is None or (c.metrics_data or "").lower().startswith(data.lower()))
        ]
        found += [Entry(one, c) for c in wanted]
        if not known and license is None and data is None:
            found.append(Entry(one, None))
    return found


def _top1(row: Checkpoint) -> float:
    return row.metrics.get("top1", 0.0)


def _licensed(row: Checkpoint, license: str) -> bool:
    return row.license in PERMISSIVE if license.lower() == FREE else row.license.lower() == license.lower()


def _known(what: str, asked: str, there: set[str], *, whole: bool) -> None:
    """Refuse what no checkpoint has, and list what some have."""
    if not any(one.lower() == asked.lower() if whole else one.lower().startswith(asked.lower()) for one in there):
        near = did_you_mean(asked, {*there, FREE} if whole else there)
        raise ValueError(f"no checkpoint {what} {asked!r}{near}; there are {', '.join(sorted(there))}")


def _belongs(variant: Variant, family: str) -> bool:
    return variant.family.lower() == family.lower() or variant.name.lower().startswith(family.lower())
