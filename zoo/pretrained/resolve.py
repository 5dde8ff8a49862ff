"""What the weights that `trained` is asked for are: the record of a tag, a URL or a path, and its tensors under the file's own names."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weights
from convert import formats, sandbox
from convert.formats import safetensors
from convert.source import Convention, Spatial, Stored
from weights import (
    Checkpoint,
    ConvertError,
    HashMismatch,
    NoPretrainedWeights,
    Preprocessing,
    UnknownWeights,
    UnsupportedFormat,
    WeightsMismatch,
    header,
)
from weights.finite import check_values
from weights.places import at_home
from zoo.networks.model import CATALOGUE, Model
from zoo.pretrained.run_folder import WEIGHTS, is_run, read_row, unfinished
from zoo.pretrained.search import model_class

log = logging.getLogger("zoo")


def find_record(model: type[Model], named: str | None = None) -> Checkpoint:
    """Find a record by its name: None means the default checkpoint, a tag another, a URL the row that has it or else an unknown one.

    Raises:
        NoPretrainedWeights: no checkpoint of this network is known; the message names the nearest that have some.
        UnknownWeights: no checkpoint has this tag.
    """
    name = model.variant().__name__
    if named is not None and "://" in named:
        registered = (c for c in weights.checkpoints(name) if named in c.sources)
        return next(registered, None) or _unknown(model, named)
    try:
        return weights.find(name, named)
    except NoPretrainedWeights as error:
        raise NoPretrainedWeights(_no_weights(model)) from error


def record_of(name: str) -> Checkpoint:
    """Find a record by the name that commands and locks use, "ResNet50" or "ResNet50:imagenet1k_v1"; raises as `find_record` does."""
    model, _, tag = name.partition(":")
    return find_record(model_class(model), tag or None)


def nearest_with_weights(model: type[Model], count: int = 3) -> list[Checkpoint]:
    """List the default checkpoints of the variants most like `model`: of its family first, then by parameter count."""
    classes = inspect.signature(model.variant()).parameters["num_classes"].default
    defaults = [c for c in weights.checkpoints() if c.default and c.model in CATALOGUE and c.num_classes == classes]

    def distance(checkpoint: Checkpoint) -> tuple[bool, float]:
        other = CATALOGUE[checkpoint.model]
        return other.family() is not model.family(), abs(other.params - getattr(model, "params", 0))

    return sorted(defaults, key=distance)[:count]


def find(
    model: type[Model],
    named: str | os.PathLike[str] | None,
    verify: str,
    progress: bool,
    frozen: bool | None,
    told: tuple[Convention | None, Spatial | None],
    new_head: bool,
    options: Mapping[str, Any],
) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Find the record that is named, and its tensors under the file's own names; known bytes bring their record along.

    Args:
        model, named, verify, progress, frozen, options: as `trained` takes them.
        told: what is said of a foreign file's kernels: their convention, and the order of their sides.
        new_head: whether the file may lack a classifier.
    """
    name = model.variant().__name__
    if named is not None and "://" not in os.fspath(named) and _is_path(name, named):
        path = at_home(named)
        if not path.exists():
            tags = ", ".join(c.tag for c in weights.checkpoints(name)) or "none is known"
            raise UnknownWeights(f"{path} is no file. trained({name}, …) takes a tag ({tags}), a URL or a path.")
        if path.is_dir() and is_run(path):
            return _of_run(model, path)
        if why := unfinished(path):
            raise UnknownWeights(why)
        try:
            format = formats.sniff(path)
        except UnsupportedFormat:
            if path.is_dir():
                raise UnknownWeights(f"{path} is a folder, and no checkpoint of a kind that is one (TensorFlow's, Orbax)") from None
            raise
        if any(told) or format not in ("safetensors", "pytorch"):
            return _foreign(model, path, format, told, new_head, options)
        sha256, buffer = weights.read_file(path)
        record = _unknown(model, str(path), sha256=sha256)
        if format == "pytorch":
            with sandbox.read(path, format, data=buffer) as opened:
                return _recognised(record, sha256), _loaded(opened.tensors, path)
        with _about(path):
            noted = _noted(record, header.metadata(buffer), model)
            tensors = safetensors.tensors(buffer)
        return noted or _recognised(record, sha256), _finite(tensors, path)
    record = find_record(model, None if named is None else os.fspath(named))
    buffer = weights.open_weights(record, to_safetensors=to_safetensors, verify=verify, progress=progress, frozen=frozen)
    if not record.num_classes:
        record = _recognised(record, weights.get(record, to_safetensors=to_safetensors, frozen=frozen).source_sha256)
    return record, safetensors.tensors(buffer)


def to_safetensors(source: Path, destination: Path) -> str:
    """Rewrite the pickled checkpoint `source` as safetensors, without running any of its code; a file that is safetensors is copied.

    A process of its own reads the pickle, see `convert.sandbox`; this one writes what it is told, and checks what it wrote.

    Returns:
        The SHA-256 of the bytes that were converted: they were read once, and whoever writes to the file meanwhile comes too late.
    """
    sha256, data = weights.read_file(source)
    if header.is_safetensors(data):
        destination.write_bytes(data)
        return sha256
    with sandbox.read(source, "pytorch", data=data) as opened:
        del data  # the reader has its own copy
        safetensors.save_stored(opened.tensors, destination)
    return sha256


