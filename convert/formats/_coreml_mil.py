"""What each operation of an ML program is in ONNX's words; a program with one that has none is read for its weights alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from convert.formats._operators import Transcript
from convert.source import Stored
from weights.errors import MalformedFile

SUFFIX = re.compile(r"_to_fp(?:16|32)$|_cast_fp(?:16|32)$|_(?:palettized|quantized|cast)$")
Held = Stored | np.ndarray | str
"""A constant: a tensor of reals, whole numbers or truth values, or a word."""


@dataclass(slots=True)
class Operation:
    """A step of a program: what it reads in each role, names or constants in place, and what it gives."""

    type: str
    inputs: Mapping[str, list[str]]
    outputs: list[str]


@dataclass(slots=True)
class Program:
    """The function of a program that computes the network.

    Attributes:
        inputs: shapes by name.
        constants: by the name that other operations read them under.
        names: of constants, as their author called them.
    """

    inputs: Mapping[str, tuple[int, ...]]
    outputs: Sequence[str]
    operations: list[Operation] = field(default_factory=list[Operation])
    constants: dict[str, Held] = field(default_factory=dict[str, Held])
    names: dict[str, str] = field(default_factory=dict[str, str])


class Said(Transcript):
    """A program as it is said; `now` has the value that stands for each name."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.now: dict[str, str] = {}
        self.modules: set[str] = set()

    def read(self, operation: Operation, role: str = "x") -> str:
        """Name what an operation reads in a role; "" where it reads nothing."""
        names = operation.inputs.get(role) or [""]
        return self._value(names[0])

    def all(self, operation: Operation, role: str) -> list[str]:
        return [self._value(name) for name in operation.inputs.get(role, [])]

    def _value(self, name: str) -> str:
        held = self.program.constants.get(name)
        if isinstance(held, Stored) and name not in self.model.tensors:
            self.constant(name, held)
        elif isinstance(held, np.ndarray) and name not in self.now:
            self.now[name] = self.numbers(held, np.float32 if held.dtype.kind == "f" else np.int64)
        return self.now.get(name, name)

    def told(self, operation: Operation, role: str) -> Held | None:
        names = operation.inputs.get(role) or [""]
        return self.program.constants.get(names[0])

    def whole(self, operation: Operation, role: str, default: tuple[int, ...]) -> tuple[int, ...]:
        held = self.told(operation, role)
        return (
            tuple(int(n) for n in held.reshape(-1)) if isinstance(held, np.ndarray) and held.size and held.dtype.kind in "iub" else default
        )

    def flag(self, operation: Operation, role: str, default: bool = False) -> bool:
        return bool(self.whole(operation, role, (int(default),))[0])

    def real(self, operation: Operation, role: str, default: float) -> float:
        held = self.told(operation, role)
        array = held.array() if isinstance(held, Stored) and math.prod(held.shape) == 1 else held
        return float(array.reshape(-1)[0]) if isinstance(array, np.ndarray) and array.size else default

    def word(self, operation: Operation, role: str, default: str) -> str:
        held = self.told(operation, role)
        return held if isinstance(held, str) else default

    def module(self, operation: Operation, *roles: str) -> str:
        """Call a layer as its weight is called, else as what it gives."""
        weight = next((names[0] for role in roles if (names := operation.inputs.get(role))), "")
        called = SUFFIX.sub("", SUFFIX.sub("", self.program.names.get(weight, weight)))
        match = re.match(r"(.+?)[._](?:weight|gamma|kernel)(?:_\d+)?$", called)
        name = match[1] if match else SUFFIX.sub("", operation.outputs[0]) if operation.outputs else called
        name = name if name not in self.modules else f"{name}#{len(self.modules)}"
        self.modules.add(name)
        return name

    def gives(self, operation: Operation, *values: str) -> bool:
        self.now.update(zip(operation.outputs, values, strict=False))
        return True


def said(program: Program) -> tuple[Said, list[str]]:
    """Say a whole program, and which kinds of operations could not be said."""
    out, unknown = Said(program), list[str]()
    for name, shape in program.inputs.items():
        out.input(name, shape)
    for operation in program.operations:
        handler = HANDLERS.get(operation.type)
        if handler is None or not operation.outputs or not handler(out, operation):
            unknown.append(operation.type)
            out.gives(operation, *(out.fresh() for _ in operation.outputs))
    out.model.outputs = [out.now.get(name, name) for name in program.outputs]
    return out, list(dict.fromkeys(unknown))


def _window(out: Said, operation: Operation, sides: int) -> dict[str, Any] | None:
    """Say how a window goes over a map; None where it can't be said."""
    kind = out.word(operation, "pad_type", "valid")
    if kind in ("same", "same_lower"):
        return {"auto_pad": "SAME_UPPER" if kind == "same" else "SAME_LOWER"}
    pads = out.whole(operation, "pad", (0,) * 2 * sides) if kind == "custom" else (0,) * 2 * sides
    return {"pads": (*pads[::2], *pads[1::2])} if kind in ("valid", "custom") and len(pads) == 2 * sides else None


