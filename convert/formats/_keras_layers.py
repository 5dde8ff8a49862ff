"""How Keras stores each kind of layer, in every generation: names of its variables, their order, their axes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from convert.formats._hdf5 import Dataset
from convert.source import Convention, Shape, Stored
from convert.steps import Reshape, from_layout

MODERN = {
    "Convolution1D": "Conv1D",
    "Convolution2D": "Conv2D",
    "AtrousConvolution2D": "Conv2D",
    "Convolution3D": "Conv3D",
    "Deconvolution2D": "Conv2DTranspose",
    "Convolution2DTranspose": "Conv2DTranspose",
    "SeparableConvolution2D": "SeparableConv2D",
    "DepthwiseConvolution2D": "DepthwiseConv2D",
    "MaxPool2D": "MaxPooling2D",
    "AvgPool2D": "AveragePooling2D",
    "GlobalAvgPool2D": "GlobalAveragePooling2D",
    "GlobalMaxPool2D": "GlobalMaxPooling2D",
    "BatchNormalizationV1": "BatchNormalization",
    "BatchNormalizationV2": "BatchNormalization",
    "SyncBatchNormalization": "BatchNormalization",
    "TensorFlowOpLayer": "TFOpLambda",
}
"""What older Keras calls a layer, and today's name."""

AXES = {1: "W", 2: "HW", 3: "DHW"}
CONVOLUTIONS = {"Conv1D": 1, "Conv2D": 2, "Conv3D": 3, "QuantConv2D": 2}
TRANSPOSED = {"Conv1DTranspose": 1, "Conv2DTranspose": 2, "Conv3DTranspose": 3}
DEPTHWISE = {"DepthwiseConv1D": 1, "DepthwiseConv2D": 2}
SEPARABLE = {"SeparableConv1D": 1, "SeparableConv2D": 2}
FLIPPED = {"Conv1D", "Conv2D", "Conv3D", "Conv2DTranspose"}
"""Layers whose kernels Theano slides backwards; Keras turns the others itself."""

ORDER: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*CONVOLUTIONS, *TRANSPOSED, "Dense", "EinsumDense"), ("kernel", "bias")),
    **dict.fromkeys(DEPTHWISE, ("depthwise_kernel", "bias")),
    **dict.fromkeys(SEPARABLE, ("depthwise_kernel", "pointwise_kernel", "bias")),
    "BatchNormalization": ("gamma", "beta", "moving_mean", "moving_variance"),
    **dict.fromkeys(("LayerNormalization", "GroupNormalization"), ("gamma", "beta")),
    "LayerScale": ("gamma",),  # of keras.applications' ConvNeXt, which gives the variable no name
    "Normalization": ("mean", "variance", "count"),
    "PReLU": ("alpha",),
    "Embedding": ("embeddings",),
}
"""Variables of a layer in the order in which Keras 3 numbers them; what a layer was built without is skipped."""


def snake(name: str) -> str:
    """Spell a class as Keras 3 counts it: Conv2DTranspose is conv2d_transpose."""
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()


SNAKES = {snake(name): name for name in ORDER}
"""Classes by the names that Keras 3 numbers them under: "conv2d_transpose", "p_re_lu"."""

LEAVES = {
    "kernel": "weight",
    "W": "weight",
    "depthwise_kernel": "weight",
    "bias": "bias",
    "b": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "running_mean": "running_mean",
    "moving_variance": "running_var",
    # Keras 1 kept the name of 0.3's standard deviation for what had become a variance
    "running_std": "running_var",
    "alpha": "weight",
    "alphas": "weight",
    "embeddings": "weight",
}


