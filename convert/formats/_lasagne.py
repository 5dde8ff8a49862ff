"""Lasagne's lists of parameters: no names, only an order; the same list is in .npz files and in pickles."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from convert._guard import check
from convert.formats import _named, _pickles
from convert.kinds import is_dict, is_list
from convert.source import WEIGHTED, Convention, Part, Positional, Shape, Source, Stored, in_memory, laid_out
from convert.steps import Cast, Moment, Step, from_layout
from weights.errors import ConvertError, MalformedFile

log = logging.getLogger("convert")

EPS = 1e-4
"""What Lasagne's BatchNormLayer adds to a variance before it keeps the inverse of the root."""
LEAVES = {**WEIGHTED, "norm": ("bias", "weight", "running_mean", "running_var")}
ZOO = ("param values", "values", "params", "param_values")
"""Where a dict keeps the list; the first two are the model zoo's."""
SAID_BESIDE = ("synset", "mean")
"""Keys that stand beside the list in files of the model zoo, whose networks come from Caffe: they are not flipped."""


def positional(path: Path, format: str, tensors: Sequence[Stored], notes: Sequence[str] = (), convention: Convention = "unknown") -> Source:
    """Describe a list. Conv2DLayer's kernels are of true convolution, Conv2DDNNLayer's are not, and a list doesn't say which."""
    dtypes = {tensor.stored_dtype.newbyteorder("=") for tensor in tensors if tensor.stored_dtype.kind == "f"}
    narrow = np.dtype(np.float32) if dtypes == {np.dtype(np.float32), np.dtype(np.float64)} else None

    def steps(kind: str, leaf: str, shape: Shape) -> tuple[Step, ...]:
        if kind == "linear" and leaf == "weight":
            return from_layout("linear", "IO", shape)
        if kind == "norm" and leaf == "running_var":
            # beside float32 weights, inverse deviations are float64 so that variances come back to the last bit
            return (Moment("inv_std", EPS), *((Cast("float64", "float32"),) if narrow is not None else ()))
        return ()

    layout = Positional(LEAVES, steps, convention)
    named = {str(number): tensor for number, tensor in enumerate(tensors)}
    return Source(path, format, "Lasagne", named, positional=True, notes=list(notes), layout=layout)


def from_pickle(path: Path, format: str, tree: Any, size: int) -> Source:
    """Describe what a pickle holds: a list, a list under a key with facts beside it, or arrays by layer."""
    facts: dict[str, str] = {}
    convention: Convention = "unknown"
    preprocessing: dict[str, Any] = {}
    tree = _pickles.opened(tree)
    if is_list(tree) and len(tree) == 1 and is_dict(_pickles.opened(tree[0])):
        tree = _pickles.opened(tree[0])  # NumPy keeps one object as an array of one
    if is_dict(tree) and (key := next((key for key in ZOO if is_list(_pickles.opened(tree.get(key)))), None)) is not None:
        beside = [str(other) for other in tree if other != key]
        if key in ZOO[:2] and any(other.startswith(SAID_BESIDE) for other in beside):
            convention = "correlation"
            facts["origin"] = "Lasagne's model zoo"
        facts |= {"also holds": ", ".join(beside)[:200]} if beside else {}
        preprocessing = _preprocessing(tree)
        tree = tree[key]
    if is_dict(tree):
        found = _pickles.arrays(tree, by_kind=True)
        check(path, found.values(), size)
        if not found:
            raise MalformedFile(f"{path} holds no tensors; its keys are: {', '.join(map(str, tree))[:200] or 'none'}")
        return _by_layer(path, format, {".".join(place): tensor for place, tensor in found.items()}, facts)
    listed = list(_pickles.arrays(tree).values())
    check(path, listed, size)
    if not listed:
        raise MalformedFile(f"{path} holds no tensors")
    source = positional(path, format, listed, convention=convention)
    source.facts.update(facts)
    source.preprocessing = preprocessing
    return source


def _by_layer(path: Path, format: str, tensors: dict[str, Stored], facts: dict[str, str]) -> Source:
    """Describe arrays by layer, as nolearn keeps them, and as NumPy keeps a dict of layers."""
    named: dict[str, Stored] = {}
    for name, tensor in ((name, replace(tensor, origin=name)) for name, tensor in tensors.items()):
        if name.endswith(".inv_std"):
            named[name.removesuffix("inv_std") + "running_var"] = tensor.then(Moment("inv_std", EPS))
        else:
            named[name] = tensor
    return _named.source(path, format, named, facts, [])


def listed(parts: Sequence[Part], convention: str | None) -> Iterator[Stored]:
    """Give a network's tensors in Lasagne's order and form; the parts are in that order already."""
    for part in parts:
        if part.kind not in LEAVES:
            raise ConvertError(
                f"Lasagne's list holds layers of the kinds {', '.join(LEAVES)}, and {part.name!r} is none of these; write another format, "
                "safetensors for example"
            )
        for leaf in LEAVES[part.kind]:
            tensor = part.leaves.get(leaf)
            if tensor is None:
                if part.kind == "norm":
                    raise ConvertError(f"Lasagne's BatchNormLayer has a {leaf}, and {part.name} has none")
                continue
            yield _theirs(part, leaf, tensor, convention)


def _theirs(part: Part, leaf: str, tensor: Stored, convention: str | None) -> Stored:
    if leaf == "weight" and len(tensor.shape) == 2:
        return laid_out(tensor, "linear", "IO")
    if leaf == "weight" and len(tensor.shape) > 2 and convention == "convolution":
        return laid_out(tensor, "conv", "OI" + "DHW"[5 - len(tensor.shape) :], flipped=True)
    if leaf == "running_var":
        return in_memory(tensor.origin, inverse_deviation(tensor.array(), part.name))
    return tensor


def _preprocessing(tree: dict[Any, Any]) -> dict[str, Any]:
    """Read the mean of the model zoo's images: three numbers, of colours in Caffe's order, or a picture."""
    found = _pickles.arrays({key: value for key, value in tree.items() if key in ("mean value", "mean_value")})
    mean = next(iter(found.values()), None)
    if mean is None or mean.stored_shape != (3,):
        return {}
    return {"mean": tuple(float(value) / 255 for value in mean.load()), "std": (1 / 255,) * 3, "channel_order": "bgr"}


def inverse_deviation(variance: np.ndarray, name: str) -> np.ndarray:
    """Compute 1 / sqrt(variance + eps) in float64, so that the way back gives the same float32 variance.

    No float64 does that for a variance below some 1e-13: next to eps too few digits are left of it. A warning says how many there are.
    """
    kept = Moment("inv_std", EPS).undo(variance.astype(np.float64))
    back = Moment("inv_std", EPS).do(kept).astype(variance.dtype)
    if lost := int((back != variance).sum()):
        log.warning("%s: %d variances are too small to come back to the last bit from Lasagne's inverse deviations", name, lost)
    return kept
