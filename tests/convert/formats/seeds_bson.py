# ruff: noqa: RUF001 - Flux names its fields in Greek
"""Small BSON.jl files of every dialect, for the fuzzer and the tests; encoded by PyMongo, which knows nothing of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bson as pymongo
import numpy as np
from bson.int64 import Int64

from convert.formats import bson
from convert.source import Part, in_memory

DRAW = np.random.default_rng(0)


def kind(*path: str, params: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Make a type."""
    return {"tag": "datatype", "name": list(path), "params": list(params)}


def array(values: np.ndarray, main: bool = False) -> dict[str, Any]:
    """Make an array that NumPy shows with reversed axes."""
    name = {"f4": "Float32", "f8": "Float64", "f2": "Float16", "i8": "Int64"}[values.dtype.str[1:]]
    path = ("Main", "Core", name) if main else ("Core", name)
    return {"tag": "array", "type": kind(*path), "size": [Int64(n) for n in values.shape[::-1]], "data": values.tobytes()}


def struct(*path: str, data: Any = (), params: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Make a value of a type."""
    return {"tag": "struct", "type": kind(*path, params=params), "data": list(data)}


def tuple_of(*items: Any) -> dict[str, Any]:
    return {"tag": "tuple", "data": list(items)}


def ints(*numbers: int) -> dict[str, Any]:
    return tuple_of(*map(Int64, numbers))


def symbol(name: str) -> dict[str, Any]:
    return {"tag": "symbol", "name": name}


def function(*path: str) -> dict[str, Any]:
    return struct(*path[:-1], "#" + path[-1])


def named(**fields: Any) -> dict[str, Any]:
    """Make a NamedTuple."""
    return struct("Core", "NamedTuple", data=fields.values(), params=(tuple_of(*map(symbol, fields)), kind("Core", "Tuple")))


def floats(*shape: int) -> np.ndarray:
    return DRAW.standard_normal(shape).astype("f4")


IDENTITY, RELU = function("Base", "identity"), function("NNlib", "relu")


def conv(
    weight: np.ndarray, bias: Any, *, name: str = "Conv", activation: Any = RELU, pad: tuple[int, ...] = (1, 1, 1, 1)
) -> dict[str, Any]:
    """Make a Conv since 0.13 if its name is Conv, else a layer that has no groups."""
    fields = [activation, array(weight), bias, ints(1, 1), ints(*pad), ints(1, 1)]
    return struct("Flux", name, data=[*fields, Int64(1)] if name == "Conv" else fields)


def norm(channels: int) -> dict[str, Any]:
    values = [array(floats(channels)) for _ in range(3)] + [array(np.abs(floats(channels)) + 1)]
    tail = [1e-5, 0.1, True, True, None, Int64(channels)]
    return struct("Flux", "BatchNorm", data=[RELU, *values, *tail])


def modern() -> dict[str, Any]:
    """Make a whole model of Flux 0.14: branches, a shortcut, pools, a closure."""
    inner = struct("Flux", "Chain", data=[tuple_of(conv(floats(4, 4, 3, 3), False, activation=IDENTITY), norm(4))])
    return struct(
        "Flux",
        "Chain",
        data=[
            tuple_of(
                conv(floats(4, 3, 3, 3), array(floats(4))),
                struct("Flux", "MaxPool", data=[ints(2, 2), ints(0, 0, 0, 0), ints(2, 2)]),
                struct("Flux", "SkipConnection", data=[inner, function("Base", "+")]),
                struct(
                    "Flux",
                    "Parallel",
                    data=[function("Base", "vcat"), tuple_of(conv(floats(2, 4, 1, 1), array(floats(2)), pad=(0, 0, 0, 0)), IDENTITY)],
                ),
                struct("Flux", "MeanPool", data=[ints(2, 2), ints(0, 0, 0, 0), ints(2, 2)]),
                struct("Flux", "Dropout", data=[0.5, {"tag": "tuple", "data": []}]),
                function("MLUtils", "flatten"),
                struct("Flux", "Dense", data=[array(floats(24, 5)), array(floats(5)), IDENTITY]),
                {"tag": "jl_anonymous", "typename": struct("Core", "TypeName"), "params": []},
            )
        ],
    )


def tracked(number: int) -> dict[str, Any]:
    """Make a parameter of Flux 0.9 and older: [tracker, data, grad], data and grad by reference."""
    data = [None, {"tag": "backref", "ref": Int64(number)}, {"tag": "backref", "ref": Int64(number)}]
    return struct("Flux", "Tracker", "TrackedArray", data=data)


def tracker_era(depthwise: np.ndarray | None = None) -> dict[str, Any]:
    """Make a whole model of Flux 0.5: its BatchNorm keeps a standard deviation, its Dense W and b."""
    weight = floats(4, 3, 3, 3) if depthwise is None else depthwise
    channels = weight.shape[0] if depthwise is None else weight.shape[0] * weight.shape[1]
    arrays = [weight, floats(channels), floats(channels), floats(channels), floats(7, channels).T.copy(), floats(7)]
    first = "Conv" if depthwise is None else "DepthwiseConv"
    layers = [
        struct("Flux", first, data=[RELU, tracked(1), tracked(2), ints(1, 1), ints(1, 1), ints(1, 1)]),
        struct(
            "Flux",
            "BatchNorm",
            data=[RELU, tracked(3), tracked(4), array(floats(channels)), array(np.abs(floats(channels)) + 1), 1e-8, 0.1, True],
        ),
        struct("Flux", "Dense", data=[tracked(5), tracked(6), IDENTITY]),
    ]
    return {"model": struct("Flux", "Chain", data=[layers]), "_backrefs": [array(item, main=True) for item in arrays]}


def zygote_params(arrays: list[np.ndarray]) -> dict[str, Any]:
    """Make what `Flux.params` gave in 0.10 to 0.12, saved as it was."""
    refs = [{"tag": "backref", "ref": Int64(number)} for number in range(1, len(arrays) + 1)]
    nothing = {"tag": "array", "type": kind("Core", "Nothing"), "size": [Int64(len(arrays))], "data": b""}
    ids = struct("Base", "IdSet", data=[struct("Base", "IdDict", data=[refs, nothing])])
    buffer = struct("Zygote", "Buffer", data=[refs, False])
    return {"weights": struct("Zygote", "Params", data=[buffer, ids]), "_backrefs": [array(item) for item in arrays]}


def state() -> dict[str, Any]:
    """Make a `Flux.state`: a Conv, a pool that kept nothing, a CrossCor, a BatchNorm, a Dense."""
    empty = tuple_of()
    first = named(
        σ=empty,
        weight=array(floats(4, 3, 3, 3)),
        bias=array(floats(4)),
        stride=ints(1, 1),
        pad=ints(0, 0, 0, 0),
        dilation=ints(1, 1),
        groups=Int64(1),
    )
    second = named(σ=empty, weight=array(floats(4, 4, 3, 3)), bias=False, stride=ints(1, 1), pad=ints(0, 0, 0, 0), dilation=ints(1, 1))
    third = named(
        **{"λ": empty, "β": array(floats(4)), "γ": array(floats(4)), "μ": array(floats(4)), "σ²": array(np.abs(floats(4)) + 1), "ϵ": 1e-5}
    )
    dense = named(weight=array(floats(16, 5)), bias=array(floats(5)), σ=empty)
    return {
        "model_state": named(layers=tuple_of(first, empty, second, third, dense)),
        "opt_state": named(layers=tuple_of(array(floats(3)))),
    }


def caffe2() -> dict[str, Any]:
    """Make a file of Metalhead's of 2018."""
    names = {"gpu_0/conv1_w_0": floats(4, 3, 3, 3), "gpu_0/res_conv1_bn_riv_0": np.abs(floats(4)) + 1, "gpu_0/res_conv1_bn_rm_0": floats(4)}
    names |= {
        "gpu_0/res_conv1_bn_s_0": floats(4),
        "gpu_0/res_conv1_bn_b_0": floats(4),
        "gpu_0/pred_w_0": floats(5, 4),
        "gpu_0/pred_b_0": floats(5),
    }
    return {name: array(values) for name, values in names.items()}


def parts() -> list[Part]:
    """Make one module of each kind, with asymmetric kernels."""
    leaves = {name: in_memory(name, floats(4)) for name in ("weight", "bias", "running_mean", "running_var")}
    return [
        Part("layers.1.layers.1", "conv", {"weight": in_memory("w", floats(4, 3, 3, 5)), "bias": in_memory("b", floats(4))}),
        Part("layers.1.layers.2", "norm", leaves | {"num_batches_tracked": in_memory("n", np.array(3))}),
        Part("layers.1.layers.3", "conv", {"weight": in_memory("w", floats(6, 2, 3, 3))}, groups=2),
        Part("layers.1.layers.4", "depthwise", {"weight": in_memory("w", floats(12, 1, 3, 3))}, groups=6),
        Part(
            "layers.1.layers.6", "transposed", {"weight": in_memory("w", floats(8, 5, 2, 2)), "bias": in_memory("b", floats(10))}, groups=2
        ),
        Part("layers.2.layers.3", "linear", {"weight": in_memory("w", floats(7, 9)), "bias": in_memory("b", floats(7))}, grid=(1, 3, 3)),
    ]


def save(document: dict[str, Any], path: Path) -> Path:
    path.write_bytes(pymongo.encode(document))
    return path


def seeds(folder: Path) -> list[Path]:
    listed = [floats(4, 3, 3, 3), floats(4), floats(16, 5), floats(5)]
    documents = {
        "params": {"acc": 0.99, "params": [array(item) for item in listed]},
        "zygote": zygote_params(listed),
        "tracker": tracker_era(),
        "depthwise": tracker_era(floats(3, 2, 3, 3)),
        "modern": {"model": modern()},
        "state": state(),
        "caffe2": caffe2(),
        "dict": {"weights": struct("Base", "Dict", data=[list(caffe2()), list(caffe2().values())])},
    }
    made = [save(document, folder / f"{name}.bson") for name, document in documents.items()]
    bson.write(parts(), folder / "ours.bson", metadata={"source": "a test"})
    return [*made, folder / "ours.bson"]