@dataclass(frozen=True, slots=True)
class Era:
    """What a whole file says about how its layers are stored.

    Attributes:
        version: Keras's, "" where the file has none.
        backend: "theano", "tensorflow", "cntk", "jax", "torch", or "".
        ordering: of Keras 1's kernels, "th" or "tf"; "" from Keras 2 on.
        convention: of the kernels that a backend may flip.
    """

    version: str = ""
    backend: str = ""
    ordering: str = ""
    convention: Convention = "correlation"

    @property
    def generation(self) -> int:
        """Keras's major version; where the file has none, 1 for old names and 2 for others."""
        found = re.match(r"\d+", self.version)
        return int(found[0]) if found else 1 if self.ordering else 2


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a file.

    Attributes:
        name: the module's, dots where models nest.
        kind: its class by today's name, "" if nothing says.
        config: what the file says of it.
        variables: Keras's name of each, "kernel", and the tensor as it is stored.
    """

    name: str
    kind: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    variables: Sequence[tuple[str, Stored]] = ()


def numbered(kind: str, config: Mapping[str, Any], count: int) -> list[str]:
    """Name the variables that Keras 3 only numbers.

    Returns:
        As many names as there are variables: numbers, where the class is not known.
    """
    names = [
        name
        for name in ORDER.get(kind, ())
        if config.get({"bias": "use_bias", "gamma": "scale", "beta": "center"}.get(name, ""), True) is not False
    ]
    if kind == "BatchNormalization" and len(names) != count == 3:
        names = ["beta", "moving_mean", "moving_variance"]  # keras.applications leaves the scale out, nobody the shift
    if kind == "BatchNormalization" and len(names) != count == 2:
        names = ["moving_mean", "moving_variance"]
    if count <= len(names):
        return names[:count]
    return [*names, *(str(number) for number in range(len(names), count))]


def tensors(layer: Layer, era: Era) -> Iterator[tuple[str, Stored]]:
    """Give a layer's variables PyTorch's names and the steps to PyTorch's form; what isn't known stays as it is."""
    kind = layer.kind or guess(layer, era)
    names = [name for name, _ in layer.variables]
    for name, stored in layer.variables:
        if kind in DEPTHWISE and name == "kernel":
            name = "depthwise_kernel"
        if kind in SEPARABLE and names[:1] != ["kernel"]:
            part = "depthwise" if name == "depthwise_kernel" else "pointwise"
            leaf = "bias" if name in ("bias", "b") else "weight" if name in ("depthwise_kernel", "pointwise_kernel") else name
            yield f"{layer.name}.{part}.{leaf}", _kernel(stored, kind, name, era)
        elif kind == "LayerScale" and len(names) == 1:
            yield f"{layer.name}.weight", stored
        elif kind and (kind not in ORDER or kind == "EinsumDense"):
            yield f"{layer.name}.{name}", stored
        elif name in ("kernel", "W", "depthwise_kernel"):
            yield f"{layer.name}.weight", _kernel(stored, kind, name, era)
        elif kind == "PReLU" and name in LEAVES and _per_channel(stored.stored_shape):
            yield f"{layer.name}.weight", stored.then(Reshape(stored.stored_shape, (max(stored.stored_shape),)))
        else:
            yield f"{layer.name}.{LEAVES.get(name, name)}", stored


def kernel_layout(kind: str, name: str, era: Era, rank: int) -> tuple[str, str] | None:
    """Tell a kernel's kind for `convert.steps` and its layout in the file; None if it is no kernel of a known layer."""
    old = era.generation < 2 and era.ordering == "th"
    if kind == "Dense" and rank == 2:
        return "linear", "IO"
    spatial = {**CONVOLUTIONS, **TRANSPOSED, **DEPTHWISE, **SEPARABLE}.get(kind, 0)
    if not spatial or rank != spatial + 2:
        return None
    axes = AXES[spatial]
    if name == "depthwise_kernel":
        return "depthwise", f"MC{axes}" if old else f"{axes}CM"
    if kind in TRANSPOSED:
        return "transposed", (f"OI{axes}" if old else f"{axes}IO") if era.generation < 2 else f"{axes}OI"
    return "conv", f"OI{axes}" if old else f"{axes}IO"


def convention(kind: str, era: Era) -> Convention:
    """Tell what a layer computes with its kernel: Theano flips some kinds only."""
    if era.convention == "correlation" or kind in FLIPPED:
        return era.convention
    return "unknown" if era.convention == "unknown" else "correlation"


