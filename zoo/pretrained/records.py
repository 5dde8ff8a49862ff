"""Records by their names: a tag, a URL or a command's word becomes a row of the registry. It needs no torch."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import weights
from weights import Checkpoint, NoPretrainedWeights, UnknownWeights, WeightsError, header
from weights.places import file_name
from weights.record import BY_NETWORK, KEPT, PERMISSIVE
from zoo.variants import CLASSIFICATION, Variant, of_all_tasks, spelt, variants

FILE = "file"
"""The format of a record whose file is kept as it is, and whose framework is seen when it is read.

All bytes of any file that is kept are one tensor of this name.
"""


def find_record(network: str | Variant, named: str | None = None) -> Checkpoint:
    """Find a record by its name: None means the default checkpoint, a tag another, a URL the row that has it or else an unknown one.

    Example:
        >>> find_record("ResNet20").tag
        'cifar10'

    Args:
        network: a name of the catalogue, or what is known of a network that it doesn't have.
        named: a tag or a URL.

    Raises:
        NoPretrainedWeights: no checkpoint of this network is known; the message names the nearest that have some.
        UnknownWeights: no checkpoint has this tag.
    """
    known = of_all_tasks()[network] if isinstance(network, str) else network
    if named is not None and "://" in named:
        registered = (c for c in weights.checkpoints(known.name) if named in c.sources)
        return next(registered, None) or unknown(known, named)
    try:
        return weights.find(known.name, named)
    except NoPretrainedWeights as error:
        raise NoPretrainedWeights(_no_weights(known)) from error


def record_of(name: str) -> Checkpoint:
    """Find a record by the name that commands and locks use, "ResNet50" or "ResNet50:imagenet1k_v1"; raises as `find_record` does."""
    model, colon, tag = name.partition(":")
    if colon and not tag:
        raise UnknownWeights(f"{name} names no checkpoint behind its colon: {spelt(model)}:TAG, or {spelt(model)} for the default")
    return find_record(spelt(model), tag or None)


def nearest_with_weights(here: Variant, count: int = 3) -> list[Checkpoint]:
    """List the default checkpoints of the variants most like a network: of its family first, then by parameter count."""
    known = variants()
    defaults = [c for c in weights.checkpoints() if c.default and c.model in known and c.num_classes == here.num_classes]

    def distance(checkpoint: Checkpoint) -> tuple[bool, float]:
        other = known[checkpoint.model]
        return other.family != here.family, abs(other.params - here.params)

    return sorted(defaults, key=distance)[:count]


def unknown(network: Variant, source: str, **facts: Any) -> Checkpoint:
    """Make the record of a source that no registry knows; its preprocessing is assumed to be that of the default checkpoint."""
    if foreign_format(source) is not None:
        facts = {"format": FILE, **facts}
    default = next((c for c in weights.checkpoints(network.name) if c.default), None)
    side = network.input_size
    if default is not None:
        facts["preprocessing"] = default.preprocessing
        assumed = f"its preprocessing is assumed to be that of {network.name} {default.tag}"
        needs = ", ".join(f"{k}={v!r}" for k, v in default.options.items())
        facts["provenance"] = f"named by the user; {assumed}" + (f", but not the options of that: {needs}" if needs else "")
    elif side < 64:  # no ImageNet network, so not ImageNet's usual preprocessing
        facts["preprocessing"] = replace(weights.adhoc(network.name, source).preprocessing, resize=side, crop=side)
    return weights.adhoc(network.name, source, **facts)


def foreign_format(source: str) -> str | None:
    """Tell of an address by the end of its file's name which other framework wrote that; None for what PyTorch writes, and for a path.

    Example:
        >>> foreign_format("hf://acme/wheels/model.keras")
        'keras'
    """
    if "://" not in source:
        return None
    from convert import formats

    known, last = formats.formats(), file_name(source).lower()
    own = tuple(suffix for name in ("safetensors", "pytorch") for suffix in known[name].SUFFIXES)
    return next((name for name, module in known.items() if last.endswith(module.SUFFIXES) and not last.endswith(own)), None)


def restriction(record: Checkpoint) -> str:
    """Say what a checkpoint's licence may forbid; "" where it allows every use, or nobody states one.

    Example:
        >>> restriction(find_record("ResNet50", "fb_ssl_yfcc100m_ft_in1k"))
        'not for commercial use'
    """
    if record.license in PERMISSIVE or record.license == "unstated":
        return ""
    if re.search("-NC-|noncommercial|non-commercial", record.license, re.IGNORECASE):
        return "not for commercial use"
    return "terms of its own; read them before you use it"


def to_safetensors(source: Path, destination: Path, record: Checkpoint | None = None) -> str:
    """Rewrite the pickled checkpoint `source` as safetensors, without running any of its code; a file that is safetensors is copied.

    A process of its own reads the pickle, see `convert.sandbox`; this one writes what it is told, and checks what it wrote. Keras's file
    becomes the tensors of the record's network as `trained(NETWORK, PATH)` makes them. Of the formats "file" and "darknet" the bytes are
    kept, as one tensor.

    Returns:
        The SHA-256 of the bytes that were converted: they were read once, and whoever writes to the file meanwhile comes too late.
    """
    import numpy as np

    from convert import sandbox
    from convert.formats import safetensors
    from convert.source import in_memory

    if record is not None and record.format in KEPT:
        sha256, data = weights.read_file(source)
        safetensors.save_stored({FILE: in_memory(FILE, np.frombuffer(data, np.uint8))}, destination)
        return sha256
    if record is not None and record.format in BY_NETWORK:
        return _as_network(source, destination, record)
    sha256, data = weights.read_file(source)
    if header.is_safetensors(data):
        destination.write_bytes(data)
        return sha256
    with sandbox.read(source, "pytorch", data=data, weights_of="all") as opened:
        del data  # the reader has its own copy
        safetensors.save_stored(opened.tensors, destination)
    return sha256


@contextmanager
def as_file(record: Checkpoint, data: Any) -> Iterator[tuple[Path, str]]:
    """Give a file that was kept back under the name that it has at its source, with its format; what goes wrong inside says the source.

    Args:
        record: whose format is one of `weights.record.KEPT`.
        data: a uint8 tensor of all of its bytes.
    """
    from convert import formats

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, plain_name(record.sources[0]))
        data.numpy().tofile(path)
        try:
            yield path, formats.sniff(path) if record.format == FILE else record.format
        except WeightsError as error:
            error.args = (str(error).replace(str(path), record.sources[0]), *error.args[1:])
            raise


def plain_name(source: str) -> str:
    """Name the file of a source so that no folder has trouble with it."""
    return re.sub(r"[^\w.-]", "_", file_name(source))[-100:].lstrip(".") or "weights"


def _as_network(source: Path, destination: Path, record: Checkpoint) -> str:
    """Write another framework's file as the tensors of a record's network, by its names and with the record's options.

    It is read under the name that its publisher gave it: "tf_kernels" in that is all that some of Keras's files say of their convention.
    """
    from convert.formats import safetensors
    from zoo.catalogue import model_class
    from zoo.conversion.namings import open_foreign
    from zoo.conversion.notes import file_sha256

    cls = model_class(record.model)
    with tempfile.TemporaryDirectory() as folder:
        named = Path(folder, plain_name(record.sources[0]))
        try:
            named.symlink_to(source.absolute())
        except OSError:  # where links are a privilege
            shutil.copyfile(source, named)
        try:
            foreign = open_foreign(named, cls, format=record.format, naming=record.names, **record.options)
            with foreign.source:
                safetensors.save_stored(foreign.adopted.tensors, destination)
        except WeightsError as error:
            error.args = (str(error).replace(str(named), str(source)), *error.args[1:])
            raise
    return file_sha256(source)


def _no_weights(network: Variant) -> str:
    if network.task != CLASSIFICATION:
        return f"no pretrained weights of {network.name} are known. If you have a file: trained({network.name}, FILE)."
    near = []
    for c in nearest_with_weights(network):
        accuracy = f", top-1 {c.metrics['top1']:.2f} %" if "top1" in c.metrics else ""
        near.append(f"{c.model} ({variants()[c.model].params / 1e6:.1f} M parameters{accuracy})")
    return (
        f"no pretrained weights of {network.name} are known. Nearest with weights: {', '.join(near) or 'none'}. "
        f"If you have a file: zoo add FILE {network.name}:mine, or trained({network.name}, FILE)."
    )
