"""Write Keras's files: weights alone with h5py, whole models with the architecture that Keras itself states.

A ``.weights.h5`` file names a layer by its class and a count in the order of ``model.layers``, and a legacy ``.h5`` file lists layers
in that order; Keras reads both by it. So the parts must come in that order, as the rows of `convert.names.keras` do.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from convert._guard import need
from convert.formats import _keras_model
from convert.formats._outlet import outlet
from convert.kinds import is_dict
from convert.names.keras import IMAGENET
from convert.source import Convention, Part, Stored, in_memory, laid_out, reflattened
from convert.steps import Shape
from weights.documents import read_json
from weights.errors import ConvertError, MalformedFile

NOTES = "kernelzoo"
"""Name of the dataset, and of the entry in a .keras file's metadata, that holds where the tensors came from."""

WHOLE = (".keras", ".model.h5")
"""Endings of whole models; `.weights.h5` is Keras 3's weights, any other `.h5` or `.hdf5` the weights that all versions since 2 read."""

LAYOUTS = {2: "IO", 3: "WIO", 4: "HWIO", 5: "DHWIO"}
# Keras's class, its name in a .weights.h5 file, and its variables in order: our leaf, their name
KINDS: dict[str, tuple[tuple[str, str], ...]] = {
    "conv": (("weight", "kernel"), ("bias", "bias")),
    "transposed": (("weight", "kernel"), ("bias", "bias")),
    "depthwise": (("weight", "depthwise_kernel"), ("bias", "bias")),
    "linear": (("weight", "kernel"), ("bias", "bias")),
    "norm": (("weight", "gamma"), ("bias", "beta"), ("running_mean", "moving_mean"), ("running_var", "moving_variance")),
    "layer_normalization": (("weight", "gamma"), ("bias", "beta")),
    "layer_scale": (("weight", "variable"),),
}
CONVNEXT = re.compile(r"(\w+)_stem\.\1_stem_conv")
"""The first layer of a ConvNeXt: all others begin with the network's name, too."""
HALVES = (".depthwise", ".pointwise")
VERSION = "2.3.1"
"""Of the Keras whose dialect a legacy file speaks: the last with every backend; later ones read it too."""
ATTRIBUTE_BYTES = 64_000
"""An attribute of HDF5 can't be longer; Keras cuts its lists into several then."""
SLAB_BYTES = 2**24
EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a Keras model: its name, its class in snake case, and its variables under Keras's names, in its form and order.

    A model within the model has its layers in `inner`, and all their variables.
    """

    name: str
    kind: str
    variables: tuple[Stored, ...]
    inner: tuple[Layer, ...] = ()


def write(parts: Sequence[Part], path: Path, *, convention: Convention | None = None, metadata: Mapping[str, str]) -> None:
    """Write a model or its weights, as the ending of `path` says; the same input always gives the same bytes.

    Args:
        parts: in the order of Keras's layers.
        path: ".weights.h5" is Keras 3's, ".h5" and ".hdf5" legacy weights; ".keras" and ".model.h5" are whole models, whose last
            layer gives logits.
        convention: "convolution" writes a legacy file as Keras with Theano did, whose readers flip the kernels back. A depthwise
            kernel is never flipped there.
        metadata: what `zoo convert` notes; the model's name, its options and its preprocessing in it matter here.

    Raises:
        ConvertError: a file of this ending can't hold it; the message says which can.
        MissingLibrary: h5py is not installed, or for a whole model Keras.
    """
    if path.name.endswith(".weights.json"):
        raise ConvertError(f"{path.name}: weights in shards are read and not written; write them into one file, .weights.h5")
    h5py = need("h5py")
    notes = _notes(metadata)
    layers = _layers(parts, convention == "convolution", metadata.get("naming", "keras"), notes)
    legacy = path.name.endswith((".h5", ".hdf5")) and not path.name.endswith((".weights.h5", *WHOLE))
    if convention == "convolution" and not legacy:
        raise ConvertError(f"{path.name}: Keras 3 has no backend with true convolution; a legacy file, .h5, of weights says Theano's")
    if path.name.endswith(".keras"):
        _write_model(h5py, layers, path, notes, metadata)
        return
    if path.name.endswith(WHOLE):
        _keras_model.save([(layer.name, layer.variables) for layer in layers], notes, path)
        with h5py.File(path, "r+") as file:
            _note(file, metadata)
        return
    with outlet(path) as made, h5py.File(made, "w") as file:
        if legacy:
            _write_legacy(file, layers, "theano" if convention == "convolution" else "tensorflow")
        else:
            _write_v3(file, layers)
        _note(file, metadata)


def _note(file: Any, metadata: Mapping[str, str]) -> None:
    """Keep where the tensors came from in a dataset beside the layers, which Keras never looks at."""
    if NOTES in metadata:
        file.create_dataset(NOTES, data=metadata[NOTES].encode())


def _notes(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    try:
        notes = read_json(metadata.get(NOTES, "{}"), "the notes")
    except MalformedFile:
        return {}
    return notes if is_dict(notes) else {}


SECOND = "EfficientNetV2_"
"""How networks are called whose Keras model begins like EfficientNet and keeps nothing of its images: S, M and L rescale them, and the
mean and variance of B0 to B3 are constants of the layer."""


def _layers(parts: Sequence[Part], theano: bool, naming: str, notes: Mapping[str, Any]) -> list[Layer]:
    """Turn parts into layers: two halves of a separable convolution are one, and EfficientNet begins by normalising.

    ConvNeXt has a Sequential for its stem and for each convolution that halves the map.
    """
    convnext = naming == "keras" and bool(parts) and CONVNEXT.fullmatch(parts[0].name) is not None
    parts = [_convnexts(part) for part in parts] if convnext else parts
    names = {part.name for part in parts}
    made: list[Layer] = []
    halves: dict[str, tuple[Stored, ...]] = {}
    for part in parts:
        whole = next((part.name.removesuffix(half) for half in HALVES if part.name.endswith(half)), None)
        if whole is None or any(whole + half not in names for half in HALVES):
            made.append(Layer(part.name, _class(part), _variables(part, theano)))
            continue
        variables = _variables(part, theano=False)  # Keras flips no separable kernel
        if part.name.endswith(".pointwise"):
            variables = (replace(variables[0], origin="pointwise_kernel"), *variables[1:])
        if whole in halves:
            made.append(Layer(whole, "separable_conv2d", (*halves[whole], *variables)))
        else:
            halves[whole] = variables
    if naming == "keras" and made and made[0].name == "stem_conv" and not str(notes.get("model")).startswith(SECOND):
        made.insert(0, _normalization({**IMAGENET, **(notes.get("preprocessing") or {})}))
    return _sequentials(made) if convnext else made


def _convnexts(part: Part) -> Part:
    """Say what Keras's ConvNeXt makes of a part: its depthwise convolutions are grouped ones there."""
    kinds = {"depthwise": "conv", "parameter": "layer_scale", "other": "layer_normalization"}
    return replace(part, kind=kinds.get(part.kind, part.kind))


