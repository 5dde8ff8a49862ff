"""Ours, to a file of another framework, and back: every bit must come home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity import randomised

from convert import formats
from convert.core import COUNTER
from convert.formats._torch import as_array
from convert.network import layers
from convert.source import Convention
from zoo.converting import naming_for, write_network
from zoo.foreign import adopted
from zoo.model import CATALOGUE, Model


def built(name: str, **options: Any) -> Model:
    """Make a network with random weights that neither vanish nor explode."""
    with torch.device("meta"):
        network = CATALOGUE[name](**options)
    network.load_state_dict(randomised(network), assign=True)
    return network.eval()


def differences(network: Model, format: str, convention: Convention | None, folder: Path) -> list[str]:
    """Write the network, read it back, and name the tensors that are not the same bits."""
    writer = formats.formats()[format]
    path = folder / f"x{writer.SUFFIXES[0]}"
    shape = (network.in_channels, network.input_size, network.input_size)
    structure = layers(network, shape)
    metadata = {"format": "pt"}
    if getattr(writer, "EXPORTS", False):
        writer.export(network, path, input_shape=shape, metadata=metadata, verify=False)
    else:
        write_network(network, path, writer, naming_for(format, "auto", type(network), network), convention, metadata, structure)
    wrong = []
    with formats.read(path) as source:
        assert source.format == format
        silent = source.positional or "unknown" in source.conventions
        found = adopted(source, type(network), convention=convention if silent else None, spatial="hw")
        for name, tensor in network.state_dict().items():
            if name.endswith(COUNTER):
                continue
            here = as_array(tensor)
            there = np.ascontiguousarray(found.adopted.tensors[name].array())
            if there.dtype != here.dtype or there.shape != here.shape or there.tobytes() != here.tobytes():
                wrong.append(name)
    for file in folder.iterdir():
        file.unlink()
    return wrong