def conv(out: Said, operation: Operation) -> bool:
    held, back = out.told(operation, "weight"), operation.type == "conv_transpose"
    if not isinstance(held, Stored) or len(held.shape) != 4 or operation.inputs.get("output_shape"):
        return False
    how = _window(out, operation, 2)
    if how is None or (back and "auto_pad" in how):
        return False
    groups = out.whole(operation, "groups", (1,))[0]
    how |= {"strides": out.whole(operation, "strides", (1, 1)), "dilations": out.whole(operation, "dilations", (1, 1)), "group": groups}
    bias = out.read(operation, "bias")
    inputs = [out.read(operation), out.read(operation, "weight"), *([bias] if bias else [])]
    module = out.module(operation, "weight")
    return out.gives(operation, out.add("ConvTranspose" if back else "Conv", inputs, module=module, **how))


def dense(out: Said, operation: Operation) -> bool:
    held = out.told(operation, "weight")
    if not isinstance(held, Stored) or len(held.shape) != 2:
        return False
    bias, module = out.read(operation, "bias"), out.module(operation, "weight")
    inputs = [out.read(operation), out.read(operation, "weight"), *([bias] if bias else [])]
    return out.gives(operation, out.add("Gemm", inputs, module=module, transB=1))


def product(out: Said, operation: Operation) -> bool:
    held = out.told(operation, "y")
    if not isinstance(held, Stored) or len(held.shape) != 2 or out.flag(operation, "transpose_x"):
        return False
    turned = int(out.flag(operation, "transpose_y"))
    inputs = [out.read(operation), out.read(operation, "y")]
    return out.gives(operation, out.add("Gemm", inputs, module=out.module(operation, "y"), transB=turned))


def norm(out: Said, operation: Operation) -> bool:
    held = [out.told(operation, role) for role in ("mean", "variance", "gamma", "beta")]
    if not all(isinstance(each, Stored) for each in held):
        return False
    leaves = [out.read(operation, role) for role in ("gamma", "beta", "mean", "variance")]
    module, eps = out.module(operation, "gamma"), out.real(operation, "epsilon", 1e-5)
    return out.gives(operation, out.add("BatchNormalization", [out.read(operation), *leaves], module=module, epsilon=eps))


def pool(out: Said, operation: Operation) -> bool:
    kernel, average = out.whole(operation, "kernel_sizes", ()), operation.type == "avg_pool"
    how = _window(out, operation, 2)
    if len(kernel) != 2 or how is None:
        return False
    inside = out.flag(operation, "exclude_padding_from_average")
    if average and "auto_pad" in how and not inside:
        return False  # the zeros of SAME are counted, which ONNX has no word for
    how |= {"kernel_shape": kernel, "strides": out.whole(operation, "strides", (1, 1))}
    how |= {"ceil_mode": 1} if out.flag(operation, "ceil_mode") else {}
    how |= {"count_include_pad": int(not inside)} if average else {}
    return out.gives(operation, out.add("AveragePool" if average else "MaxPool", [out.read(operation)], name=operation.outputs[0], **how))


def reduced(op: str, out: Said, operation: Operation) -> bool:
    axes = out.whole(operation, "axes", ())
    how: dict[str, Any] = {"keepdims": int(out.flag(operation, "keep_dims")), "axes": axes}
    return bool(axes) and out.gives(operation, out.add(op, [out.read(operation)], name=operation.outputs[0], **how))


def plain(op: str, out: Said, operation: Operation, **attrs: tuple[str, float]) -> bool:
    how: dict[str, Any] = {name: out.real(operation, role, default) for name, (role, default) in attrs.items()}
    return out.gives(operation, out.add(op, [out.read(operation)], name=operation.outputs[0], **how))


def both(op: str, out: Said, operation: Operation) -> bool:
    return out.gives(operation, out.add(op, [out.read(operation), out.read(operation, "y")], name=operation.outputs[0]))


def clip(out: Said, operation: Operation) -> bool:
    low, high = (0.0, 6.0) if operation.type == "relu6" else (out.real(operation, role, at) for role, at in (("alpha", 0), ("beta", 0)))
    inputs = [out.read(operation), out.numbers(low, np.float32), out.numbers(high, np.float32)]
    return out.gives(operation, out.add("Clip", inputs, name=operation.outputs[0]))


def silu(out: Said, operation: Operation) -> bool:
    x = out.read(operation)
    gate = out.add("Sigmoid", [x])
    return out.gives(operation, out.add("Mul", [x, gate], name=operation.outputs[0]))


