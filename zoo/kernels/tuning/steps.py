"""What kinds of steps there are: which ops could compute each, and which arguments an op takes of a step.

An op of `ops/` is chosen for networks when its name is in `op_names` and its arguments are in the tables here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.passes.graph import Node
from zoo.kernels.passes.kinds import is_depthwise, is_stem
from zoo.kernels.passes.place import Place

MERGED = ("join", "stem_pool", "depthwise_squeeze")
"""Kinds that are several steps in one, each there to be run instead."""

NARROW = ("narrow_conv", "quantize")
"""Kinds of steps in 8 bits."""

COMPUTED = ("conv", "pool", "mean", "pointwise", "layer_norm", "squeeze_excite", "window_attention", "response_gate", *NARROW, *MERGED)
"""Kinds of steps that have candidates; the others move, view or concatenate, or run as ATen has them."""

UNPLACED = ("join", "depthwise_squeeze")
"""Kinds whose kernels make memory of their own: a value that belongs into a concatenation is copied there."""


ATEN = "aten"
"""The candidate that every step has: its definition in plain PyTorch, in the plan's dtype."""

FOREIGN = (ATEN, "cudnn_conv", "cudnn_graph", "cublaslt", "narrow_cudnn", "narrow_cublaslt")
"""Candidates whose kernels are not ours, and don't wait as ours do."""

MAKES_ITS_MAP = (ATEN, "cudnn_conv")
"""Candidates whose library makes the map that it writes, where nobody can say."""

OVERWRITES = {"pointwise": "x", "layer_norm": "x", "conv": "residual", "grouped": "residual", "join": "residual", "cublaslt": "residual"}
"""The input of an op that `out` may be: each of its elements is read by the program that writes there, before it does."""

IMAGE_OPS = ("stem", "stem_pool")
"""Ops that read the packed image instead of the map."""

_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "conv": ("stride", "padding", "dilation", "act", "pre_act", "tf32", "out_dtype"),
    "cudnn_conv": ("stride", "padding", "dilation", "groups", "act", "tf32"),
    "cudnn_graph": ("stride", "padding", "dilation", "groups", "act", "tf32"),
    "cublaslt": ("stride", "padding", "dilation", "act", "tf32"),
    **dict.fromkeys(("narrow_conv", "narrow_cudnn", "narrow_cublaslt"), ("stride", "padding", "dilation", "act", "out_dtype")),
    "quantize": ("act", "out_dtype"),
    "grouped": ("stride", "padding", "dilation", "groups", "act", "tf32"),
    "depthwise": ("stride", "padding", "dilation", "act"),
    "stem": ("stride", "padding", "act", "tf32"),
    "stem_pool": ("stride", "padding", "act", "pool_padding", "ceil_mode", "tf32"),
    "pool": ("kind", "kernel", "stride", "padding", "ceil_mode", "count_include_pad", "pre_act"),
    "global_pool": ("pre_act", "out_dtype"),
    "pointwise": ("pre_act", "act", "out_dtype"),
    "join": ("stride2", "act", "next_act", "tf32"),
    "layer_norm": ("eps",),
    "response_gate": ("eps",),
    "window_attention": ("heads", "window", "step", "stride", "roll", "first", "pitch", "factor", "cosine", "tf32"),
}

_WEIGHTS: dict[str, tuple[str, ...]] = {
    "join": ("weight", "weight2", "next_weight"), "squeeze_excite": ("weight1", "weight2"),
}  # fmt: skip

_VECTORS: dict[str, tuple[str, ...]] = {
    "join": ("bias", "next_bias"), "squeeze_excite": ("bias1", "bias2"),
    "pool": ("scale", "shift", "factor"), "global_pool": ("scale", "shift"), "pointwise": ("scale", "shift"),
    "layer_norm": ("scale", "shift"),
    "window_attention": ("bias", "scale", "region"), "response_gate": ("scale",),
    "conv": ("bias", "scale", "shift"),
    **dict.fromkeys(("narrow_conv", "narrow_cudnn", "narrow_cublaslt"), ("factor", "bias", "residual_factor", "out_factor")),
    "quantize": ("out_factor",),
}  # fmt: skip

