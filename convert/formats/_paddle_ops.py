"""Programs of Paddle's, and what each operator is in ONNX's words; one that has none keeps its place under its own name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from convert.formats._operators import Transcript
from convert.formats._wire import Budget, Message, message, one, schema
from convert.kinds import is_list
from convert.source import Stored
from weights.errors import LimitExceeded, MalformedFile

DTYPES = {0: "bool", 1: "int16", 2: "int32", 3: "int64", 4: "float16", 5: "float32", 6: "float64", 20: "uint8", 21: "int8", 22: "bfloat16"}
VARIABLE = schema(
    "string name 1, kind kinds 2, int kept 3",
    kind=schema("int type 1, lod lods 3", lod=schema("tensor tensors 1", tensor=schema("int dtype 1, ints dims 2"))),
)
OPERATOR = schema(
    "io inputs 1, io outputs 2, string type 3, attribute attributes 4",
    io=schema("string name 1, string values 2"),
    attribute=schema(
        "string name 1, int i 3, float f 4, string s 5, ints ints 6, floats floats 7, string strings 8, int b 10, ints bools 11, "
        "int long 13, ints longs 15"
    ),
)
PROGRAM = schema("block blocks 1", block=schema("variable variables 3, operator operators 4", variable=VARIABLE, operator=OPERATOR))
TENSOR = 7
"""The type of a variable that is an array; others are lists and what feeds and fetches."""
LAYER = re.compile(r"(.+)\.[wb]_\d+$")
MOST_OPERATORS = 200_000


@dataclass(slots=True)
class Variable:
    """An array of a program; `kept` ones are its weights."""

    dims: tuple[int, ...]
    kept: bool


@dataclass(slots=True)
class Step:
    """An operator: its inputs and outputs by their roles."""

    type: str
    inputs: Mapping[str, list[str]]
    outputs: Mapping[str, list[str]]
    attrs: Mapping[str, Any]

    def ints(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        held: Any = self.attrs.get(name, default)
        return tuple(int(n) for n in held) if is_list(held) else default

    def text(self, name: str, default: str = "") -> str:
        return str(self.attrs.get(name) or default)


@dataclass(slots=True)
class Program:
    """The first block of a program; others are bodies of loops and branches."""

    variables: Mapping[str, Variable]
    steps: list[Step]


def parse(data: memoryview) -> Program:
    """Read a program."""
    blocks = message(data, PROGRAM, Budget()).get("blocks", [])
    if not blocks:
        raise MalformedFile("it is a program without a block")
    variables: dict[str, Variable] = {}
    for told in blocks[0].get("variables", []):
        kinds = told.get("kinds", [])
        tensors = [t for kind in kinds if one(kind, "type", 0) == TENSOR for lod in kind.get("lods", []) for t in lod.get("tensors", [])]
        dims = tuple(int(n) for n in tensors[-1].get("dims", [])) if tensors else ()
        variables[one(told, "name", "")] = Variable(dims, bool(one(told, "kept", 0)) and bool(tensors))
    steps = [_step(told) for told in blocks[0].get("operators", [])]
    if len(steps) > MOST_OPERATORS:
        raise LimitExceeded(f"it has more than {MOST_OPERATORS} operators")
    return Program(variables, steps)


def _step(told: Message) -> Step:
    sides = [{one(io, "name", ""): io.get("values", []) for io in told.get(side, [])} for side in ("inputs", "outputs")]
    attrs: dict[str, Any] = {}
    for entry in told.get("attributes", []):
        many = next((entry[kind] for kind in ("ints", "floats", "strings", "bools", "longs") if kind in entry), None)
        single = next((entry[kind][-1] for kind in ("i", "f", "s", "b", "long") if kind in entry), None)
        attrs[one(entry, "name", "")] = many if many is not None else single
    return Step(one(told, "type", ""), sides[0], sides[1], attrs)


class Said(Transcript):
    """A program's operators as they are said; a variable that is written again is another value from there on."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.variables = program.variables
        self.now: dict[str, str] = {}
        self.notes: list[str] = []

    def value(self, step: Step, role: str) -> str:
        """Name what an operator reads in a role; "" where it reads nothing."""
        names = step.inputs.get(role) or [""]
        return self.now.get(names[0], names[0])

    def rank(self, step: Step, role: str) -> int:
        names = step.inputs.get(role) or [""]
        return len(self.variables[names[0]].dims) if names[0] in self.variables else 0

    def gives(self, step: Step, value: str, role: str = "Out") -> bool:
        """Say what an operator gives in a role."""
        names = step.outputs.get(role) or []
        if names:
            self.now[names[0]] = value
        return bool(names)

    def named(self, step: Step, *roles: str) -> str:
        """Name a layer by its parameters, "conv2d_0.w_0" or "conv1.weight"."""
        for role in roles:
            name = (step.inputs.get(role) or [""])[0]
            if name in self.model.tensors:
                match = LAYER.match(name)
                return match[1] if match else name.rpartition(".")[0] or name
        return ""


