"""Small Caffe files, written here without Caffe: a network as a list of layers, in each way that Caffe ever stored one."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# caffe.proto: the number of a layer's parameters in LayerParameter and in V1LayerParameter, and the numbers inside
PARAMS: dict[str, tuple[int, int, dict[str, int]]] = {
    "transform_param": (100, 36, {"scale": 1, "mean_file": 4, "mean_value": 5}),
    "concat_param": (104, 9, {"concat_dim": 1, "axis": 2}),
    "convolution_param": (
        106,
        10,
        {"num_output": 1, "bias_term": 2, "pad": 3, "kernel_size": 4, "group": 5, "stride": 6, "pad_h": 9, "pad_w": 10}
        | {"kernel_h": 11, "kernel_w": 12, "stride_h": 13, "stride_w": 14, "dilation": 18},
    ),
    "eltwise_param": (110, 24, {"operation": 1, "coeff": 2}),
    "inner_product_param": (117, 17, {"num_output": 1, "bias_term": 2, "axis": 5, "transpose": 6}),
    "lrn_param": (118, 18, {"local_size": 1, "alpha": 2, "beta": 3, "norm_region": 4, "k": 5}),
    "pooling_param": (121, 19, {"pool": 1, "kernel_size": 2, "stride": 3, "pad": 4, "global_pooling": 12, "round_mode": 13}),
    "power_param": (122, 21, {"power": 1, "scale": 2, "shift": 3}),
    "relu_param": (123, 30, {"negative_slope": 1}),
    "slice_param": (126, 31, {"slice_point": 2, "axis": 3}),
    "reshape_param": (133, 0, {"shape": 1}),
    "flatten_param": (135, 0, {"axis": 1}),
    "batch_norm_param": (139, 0, {"use_global_stats": 1, "eps": 3}),
    "scale_param": (142, 0, {"axis": 1, "bias_term": 4}),
    "input_param": (143, 0, {"shape": 1}),
    "permute_param": (202, 0, {"order": 1}),
}
WORDS = {"MAX": 0, "AVE": 1, "PROD": 0, "SUM": 1, "FLOOR": 1, "TRAIN": 0, "TEST": 1}
ELTWISE_MAX = 2
FLOATS = {"scale", "mean_value", "coeff", "alpha", "beta", "k", "power", "shift", "negative_slope", "eps"}
V1_TYPES = {
    "Concat": 3,
    "Convolution": 4,
    "Data": 5,
    "Dropout": 6,
    "InnerProduct": 14,
    "LRN": 15,
    "Pooling": 17,
    "ReLU": 18,
    "Softmax": 20,
    "SoftmaxWithLoss": 21,
    "Split": 22,
    "Eltwise": 25,
    "Power": 26,
    "Slice": 33,
    "Deconvolution": 39,
}
V0_TYPES = {"Convolution": "conv", "InnerProduct": "innerproduct", "Pooling": "pool", "ReLU": "relu", "LRN": "lrn", "Softmax": "softmax"}
V0_FIELDS = {"num_output": 3, "bias_term": 4, "pad": 7, "kernel_size": 8, "group": 9, "stride": 10, "pool": 11}
V0_FIELDS |= {"local_size": 13, "alpha": 14, "beta": 15, "k": 22}


@dataclass
class Layer:
    name: str
    type: str
    bottom: Sequence[str] = ()
    top: Sequence[str] = ()
    blobs: Sequence[np.ndarray] = ()
    params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    include: str = ""


def varint(value: int) -> bytes:
    value %= 1 << 64
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def tag(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def chunk(number: int, payload: bytes | str) -> bytes:
    payload = payload.encode() if isinstance(payload, str) else payload
    return tag(number, 2) + varint(len(payload)) + payload


def integer(number: int, value: int) -> bytes:
    return tag(number, 0) + varint(value)


def real(number: int, value: float) -> bytes:
    return tag(number, 5) + struct.pack("<f", value)


def shape(dims: Iterable[int]) -> bytes:
    return chunk(1, b"".join(map(varint, dims)))


def blob(array: np.ndarray, style: str = "packed") -> bytes:
    """Encode a BlobProto: "packed", "unpacked", "chunks", "double", "double unpacked", each with "legacy" for four old dimensions."""
    flat = array.reshape(-1)
    if "double" in style:
        data = flat.astype("<f8")
        packed, single, wide = (8, 1, data.tobytes())
    else:
        data = flat.astype("<f4")
        packed, single, wide = (5, 5, data.tobytes())
    size = data.itemsize
    if "unpacked" in style:
        numbers = b"".join(tag(packed, single) + wide[at : at + size] for at in range(0, len(wide), size))
    elif "chunks" in style:
        middle = len(data) // 2 * size
        numbers = chunk(packed, wide[:middle]) + chunk(packed, wide[middle:])
    else:
        numbers = chunk(packed, wide)
    if "legacy" in style:
        dims = (1,) * (4 - array.ndim) + array.shape
        return b"".join(integer(number, dim) for number, dim in enumerate(dims, start=1)) + numbers
    return numbers + chunk(7, shape(array.shape))


def message(fields: Mapping[str, Any], numbers: Mapping[str, int]) -> bytes:
    out = b""
    for name, value in fields.items():
        for each in value if isinstance(value, list | tuple) and name != "shape" else [value]:
            if name == "shape":
                out += chunk(numbers[name], shape(each))
            elif name in FLOATS:
                out += real(numbers[name], each)
            elif name == "operation":
                out += integer(numbers[name], ELTWISE_MAX if each == "MAX" else WORDS[each])
            elif name == "mean_file":
                out += chunk(numbers[name], each)
            else:
                out += integer(numbers[name], WORDS[each] if isinstance(each, str) else int(each))
    return out


def v2(layers: Sequence[Layer], name: str = "net", style: str = "packed", header: bytes = b"") -> bytes:
    """Encode a network in today's layers."""
    out = chunk(1, name) + header
    for layer in layers:
        body = chunk(1, layer.name) + chunk(2, layer.type)
        body += b"".join(chunk(3, bottom) for bottom in layer.bottom) + b"".join(chunk(4, top) for top in layer.top)
        body += b"".join(chunk(7, blob(array, style)) for array in layer.blobs)
        if layer.include:
            body += chunk(8, integer(1, WORDS[layer.include]))
        body += integer(10, 0)  # every layer of a snapshot says TRAIN
        for param, fields in layer.params.items():
            body += chunk(PARAMS[param][0], message(fields, PARAMS[param][2]))
        out += chunk(100, body)
    return out