def _sequentials(layers: Sequence[Layer]) -> list[Layer]:
    """Put layers that are called `model.layer` into the models of their names."""
    made: list[Layer] = []
    for name, members in groupby(layers, lambda layer: layer.name.rpartition(".")[0] or layer.name):
        inner = tuple(replace(layer, name=layer.name.rpartition(".")[2]) for layer in members)
        variables = tuple(variable for layer in inner for variable in layer.variables)
        made.extend([Layer(name, "sequential", variables, inner)] if len(inner) > 1 else inner)
    return made


def _class(part: Part) -> str:
    if part.kind in ("conv", "transposed", "depthwise"):
        axes = len(part.leaves["weight"].shape) - 2
        return {"conv": "conv{}d", "transposed": "conv{}d_transpose", "depthwise": "depthwise_conv{}d"}[part.kind].format(axes)
    return {"linear": "dense", "norm": "batch_normalization"}.get(part.kind, part.kind)


def _normalization(prepared: Mapping[str, Any]) -> Layer:
    """Make the layer that does in EfficientNet what preprocessing does here: Keras's takes images of 0..255."""
    arrays = {
        "mean": np.array(prepared["mean"], np.float32),
        "variance": np.array(prepared["std"], np.float32) ** 2,
        "count": np.array(0, np.int32),
    }
    return Layer("normalization", "normalization", tuple(in_memory(name, array) for name, array in arrays.items()))


def _variables(part: Part, theano: bool) -> tuple[Stored, ...]:
    if part.kind not in KINDS:
        raise ConvertError(f"{part.name}: Keras's files hold {', '.join(KINDS)} layers, not one of kind {part.kind!r}")
    made: list[Stored] = []
    for leaf, name in KINDS[part.kind]:
        if leaf not in part.leaves:
            continue
        stored = part.leaves[leaf]
        if leaf == "weight" and part.kind not in ("norm", "layer_normalization", "layer_scale"):
            layout, multiplier = _layout(part, stored.shape)
            if part.kind == "linear" and part.grid is not None:
                stored = reflattened(stored, part.grid)
            depthwise = part.groups > 1 and stored.shape[1] == 1
            flipped = theano and part.kind in ("conv", "transposed") and not depthwise
            stored = laid_out(stored, part.kind, layout, flipped=flipped, multiplier=multiplier)
        made.append(replace(stored, origin=name))
    return tuple(made)