def said(program: Program, arrays: Mapping[str, Stored]) -> Said:
    """Say a whole program, with its arrays."""
    out = Said(program)
    for name, held in arrays.items():
        out.constant(name, held)
    ends: list[str] = []
    for step in program.steps:
        mark, handler = len(out.model.operators), HANDLERS.get(step.type)
        if step.type == "feed":
            name = (step.outputs.get("Out") or [""])[0]
            if name not in out.model.inputs:
                out.input(name, [n if n > 0 else None for n in program.variables[name].dims] if name in program.variables else ())
        elif step.type == "fetch":
            ends.append(out.value(step, "X"))
        elif handler is None or not handler(out, step):
            del out.model.operators[mark:]
            read = [out.now.get(name, name) for names in step.inputs.values() for name in names]
            outputs = [(name, out.fresh()) for names in step.outputs.values() for name in names]
            out.unknown(step.type, read, [made for _, made in outputs], step.type)
            out.now.update(outputs)
    out.model.outputs = list(dict.fromkeys(ends))
    return out


def plain(op: str, out: Said, step: Step, **attrs: Any) -> bool:
    return out.gives(step, out.add(op, [out.value(step, "X")], name=(step.outputs.get("Out") or [""])[0], **attrs))


def _pads(step: Step) -> dict[str, Any] | None:
    way, sides = step.text("padding_algorithm", "EXPLICIT"), step.ints("paddings", (0, 0))
    if way in ("SAME", "VALID"):
        return {"auto_pad": {"SAME": "SAME_UPPER", "VALID": "VALID"}[way]}
    if len(sides) == 2:
        return {"pads": (*sides, *sides)}
    return {"pads": (sides[0], sides[2], sides[1], sides[3])} if len(sides) == 4 else None


def conv(out: Said, step: Step) -> bool:
    pads, back = _pads(step), "transpose" in step.type
    fused = step.attrs.get("fuse_relu") or step.text("fuse_activation") or step.inputs.get("ResidualData")
    weight = out.value(step, "Filter")
    if pads is None or fused or step.text("data_format", "NCHW") not in ("NCHW", "AnyLayout") or weight not in out.model.tensors:
        return False
    strides, dilations = step.ints("strides", (1, 1)), step.ints("dilations", (1, 1))
    how: dict[str, Any] = {"strides": strides, "dilations": dilations, "group": int(step.attrs.get("groups") or 1), **pads}
    if back:
        if step.ints("output_size"):
            return False
        how["output_padding"] = step.ints("output_padding") or (0, 0)
    bias = [out.value(step, "Bias")] if out.value(step, "Bias") else []
    made = out.add("ConvTranspose" if back else "Conv", [out.value(step, "Input"), weight, *bias], module=out.named(step, "Filter"), **how)
    return out.gives(step, made, "Output")


def norm(out: Said, step: Step) -> bool:
    inputs = [out.value(step, role) for role in ("X", "Scale", "Bias", "Mean", "Variance")]
    if step.text("data_layout", "NCHW") not in ("NCHW", "AnyLayout"):
        return False
    eps = step.attrs.get("epsilon")
    module = out.named(step, "Scale", "Bias", "Mean")
    return out.gives(step, out.add("BatchNormalization", inputs, module=module, epsilon=float(1e-5 if eps is None else eps)), "Y")


def elementwise(op: str, out: Said, step: Step) -> bool:
    x, y = out.value(step, "X"), out.value(step, "Y")
    axis, ranks = step.attrs.get("axis"), (out.rank(step, "X"), out.rank(step, "Y"))
    axis = -1 if axis is None else int(axis)
    if axis >= 0 and 0 < ranks[1] < ranks[0]:
        behind = ranks[0] - axis - ranks[1]
        if behind < 0 or y not in out.model.tensors:
            return behind == 0
        if behind:
            y = out.add("Reshape", [y, out.numbers([*out.model.tensors[y].shape, *(1,) * behind])])
    module = out.named(step, "Y", "X")
    return out.gives(step, out.add(op, [x, y], name=(step.outputs.get("Out") or [""])[0], module=module))


def dense(out: Said, step: Step) -> bool:
    x, weight = out.value(step, "X"), out.value(step, "Y")
    sides = [bool(step.attrs.get(name)) for name in ("transpose_X", "trans_x", "transpose_Y", "trans_y")]
    alpha, columns = step.attrs.get("alpha"), step.attrs.get("x_num_col_dims")
    if weight not in out.weights or sides[0] or sides[1] or (alpha is not None and alpha != 1) or (columns is not None and columns != 1):
        return False
    if step.type == "mul" and out.rank(step, "X") > 2:
        x = out.add("Flatten", [x], axis=1)
    kernel = out.turned(weight, (1, 0)) if sides[2] or sides[3] else weight
    return out.gives(step, out.add("MatMul", [x, kernel], module=out.named(step, "Y")))