def gelu(out: Said, operation: Operation) -> bool:
    kind = {"EXACT": "none", "TANH_APPROXIMATION": "tanh"}.get(out.word(operation, "mode", "EXACT"))
    how: dict[str, Any] = {"approximate": kind}
    return kind is not None and out.gives(operation, out.add("Gelu", [out.read(operation)], name=operation.outputs[0], **how))


def slope(out: Said, operation: Operation) -> bool:
    held = out.told(operation, "alpha")
    if not isinstance(held, Stored):
        return False
    shaped = out.add("Reshape", [out.read(operation, "alpha"), out.numbers([*held.shape, 1, 1])])
    return out.gives(operation, out.add("PRelu", [out.read(operation), shaped], module=out.module(operation, "alpha")))


def concat(out: Said, operation: Operation) -> bool:
    axis = out.whole(operation, "axis", ())
    if not axis or out.flag(operation, "interleave"):
        return False
    return out.gives(operation, out.add("Concat", out.all(operation, "values"), name=operation.outputs[0], axis=axis[0]))


def shaped(op: str, role: str, out: Said, operation: Operation) -> bool:
    sizes = out.whole(operation, role, ())
    if not sizes:
        return False
    return out.gives(operation, out.add(op, [out.read(operation), out.numbers(sizes)], name=operation.outputs[0]))


def turned(out: Said, operation: Operation) -> bool:
    perm = out.whole(operation, "perm", ())
    return bool(perm) and out.gives(operation, out.add("Transpose", [out.read(operation)], name=operation.outputs[0], perm=perm))


def softmax(out: Said, operation: Operation) -> bool:
    axis = out.whole(operation, "axis", (-1,))[0]
    return out.gives(operation, out.add("Softmax", [out.read(operation)], name=operation.outputs[0], axis=axis))


def alias(out: Said, operation: Operation) -> bool:
    return bool(x := out.read(operation)) and out.gives(operation, out.add("Identity", [x]))


def margin(out: Said, operation: Operation) -> bool:
    pads = out.whole(operation, "pad", ())
    if out.word(operation, "mode", "constant") != "constant" or not 2 <= len(pads) <= 8 or len(pads) % 2:
        return False
    pads = (*(0,) * (8 - len(pads)), *pads)
    value = out.numbers(out.real(operation, "constant_val", 0.0), np.float32)
    inputs = [out.read(operation), out.numbers([*pads[::2], *pads[1::2]]), value]
    return out.gives(operation, out.add("Pad", inputs, name=operation.outputs[0]))


def upsample(out: Said, operation: Operation) -> bool:
    tall, wide = (out.real(operation, role, at) for role, at in (("scale_factor_height", 1), ("scale_factor_width", 1)))
    how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    inputs = [out.read(operation), "", out.numbers([1, 1, tall, wide], np.float32)]
    return out.gives(operation, out.add("Resize", inputs, name=operation.outputs[0], **how))


HANDLERS: dict[str, Callable[[Said, Operation], bool]] = {
    "conv": conv,
    "conv_transpose": conv,
    "linear": dense,
    "matmul": product,
    "batch_norm": norm,
    "max_pool": pool,
    "avg_pool": pool,
    "reduce_mean": partial(reduced, "ReduceMean"),
    "reduce_max": partial(reduced, "ReduceMax"),
    "relu": partial(plain, "Relu"),
    "tanh": partial(plain, "Tanh"),
    "sigmoid": partial(plain, "Sigmoid"),
    "softplus": partial(plain, "Softplus"),
    "leaky_relu": partial(plain, "LeakyRelu", alpha=("alpha", 0.01)),
    "elu": partial(plain, "Elu", alpha=("alpha", 1.0)),
    "sigmoid_hard": partial(plain, "HardSigmoid", alpha=("alpha", 0.2), beta=("beta", 0.5)),
    "prelu": slope,
    "relu6": clip,
    "clip": clip,
    "silu": silu,
    "gelu": gelu,
    "add": partial(both, "Add"),
    "sub": partial(both, "Sub"),
    "mul": partial(both, "Mul"),
    "real_div": partial(both, "Div"),
    "maximum": partial(both, "Max"),
    "concat": concat,
    "reshape": partial(shaped, "Reshape", "shape"),
    "squeeze": partial(shaped, "Squeeze", "axes"),
    "expand_dims": partial(shaped, "Unsqueeze", "axes"),
    "transpose": turned,
    "softmax": softmax,
    "pad": margin,
    "upsample_nearest_neighbor": upsample,
    "cast": alias,
    "identity": alias,
}


def checked(program: Program) -> Program:
    """Raise MalformedFile where two operations give one value."""
    given = [name for operation in program.operations for name in operation.outputs] + list(program.constants)
    if len(set(given)) < len(given):
        raise MalformedFile("two of its operations give a value of one name")
    return program
