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
from convert.network import Layer, layers
from convert.source import Convention
from zoo.catalogue import CATALOGUE
from zoo.conversion.export import naming_for, write_network
from zoo.conversion.namings import adopted
from zoo.networks.model import Model


def built(name: str, **options: Any) -> Model:
    """Make a network with random weights that neither vanish nor explode."""
    with torch.device("meta"):
        network = CATALOGUE[name](**options)
    state = randomised(network)
    if name == "InceptionV3":  # Keras's BatchNorms have no scale there; another one is folded, which rounds
        state |= {key: torch.ones_like(value) for key, value in state.items() if key.endswith("bn.weight")}
    network.load_state_dict(state, assign=True)
    return network.eval()


COMBINATIONS: dict[str, tuple[str, tuple[Convention, ...]]] = {
    # the ending of the file, and what its framework's layers can compute
    "keras": (".h5", ("correlation", "convolution")),
    "bson": (".bson", ("correlation", "convolution")),
    "jld2": (".jld2", ("correlation", "convolution")),
    "npz": (".npz", ("correlation", "convolution")),
    "theano": (".pkl", ("correlation", "convolution")),
    "matconvnet": (".mat", ("correlation", "convolution")),
    "darknet": (".weights", ("correlation", "convolution")),
    "flax": (".msgpack", ("correlation",)),
    "onnx": (".onnx", ("correlation",)),
    "openvino": (".xml", ("correlation",)),
    "pytorch": (".pth", ("correlation",)),
    "safetensors": (".safetensors", ("correlation",)),
}


def differences(network: Model, format: str, convention: Convention, folder: Path, ending: str = "") -> list[str]:
    """Write the network, read it back, and name the tensors that are not the same bits."""
    path = written(network, format, convention, folder / f"x{ending or COMBINATIONS[format][0]}")
    wrong = []
    with formats.read(path) as source:
        assert source.format == format
        silent = source.positional or "unknown" in source.conventions
        found = adopted(source, type(network), convention=convention if silent else None, spatial="hw", **_constructor(network))
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


def written(network: Model, format: str, convention: Convention, path: Path) -> Path:
    """Write the network."""
    writer = formats.formats()[format]
    if getattr(writer, "EXPORTS", False):
        shape = (network.in_channels, network.input_size, network.input_size)
        writer.export(network, path, input_shape=shape, metadata={}, verify=False)
    else:
        naming = naming_for(format, "auto", type(network), network)
        write_network(network, path, writer, naming, convention, {}, _layers(type(network), network))
    return path


def _layers(cls: type[Model], network: Model) -> list[Layer]:
    if cls not in _known:
        _known[cls] = layers(network, (network.in_channels, network.input_size, network.input_size))
    return _known[cls]


_known: dict[type[Model], list[Layer]] = {}


def _constructor(network: Model) -> dict[str, Any]:
    return {"num_classes": network.num_classes, "in_channels": network.in_channels}