def pool(out: Said, step: Step) -> bool:
    kind, kernel, pads = step.text("pooling_type", "max"), step.ints("ksize"), _pads(step)
    whole = step.attrs.get("global_pooling") or (step.attrs.get("adaptive") and kernel == (1, 1))
    if kind not in ("max", "avg") or step.text("data_format", "NCHW") not in ("NCHW", "AnyLayout"):
        return False
    if whole:
        return plain("GlobalMaxPool" if kind == "max" else "GlobalAveragePool", out, step)
    ceil = bool(step.attrs.get("ceil_mode"))
    if step.attrs.get("adaptive") or pads is None or len(kernel) != 2:
        return False
    how: dict[str, Any] = {"kernel_shape": kernel, "strides": step.ints("strides", (1, 1)), "ceil_mode": int(ceil), **pads}
    if kind == "avg":
        how["count_include_pad"] = int(not step.attrs.get("exclusive", True))
    return plain("MaxPool" if kind == "max" else "AveragePool", out, step, **how)


def flatten(out: Said, step: Step) -> bool:
    first, last = step.attrs.get("start_axis", step.attrs.get("axis", 1)), step.attrs.get("stop_axis", -1)
    rank = out.rank(step, "X")
    return first == 1 and last in (-1, rank - 1) and plain("Flatten", out, step, axis=1)


def reshape(out: Said, step: Step) -> bool:
    shape = step.ints("shape")
    if not shape or step.inputs.get("ShapeTensor") or step.inputs.get("Shape"):
        return False
    return out.gives(step, out.add("Reshape", [out.value(step, "X"), out.numbers(shape)], name=(step.outputs.get("Out") or [""])[0]))


def squeeze(op: str, out: Said, step: Step) -> bool:
    return bool(step.ints("axes")) and plain(op, out, step, axes=list(step.ints("axes")))


def concat(out: Said, step: Step) -> bool:
    values = [out.now.get(name, name) for name in step.inputs.get("X") or []]
    if not values or step.inputs.get("AxisTensor"):
        return False
    axis = int(step.attrs.get("axis") or 0)
    return out.gives(step, out.add("Concat", values, name=(step.outputs.get("Out") or [""])[0], axis=axis))


def dropout(out: Said, step: Step) -> bool:
    """At inference, of the older kind, numbers are as much smaller as they were fewer in training."""
    if step.text("dropout_implementation", "downgrade_in_infer") == "upscale_in_train":
        return plain("Identity", out, step)
    share = step.attrs.get("dropout_prob")
    factor = out.numbers(1 - float(0.5 if share is None else share), "float32")
    return out.gives(step, out.add("Mul", [out.value(step, "X"), factor]))


def scale(out: Said, step: Step) -> bool:
    factor, added = step.attrs.get("scale"), step.attrs.get("bias")
    factor, added = float(1 if factor is None else factor), float(added or 0)
    if step.inputs.get("ScaleTensor"):
        return False
    if not step.attrs.get("bias_after_scale", True):
        added *= factor
    value = out.value(step, "X")
    value = out.add("Mul", [value, out.numbers(factor, "float32")]) if factor != 1 else value
    value = out.add("Add", [value, out.numbers(added, "float32")]) if added else value
    return out.gives(step, out.add("Identity", [value]))


def clip(low: float | str, high: float | str, out: Said, step: Step) -> bool:
    limits = [float(step.attrs.get(side) or 0) if isinstance(side, str) else side for side in (low, high)]
    return out.gives(step, out.add("Clip", [out.value(step, "X"), *(out.numbers(n, "float32") for n in limits)]))


def number(out: Said, step: Step, name: str, default: float) -> float:
    held = step.attrs.get(name)
    return float(np.float32(default if held is None else held))


def hard_swish(out: Said, step: Step) -> bool:
    wanted = [("threshold", 6.0), ("scale", 6.0), ("offset", 3.0)]
    return all(number(out, step, name, value) == value for name, value in wanted) and plain("HardSwish", out, step)


def silu(out: Said, step: Step) -> bool:
    if step.type == "swish" and number(out, step, "beta", 1) != 1:
        return False
    x = out.value(step, "X")
    return out.gives(step, out.add("Mul", [x, out.add("Sigmoid", [x])]))


