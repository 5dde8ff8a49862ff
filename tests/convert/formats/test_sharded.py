"""Checkpoints in shards, by the index beside them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from convert import sandbox
from convert.formats import safetensors
from weights.errors import LimitExceeded, MalformedFile, UnsafeFormat
from zoo.conversion.notes import file_sha256

STATE = {"conv.weight": torch.arange(36.0).reshape(2, 2, 3, 3), "conv.bias": torch.ones(2), "fc.weight": torch.rand(3, 2)}
SHARDS = [["conv.weight", "conv.bias"], ["fc.weight"]]


def index(folder: Path, ending: str, **changed: object) -> Path:
    """Write two shards and what says which tensor is in which."""
    places: dict[str, object] = {}
    for number, names in enumerate(SHARDS, start=1):
        name = f"model-0000{number}-of-00002.{ending}"
        held: dict[str, Tensor] = {one: STATE[one] for one in names}
        safetensors.save(held, folder / name) if ending == "safetensors" else torch.save(held, folder / name)
        places |= dict.fromkeys(names, name)
    made = folder / f"model.{ending}.index.json"
    made.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": {**places, **changed}}))
    return made


@pytest.mark.parametrize(("ending", "format"), [("safetensors", "safetensors"), ("bin", "pytorch")])
def test_shards_are_one_file(ending: str, format: str, tmp_path: Path) -> None:
    with sandbox.read(index(tmp_path, ending)) as source:
        assert source.format == format
        assert source.facts["shards"] == "2"
        for name, tensor in STATE.items():
            assert torch.equal(torch.from_numpy(source.tensors[name].array().copy()), tensor)
        assert source.tensors["conv.weight"].convention == "correlation"


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"other": "model-00003-of-00003.safetensors"}, MalformedFile, "not beside it. Fetch all"),
        ({"other": "../secret.safetensors"}, UnsafeFormat, "own folder"),
        ({"other": "/etc/passwd"}, UnsafeFormat, "own folder"),
        ({"other": 3}, MalformedFile, "something else than names"),
    ],
)
def test_a_wrong_index_is_refused(ending: str, changed: dict[str, object], error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        sandbox.read(index(tmp_path, ending, **changed))


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    path = index(tmp_path, "safetensors", **{"other.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(MalformedFile, match=r"'other\.weight' is in model-00001-of-00002\.safetensors, and it is not"):
        sandbox.read(path)


def test_deep_or_long_indices_are_refused(tmp_path: Path) -> None:
    made = index(tmp_path, "safetensors")
    made.write_text('{"weight_map": {"a": "x.safetensors", "b": ' + "[" * 100_000 + "]" * 100_000 + "}}")
    with pytest.raises((MalformedFile, LimitExceeded)):
        sandbox.read(made)


def test_the_hash_of_an_index_is_of_its_shards_too(tmp_path: Path) -> None:
    made = index(tmp_path, "safetensors")
    before = file_sha256(made)
    assert before == file_sha256(made) != hashlib.sha256(made.read_bytes()).hexdigest()
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    assert file_sha256(made) != before
