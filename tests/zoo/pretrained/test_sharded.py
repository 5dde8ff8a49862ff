"""`trained` takes a checkpoint in shards by its index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weights.errors import MalformedFile
from zoo import ResNet20, trained

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_a_network_is_filled_from_all_shards(tmp_path: Path) -> None:
    state = ResNet20().state_dict()
    names = list(state)
    for shard, some in zip(SHARDS, (names[:50], names[50:]), strict=True):
        save_file({name: state[name] for name in some}, tmp_path / shard)
    places = {name: SHARDS[number >= 50] for number, name in enumerate(names)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    found = trained(ResNet20, index).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    index.write_text(json.dumps({"weight_map": places | {names[-1]: index.name}}))
    with pytest.raises(MalformedFile, match="as a shard"):
        trained(ResNet20, index)
