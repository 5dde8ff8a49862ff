"""What Flux.jl's layers keep, version by version, and how their arrays become PyTorch's; for both of Julia's containers.

Source: https://github.com/FluxML/Flux.jl, src/layers/conv.jl, basic.jl and normalise.jl at the tags v0.4 to v0.16.
"""

# ruff: noqa: RUF001 - Flux names its fields in Greek

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from convert._guard import MAX_FACT
from convert.formats._julia import Array, Struct
from convert.kinds import is_dict, is_row
from convert.source import WEIGHTED, Convention, Positional, Stored
from convert.steps import Moment, Shape, Step, from_layout
from weights.errors import LimitExceeded

CONV = ("σ", "weight", "bias", "stride", "pad", "dilation", "groups")
FIELDS: dict[str, tuple[str, ...]] = {
    "Chain": ("layers",),
    "Parallel": ("connection", "layers"),
    "SkipConnection": ("layers", "connection"),
    "Maxout": ("layers",),
    "Conv": CONV,
    "Conv2D": CONV,  # Flux 0.4
    "CrossCor": CONV,
    "DepthwiseConv": CONV,
    "ConvTranspose": CONV,
    "MaxPool": ("k", "pad", "stride"),
    "MeanPool": ("k", "pad", "stride"),
    "AdaptiveMeanPool": ("out",),
    "AdaptiveMaxPool": ("out",),
    "Dropout": ("p",),
    "AlphaDropout": ("p",),
    "LayerNorm": ("λ", "diag", "ϵ", "size", "affine"),
    "Scale": ("scale", "bias", "σ"),
    "Diagonal": ("α", "β"),
}
"""Fields of each layer in the order of its declaration; a file of an older version has fewer, from the left."""
NORM_8 = ("λ", "β", "γ", "μ", "σ²", "ϵ", "momentum", "active")
NORM = ("λ", "β", "γ", "μ", "σ²", "ϵ", "momentum", "affine", "track_stats", "active", "chs")
TRANSPOSE_8 = ("σ", "weight", "bias", "stride", "pad", "outpad", "dilation", "groups")

NORM_LEAVES = {"γ": "weight", "β": "bias", "μ": "running_mean", "σ²": "running_var", "σ": "running_var"}

STD_BELOW_EPS = 1e-6
"""Flux 0.4 to 0.6 keep a moving standard deviation where later ones keep the variance, in as many fields; their epsilon tells
them apart: 1e-8, then 1e-5."""
TORCH_EPS = 1e-5
CONV_KINDS = {"Conv": "conv", "Conv2D": "conv", "CrossCor": "conv", "ConvTranspose": "transposed", "DepthwiseConv": "depthwise"}
LETTERS = {"conv": "OI", "transposed": "IO", "depthwise": "CM"}
"""Of the axes before the spatial ones, reversed. DepthwiseConv, a struct of its own up to 0.12, has (W, H, multiplier, channel)."""

MAX_VISITS = 100_000
"""Of values: a file may name one value in many places, and so describe a tree that it does not hold."""

ALIASES = {"W": "weight", "w": "weight", "b": "bias", "gamma": "γ", "beta": "β", "mu": "μ", "eps": "ϵ", "ε": "ϵ", "µ": "μ"}
OPTIMISER = ("opt", "optim", "optimizer", "optimiser", "opt_state", "optimizer_state", "state_tree", "grads")
FAVOURITES = ("model_state", "model", "state", "weights", "params", "ps")


def named(struct: Struct) -> dict[str, Any]:
    """Name the fields of a layer by its type and how many there are; "1", "2", … where nobody knows them."""
    count = len(struct.fields)
    if struct.name == "BatchNorm":
        names = NORM_8 if count <= len(NORM_8) else NORM
        if count == len(NORM_8) and isinstance(struct.fields[5], float) and struct.fields[5] < STD_BELOW_EPS:
            names = tuple("σ" if name == "σ²" else name for name in NORM_8)
    elif struct.name == "Dense" and count == 3:
        names = ("σ", "weight", "bias") if not isinstance(struct.fields[0], Array) else ("weight", "bias", "σ")
    elif struct.name == "ConvTranspose" and count == len(TRANSPOSE_8):
        names = TRANSPOSE_8
    else:
        names = FIELDS.get(struct.name, ("layers",) if count == 1 and "Metalhead" in struct.path else ())
    if len(names) < count:
        names = tuple(str(index + 1) for index in range(count))
    return dict(zip(names, struct.fields, strict=False))


def join(path: str, name: str) -> str:
    """Name a value inside another one."""
    return f"{path}.{name}" if path else name


def kind_of(fields: Mapping[str, Any], type_name: str = "") -> str:
    """Tell what a layer is by its type, or by the fields it keeps: a kind of `CONV_KINDS`, "linear", "norm", or "" for a container."""
    weight = fields.get("weight")
    if isinstance(weight, Array) and 3 <= len(weight.shape) <= 5:
        if type_name in CONV_KINDS:
            kind = CONV_KINDS[type_name]
            return "conv" if kind == "depthwise" and weight.shape[1] == 1 else kind
        return "transposed" if _is_transposed(fields, weight) else "conv"
    if isinstance(weight, Array) and len(weight.shape) == 2:
        return "linear"
    return "norm" if any(isinstance(fields.get(key), Array) for key in ("γ", "μ")) else ""