def resize(mode: str, out: Said, step: Step) -> bool:
    given, aligned = step.attrs.get("scale"), step.attrs.get("align_corners")
    factors: list[Any] = given if is_list(given) else [given, given]
    if (
        aligned
        or any(not n or n <= 0 for n in factors)
        or len(factors) != 2
        or any(step.inputs.get(r) for r in ("OutSize", "Scale", "SizeTensor"))
    ):
        return False
    half = mode == "linear" and step.attrs.get("align_mode") == 0
    if mode == "linear" and not half:
        return False
    how = {"coordinate_transformation_mode": "half_pixel" if half else "asymmetric", "nearest_mode": "floor"}
    return out.gives(step, out.add("Resize", [out.value(step, "X"), "", out.numbers([1, 1, *factors], "float32")], mode=mode, **how))


def reduced(op: str, out: Said, step: Step) -> bool:
    axes = step.ints("dim")
    return (
        bool(axes)
        and not step.attrs.get("reduce_all")
        and plain(op, out, step, axes=list(axes), keepdims=int(bool(step.attrs.get("keep_dim"))))
    )


def prelu(out: Said, step: Step) -> bool:
    slope = out.model.tensors.get(out.value(step, "Alpha"))
    if slope is None or step.text("mode") not in ("channel", "all"):
        return False
    wanted = [1] if step.text("mode") == "all" else [int(np.prod(slope.shape)), 1, 1]
    shaped = out.add("Reshape", [out.value(step, "Alpha"), out.numbers(wanted)])
    return out.gives(step, out.add("PRelu", [out.value(step, "X"), shaped], module=out.named(step, "Alpha")))


def split(out: Said, step: Step) -> bool:
    names, sections = step.outputs.get("Out") or [], step.ints("sections")
    if not names or step.inputs.get("AxisTensor") or step.inputs.get("SectionsTensorList"):
        return False
    made = [out.fresh() for _ in names]
    sizes = [out.numbers(sections)] if sections else []
    out.several("Split", [out.value(step, "X"), *sizes], made, axis=int(step.attrs.get("axis") or 0))
    out.now.update(zip(names, made, strict=True))
    return True


HANDLERS: dict[str, Callable[[Said, Step], bool]] = {
    **dict.fromkeys(("conv2d", "depthwise_conv2d", "conv2d_transpose", "depthwise_conv2d_transpose"), conv),
    **dict.fromkeys(("batch_norm", "sync_batch_norm"), norm),
    "elementwise_add": partial(elementwise, "Add"),
    "elementwise_sub": partial(elementwise, "Sub"),
    "elementwise_mul": partial(elementwise, "Mul"),
    "elementwise_div": partial(elementwise, "Div"),
    "elementwise_max": partial(elementwise, "Max"),
    **dict.fromkeys(("mul", "matmul", "matmul_v2"), dense),
    **dict.fromkeys(("pool2d",), pool),
    **dict.fromkeys(("flatten", "flatten2", "flatten_contiguous_range"), flatten),
    **dict.fromkeys(("reshape", "reshape2"), reshape),
    "squeeze2": partial(squeeze, "Squeeze"),
    "unsqueeze2": partial(squeeze, "Unsqueeze"),
    "transpose2": lambda out, step: bool(step.ints("axis")) and plain("Transpose", out, step, perm=step.ints("axis")),
    "concat": concat,
    "split": split,
    "softmax": lambda out, step: plain("Softmax", out, step, axis=int(-1 if step.attrs.get("axis") is None else step.attrs["axis"])),
    "dropout": dropout,
    "scale": scale,
    **dict.fromkeys(("assign", "cast", "share_data"), partial(plain, "Identity")),
    "relu": partial(plain, "Relu"),
    "sigmoid": partial(plain, "Sigmoid"),
    "tanh": partial(plain, "Tanh"),
    "softplus": partial(plain, "Softplus"),
    "relu6": partial(clip, 0.0, 6.0),
    "clip": partial(clip, "min", "max"),
    "leaky_relu": lambda out, step: plain("LeakyRelu", out, step, alpha=number(out, step, "alpha", 0.02)),
    "elu": lambda out, step: plain("Elu", out, step, alpha=number(out, step, "alpha", 1)),
    "gelu": lambda out, step: plain("Gelu", out, step, approximate="tanh" if step.attrs.get("approximate") else "none"),
    "hard_sigmoid": lambda out, step: plain(
        "HardSigmoid", out, step, alpha=number(out, step, "slope", 0.2), beta=number(out, step, "offset", 0.5)
    ),
    "hard_swish": hard_swish,
    **dict.fromkeys(("silu", "swish"), silu),
    "prelu": prelu,
    **dict.fromkeys(("nearest_interp", "nearest_interp_v2"), partial(resize, "nearest")),
    **dict.fromkeys(("bilinear_interp", "bilinear_interp_v2"), partial(resize, "linear")),
    "reduce_mean": partial(reduced, "ReduceMean"),
    "reduce_max": partial(reduced, "ReduceMax"),
}