def guess(layer: Layer, era: Era) -> str:
    """Tell a layer's class from the names and shapes of its variables, and from its own name where those are not enough."""
    shapes: dict[str, Shape] = {name: stored.stored_shape for name, stored in layer.variables}
    if "depthwise_kernel" in shapes:
        table = SEPARABLE if "pointwise_kernel" in shapes else DEPTHWISE
        return _by_rank(table, len(shapes["depthwise_kernel"]))
    if shapes.keys() & {"moving_mean", "running_mean"}:
        return "BatchNormalization"
    kernel = shapes.get("kernel", shapes.get("W"))
    if kernel is None or len(kernel) < 2:
        scaled = len(shapes) == 1 and layer.name.endswith("layer_scale")
        return "PReLU" if shapes.keys() & {"alpha", "alphas"} else "LayerScale" if scaled else ""
    if len(kernel) == 2:
        return "Dense"
    bias = shapes.get("bias", shapes.get("b"))
    words = layer.name.lower()
    if "depthwise" in words and bias in (None, (kernel[-1] * kernel[-2],)):
        return _by_rank(DEPTHWISE, len(kernel))
    swapped = bias == (kernel[-2],) if bias and kernel[-1] != kernel[-2] and not era.ordering else None
    if swapped or (swapped is None and re.search(r"transpose|deconv", words)):
        return _by_rank(TRANSPOSED, len(kernel))
    return _by_rank(CONVOLUTIONS, len(kernel))


def ordering(layers: Sequence[Layer]) -> str:
    """Tell Keras 1's order of kernel axes, "th" (O, I, h, w) or "tf" (h, w, I, O), by configs, biases and shapes together."""
    votes = 0
    for layer in layers:
        said = layer.config.get("dim_ordering")
        if said in ("th", "tf"):
            return said
        found = dict(layer.variables)
        kernel, bias = found.get("W"), found.get("b")
        if kernel is None or len(kernel.stored_shape) < 4:
            continue
        votes += channels_first(kernel.stored_shape, bias.stored_shape if bias is not None else None)
    return "th" if votes > 0 else "tf"


def channels_first(kernel: Shape, bias: Shape | None) -> int:
    """Tell how much speaks for a kernel's being (O, I, h, w), and below zero for (h, w, I, O).

    A bias has as many numbers as there are outputs; kernels are mostly square; and they have fewer pixels than channels.
    """
    if bias is not None and len(bias) == 1 and kernel[0] != kernel[-1]:
        return 100 * ((bias[0] == kernel[0]) - (bias[0] == kernel[-1]))
    if (kernel[0] == kernel[1]) != (kernel[-2] == kernel[-1]):
        return 10 if kernel[-2] == kernel[-1] else -10
    front, back = kernel[0] * kernel[1], kernel[-2] * kernel[-1]
    return (front > back) - (front < back)


def variable(dataset: Dataset, origin: str) -> Stored:
    """Describe a variable; numbers of 16 bits that the file calls bfloat16, or gives no name that NumPy knows, are bfloat16."""
    from convert.formats._torch import numpy_dtype

    kind = dataset.type
    if not (kind.bfloat16 or (kind.kind == "opaque" and kind.dtype.itemsize == 2)):
        return dataset.stored(origin)
    dtype = numpy_dtype("bfloat16")
    return Stored(origin, dataset.shape, dtype, lambda: dataset.load().view(dtype))


def _kernel(stored: Stored, kind: str, name: str, era: Era) -> Stored:
    shape = stored.stored_shape
    if kind == "Conv1D" and era.generation < 2 and len(shape) == 4:
        # Keras 1 held (taps, 1, I, O), and before 1.2, or for Theano, (O, I, taps, 1)
        tall = shape[1] == 1 and not (shape[3] == 1 and era.ordering == "th")
        flat = (shape[0], *shape[2:]) if tall else shape[:3]
        first = Reshape(shape, flat)
        return replace(stored, steps=(first, *from_layout("conv", "WIO" if tall else "OIW", flat)), convention=convention(kind, era))
    found = kernel_layout(kind, name, era, len(shape))
    if found is None:
        return stored
    steps = from_layout(found[0], found[1], shape)
    return replace(stored, steps=steps, convention=None if found[0] == "linear" else convention(kind, era))


def _per_channel(shape: Shape) -> bool:
    return len(shape) > 1 and sorted(shape)[:-1] == [1] * (len(shape) - 1)


def _by_rank(table: Mapping[str, int], rank: int) -> str:
    return next((name for name, spatial in table.items() if spatial + 2 == rank), "")
