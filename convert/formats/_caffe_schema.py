"""The messages of caffe.proto that say what a network is: field numbers, names and types, and the three generations of layers.

Both readers, of the wire format and of the text format, give a message as a dict of lists, by field name; enumerations stay as
they were written, a number or a word, and `word` makes one of both.

Source: https://github.com/BVLC/caffe, src/caffe/proto/caffe.proto; the messages of SSD's fork above number 200.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from convert.kinds import is_dict

Message = dict[str, list[Any]]
Schema = Mapping[int, tuple[str, Any]]
"""Field number to name and type: "int", "bool", "float", "string", "blob", or the schema of a message."""

SHAPE: Schema = {1: ("dim", "int")}
RULE: Schema = {1: ("phase", "int"), 4: ("stage", "string"), 5: ("not_stage", "string")}
TRANSFORM: Schema = {
    1: ("scale", "float"),
    3: ("crop_size", "int"),
    4: ("mean_file", "string"),
    5: ("mean_value", "float"),
}
CONVOLUTION: Schema = {
    1: ("num_output", "int"),
    2: ("bias_term", "bool"),
    3: ("pad", "int"),
    4: ("kernel_size", "int"),
    5: ("group", "int"),
    6: ("stride", "int"),
    9: ("pad_h", "int"),
    10: ("pad_w", "int"),
    11: ("kernel_h", "int"),
    12: ("kernel_w", "int"),
    13: ("stride_h", "int"),
    14: ("stride_w", "int"),
    16: ("axis", "int"),
    18: ("dilation", "int"),
}
POOLING: Schema = {
    1: ("pool", "int"),
    2: ("kernel_size", "int"),
    3: ("stride", "int"),
    4: ("pad", "int"),
    5: ("kernel_h", "int"),
    6: ("kernel_w", "int"),
    7: ("stride_h", "int"),
    8: ("stride_w", "int"),
    9: ("pad_h", "int"),
    10: ("pad_w", "int"),
    12: ("global_pooling", "bool"),
    13: ("round_mode", "int"),
}
DENSE: Schema = {1: ("num_output", "int"), 2: ("bias_term", "bool"), 5: ("axis", "int"), 6: ("transpose", "bool")}
LRN: Schema = {1: ("local_size", "int"), 2: ("alpha", "float"), 3: ("beta", "float"), 4: ("norm_region", "int"), 5: ("k", "float")}
ELTWISE: Schema = {1: ("operation", "int"), 2: ("coeff", "float")}
CONCAT: Schema = {1: ("concat_dim", "int"), 2: ("axis", "int")}
SLICE: Schema = {1: ("slice_dim", "int"), 2: ("slice_point", "int"), 3: ("axis", "int")}
POWER: Schema = {1: ("power", "float"), 2: ("scale", "float"), 3: ("shift", "float")}
RESHAPE: Schema = {1: ("shape", SHAPE), 2: ("axis", "int"), 3: ("num_axes", "int")}

# The parameters of single layers under the numbers of today's LayerParameter
PARAMETERS: Schema = {
    100: ("transform_param", TRANSFORM),
    104: ("concat_param", CONCAT),
    106: ("convolution_param", CONVOLUTION),
    110: ("eltwise_param", ELTWISE),
    117: ("inner_product_param", DENSE),
    118: ("lrn_param", LRN),
    121: ("pooling_param", POOLING),
    122: ("power_param", POWER),
    123: ("relu_param", {1: ("negative_slope", "float")}),
    125: ("softmax_param", {2: ("axis", "int")}),
    126: ("slice_param", SLICE),
    131: ("prelu_param", {2: ("channel_shared", "bool")}),
    133: ("reshape_param", RESHAPE),
    135: ("flatten_param", {1: ("axis", "int"), 2: ("end_axis", "int")}),
    139: ("batch_norm_param", {1: ("use_global_stats", "bool"), 3: ("eps", "float")}),
    140: ("elu_param", {1: ("alpha", "float")}),
    141: ("bias_param", {1: ("axis", "int")}),
    142: ("scale_param", {1: ("axis", "int"), 4: ("bias_term", "bool")}),
    143: ("input_param", {1: ("shape", SHAPE)}),
    148: ("clip_param", {1: ("min", "float"), 2: ("max", "float")}),
    202: ("permute_param", {1: ("order", "int")}),
}
LAYER: Schema = {
    1: ("name", "string"),
    2: ("type", "string"),
    3: ("bottom", "string"),
    4: ("top", "string"),
    7: ("blobs", "blob"),
    8: ("include", RULE),
    9: ("exclude", RULE),
    **PARAMETERS,
}
# The first generation: one message for all kinds of layers, inside the second's
V0_LAYER: Schema = {
    1: ("name", "string"),
    2: ("type", "string"),
    3: ("num_output", "int"),
    4: ("biasterm", "bool"),
    7: ("pad", "int"),
    8: ("kernelsize", "int"),
    9: ("group", "int"),
    10: ("stride", "int"),
    11: ("pool", "int"),
    13: ("local_size", "int"),
    14: ("alpha", "float"),
    15: ("beta", "float"),
    17: ("scale", "float"),
    18: ("meanfile", "string"),
    20: ("cropsize", "int"),
    22: ("k", "float"),
    50: ("blobs", "blob"),
    65: ("concat_dim", "int"),
}
V1_LAYER: Schema = {
    1: ("layer", V0_LAYER),
    2: ("bottom", "string"),
    3: ("top", "string"),
    4: ("name", "string"),
    5: ("type", "int"),
    6: ("blobs", "blob"),
    9: ("concat_param", CONCAT),
    10: ("convolution_param", CONVOLUTION),
    17: ("inner_product_param", DENSE),
    18: ("lrn_param", LRN),
    19: ("pooling_param", POOLING),
    21: ("power_param", POWER),
    24: ("eltwise_param", ELTWISE),
    30: ("relu_param", {1: ("negative_slope", "float")}),
    31: ("slice_param", SLICE),
    32: ("include", RULE),
    33: ("exclude", RULE),
    36: ("transform_param", TRANSFORM),
    39: ("softmax_param", {2: ("axis", "int")}),
}
NET: Schema = {
    1: ("name", "string"),
    2: ("layers", V1_LAYER),
    3: ("input", "string"),
    4: ("input_dim", "int"),
    8: ("input_shape", SHAPE),
    100: ("layer", LAYER),
}

# V1's enumeration of kinds, as today's names; by number and by word
V1_TYPES: dict[int, tuple[str, str]] = {
    1: ("ACCURACY", "Accuracy"),
    2: ("BNLL", "BNLL"),
    3: ("CONCAT", "Concat"),
    4: ("CONVOLUTION", "Convolution"),
    5: ("DATA", "Data"),
    6: ("DROPOUT", "Dropout"),
    7: ("EUCLIDEAN_LOSS", "EuclideanLoss"),
    8: ("FLATTEN", "Flatten"),
    9: ("HDF5_DATA", "HDF5Data"),
    10: ("HDF5_OUTPUT", "HDF5Output"),
    11: ("IM2COL", "Im2col"),
    12: ("IMAGE_DATA", "ImageData"),
    13: ("INFOGAIN_LOSS", "InfogainLoss"),
    14: ("INNER_PRODUCT", "InnerProduct"),
    15: ("LRN", "LRN"),
    16: ("MULTINOMIAL_LOGISTIC_LOSS", "MultinomialLogisticLoss"),
    17: ("POOLING", "Pooling"),
    18: ("RELU", "ReLU"),
    19: ("SIGMOID", "Sigmoid"),
    20: ("SOFTMAX", "Softmax"),
    21: ("SOFTMAX_LOSS", "SoftmaxWithLoss"),
    22: ("SPLIT", "Split"),
    23: ("TANH", "TanH"),
    24: ("WINDOW_DATA", "WindowData"),
    25: ("ELTWISE", "Eltwise"),
    26: ("POWER", "Power"),
    27: ("SIGMOID_CROSS_ENTROPY_LOSS", "SigmoidCrossEntropyLoss"),
    28: ("HINGE_LOSS", "HingeLoss"),
    29: ("MEMORY_DATA", "MemoryData"),
    30: ("ARGMAX", "ArgMax"),
    31: ("THRESHOLD", "Threshold"),
    32: ("DUMMY_DATA", "DummyData"),
    33: ("SLICE", "Slice"),
    34: ("MVN", "MVN"),
    35: ("ABSVAL", "AbsVal"),
    36: ("SILENCE", "Silence"),
    37: ("CONTRASTIVE_LOSS", "ContrastiveLoss"),
    38: ("EXP", "Exp"),
    39: ("DECONVOLUTION", "Deconvolution"),
}
V0_TYPES = {
    "conv": "Convolution",
    "innerproduct": "InnerProduct",
    "pool": "Pooling",
    "relu": "ReLU",
    "lrn": "LRN",
    "dropout": "Dropout",
    "concat": "Concat",
    "flatten": "Flatten",
    "softmax": "Softmax",
    "softmax_loss": "SoftmaxWithLoss",
    "data": "Data",
    "images": "ImageData",
    "hdf5_data": "HDF5Data",
    "window_data": "WindowData",
    "split": "Split",
    "padding": "Padding",
    "sigmoid": "Sigmoid",
    "tanh": "TanH",
    "accuracy": "Accuracy",
}


def one(message: Message, field: str, default: Any) -> Any:
    """Return a field that occurs at most once, the last time if it does more often; as the type that `default` has."""
    if not message.get(field):
        return default
    value = message[field][-1]
    if is_dict(default):
        return value if is_dict(value) else default
    return type(default)(value)


def word(message: Message, field: str, words: Sequence[str]) -> str:
    """Return an enumeration's value as its word, whether it was written as a number or as a word; `words` begin with the default's."""
    value = message[field][-1] if message.get(field) else 0
    if isinstance(value, str):
        return value
    return words[value] if 0 <= value < len(words) else str(value)


def layers(net: Message) -> list[Message]:
    """List a network's layers in today's form, whichever generation wrote them.

    Caffe itself carries one generation in a file; where two are, the newer counts.
    """
    if net.get("layer"):
        return net["layer"]
    return [_from_v0(layer) if "layer" in layer else _from_v1(layer) for layer in net.get("layers", [])]


def _from_v1(layer: Message) -> Message:
    number = layer.get("type", [0])[-1]
    words = dict(V1_TYPES.values())
    kind = words.get(number, number) if isinstance(number, str) else V1_TYPES.get(number, ("", f"V1 type {number}"))[1]
    return {**layer, "type": [kind]}


def _from_v0(outer: Message) -> Message:
    inner: Message = outer["layer"][-1]
    kind = V0_TYPES.get(one(inner, "type", ""), one(inner, "type", ""))
    window = {new: inner[old] for new, old in (("pad", "pad"), ("kernel_size", "kernelsize"), ("stride", "stride")) if old in inner}
    output = {new: inner[old] for new, old in (("num_output", "num_output"), ("bias_term", "biasterm")) if old in inner}
    made: Message = {
        "name": inner.get("name", []),
        "type": [kind],
        "bottom": outer.get("bottom", []),
        "top": outer.get("top", []),
        "blobs": inner.get("blobs", []) or outer.get("blobs", []),
        "convolution_param": [{**window, **output, **({"group": inner["group"]} if "group" in inner else {})}],
        "inner_product_param": [output],
        "pooling_param": [{**window, **({"pool": inner["pool"]} if "pool" in inner else {})}],
        "lrn_param": [{field: inner[field] for field in ("local_size", "alpha", "beta", "k") if field in inner}],
    }
    if "concat_dim" in inner:
        made["concat_param"] = [{"concat_dim": inner["concat_dim"]}]
    if kind in ("Data", "ImageData", "WindowData"):
        made["transform_param"] = [
            {new: inner[old] for new, old in (("scale", "scale"), ("mean_file", "meanfile"), ("crop_size", "cropsize")) if old in inner}
        ]
    return made
