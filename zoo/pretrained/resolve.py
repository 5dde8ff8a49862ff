"""What the weights that `trained` is asked for are: the record of a tag, a URL or a path, and its tensors under the file's own names."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
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
from convert.source import Convention, Spatial, Stored
from weights import (
    Checkpoint,
    ConvertError,
    HashMismatch,
    Preprocessing,
    UnknownWeights,
    UnsupportedFormat,
    WeightsMismatch,
    header,
)
from weights.containers import open_any
from weights.digests import of_bytes
from weights.errors import NonFinite
from weights.finite import check_values
from weights.places import at_home
from weights.record import KEPT
from zoo.conversion.beside import Beside, beside_file, beside_source
from zoo.conversion.pixels import known_pixels
from zoo.networks.model import Model
from zoo.networks.published import Published
from zoo.pretrained.records import FILE, as_file, find_record, to_safetensors, unknown
from zoo.pretrained.run_folder import WEIGHTS, is_run, read_row, unfinished
from zoo.variants import described

log = logging.getLogger("zoo")


def find(
    model: type[Model],
    named: str | os.PathLike[str] | None,
    verify: str,
    progress: bool,
    frozen: bool | None,
    told: tuple[Convention | None, Spatial | None, bool],
    new_head: bool,
    options: Mapping[str, Any],
    weights_of: str | None = None,
) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Find the record that is named, and its tensors under the file's own names; known bytes bring their record along.

    Args:
        model, named, verify, progress, frozen, options, weights_of: as `trained` takes them.
        told: what is said of a foreign file: its kernels' convention, the order of their sides, and whether its tensors are matched.
        new_head: whether the file may lack a classifier.
    """
    name = model.variant().__name__
    if named is not None and "://" not in os.fspath(named) and is_path(name, named):
        path = at_home(named)
        if not path.exists():
            tags = ", ".join(c.tag for c in weights.checkpoints(name)) or "none is known"
            raise UnknownWeights(f"{path} is no file. trained({name}, …) takes a tag ({tags}), a URL or a path.")
        if path.is_dir() and is_run(path):
            _has_no_say(told, f"the run in {path}")
            return of_run(model, path, weights_of)
        if why := unfinished(path):
            raise UnknownWeights(why)
        try:
            format = formats.sniff(path)
        except UnsupportedFormat:
            if path.is_dir():
                raise UnknownWeights(f"{path} is a folder, and no checkpoint of a kind that is one (TensorFlow's, Orbax)") from None
            raise
        if any(told) or format not in ("safetensors", "pytorch") or path.name.endswith(".json"):  # an index of shards
            return _foreign(model, path, format, told, new_head, options, weights_of)
        sha256, buffer = weights.read_file(path)
        record = unknown(described(model), str(path), sha256=sha256)
        if format == "pytorch":
            with sandbox.read(path, format, data=buffer, weights_of=weights_of) as opened:
                return _known(record, sha256, model, options, lambda: beside_file(path, model), buffer), loaded(opened.tensors, path)
        with _about(path):
            noted = _noted(record, header.metadata(buffer), model)
            tensors = chosen(safetensors.tensors(buffer), weights_of, path)
        return noted or _known(record, sha256, model, options, lambda: beside_file(path, model)), all_finite(tensors, path)
    record = find_record(described(model), None if named is None else os.fspath(named))
    record, buffer = open_any(record, to_safetensors=to_safetensors, verify=verify, progress=progress, frozen=frozen)
    if record.format in KEPT:
        return _of_file(model, record, safetensors.tensors(buffer)[FILE], told, new_head, options, weights_of)
    if record.num_classes or record.embedding:
        _has_no_say(told, f"{record.model}:{record.tag}")
    elif any(told):
        content = torch.frombuffer(bytearray(buffer), dtype=torch.uint8)
        found, tensors = _of_file(model, replace(record, format="safetensors"), content, told, new_head, options, weights_of)
        served = weights.get(record, to_safetensors=to_safetensors, frozen=frozen).source_sha256
        return replace(found, sha256=served), tensors
    else:
        sha256 = weights.get(record, to_safetensors=to_safetensors, frozen=frozen).source_sha256
        asked = record
        record = _known(record, sha256, model, options, lambda: beside_source(asked, model, frozen))
    return record, chosen(safetensors.tensors(buffer), weights_of, f"{record.model}:{record.tag}")


def _has_no_say(told: tuple[Convention | None, Spatial | None, bool], whose: str) -> None:
    """Refuse options of foreign files for other files."""
    said = [name for name, value in zip(("kernel_convention", "spatial", "match"), told, strict=True) if value]
    if said:
        raise TypeError(f"{whose} says itself how it is to be read, so leave {' and '.join(said)} out: that is for files of others")


def _of_file(model: type[Model], record: Checkpoint, data: Tensor, *how: Any, **more: Any) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Read another framework's file that came from an address, as `_foreign` reads one that lies here, under the name that it has there."""
    with as_file(record, data) as (path, format):
        return _foreign(model, path, format, *how, **more, source=record.sources[0])