def _layout(part: Part, shape: Shape) -> tuple[str, int]:
    """Tell how Keras lays out a weight, and of a depthwise one how many outputs an input has."""
    layout = LAYOUTS[len(shape)]
    if part.kind == "depthwise":
        return layout[:-2] + "CM", shape[0] // part.groups
    return layout[:-2] + "OI" if part.kind == "transposed" else layout, 1


def _write_legacy(file: Any, layers: Sequence[Layer], backend: str) -> None:
    """Write the form of Keras 1 and 2: a group for each layer, and lists of names as attributes."""
    _attribute(file, "layer_names", [layer.name for layer in layers])
    file.attrs["backend"] = backend.encode()
    file.attrs["keras_version"] = VERSION.encode()
    for layer in layers:
        group = file.require_group(layer.name)
        held = [
            (f"{layer.name}/{one.name}" if layer.inner else layer.name, each) for one in layer.inner or (layer,) for each in one.variables
        ]
        _attribute(group, "weight_names", [f"{scope}/{variable.origin}:0" for scope, variable in held])
        for scope, variable in held:
            _fill(group, f"{scope}/{variable.origin}:0", variable.array())


def _write_v3(file: Any, layers: Sequence[Layer]) -> None:
    """Write the form of Keras 3: layers counted by class, variables by position, and the name as an attribute."""
    counts: Counter[str] = Counter()
    for layer in layers:
        number = counts[layer.kind]
        counts[layer.kind] += 1
        group = file.create_group(f"layers/{layer.kind}{f'_{number}' if number else ''}/vars")
        group.attrs["name"] = layer.name
        if layer.inner:
            _write_v3(group.parent, layer.inner)
            continue
        for place, variable in enumerate(layer.variables):
            array = variable.array()
            if array.dtype.name == "bfloat16":  # HDF5 has no such type
                _fill(group, str(place), array.view("V2"))
                group[str(place)].attrs["dtype"] = "bfloat16"
            else:
                _fill(group, str(place), array)


def _attribute(group: Any, name: str, values: Sequence[str]) -> None:
    encoded = np.array([value.encode() for value in values]) if values else np.zeros(0, "S1")
    pieces = -(-encoded.nbytes // ATTRIBUTE_BYTES)
    if pieces <= 1:
        group.attrs[name] = encoded
        return
    for number, piece in enumerate(np.array_split(encoded, pieces + 1)):
        group.attrs[f"{name}{number}"] = piece


def _fill(group: Any, name: str, array: np.ndarray) -> None:
    """Write an array in slabs, so that no second copy of a transposed one is made."""
    if array.dtype.name == "bfloat16":
        raise ConvertError(f"{name}: a legacy file can't hold bfloat16; .weights.h5 can")
    dataset = group.create_dataset(name, array.shape, array.dtype)
    if array.ndim == 0 or array.nbytes <= SLAB_BYTES:
        dataset[()] = array
        return
    rows = max(1, SLAB_BYTES // (array.nbytes // array.shape[0]))
    for start in range(0, array.shape[0], rows):
        dataset[start : start + rows] = array[start : start + rows]


def _write_model(h5py: Any, layers: Sequence[Layer], path: Path, notes: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write a .keras file: a zip of the architecture, which Keras states, and of a weights file."""
    config, version = _keras_model.config([(layer.name, layer.variables) for layer in layers], notes, path)
    described = {"keras_version": version, "date_saved": "1980-01-01@00:00:00"}  # the same input gives the same bytes
    if NOTES in metadata:
        described[NOTES] = metadata[NOTES]
    with TemporaryDirectory(dir=path.parent) as folder:
        weights = Path(folder) / "model.weights.h5"
        with outlet(weights) as made, h5py.File(made, "w") as file:
            _write_v3(file, layers)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, text in (("metadata.json", json.dumps(described)), ("config.json", config)):
                archive.writestr(zipfile.ZipInfo(name, EPOCH), text)
            with weights.open("rb") as source, archive.open(zipfile.ZipInfo(weights.name, EPOCH), "w", force_zip64=True) as sink:
                while piece := source.read(SLAB_BYTES):
                    sink.write(piece)