def v1(layers: Sequence[Layer], name: str = "net", style: str = "legacy packed", header: bytes = b"") -> bytes:
    """Encode a network in the layers of 2014."""
    out = chunk(1, name)
    for layer in layers:
        body = b"".join(chunk(2, bottom) for bottom in layer.bottom) + b"".join(chunk(3, top) for top in layer.top)
        body += chunk(4, layer.name) + integer(5, V1_TYPES[layer.type])
        body += b"".join(chunk(6, blob(array, style)) for array in layer.blobs)
        for param, fields in layer.params.items():
            body += chunk(PARAMS[param][1], message(fields, PARAMS[param][2]))
        out += chunk(2, body)
    return out + header


def v0(layers: Sequence[Layer], name: str = "net", style: str = "legacy packed", header: bytes = b"") -> bytes:
    """Encode a network in the layers of 2013."""
    out = chunk(1, name)
    for layer in layers:
        inner = chunk(1, layer.name) + chunk(2, V0_TYPES[layer.type])
        for fields in layer.params.values():
            inner += message(fields, V0_FIELDS)
        inner += b"".join(chunk(50, blob(array, style)) for array in layer.blobs)
        outer = b"".join(chunk(2, bottom) for bottom in layer.bottom) + b"".join(chunk(3, top) for top in layer.top)
        out += chunk(2, chunk(1, inner) + outer)
    return out + header


def inputs(name: str, dims: Sequence[int]) -> bytes:
    """Encode an input that no layer makes."""
    return chunk(3, name) + b"".join(integer(4, dim) for dim in dims)


def prototxt(layers: Sequence[Layer], data: Sequence[int] = ()) -> str:
    """Describe the same network in text."""
    lines = ['name: "net"  # a comment']
    if data:
        lines += ['input: "data"', *(f"input_dim: {dim}" for dim in data)]
    for layer in layers:
        lines += ["layer {", f'  name: "{layer.name}"', f"  type: '{layer.type}'"]
        lines += [f'  bottom: "{bottom}"' for bottom in layer.bottom] + [f'  top: "{top}"' for top in layer.top]
        if layer.include:
            lines.append(f"  include {{ phase: {layer.include} }}")
        for param, fields in layer.params.items():
            lines.append(f"  {param} {{")
            lines += [f"    {name}{_text(name, value)}" for name, value in fields.items() if name == "shape" or not _many(value)]
            lines += [f"    {name}: {each}" for name, value in fields.items() if name != "shape" and _many(value) for each in value]
            lines.append("  }")
        lines.append("}")
    return "\n".join(lines) + "\n"