def of_run(model: type[Published], folder: Path, weights_of: str | None = None) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Read the result of `zoo finetune`: its folder holds a row of the registry and the file that the row promises."""
    record = read_row(folder)
    if record.model != model.variant().__name__:
        raise WeightsMismatch(f"{folder} is a run of {record.model}: trained({record.model}, …), not of {model.variant().__name__}")
    file = folder / WEIGHTS
    sha256, buffer = weights.read_file(file)
    if sha256 != record.sha256:
        raise HashMismatch(f"{file}: expected sha256 {record.sha256}, got {sha256}; zoo finetune --resume {folder} writes it again")
    return record, all_finite(chosen(safetensors.tensors(buffer), weights_of, file), file)


def _foreign(
    model: type[Model],
    path: Path,
    format: str,
    told: tuple[Convention | None, Spatial | None, bool],
    new_head: bool,
    options: Mapping[str, Any],
    weights_of: str | None,
    source: str | None = None,
) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Read another framework's file: its tensors under our names, and a record with the options that it needs.

    `source` is where it came from, if not from `path`.
    """
    from zoo.conversion.namings import open_foreign
    from zoo.conversion.notes import companions, file_sha256

    asked: dict[str, Any] = {"format": format, "convention": told[0], "spatial": told[1], "match": told[2], "weights_of": weights_of}
    try:
        foreign = open_foreign(path, model, **asked, **options)
    except WeightsMismatch:
        if not new_head:
            raise
        foreign = open_foreign(path, model, headless=True, **asked, **options)
    with foreign.source:
        tensors = loaded(foreign.adopted.tensors, path)
    sha256, beside = file_sha256(path), {name: file_sha256(path.parent / name) for name in foreign.source.beside}
    known = {"options": {k: v for k, v in foreign.options.items() if k not in options}, "sha256": sha256, "labels": foreign.labels}
    source = source or str(path)
    record, steps = unknown(described(model), source, **known), _steps(foreign.preprocessing)
    if not {"mean", "std"} <= steps.keys():
        record = _recognised(record, sha256)
    if beside and record.tag == source:
        record = replace(record, provenance=f"{record.provenance}{companions(beside)}")
    if (pixels := known_pixels(foreign, {})).status == "guessed" and record.tag == source:
        record = replace(record, pixels=pixels.said.removeprefix("pixels "))
    return replace(record, preprocessing=replace(record.preprocessing, **steps)), tensors


def loaded(tensors: Mapping[str, Stored], path: Path) -> dict[str, Tensor]:
    """Read the tensors of an open file; NaN and infinity are refused."""
    from convert.formats._torch import as_tensor

    return all_finite({name: as_tensor(stored.array()).contiguous() for name, stored in tensors.items()}, path)


@contextmanager
def _about(path: Path) -> Generator[None]:
    """Say in errors of a file's content whose it is."""
    try:
        yield
    except ConvertError as error:
        raise type(error)(f"{path}: {error}") from error


def all_finite(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return tensors of a file that nothing was installed of, which is where NaN is refused otherwise."""
    called = {dtype: name for name, (_, dtype) in header.DTYPES.items()}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in called and (tensor.is_floating_point() or tensor.is_complex()):  # no file of safetensors has such
            if not (tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()).isfinite().all():
                raise NonFinite(f"{path}: {name!r} holds NaN or an infinity; use another checkpoint")
        elif (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
            flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            check_values(flat.data, called[dtype], name, str(path))
    return tensors


def _noted(record: Checkpoint, metadata: Mapping[str, str], model: type[Model]) -> Checkpoint | None:
    """Believe what `zoo convert` wrote into a file about the options and the preprocessing of its weights; None where it wrote nothing."""
    from zoo.conversion.notes import companions, notes

    told = notes(metadata, model)
    if not told:
        return None
    beside: Any = told["source"].get("beside")
    source = f"converted from {told['source'].get('file')}, sha256 {told['source'].get('sha256')}"
    source += companions(beside) if isinstance(beside, Mapping) else ""
    steps = replace(record.preprocessing, **_steps(told["preprocessing"]))
    pixels = str(told["pixels"].get("said", ""))[:300].removeprefix("pixels ") or None
    return replace(record, options=told["options"], provenance=source, preprocessing=steps, labels=told.get("labels"), pixels=pixels)


def _steps(told: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in told.items() if k in Preprocessing.__dataclass_fields__}


def is_path(model: str, named: str | os.PathLike[str]) -> bool:
    """Tell a path from a tag: a registered tag is one, even where a file of that name lies around."""
    path = at_home(named)
    if isinstance(named, os.PathLike) or os.sep in named:
        return True
    if os.fspath(named).lower() in {c.tag.lower() for c in weights.checkpoints(model)}:
        return False
    return path.exists() or any(path.name.endswith(suffix) for module in formats.formats().values() for suffix in module.SUFFIXES)


def _known(
    unknown: Checkpoint,
    sha256: str,
    model: type[Model],
    options: Mapping[str, Any],
    read: Callable[[], Beside | None],
    data: memoryview | None = None,
) -> Checkpoint:
    """Return the registry's record of these bytes, or else the one of an unknown file, completed by what files beside it say."""
    known = weights.recognise(sha256, None if data is None else partial(of_bytes, data))
    if (known is not None and known.model == unknown.model) or (beside := read()) is None:
        return _recognised(unknown, sha256, data)
    if not beside.preprocessing:
        files = " and ".join(beside.files)
        say = "do not say" if len(beside.files) > 1 else "does not say"
        log.warning("%s is in no registry, and %s %s how its images are prepared", unknown.sources[0], files, say)
    return beside.record(unknown, model, options).hashed(sha256)


def _recognised(unknown: Checkpoint, sha256: str, data: memoryview | None = None) -> Checkpoint:
    """Return the registry's record of these bytes, or, with a word about what is assumed, the one of an unknown file."""
    known = weights.recognise(sha256, None if data is None else partial(of_bytes, data))
    if known is not None and known.model == unknown.model:
        return known
    log.warning("%s is in no registry: %s", unknown.sources[0], unknown.provenance.partition("; ")[2])
    return unknown.hashed(sha256)