def layout_of(kind: str, rank: int) -> str:
    """Spell the layout of a weight of this kind, as it lies: "OIHW", "CMHW", "IO"."""
    return "IO" if kind == "linear" else LETTERS[kind] + "DHW"[5 - rank :]


def _is_transposed(fields: Mapping[str, Any], weight: Array) -> bool:
    """Tell a ConvTranspose in a state, which names no types: it has outpad, or a bias that fits its outputs only."""
    if "outpad" in fields:
        return True
    bias, groups = fields.get("bias"), fields.get("groups")
    if not isinstance(bias, Array) or not isinstance(groups, int) or len(bias.shape) != 1:
        return False
    return bias.shape[0] != weight.shape[0] and bias.shape[0] == weight.shape[1] * groups


@dataclass(slots=True)
class Walk:
    """Collect the tensors of a tree of layers.

    Attributes:
        state_only: whether a tree without types can only be a `Flux.state`, which older Flux has not, as in BSON; JLD2 names the
            fields of whole models too.
        recorded: the convention that a file written here says of itself.
        tensors: by module and PyTorch's leaf.
        notes: what a reader of the report wants to know.
    """

    state_only: bool = True
    recorded: Convention | None = None
    tensors: dict[str, Stored] = field(default_factory=dict[str, Stored])
    notes: list[str] = field(default_factory=list[str])
    visits: int = 0
    _without_groups: list[str] = field(default_factory=list[str])
    _with_groups: int = 0
    _bare: list[str] = field(default_factory=list[str])

    def run(self, value: Any, path: str = "") -> None:
        """Walk a tree whose root is called `path`, and settle what can be known only at its end."""
        self._visit(value, path)
        self._settle()

    def _visit(self, value: Any, path: str) -> None:
        self.visits += 1
        if self.visits > MAX_VISITS:
            raise LimitExceeded(f"the file describes more than {MAX_VISITS} values")
        if isinstance(value, Struct):
            self._layer(named(value), path, value.name)
        elif is_dict(value):
            renamed = {ALIASES.get(str(key), str(key)): item for key, item in value.items()}
            self._layer(renamed if len(renamed) == len(value) and kind_of(renamed) else value, path, "")
        elif is_row(value):
            for index, item in enumerate(value):
                self._visit(item, join(path, str(index + 1)))
        elif isinstance(value, Array):
            self._emit(path or "value", value, path)

    def _layer(self, fields: Mapping[str, Any], path: str, type_name: str) -> None:
        kind = kind_of(fields, type_name)
        done: tuple[str, ...] = ()
        if kind == "norm":
            self._norm(fields, path)
            done = tuple(NORM_LEAVES)
        elif kind:
            weight, bias = fields["weight"], fields.get("bias")
            steps = from_layout(kind, layout_of(kind, len(weight.shape)), weight.shape)
            convention = None if kind == "linear" else self._convention(fields, path, type_name)
            self._emit(join(path, "weight"), weight, path, steps, convention)
            if isinstance(bias, Array):
                self._emit(join(path, "bias"), bias, path)
            done = ("weight", "bias")
        for name, item in fields.items():
            if name not in done and isinstance(item, Array | Struct | dict | list | tuple):
                self._visit(item, join(path, name))

    def _norm(self, fields: Mapping[str, Any], path: str) -> None:
        for name, leaf in NORM_LEAVES.items():
            item = fields.get(name)
            if isinstance(item, Array):
                self._emit(join(path, leaf), item, path, (Moment("std", TORCH_EPS),) if name == "σ" else ())
                if name == "σ":
                    self.notes.append(f"{path}: keeps a standard deviation (Flux 0.4 to 0.6), to which no epsilon is added")

    def _convention(self, fields: Mapping[str, Any], path: str, type_name: str) -> Convention:
        if self.recorded is not None:
            return self.recorded
        if type_name:
            return "correlation" if type_name == "CrossCor" else "convolution"
        if "groups" in fields:
            self._with_groups += 1
            return "convolution"
        if "stride" in fields:
            self._without_groups.append(join(path, "weight"))
            return "unknown"
        self._bare.append(join(path, "weight"))
        return "convolution" if "layers" in path.split(".") else "unknown"

    def _settle(self) -> None:
        """Decide on kernels with stride and without groups: CrossCor since Flux 0.13, when Conv got its groups; Conv before."""
        if self._without_groups and (self.state_only or self._with_groups):
            for name in self._without_groups:
                self.tensors[name] = replace(self.tensors[name], convention="correlation")
            self.notes.append(f"{len(self._without_groups)} kernels keep a stride and no groups, as CrossCor does and Conv does not")
        elif self._without_groups:
            self.notes.append(
                f"{len(self._without_groups)} kernels keep a stride and no groups: a CrossCor, or a Conv of Flux before 0.13; "
                "their convention is unknown"
            )
        if self._bare:
            said = {self.tensors[name].convention for name in self._bare}
            guess = "they are taken for Flux's Conv, as they are in a Chain"
            why = guess if said == {"convolution"} else "nothing says which layer trained them"
            self.notes.append(f"{len(self._bare)} kernels come without their layer's other fields; {why}")
        self._without_groups, self._bare, self._with_groups = [], [], 0

    def _emit(self, name: str, array: Array, path: str, steps: tuple[Step, ...] = (), convention: Convention | None = None) -> None:
        if name in self.tensors:
            self.notes.append(f"{name}: named twice; the second is left out")
            return
        origin = name if path else name.rpartition(".")[2]
        self.tensors[name] = Stored(origin, array.shape, array.dtype, array.load, steps, convention)


