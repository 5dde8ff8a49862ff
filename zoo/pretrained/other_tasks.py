"""`trained` for networks that answer something else than a class: detectors and segmenters.

Such a network knows its own names of tensors, which are those of the implementation that its files come from, and says what is in a
foreign file by `adopt`. So there is no search among namings as for classifiers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weights
from convert import formats, sandbox
from convert.formats import safetensors
from convert.sets import chosen
from weights import BadRecord, Checkpoint, Preprocessing, UnknownWeights
from weights.containers import open_any
from weights.digests import of_file
from weights.places import at_home
from weights.record import KEPT
from zoo.conversion.notes import file_sha256
from zoo.labels import labels as labels_named
from zoo.networks.assignment import assign
from zoo.networks.published import Published
from zoo.pretrained.records import FILE, as_file, find_record, to_safetensors
from zoo.pretrained.resolve import is_path, loaded, of_run
from zoo.pretrained.run_folder import is_run, unfinished
from zoo.variants import described


def trained_other(
    cls: type[Published],
    named: str | os.PathLike[str] | None,
    *,
    num_classes: int | None,
    weights_of: str | None,
    options: Mapping[str, Any],
    **how: Any,
) -> Published:
    """Build a network for another task than classification with pretrained weights, in eval mode.

    Args:
        cls: its class.
        named: a tag, a URL, a path, or None for the default checkpoint.
        num_classes: another number than the checkpoint's draws the heads anew.
        weights_of: as `trained` takes it.
        options: constructor keywords.
        how: `verify`, `progress` and `frozen`, as `trained` takes them.

    Raises:
        As `trained` does.
    """
    record, tensors = _found(cls, named, weights_of, how)
    told = {**record.options, **options}
    if record.num_classes:
        told.setdefault("num_classes", record.num_classes)
    with torch.device("meta"):
        network = cls(**told)
    if not record.num_classes and (count := _classes(network, network.adopt(tensors))) not in (None, network.num_classes):
        with torch.device("meta"):
            told["num_classes"] = count
            network = cls(**told)
    state = network.adopt(tensors)
    counters = (name for name in network.state_dict() if name.endswith("num_batches_tracked") and name not in state)
    state |= {name: torch.zeros((), dtype=torch.int64) for name in counters}
    if num_classes is not None and num_classes != network.num_classes:
        fresh = cls(**{**told, "num_classes": num_classes})
        heads = tuple(f"{name}." for name in fresh.classifiers)
        drawn = fresh.state_dict()
        _refuse_others(network, state, heads, record)
        network, state = fresh, {name: drawn[name] if name.startswith(heads) else state[name] for name in drawn}
        record = replace(record, labels=None, metrics={}, metrics_data=None)
    assign(network, state, file=record.sources[0])
    network.eval()
    network.checkpoint = _settled(record, network, {k: v for k, v in told.items() if k != "num_classes"})
    return network


def _classes(network: Published, state: Mapping[str, Tensor]) -> int | None:
    """Return how many classes a file has of which nobody told: its first classifier's rows, by those that a class has."""
    name = f"{network.classifiers[0]}.weight"
    own, found = network.state_dict().get(name), state.get(name)
    if own is None or found is None or found.dim() != own.dim():
        return None
    each = own.shape[0] // network.num_classes
    return int(found.shape[0]) // each if each and found.shape[0] % each == 0 else None


def _refuse_others(network: Published, state: Mapping[str, Tensor], heads: tuple[str, ...], record: Checkpoint) -> None:
    """See that a file holds all that is kept of a network whose heads are drawn anew; raises as `assign` does."""
    wanted = network.state_dict()
    kept = {name: tensor for name, tensor in state.items() if name in wanted or not name.startswith(heads)}
    filled = {name: torch.zeros(wanted[name].shape, dtype=wanted[name].dtype) for name in wanted if name.startswith(heads)}
    assign(network, {**filled, **kept}, file=record.sources[0])


def _found(
    cls: type[Published], named: str | os.PathLike[str] | None, weights_of: str | None, how: Mapping[str, Any]
) -> tuple[Checkpoint, Mapping[str, Tensor]]:
    """Find the record that is named, and the file's tensors under its own names."""
    name = cls.variant().__name__
    if named is None or "://" in os.fspath(named) or not is_path(name, named):
        known = find_record(described(cls), None if named is None else os.fspath(named))
        record, buffer = open_any(known, to_safetensors=to_safetensors, **how)
        if record.format in KEPT:
            with as_file(record, safetensors.tensors(buffer)[FILE]) as (path, format):
                return _of_file(cls, path, format, weights_of, record)
        return record, chosen(safetensors.tensors(buffer), weights_of, f"{record.model}:{record.tag}")
    path = at_home(named)
    if not path.exists():
        tags = ", ".join(c.tag for c in weights.checkpoints(name)) or "none is known"
        raise UnknownWeights(f"{path} is no file. trained({name}, …) takes a tag ({tags}), a URL or a path.")
    if path.is_dir() and is_run(path):
        return of_run(cls, path, weights_of)
    if why := unfinished(path):
        raise UnknownWeights(why)
    return _of_file(cls, path, formats.sniff(path), weights_of)


def _of_file(
    cls: type[Published], path: Path, format: str, weights_of: str | None, kept: Checkpoint | None = None
) -> tuple[Checkpoint, Mapping[str, Tensor]]:
    """Read a file of any format: its tensors under its own names, and the record of it, which says what the file says of itself.

    `kept` is the record under which it was kept, if it is not the user's own file.
    """
    with cls.described(path, format) as file, sandbox.read(file, format, weights_of=weights_of) as opened:
        tensors, facts = loaded(opened.tensors, path), {**opened.facts, "format": format}
    options, steps = cls.told_by(facts)
    name, sha256 = cls.variant().__name__, file_sha256(path)
    known = kept if kept is not None and kept.num_classes else _recognised(sha256, path, name, format)
    if known is not None and known.model == name:
        return replace(known, options={**(options if known.format in KEPT else {}), **known.options}), tensors
    default = next((c for c in weights.checkpoints(name) if c.default), None)
    labels = default.labels if default else cls.labels
    told = {"provenance": "named by the user", "preprocessing": Preprocessing(**steps), "labels": labels}
    record = weights.adhoc(name, str(path) if kept is None else kept.sources[0], **told, **({"format": kept.format} if kept else {}))
    return replace(record.hashed(sha256), options=options), tensors


def _recognised(sha256: str, path: Path, name: str, format: str) -> Checkpoint | None:
    return weights.recognise(sha256, partial(of_file, path), model=name, format=format)


def _settled(record: Checkpoint, network: Published, options: Mapping[str, Any]) -> Checkpoint:
    """Complete a record by what the file and the user said; its list of labels is left out where it has another number of names."""
    labels = record.labels
    if labels is not None:
        count = None
        with suppress(ValueError):
            count = len(labels_named(labels))
        if count != network.num_classes and record.num_classes:
            raise BadRecord(f"{record.model}:{record.tag}: {labels} has {count} labels, and the network {network.num_classes} classes")
        labels = labels if count == network.num_classes else None
    return replace(record, num_classes=network.num_classes, options=options, labels=labels)