def _of_run(model: type[Model], folder: Path) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Read the result of `zoo finetune`: its folder holds a row of the registry and the file that the row promises."""
    record = read_row(folder)
    if record.model != model.variant().__name__:
        raise WeightsMismatch(f"{folder} is a run of {record.model}: trained({record.model}, …), not of {model.variant().__name__}")
    file = folder / WEIGHTS
    sha256, buffer = weights.read_file(file)
    if sha256 != record.sha256:
        raise HashMismatch(f"{file}: expected sha256 {record.sha256}, got {sha256}; zoo finetune --resume {folder} writes it again")
    return record, _finite(safetensors.tensors(buffer), file)


def _foreign(
    model: type[Model],
    path: Path,
    format: str,
    told: tuple[Convention | None, Spatial | None],
    new_head: bool,
    options: Mapping[str, Any],
) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Read another framework's file: its tensors under our names, and a record with the options that it needs."""
    from zoo.conversion.foreign import file_sha256, open_foreign

    chosen: dict[str, Any] = {"format": format, "convention": told[0], "spatial": told[1]}
    try:
        foreign = open_foreign(path, model, **chosen, **options)
    except WeightsMismatch:
        if not new_head:
            raise
        foreign = open_foreign(path, model, headless=True, **chosen, **options)
    with foreign.source:
        tensors = _loaded(foreign.adopted.tensors, path)
    sha256 = file_sha256(path)
    known = {"options": {k: v for k, v in foreign.options.items() if k not in options}, "sha256": sha256, "labels": foreign.labels}
    record, steps = _unknown(model, str(path), **known), _steps(foreign.preprocessing)
    if not {"mean", "std"} <= steps.keys():
        record = _recognised(record, sha256)
    return replace(record, preprocessing=replace(record.preprocessing, **steps)), tensors


def _loaded(tensors: Mapping[str, Stored], path: Path) -> dict[str, Tensor]:
    from convert.formats._torch import as_tensor

    return _finite({name: as_tensor(stored.array()).contiguous() for name, stored in tensors.items()}, path)


@contextmanager
def _about(path: Path) -> Generator[None]:
    """Say in errors of a file's content whose it is."""
    try:
        yield
    except ConvertError as error:
        raise type(error)(f"{path}: {error}") from error


def _finite(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return tensors of a file that nothing was installed of, which is where NaN is refused otherwise."""
    called = {dtype: name for name, (_, dtype) in header.DTYPES.items()}
    for name, tensor in tensors.items():
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
            flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            check_values(flat.data, called[str(tensor.dtype).removeprefix("torch.")], name, str(path))
    return tensors


def _noted(record: Checkpoint, metadata: Mapping[str, str], model: type[Model]) -> Checkpoint | None:
    """Believe what `zoo convert` wrote into a file about the options and the preprocessing of its weights; None where it wrote nothing."""
    from zoo.conversion.foreign import notes

    told = notes(metadata, model)
    if not told:
        return None
    source = f"converted from {told['source'].get('file')}, sha256 {told['source'].get('sha256')}"
    steps = replace(record.preprocessing, **_steps(told["preprocessing"]))
    return replace(record, options=told["options"], provenance=source, preprocessing=steps, labels=told.get("labels"))


def _steps(told: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in told.items() if k in Preprocessing.__dataclass_fields__}


def _is_path(model: str, named: str | os.PathLike[str]) -> bool:
    """Tell a path from a tag: a registered tag is one, even where a file of that name lies around."""
    path = at_home(named)
    if isinstance(named, os.PathLike) or os.sep in named:
        return True
    if named in {c.tag for c in weights.checkpoints(model)}:
        return False
    return path.exists() or any(path.name.endswith(suffix) for module in formats.formats().values() for suffix in module.SUFFIXES)


def _recognised(unknown: Checkpoint, sha256: str) -> Checkpoint:
    """Return the registry's record of these bytes, or, with a word about what is assumed, the one of an unknown file."""
    known = weights.recognise(sha256)
    if known is not None and known.model == unknown.model:
        return known
    log.warning("%s is in no registry: %s", unknown.sources[0], unknown.provenance.partition("; ")[2])
    return replace(unknown, sha256=sha256)


def _unknown(model: type[Model], source: str, **facts: Any) -> Checkpoint:
    """Make the record of a source that no registry knows; its preprocessing is assumed to be that of the default checkpoint."""
    name = model.variant().__name__
    default = next((c for c in weights.checkpoints(name) if c.default), None)
    if default is not None:
        facts["preprocessing"] = default.preprocessing
        assumed = f"its preprocessing is assumed to be that of {name} {default.tag}"
        needs = ", ".join(f"{k}={v!r}" for k, v in default.options.items())
        facts["provenance"] = f"named by the user; {assumed}" + (f", but not the options of that: {needs}" if needs else "")
    elif model.input_size < 64:  # no ImageNet network, so not ImageNet's usual preprocessing
        side = model.input_size
        facts["preprocessing"] = replace(weights.adhoc(name, source).preprocessing, resize=side, crop=side)
    return weights.adhoc(name, source, **facts)


def _no_weights(model: type[Model]) -> str:
    near = []
    for c in nearest_with_weights(model):
        accuracy = f", top-1 {c.metrics['top1']:.2f} %" if "top1" in c.metrics else ""
        near.append(f"{c.model} ({CATALOGUE[c.model].params / 1e6:.1f} M parameters{accuracy})")
    return (
        f"no pretrained weights of {model.__name__} are known. Nearest with weights: {', '.join(near) or 'none'}. "
        f"If you have a file: zoo add FILE --model {model.__name__} --tag mine, or trained({model.__name__}, FILE)."
    )