def _many(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _text(name: str, value: Any) -> str:
    if name == "shape":
        return " { " + " ".join(f"dim: {dim}" for dim in value) + " }"
    if isinstance(value, bool):
        return f": {str(value).lower()}"
    return f': "{value}"' if name == "mean_file" else f": {value}"


def small(seed: int = 0) -> list[Layer]:
    """A network with every kind of layer that has tensors of its own, in-place layers, two branches and a dense end."""
    rng = np.random.default_rng(seed)

    def normal(*dims: int) -> np.ndarray:
        return rng.normal(0, 0.5, dims).astype("f4")

    statistics = [normal(6) * 7, rng.uniform(1, 3, 6).astype("f4") * 7, np.array([7], "f4")]
    conv = "convolution_param"
    return [
        Layer(
            "conv1",
            "Convolution",
            ["data"],
            ["conv1"],
            [normal(6, 3, 3, 3)],
            {conv: {"num_output": 6, "bias_term": False, "kernel_size": 3}},
        ),
        Layer("conv1/bn", "BatchNorm", ["conv1"], ["conv1"], statistics, {"batch_norm_param": {"eps": 1e-3}}),
        Layer("conv1/scale", "Scale", ["conv1"], ["conv1"], [normal(6), normal(6)], {"scale_param": {"bias_term": True}}),
        Layer("relu1", "ReLU", ["conv1"], ["conv1"]),
        Layer("pool1", "Pooling", ["conv1"], ["pool1"], params={"pooling_param": {"pool": "MAX", "kernel_size": 3, "stride": 2}}),
        Layer("norm1", "LRN", ["pool1"], ["norm1"], params={"lrn_param": {"local_size": 3, "alpha": 0.5, "beta": 0.75}}),
        Layer(
            "dw",
            "Convolution",
            ["norm1"],
            ["dw"],
            [normal(6, 1, 3, 3), normal(6)],
            {conv: {"num_output": 6, "kernel_size": 3, "pad": 1, "group": 6}},
        ),
        Layer("prelu", "PReLU", ["dw"], ["dw"], [normal(6)]),
        Layer(
            "wide",
            "Convolution",
            ["norm1"],
            ["wide"],
            [normal(6, 6, 1, 3), normal(6)],
            {conv: {"num_output": 6, "kernel_h": 1, "kernel_w": 3, "pad_h": 0, "pad_w": 1}},
        ),
        Layer("relu2", "ReLU", ["wide"], ["wide"], params={"relu_param": {"negative_slope": 0.125}}),
        Layer("sum", "Eltwise", ["dw", "wide"], ["sum"], params={"eltwise_param": {"operation": "SUM", "coeff": [1.0, -0.5]}}),
        Layer("both", "Concat", ["sum", "wide"], ["both"], params={"concat_param": {"axis": 1}}),
        Layer(
            "up",
            "Deconvolution",
            ["both"],
            ["up"],
            [normal(12, 4, 4, 4), normal(4)],
            {conv: {"num_output": 4, "kernel_size": 4, "stride": 2, "pad": 1}},
        ),
        Layer("pool2", "Pooling", ["up"], ["pool2"], params={"pooling_param": {"pool": "AVE", "kernel_size": 3, "stride": 2, "pad": 1}}),
        Layer("power", "Power", ["pool2"], ["power"], params={"power_param": {"scale": 0.5, "shift": -0.25}}),
        Layer("fc", "InnerProduct", ["power"], ["fc"], [normal(5, 4 * 8 * 10), normal(5)], {"inner_product_param": {"num_output": 5}}),
        Layer("prob", "Softmax", ["fc"], ["prob"]),
    ]


DATA = (1, 3, 16, 20)
"""What `small` reads."""


def old(seed: int = 0) -> list[Layer]:
    """A network of the kinds that every generation of layers knows."""
    rng = np.random.default_rng(seed)

    def normal(*dims: int) -> np.ndarray:
        return rng.normal(0, 0.5, dims).astype("f4")

    conv = {"num_output": 4, "kernel_size": 3, "pad": 1, "stride": 2}
    return [
        Layer("conv1", "Convolution", ["data"], ["conv1"], [normal(4, 3, 3, 3), normal(4)], {"convolution_param": conv}),
        Layer("relu1", "ReLU", ["conv1"], ["conv1"]),
        Layer("pool1", "Pooling", ["conv1"], ["pool1"], params={"pooling_param": {"pool": "AVE", "kernel_size": 2, "stride": 2}}),
        Layer("fc", "InnerProduct", ["pool1"], ["fc"], [normal(5, 4 * 4 * 5), normal(5)], {"inner_product_param": {"num_output": 5}}),
        Layer("prob", "Softmax", ["fc"], ["prob"]),
    ]


STYLES = ("packed", "unpacked", "chunks", "double", "double unpacked", "legacy packed", "legacy unpacked", "legacy double")


def seeds(folder: Path) -> list[Path]:
    """Write a file of each dialect."""
    written = []
    for name, encoded in (
        ("v2", v2(small(), header=inputs("data", DATA))),
        ("v1", v1(old(), header=inputs("data", DATA))),
        ("v0", v0(old(), header=inputs("data", DATA))),
        *((style.replace(" ", "_"), v2(old(), style=style)) for style in STYLES),
    ):
        path = folder / name / f"{name}.caffemodel"
        path.parent.mkdir()
        path.write_bytes(encoded)
        written.append(path)
    described = folder / "described" / "net.caffemodel"
    described.parent.mkdir()
    described.write_bytes(v2(small()))
    described.with_suffix(".prototxt").write_text(prototxt(small(), DATA))
    return [*written, described]
