"""Checkpoints for other machines: what `weights` packs, with the networks that prove them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import weights
from weights import Checkpoint, Installed, UnknownWeights
from weights.bundle import Contents
from weights.progress import bar
from weights.unbundle import Unbundled
from zoo.labels import TABLES
from zoo.pretrained.records import record_of, to_safetensors
from zoo.variants import variants

if TYPE_CHECKING:
    from zoo.networks.model import Model


def records(names: Sequence[str]) -> list[Checkpoint]:
    """Find the records that names like "ResNet50" and "ResNet50:imagenet1k_v1" mean, each once.

    Raises:
        UnknownWeights, NoPretrainedWeights: there is no such network or checkpoint.
    """
    found: dict[tuple[str, str], Checkpoint] = {}
    for name in names:
        row = record_of(name)
        found[row.model, row.tag] = row
    return list(found.values())


def bundle(names: Sequence[str], path: str | Path, *, progress: bool = True) -> Contents:
    """Write checkpoints, and what their networks make of a few images, into one file; as `weights.bundle.bundle`."""
    from weights.bundle import bundle
    from zoo.sharing.golden_outputs import golden

    def run(row: Checkpoint, installed: Installed) -> bytes:
        return golden(_network(row, installed))

    rows = records(names)
    for row in rows:  # a download has a bar of its own
        weights.get(row, to_safetensors=to_safetensors, progress=progress)
    with bar(Path(path).name, progress) as shown:
        return bundle(rows, path, to_safetensors=to_safetensors, golden=run, labels=_table, progress=shown)


def unbundle(path: str | Path, *, check: bool = True, sha256: str | None = None, progress: bool = True) -> list[Unbundled]:
    """Install a bundle, and compare outputs before anything is installed unless `check` is false; as `weights.unbundle.unbundle`."""
    from weights.unbundle import unbundle
    from zoo.sharing.golden_outputs import compare

    def run(row: Checkpoint, installed: Installed, data: bytes | None) -> str:
        return "no golden outputs came along" if data is None else compare(_network(row, installed), data)

    with bar(Path(path).name, progress) as shown:
        return unbundle(path, check=run if check else None, accept=_accept, labels=_table, sha256=sha256, progress=shown)


def _accept(row: Checkpoint) -> None:
    if row.model not in variants():
        raise UnknownWeights(f"there is no network {row.model} in this version of kernelzoo: update it. Nothing was installed.")


def _network(row: Checkpoint, installed: Installed) -> Model:
    from zoo.catalogue import CATALOGUE
    from zoo.pretrained.trained import assemble

    return assemble(CATALOGUE[row.model], replace(row, labels=None), weights.load(installed))  # names of classes may not be here yet


def _table(name: str) -> bytes:
    """Read the table of a record's labels, which ships or is a file of the user's."""
    path = Path(name) if name.endswith(".tsv") else TABLES / f"{name}.tsv"
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"the labels {name} can't be read: {error}") from error