def choose(top: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Pick the entries of a file's top level that hold the network.

    Returns:
        The entries, and notes on those that were left out: an optimiser's state, other copies beside a favourite name.
    """
    holding = {key: value for key, value in top.items() if _holds(value)}
    notes = [f"{key}: an optimiser's state, left out" for key in holding if key.lower() in OPTIMISER]
    left = {key: value for key, value in holding.items() if key.lower() not in OPTIMISER} or holding
    favourite = next((key for key in FAVOURITES if key in left), None)
    if len(left) > 1 and favourite is not None and not all(isinstance(value, Array) for value in left.values()):
        notes += [f"{key}: left out beside {favourite}" for key in left if key != favourite]
        left = {favourite: left[favourite]}
    return left, notes


def _holds(value: Any) -> bool:
    """Tell whether there is an array in a value; a few thousand values are looked at, so that no file can make it take long."""
    stack, seen = [value], 0
    while stack and seen < MAX_VISITS:
        item = stack.pop()
        seen += 1
        if isinstance(item, Array):
            return True
        if isinstance(item, Struct):
            stack.extend(item.fields)
        elif is_dict(item):
            stack.extend(item.values())
        elif is_row(item):
            stack.extend(item)
    return False


def is_positional(value: Any) -> bool:
    """Tell whether a value is a plain list of arrays, as `Flux.params` gives them."""
    return is_row(value) and len(value) > 0 and all(isinstance(item, Array) for item in value)


def positional(arrays: Sequence[Array]) -> dict[str, Stored]:
    """Describe a list of arrays by position, from "0"."""
    return {str(index): Stored(str(index), array.shape, array.dtype, array.load) for index, array in enumerate(arrays)}


LIST_NOTE = "a list of parameters names no layers: whether they are true convolutions is unknown; running statistics are not in it"


def layout() -> Positional:
    """Say how `Flux.params` orders a layer's arrays: beta before gamma, and no running statistics at all."""
    return Positional({**WEIGHTED, "norm": ("bias", "weight")}, _positional_steps, "unknown")


def _positional_steps(kind: str, leaf: str, shape: Shape) -> tuple[Step, ...]:
    if leaf != "weight" or len(shape) < 2:
        return ()
    if kind == "depthwise" and shape[1] == 1:
        kind = "conv"
    return from_layout(kind, layout_of(kind, len(shape)), shape)


CAFFE2 = {"_rm_0": "running_mean", "_riv_0": "running_var", "_s_0": "weight", "_w_0": "weight", "_b_0": "bias"}
"""Endings of the names in Metalhead's files of 2018, which came from Caffe2 by ONNX; riv holds the variance, whatever it says."""


def is_caffe2(value: Any) -> bool:
    """Tell whether a dictionary is one of Metalhead's of 2018: most names end as Caffe2's blobs do."""
    if not is_dict(value) or not value:
        return False
    return sum(isinstance(key, str) and key.endswith(tuple(CAFFE2)) for key in value) * 2 > len(value)


def caffe2(value: Mapping[str, Any]) -> dict[str, Stored]:
    """Describe the tensors of such a dictionary: cross-correlation kernels and dense weights (out, in), as they lie.

    Metalhead flipped them while it loaded them into Flux (its pull request 14): they are not flipped here.
    """
    found: dict[str, Stored] = {}
    for key, item in value.items():
        if not isinstance(item, Array):
            continue
        ending = next((end for end in CAFFE2 if key.endswith(end)), "")
        name = f"{key.removesuffix(ending)}.{CAFFE2[ending]}" if ending else key
        spatial = name.endswith(".weight") and 3 <= len(item.shape) <= 5
        found[name] = Stored(key, item.shape, item.dtype, item.load, (), "correlation" if spatial else None)
    return found


def facts(top: Mapping[str, Any]) -> dict[str, str]:
    """List the numbers and words of a file's top level: accuracies, epochs."""
    return {str(key): str(value)[:MAX_FACT] for key, value in top.items() if _is_fact(value)}


def _is_fact(value: object) -> bool:
    return isinstance(value, str | bool | int | float | np.number) and not (isinstance(value, float) and math.isnan(value))
