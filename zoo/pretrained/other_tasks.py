"""`trained` for networks that answer something else than a class: detectors and segmenters.

Such a network knows its own names of tensors, which are those of the implementation that its files come from, and says what is in a
foreign file by `adopt`. So there is no search among namings as for classifiers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weights
from convert import formats, sandbox
from convert.formats import safetensors
from convert.sets import chosen
from convert.source import Source
from weights import BadRecord, Checkpoint, Preprocessing, UnknownWeights, WeightsError
from weights.containers import open_any
from weights.places import at_home
from zoo.conversion.notes import file_sha256
from zoo.labels import labels as labels_named
from zoo.networks.assignment import assign
from zoo.networks.published import Published
from zoo.pretrained.records import find_record, to_safetensors
from zoo.pretrained.resolve import is_path, loaded
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
        return record, chosen(safetensors.tensors(buffer), weights_of, f"{record.model}:{record.tag}")
    path = at_home(named)
    if not path.exists():
        tags = ", ".join(c.tag for c in weights.checkpoints(name)) or "none is known"
        raise UnknownWeights(f"{path} is no file. trained({name}, …) takes a tag ({tags}), a URL or a path.")
    format = formats.sniff(path)
    with _read(cls, path, format, weights_of) as opened:
        tensors, facts = loaded(opened.tensors, path), {**opened.facts, "format": format}
    sha256 = file_sha256(path)
    known = weights.recognise(sha256)
    if known is not None and known.model == name:
        return known, tensors
    options, steps = cls.told_by(facts)
    default = next((c for c in weights.checkpoints(name) if c.default), None)
    labels = default.labels if default else cls.labels
    record = weights.adhoc(name, str(path), provenance="named by the user", preprocessing=Preprocessing(**steps), labels=labels)
    return replace(record.hashed(sha256), options=options), tensors


@contextmanager
def _read(cls: type[Published], path: Path, format: str, weights_of: str | None) -> Iterator[Source]:
    """Open a file beside the description that the network has of it, whatever lies beside it otherwise."""
    beside = cls.description(format)
    if beside is None:
        with sandbox.read(path, format, weights_of=weights_of) as opened:
            yield opened
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, path.name)
        try:
            file.symlink_to(path.absolute())
        except OSError:  # where links are a privilege
            shutil.copyfile(path, file)
        file.with_suffix(beside[0]).write_text(beside[1], encoding="utf-8")
        try:
            with sandbox.read(file, format, weights_of=weights_of) as opened:
                yield opened
        except WeightsError as error:
            error.args = (str(error).replace(str(file), str(path)).replace(file.with_suffix(beside[0]).name, cls.__name__), *error.args[1:])
            raise


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
