"""What `zoo convert` notes in the metadata of a file that it writes, read back and checked; and the hash of a file in any form."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import weights
from convert.formats import _sharded
from weights.documents import misread, read_json

if TYPE_CHECKING:
    from zoo.networks.model import Model

NOTES = "kernelzoo"
"""The key of our notes in the metadata of a safetensors file."""


def notes(facts: Mapping[str, str], model: type[Model]) -> dict[str, Any]:
    """Read what `zoo convert` wrote into a file about the weights of `model`; {} where it wrote nothing, or about another network.

    Raises:
        MalformedFile: the notes are damaged.
    """
    if NOTES not in facts:
        return {}
    what, todo = "the notes of `zoo convert` in this file's metadata", "Convert the file again"
    told = read_json(facts[NOTES], what, todo)
    with misread(f"{what} are damaged", todo, wraps=weights.BadRecord):  # there is no record: the notes are what is wrong
        if told["model"] != model.variant().__name__:
            return {}
        steps = {key: value for key, value in told["preprocessing"].items() if value is not None}
        told["preprocessing"] = asdict(weights.adhoc(told["model"], "file:///none", preprocessing=steps).preprocessing)
        told["pixels"] = dict(told.get("pixels") or {})
        return {**told, "options": _suited(model, dict(told["options"])), "source": dict(told["source"])}


def _suited(model: type[Model], options: dict[str, Any]) -> dict[str, Any]:
    """Check that noted options are of their defaults' types: a network would take others, and fail when it computes."""
    usual = accepted(model)
    for name, value in options.items():
        kinds = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}.get(type(usual.get(name)), (bool, int, float, str))
        if type(value) not in kinds:
            raise TypeError(f"the option {name} can't be {str(value)[:100]!r}")
    return options


def accepted(model: type[Model]) -> dict[str, Any]:
    """Return the keywords that a class and its bases take, with their defaults; a subclass's win."""
    bases = [base.__init__ for base in reversed(model.__mro__) if "__init__" in vars(base)]
    return {name: parameter.default for init in bases for name, parameter in inspect.signature(init).parameters.items()}


def companions(hashes: Mapping[str, Any]) -> str:
    """Say which other files a source was read from: ", with lenet.bin, sha256 …"; "" where there are none."""
    return "".join(f", with {str(name)[:100]}, sha256 {str(sha256)[:64]}" for name, sha256 in hashes.items())


def file_sha256(path: Path) -> str:
    """Hash a file; of a folder, the names and hashes of its files in the order of their names; of an index, its shards too."""
    if path.is_dir():
        whole = hashlib.sha256()
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            whole.update(f"{file.relative_to(path).as_posix()}\0{file_sha256(file)}\n".encode())
        return whole.hexdigest()
    if not path.exists():  # the prefix of a TensorFlow checkpoint's files
        parts = sorted(path.parent.glob(f"{path.name}.*"))
        return hashlib.sha256("\n".join(f"{part.suffix}\0{file_sha256(part)}" for part in parts).encode()).hexdigest()
    if path.name.endswith(".index.json"):  # which holds no numbers: those are in its shards
        shards = [path.with_name(name) for name in dict.fromkeys(_sharded.listed(path).values())]
        whole = hashlib.sha256(path.read_bytes())  # of a length that `listed` has checked
        whole.update("".join(f"\n{shard.name}\0{file_sha256(shard)}" for shard in shards).encode())
        return whole.hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