_NEEDED: dict[str, tuple[tuple[str, str], ...]] = {
    "join": (("bias", "weight"), ("next_bias", "next_weight")),
    "squeeze_excite": (("bias1", "weight1"), ("bias2", "weight2")),
}  # fmt: skip
"""Biases that a kernel can't do without, and the weight whose outputs they belong to."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel and its launch parameters.

    Attributes:
        op: the op that launches it.
        config: the launch parameters.
        compiles: whether its library compiles it at its first call, which takes half a second in which no other thread runs Python.
    """

    op: str
    config: dict[str, Any] = field(default_factory=dict, compare=False)
    compiles: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return self.op if not self.config else f"{self.op} {json.dumps(self.config, sort_keys=True, separators=(',', ':'))}"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all steps of a plan share."""

    device: torch.device
    dtype: torch.dtype
    tf32: bool = False


def op_names(node: Node) -> list[str]:
    """Name the ops that have a kernel for steps of this kind, the most promising first."""
    if node.op == "narrow_conv":
        if node.attrs["kind"] != "int8":
            return ["narrow_cublaslt", "narrow_conv"]
        # cuDNN takes half a second for each of its int8 plans; on an H200 they were the slower ones elsewhere, or a tenth faster.
        _, c, kh, kw = node.attrs["weight"].shape
        return (["narrow_cudnn"] if c >= 128 and kh * kw > 1 and "residual" not in node.roles else []) + ["narrow_conv"]
    if node.op == "conv" and "stored" in node.attrs:  # only this one writes 8 bits
        return ["stem"]
    if node.op == "conv":
        if is_depthwise(node):
            return ["depthwise", "cudnn_conv"]
        if node.attrs["groups"] > 1:
            return ["grouped", "cudnn_graph", "cudnn_conv"]
        stem = ["stem"] if is_stem(node) else []
        pointwise = node.attrs["weight"].shape[2:] == (1, 1)
        return stem + (["conv", "cublaslt", "cudnn_conv", "cudnn_graph"] if pointwise else ["cudnn_conv", "cudnn_graph", "conv"])
    return [reference_op(node)] if node.op in COMPUTED else []


def reference_op(node: Node) -> str:
    """Name the op whose `reference` defines this step."""
    if node.op == "conv":
        return "cudnn_conv" if node.attrs["groups"] > 1 else "conv"
    return {"mean": "global_pool"}.get(node.op, node.op)


def arguments(node: Node, op: str, setting: Setting, out_dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return the arguments of `ops.<op>` for a step but its inputs; weights in the plan's dtype, vectors in float32, unpacked."""
    attrs = dict(node.attrs)
    attrs.update(tf32=setting.tf32, out_dtype=node.stored(setting.dtype) if node.op in NARROW else out_dtype)
    found: dict[str, Any] = {name: attrs[name] for name in _ARGUMENTS.get(op, ())}
    for name in _WEIGHTS.get(op, ("weight",)):
        value = attrs.get(name)
        if name in attrs or op not in _WEIGHTS:
            found[name] = None if value is None else value.to(setting.device, value.dtype if node.op in NARROW else setting.dtype)
    for name in _VECTORS.get(op, ("bias",)):
        value = attrs.get(name)
        found[name] = None if value is None else value.to(setting.device, torch.float32)
    if op in ("pool", "global_pool", "pointwise", "layer_norm", "window_attention", "response_gate", "quantize"):
        found.pop("weight", None)
    for bias, weight in _NEEDED.get(op, ()):
        if found[bias] is None and found[weight] is not None:
            found[bias] = torch.zeros(found[weight].shape[0], device=setting.device)
    if op == "stem_pool":
        found["pool_padding"] = found["pool_padding"][0]
    if op == "squeeze_excite":
        found |= {"act": attrs["act"], "gate_act": attrs["gate_act"], "scale": 1.0}
    return found


def describe(node: Node, places: dict[Node, Place], setting: Setting) -> str:
    """Write a step down as the key under which its choice is kept: everything that its time depends on."""
    a = node.attrs
    words = [node.op, str(setting.dtype).removeprefix("torch.") + ("/tf32" if setting.tf32 else "")]
    for role, source in zip(node.roles, node.inputs, strict=True):
        words.append(f"{role}={_map(source, places)}")
    words.append(f"out={_map(node, places)}")
    for name in sorted(a.keys() - {"source"}):
        value = a[name]
        if isinstance(value, Tensor):
            words.append(f"{name}:{'x'.join(map(str, value.shape))}")
        elif isinstance(value, dict):
            words += [f"{name}.{inner}:{'x'.join(map(str, v.shape)) if isinstance(v, Tensor) else v}" for inner, v in sorted(value.items())]
        elif value not in (None, "none", False):
            words.append(f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}")
    return " ".join(words)


def _map(node: Node, places: dict[Node, Place]) -> str:
    spot = places.get(node)
    image = "image:" if node.op == "input" else ""
    return image + "x".join(map(str, node.shape)) + (f"/{spot.buffer.shape[1]}" if spot else "")
