"""What each layer of Keras computes, in the words of `convert.graph`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.formats._keras_layers import CONVOLUTIONS, DEPTHWISE, SEPARABLE, TRANSPOSED, Era, convention, kernel_layout
from convert.kinds import is_list, is_mapping, is_row
from convert.source import Stored

Op = tuple[str, str, Mapping[str, Any]]
"""What is appended to the layer's name, the operation, its attributes."""
Find = Callable[[str], Stored | None]

IDENTITIES = (
    *("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "GaussianNoise", "GaussianDropout", "AlphaDropout"),
    *("RandomFlip", "RandomRotation", "RandomZoom", "RandomTranslation", "RandomContrast", "RandomBrightness", "RandomHeight"),
    *("RandomWidth", "StochasticDepth", "ActivityRegularization", "Identity"),
)
"""Layers that do nothing once the network is trained."""
MERGES = {"Add": "add", "Multiply": "mul", "Subtract": "sub", "Maximum": "maximum", "Average": "average", "Concatenate": "concat"}
MODES = {"sum": "add", "mul": "mul", "ave": "average", "max": "maximum", "concat": "concat"}
PLAIN = {
    **{name: name for name in ("relu", "relu6", "sigmoid", "tanh", "softmax", "softplus", "silu")},
    "swish": "silu",
    "hard_swish": "hardswish",
    "hard_silu": "hardswish",
    "linear": "identity",
}
PREPROCESSING_LIMIT = 4096
"""Numbers of a Normalization layer that go into the graph."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One call of a layer.

    Attributes:
        kind: its class.
        config: its settings.
        era: of the file.
        layout: of the maps in the model, "nhwc" or "nchw".
        operation: whether it is a function of keras.ops.
        inputs: how many values it reads.
        number: what else a function of two arguments is called with: which argument it is, and the number.
    """

    kind: str
    config: Mapping[str, Any]
    era: Era
    layout: str
    operation: bool = False
    inputs: int = 1
    number: tuple[int, float] | None = None

    def get(self, *names: str, default: Any = None) -> Any:
        """Read the first of these settings that is there and not null."""
        return next((self.config[name] for name in names if self.config.get(name) is not None), default)


def operations(layer: Setting, find: Find) -> Iterator[Op]:
    """List what a layer computes, one operation after the other; the last result is the layer's.

    Args:
        layer: the layer.
        find: a tensor of the layer by its leaf.
    """
    reader = _READERS.get(layer.kind)
    # HDF5 files of Keras 3 don't tell the function keras.ops.add from the layer Add, but a layer adds no numbers
    if layer.operation or layer.kind == "TFOpLambda" or (layer.kind in MERGES and layer.inputs == 1 and layer.number):
        yield _function(layer)
    elif layer.kind in IDENTITIES:
        yield "", "identity", {}
    elif layer.kind in MERGES or layer.kind == "Merge":
        yield _merge(layer)
    elif reader is None:
        yield _function(layer)
    else:
        found = list(reader(layer, find))
        yield from found
        # an Activation layer has said it all itself
        if layer.kind not in ("Activation", "Softmax") and (said := layer.config.get("activation")) is not None:
            op, attrs = activation(said, layer.era)
            if op != "identity":
                yield "/activation", op, attrs


def activation(said: Any, era: Era) -> tuple[str, Mapping[str, Any]]:
    """Name an activation, which Keras states as a word, a function's name or a layer."""
    if is_mapping(said):
        config = said.get("config")
        if is_mapping(config):
            found = list(operations(Setting(str(said.get("class_name")), config, era, "nhwc"), lambda leaf: None))
            return (found[0][1], found[0][2]) if len(found) == 1 else (f"unknown:{said.get('class_name')}", {})
        said = config if isinstance(config, str) else said.get("class_name")
    name = str(said)
    if name in PLAIN:
        return PLAIN[name], {}
    if name == "hard_sigmoid":
        return "hardsigmoid", {"alpha": 1 / 6, "beta": 0.5} if era.generation > 2 else {"alpha": 0.2, "beta": 0.5}
    usual = {"gelu": {"approximate": False}, "elu": {"alpha": 1.0}, "leaky_relu": {"slope": 0.2}}
    return (name, usual[name]) if name in usual else (f"unknown:{name}", {})


def pair(value: Any, default: int = 1) -> tuple[int, int]:
    """Read a number or two of them; ValueError where it is neither."""
    if value is None:
        return default, default
    if is_row(value):
        if len(value) == 1:
            return int(value[0]), int(value[0])
        tall, wide = value
        return int(tall), int(wide)
    return int(value), int(value)


def _conv(layer: Setting, find: Find) -> Iterator[Op]:
    name = "depthwise_kernel" if layer.kind in {**DEPTHWISE, **SEPARABLE} else "kernel"
    found = kernel_layout(layer.kind, name, layer.era, 4)
    if found is None:
        yield "", f"unknown:{layer.kind}", {}
        return
    kernel = pair(layer.get("kernel_size", default=(layer.get("nb_row"), layer.get("nb_col")) if layer.get("nb_row") else None), 1)
    stride, dilation = pair(layer.get("strides", "subsample")), pair(layer.get("dilation_rate", "atrous_rate"))
    attrs: dict[str, Any] = {
        "layout": found[1],
        "convention": convention(layer.kind, layer.era),
        "stride": stride,
        "pads": _padding(layer, kernel, stride),
        "dilation": dilation,
    }
    if layer.kind in SEPARABLE:
        yield ".depthwise", "depthwise", attrs
        point = kernel_layout(layer.kind, "pointwise_kernel", layer.era, 4)
        yield ".pointwise", "conv", {"layout": point[1] if point else "HWIO", "convention": attrs["convention"], "pads": "valid"}
        return
    if layer.kind in TRANSPOSED:
        if layer.get("output_padding") is not None:
            yield from _stated_output(layer, attrs, kernel)
            return
        if layer.era.generation < 2:
            attrs["pads"] = "unknown"
    if layer.kind in CONVOLUTIONS and (groups := layer.get("groups", default=1)) != 1:
        attrs["groups"] = int(groups)
    yield "", found[0], attrs


def _stated_output(layer: Setting, attrs: dict[str, Any], kernel: tuple[int, int]) -> Iterator[Op]:
    """With "output_padding" the size is stated, and what the kernel adds beyond it is cut off, the smaller half in front."""
    more = pair(layer.get("output_padding"))
    same = layer.get("padding") == "same"
    cut = [(2 * (k // 2) if same else 0) - extra for k, extra in zip(kernel, more, strict=True)]
    top, left = (max(total, 0) // 2 for total in cut)
    bottom, right = max(cut[0], 0) - top, max(cut[1], 0) - left
    beyond = max(-cut[0], 0), max(-cut[1], 0)
    yield "", "transposed", {**attrs, "pads": (top, left, bottom, right), "output_padding": beyond}


def _padding(layer: Setting, kernel: tuple[int, int], stride: tuple[int, int]) -> Any:
    said = str(layer.get("padding", "border_mode", default="valid"))
    if said == "same":
        if layer.era.backend == "theano" and max(stride) > 1 and kernel[0] % 2 and kernel[1] % 2:
            tall, wide = kernel[0] // 2, kernel[1] // 2  # Theano pads both sides alike, whatever the stride
            return tall, wide, tall, wide
        return "same_upper"
    return "valid" if said == "valid" else f"unknown {said}"


def _norm(layer: Setting, find: Find) -> Iterator[Op]:
    axis = layer.get("axis", default=-1)
    axis = axis[0] if is_list(axis) and len(axis) == 1 else axis
    old = layer.get("mode", default=0)
    fits = axis in ((1, -3) if layer.layout == "nchw" else (-1, 3)) or (axis in (1, -1) and find("running_mean") is not None)
    if old not in (0, 2) or not fits:
        yield "", "unknown:BatchNormalization over another axis", {}
    else:
        yield "", "norm", {"eps": float(layer.get("epsilon", default=1e-3)), "moment": "variance"}


def _relu(layer: Setting, find: Find) -> Iterator[Op]:
    high, slope, threshold = layer.get("max_value"), layer.get("negative_slope", "alpha", default=0.0), layer.get("threshold", default=0.0)
    if threshold:
        yield "", "unknown:ReLU with a threshold", {}
    elif slope:
        yield ("", "leaky_relu", {"slope": float(slope)}) if high is None else ("", "unknown:ReLU with a slope and a ceiling", {})
    elif high is None:
        yield "", "relu", {}
    else:
        yield ("", "relu6", {}) if float(high) == 6 else ("", "clip", {"low": 0.0, "high": float(high)})


def _prelu(layer: Setting, find: Find) -> Iterator[Op]:
    slopes = find("weight")
    fits = slopes is None or len(slopes.shape) == 1
    yield "", "prelu" if fits else "unknown:PReLU with a slope for each pixel", {}


def _softmax(layer: Setting, find: Find) -> Iterator[Op]:
    axis = layer.get("axis", default=-1)
    yield "", "softmax" if axis == (1 if layer.layout == "nchw" else -1) or axis == -1 else "unknown:Softmax over another axis", {}


def _pool(layer: Setting, find: Find) -> Iterator[Op]:
    kernel = pair(layer.get("pool_size"), 2)
    stride = pair(layer.get("strides", default=kernel))
    attrs: dict[str, Any] = {"kernel": kernel, "stride": stride, "pads": _padding(layer, (2, 2), stride), "rounding": "floor"}
    if layer.kind == "AveragePooling2D":
        yield "", "avgpool", {**attrs, "count_pad": "none"}
    else:
        yield "", "maxpool", attrs


def _flatten(layer: Setting, find: Find) -> Iterator[Op]:
    # Flatten with "channels_first" puts the channels last before it flattens, so that weights fit models of both formats
    yield "", "flatten", {"order": "hwc" if layer.layout == "nhwc" or layer.get("data_format") == "channels_first" else "chw"}


def _reshape(layer: Setting, find: Find) -> Iterator[Op]:
    yield "", "reshape", {"shape": tuple(int(size) for size in layer.get("target_shape", "dims", default=())), "layout": layer.layout}


def _pads(layer: Setting, *names: str) -> tuple[int, int, int, int]:
    said = layer.get(*names, default=1)
    if is_mapping(said):  # Keras 1
        top, left, bottom, right = (int(said.get(f"{side}_pad", 0)) for side in ("top", "left", "bottom", "right"))
        return top, left, bottom, right
    if is_row(said) and len(said) == 4:  # Keras 1: top, bottom, left, right
        top, bottom, left, right = (int(side) for side in said)
        return top, left, bottom, right
    if is_row(said):
        (top, bottom), (left, right) = (pair(side) for side in said)
        return top, left, bottom, right
    return int(said), int(said), int(said), int(said)


def _upsample(layer: Setting, find: Find) -> Iterator[Op]:
    mode = str(layer.get("interpolation", default="nearest"))
    if mode not in ("nearest", "bilinear"):
        yield "", f"unknown:UpSampling2D {mode}", {}
    else:
        yield "", "upsample", {"factor": pair(layer.get("size"), 2), "mode": mode}


def _normalize(layer: Setting, find: Find) -> Iterator[Op]:
    mean, variance = (_statistic(layer, find, name) for name in ("mean", "variance"))
    if mean is None or variance is None:
        yield "", "unknown:Normalization without statistics", {}
        return
    deviation = np.maximum(np.sqrt(variance), 1e-7)
    if layer.get("invert", default=False):
        yield "", "affine", {"scale": deviation.tolist(), "offset": mean.tolist()}
    else:
        yield "", "affine", {"scale": (1 / deviation).tolist(), "offset": (-mean / deviation).tolist()}


def _statistic(layer: Setting, find: Find, name: str) -> np.ndarray | None:
    said = layer.config.get(name)
    if said is not None:
        return np.asarray(_numbers(said), np.float64).reshape(-1)
    stored = find(name)
    if stored is None or int(np.prod(stored.shape)) > PREPROCESSING_LIMIT:
        return None
    return stored.load().astype(np.float64).reshape(-1)


def _numbers(said: Any) -> Any:
    if is_mapping(said):  # an array that Keras 3 serialised
        said = said.get("config", said).get("value") if is_mapping(said.get("config", said)) else None
    array = np.asarray(said, np.float64)
    return float(array) if array.ndim == 0 else array.reshape(-1).tolist()


def _merge(layer: Setting) -> Op:
    op = MERGES.get(layer.kind) or MODES.get(str(layer.get("mode")), "")
    if not op or layer.inputs < 2:
        return "", f"unknown:{layer.kind}", {}
    if op == "concat":
        axis = layer.get("axis", "concat_axis", default=-1)
        if axis not in ((1, -3) if layer.layout == "nchw" else (-1, 3)):
            return "", f"unknown:Concatenate over axis {axis}", {}
    return "", op, {}


def _function(layer: Setting) -> Op:
    """Say what a function does that a model calls as if it were a layer: of two values, of a value and a number, of one value."""
    stated = layer.get("function") if layer.kind == "TFOpLambda" else None  # a Lambda's is code, which nobody looks at
    called = stated if isinstance(stated, str) else layer.kind
    name = called.rsplit(".", 1)[-1].lower()
    op = {"add": "add", "multiply": "mul", "mul": "mul", "subtract": "sub", "sub": "sub", "maximum": "maximum"}.get(name)
    if op and layer.inputs == 2:
        return "", op, {}
    if layer.number and layer.inputs == 1:
        place, number = layer.number
        if op == "add":
            return "", "affine", {"scale": 1.0, "offset": number}
        if op == "mul":
            return "", "affine", {"scale": number, "offset": 0.0}
        if op == "sub":
            return "", "affine", {"scale": 1.0, "offset": -number} if place else {"scale": -1.0, "offset": number}
        if name in ("truediv", "divide", "truedivide") and place and number:
            return "", "affine", {"scale": 1 / number, "offset": 0.0}
    if layer.inputs == 1 and layer.number is None and name in PLAIN:
        return "", PLAIN[name], {}
    return "", f"unknown:{called}", {}


_READERS: dict[str, Callable[[Setting, Find], Iterable[Op]]] = {
    **dict.fromkeys(("Conv2D", "DepthwiseConv2D", "SeparableConv2D", "Conv2DTranspose"), _conv),
    "Dense": lambda layer, find: [("", "dense", {"layout": "IO"})],
    "BatchNormalization": _norm,
    "Activation": lambda layer, find: [("", *activation(layer.get("activation", default="linear"), layer.era))],
    "ReLU": _relu,
    "LeakyReLU": lambda layer, find: [("", "leaky_relu", {"slope": float(layer.get("negative_slope", "alpha", default=0.3))})],
    "PReLU": _prelu,
    "ELU": lambda layer, find: [("", "elu", {"alpha": float(layer.get("alpha", default=1.0))})],
    "Softmax": _softmax,
    "MaxPooling2D": _pool,
    "AveragePooling2D": _pool,
    "GlobalAveragePooling2D": lambda layer, find: [("", "global_avgpool", {"keepdims": bool(layer.get("keepdims", default=False))})],
    "GlobalMaxPooling2D": lambda layer, find: [("", "global_maxpool", {"keepdims": bool(layer.get("keepdims", default=False))})],
    "Flatten": _flatten,
    "Reshape": _reshape,
    "ZeroPadding2D": lambda layer, find: [("", "pad", {"pads": _pads(layer, "padding"), "value": 0.0})],
    "Cropping2D": lambda layer, find: [("", "crop", {"pads": _pads(layer, "cropping")})],
    "UpSampling2D": _upsample,
    "Rescaling": lambda layer, find: [
        ("", "affine", {"scale": _numbers(layer.get("scale", default=1.0)), "offset": _numbers(layer.get("offset", default=0.0))})
    ],
    "Normalization": _normalize,
}

LAYERS = frozenset((*_READERS, *IDENTITIES, *MERGES))
"""All that are understood here, by their names since Keras 2."""
