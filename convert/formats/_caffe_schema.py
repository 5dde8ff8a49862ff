"""The messages of caffe.proto that say what a network is: field numbers, names and types, and the three generations of layers.

Both readers, of the wire format and of the text format, give a message as a dict of lists, by field name; enumerations stay as
they were written, a number or a word, and `word` makes one of both.

Source: https://github.com/BVLC/caffe, src/caffe/proto/caffe.proto; the messages of SSD's fork above number 200.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convert.formats._wire import Message, Schema, one, schema

SHAPE = schema("int dim 1")
RULE = schema("int phase 1, string stage 4, string not_stage 5")
TRANSFORM = schema("float scale 1, int crop_size 3, string mean_file 4, float mean_value 5")
CONVOLUTION = schema(
    """int num_output 1, bool bias_term 2, int pad 3, int kernel_size 4, int group 5, int stride 6, int pad_h 9, int pad_w 10,
    int kernel_h 11, int kernel_w 12, int stride_h 13, int stride_w 14, int axis 16, int dilation 18"""
)
POOLING = schema(
    """int pool 1, int kernel_size 2, int stride 3, int pad 4, int kernel_h 5, int kernel_w 6, int stride_h 7, int stride_w 8,
    int pad_h 9, int pad_w 10, bool global_pooling 12, int round_mode 13"""
)
SOFTMAX = schema("int axis 2")
RELU = schema("float negative_slope 1")
DENSE = schema("int num_output 1, bool bias_term 2, int axis 5, bool transpose 6")
LRN = schema("int local_size 1, float alpha 2, float beta 3, int norm_region 4, float k 5")
ELTWISE = schema("int operation 1, float coeff 2")
CONCAT = schema("int concat_dim 1, int axis 2")
SLICE = schema("int slice_dim 1, int slice_point 2, int axis 3")
POWER = schema("float power 1, float scale 2, float shift 3")
LAYER: Schema = {
    **schema("string name 1, string type 2, string bottom 3, string top 4, blob blobs 7, rule include 8, rule exclude 9", rule=RULE),
    100: ("transform_param", TRANSFORM),
    104: ("concat_param", CONCAT),
    106: ("convolution_param", CONVOLUTION),
    110: ("eltwise_param", ELTWISE),
    117: ("inner_product_param", DENSE),
    118: ("lrn_param", LRN),
    121: ("pooling_param", POOLING),
    122: ("power_param", POWER),
    123: ("relu_param", RELU),
    125: ("softmax_param", SOFTMAX),
    126: ("slice_param", SLICE),
    131: ("prelu_param", schema("bool channel_shared 2")),
    133: ("reshape_param", schema("shape shape 1, int axis 2, int num_axes 3", shape=SHAPE)),
    135: ("flatten_param", schema("int axis 1, int end_axis 2")),
    139: ("batch_norm_param", schema("bool use_global_stats 1, float eps 3")),
    140: ("elu_param", schema("float alpha 1")),
    141: ("bias_param", schema("int axis 1")),
    142: ("scale_param", schema("int axis 1, bool bias_term 4")),
    143: ("input_param", schema("shape shape 1", shape=SHAPE)),
    148: ("clip_param", schema("float min 1, float max 2")),
    202: ("permute_param", schema("int order 1")),
}
# The first generation: one message for all kinds of layers, inside the second's
V0_LAYER = schema(
    """string name 1, string type 2, int num_output 3, bool biasterm 4, int pad 7, int kernelsize 8, int group 9, int stride 10,
    int pool 11, int local_size 13, float alpha 14, float beta 15, float scale 17, string meanfile 18, int cropsize 20, float k 22,
    blob blobs 50, int concat_dim 65"""
)
V1_LAYER: Schema = {
    **schema(
        "layer layer 1, string bottom 2, string top 3, string name 4, int type 5, blob blobs 6, rule include 32, rule exclude 33",
        layer=V0_LAYER,
        rule=RULE,
    ),
    9: ("concat_param", CONCAT),
    10: ("convolution_param", CONVOLUTION),
    17: ("inner_product_param", DENSE),
    18: ("lrn_param", LRN),
    19: ("pooling_param", POOLING),
    21: ("power_param", POWER),
    24: ("eltwise_param", ELTWISE),
    30: ("relu_param", RELU),
    31: ("slice_param", SLICE),
    36: ("transform_param", TRANSFORM),
    39: ("softmax_param", SOFTMAX),
}
NET = schema(
    "string name 1, v1 layers 2, string input 3, int input_dim 4, shape input_shape 8, layer layer 100",
    v1=V1_LAYER,
    shape=SHAPE,
    layer=LAYER,
)

V1_TYPES = (
    *("Accuracy", "BNLL", "Concat", "Convolution", "Data", "Dropout", "EuclideanLoss", "Flatten", "HDF5Data", "HDF5Output"),
    *("Im2col", "ImageData", "InfogainLoss", "InnerProduct", "LRN", "MultinomialLogisticLoss", "Pooling", "ReLU", "Sigmoid"),
    *("Softmax", "SoftmaxWithLoss", "Split", "TanH", "WindowData", "Eltwise", "Power", "SigmoidCrossEntropyLoss", "HingeLoss"),
    *("MemoryData", "ArgMax", "Threshold", "DummyData", "Slice", "MVN", "AbsVal", "Silence", "ContrastiveLoss", "Exp"),
    *("Deconvolution",),
)
"""V1's enumeration of kinds from 1 on, in today's names."""
WORDS = {name.lower(): name for name in V1_TYPES} | {
    "softmaxloss": "SoftmaxWithLoss",
    "conv": "Convolution",
    "pool": "Pooling",
    "images": "ImageData",
    "padding": "Padding",
}
"""The words of V1's enumeration (INNER_PRODUCT) and of V0's text (softmax_loss), in small letters and without underscores."""


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


def _today(word: str) -> str:
    return WORDS.get(word.replace("_", "").lower(), word)


def _from_v1(layer: Message) -> Message:
    said: Any = layer.get("type", [0])[-1]
    if isinstance(said, int):
        said = V1_TYPES[said - 1] if 0 < said <= len(V1_TYPES) else f"V1 type {said}"
    return {**layer, "type": [_today(said)]}


def _from_v0(outer: Message) -> Message:
    inner: Message = outer["layer"][-1]
    kind = _today(one(inner, "type", ""))
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
