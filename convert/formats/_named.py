"""Tensors by names of nobody's in particular: which leaf is a weight, and in which order its axes are."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from convert.formats import _caffe_named
from convert.source import Convention, Shape, Source, Stored
from convert.steps import from_layout

DEPTHWISE = ("depthwise_kernel", "depthwise_weights")
"""Keras's and TensorFlow's words for a depthwise kernel, whose axes are height, width, channel, multiple."""
LEAVES = {
    "weight": ("weight", "weights", "W", "w", "kernel", "gamma", "scale", "filters", "filter", *DEPTHWISE, "pointwise_kernel"),
    "bias": ("bias", "biases", "b", "beta", "offset", "shift"),
    "running_mean": ("running_mean", "moving_mean", "mean/EMA", "mean.EMA", "mean"),
    "running_var": ("running_var", "moving_variance", "variance/EMA", "variance.EMA", "variance", "var"),
}
"""PyTorch's leaf: what others call it."""
PYTORCH = {name: leaf for leaf, names in LEAVES.items() for name in names}
ENDING = re.compile(r"^(?:(.*)[./])?(" + "|".join(sorted(map(re.escape, PYTORCH), key=len, reverse=True)) + r")(?::0)?$")
TENSORFLOW = re.compile(r"kernel(:0)?$|depthwise_weights(:0)?$|(^|[./])(gamma|moving_mean|moving_variance|mean[/.]EMA)(:0)?$|:0$")
"""Names that only TensorFlow and its kin give: HWIO, and dense weights (in, out)."""
SLIM = re.compile(r"(^|[./])(weights|biases|variance)$")
"""Words that are TensorFlow's where kernels are HWIO: of networks that came to it from Caffe."""
LARGEST_KERNEL = 11


def source(path: Path, format: str, tensors: Mapping[str, Stored], facts: Mapping[str, str], notes: list[str]) -> Source:
    """Give each tensor a module and PyTorch's leaf, and its kernel the order of axes that names and shapes speak for.

    Nobody but the file's own notes can say whether such kernels are of true convolution; without them that is "unknown". TensorFlow
    knows no true convolution.
    """
    said, caffe = facts.get("kernel_convention"), False
    known = {name: split for name in tensors if all(split := _split(name))}
    if said is None and (blobs := _caffe_named.spelt(tensors, known)) is not None:
        tensors, caffe = blobs
    tensorflow = any(TENSORFLOW.search(name) for name in tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    correlation = said == "correlation" or tensorflow or caffe or (_channels_last(shapes) and any(map(SLIM.search, tensors)))
    convention: Convention = "convolution" if said == "convolution" else "correlation" if correlation else "unknown"
    last_channels = tensorflow or _channels_last(shapes)
    last_out = tensorflow or _last_out(shapes)
    halves = {_module(name) for name in tensors if _called(name) == "pointwise_kernel"}
    found: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        module, leaf = _split(name)
        if said is not None and leaf and not name.endswith(f".{leaf}"):  # a file of our own calls a weight a weight
            found[name] = tensor
            continue
        module = _half(name, module, leaf, halves)
        key = f"{module}.{leaf}" if module and leaf else leaf or name
        if key in found:
            key = name
        if _called(name) in DEPTHWISE and len(tensor.stored_shape) == 4:
            found[key] = replace(tensor, steps=from_layout("depthwise", "HWCM", tensor.stored_shape), convention=convention)
        else:
            found[key] = _shaped(tensor, last_channels, last_out, convention) if leaf == "weight" else tensor
    if last_channels and not tensorflow:
        notes = [*notes, "kernels are taken for (height, width, in, out), as their shapes speak for it"]
    flatten = "hwc" if last_channels else "chw"
    framework = "TensorFlow's names" if tensorflow else "Caffe's blobs" if caffe else "NumPy"
    return Source(path, format, framework, found, flatten=flatten, facts=dict(facts), notes=notes)


def _split(name: str) -> tuple[str, str]:
    match = ENDING.match(name)
    return ((match[1] or ""), PYTORCH[match[2]]) if match else ("", "")


def _module(name: str) -> str:
    return _split(name)[0]


def _called(name: str) -> str:
    """Return the word with which a name ends, "depthwise_kernel"."""
    match = ENDING.match(name)
    return match[2] if match else ""


def _half(name: str, module: str, leaf: str, halves: Collection[str]) -> str:
    """Name the convolution of a separable layer that a tensor is of, as Keras's own files name it here; the bias is the second one's."""
    if module not in halves or leaf not in ("weight", "bias"):
        return module
    return f"{module}.depthwise" if _called(name) in DEPTHWISE else f"{module}.pointwise"


def _shaped(tensor: Stored, last_channels: bool, last_out: bool, convention: Convention) -> Stored:
    axes = len(tensor.shape)
    if axes == 2 and last_out:
        return tensor.then(*from_layout("linear", "IO", tensor.shape))
    if not 3 <= axes <= 5:
        return tensor
    layout = "DHW"[5 - axes :] + "IO" if last_channels else "OI" + "DHW"[5 - axes :]
    return replace(tensor.then(*from_layout("conv", layout, tensor.shape)), convention=convention)


def _channels_last(shapes: Mapping[str, Shape]) -> bool:
    """Tell by the kernels alone: the two axes that are small and alike in all of them are the spatial ones."""
    kernels = [shape for shape in shapes.values() if len(shape) == 4]
    first = sum(shape[0] == shape[1] <= LARGEST_KERNEL for shape in kernels)
    last = sum(shape[2] == shape[3] <= LARGEST_KERNEL for shape in kernels)
    return first > last


def _last_out(shapes: Mapping[str, Shape]) -> bool:
    """Tell by the dense weights that are not square and their biases: a bias is as long as the axis of the outputs."""
    for name, shape in shapes.items():
        module, leaf = _split(name)
        if leaf == "weight" and len(shape) == 2 and shape[0] != shape[1]:
            beside = [other for other, dims in shapes.items() if _split(other) == (module, "bias") and dims in ((shape[0],), (shape[1],))]
            if beside:
                return shapes[beside[0]] == (shape[1],)
    return False
