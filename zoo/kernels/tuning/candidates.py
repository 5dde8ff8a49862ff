"""Seventh pass, first half: which kernels could compute a step, and how a step is bound to one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.kernels import ops
from zoo.kernels.passes.graph import Node
from zoo.kernels.passes.merge import is_depthwise, is_stem
from zoo.kernels.passes.place import Place

ATEN = "aten"
"""The candidate that every step has: its definition in plain PyTorch, in the plan's dtype."""

FOREIGN = (ATEN, "cudnn_conv", "cudnn_graph", "cublaslt")
"""Candidates whose kernels are not ours, and don't wait as ours do."""

OTHERS = ""
"""In limits the ops that are not named."""

IMAGE_OPS = ("stem", "stem_pool")
"""Ops that read the packed image instead of the map."""

EFFORT = 200
"""What `effort` of a kernel "quick" puts up with, a few seconds of compiling: ten times that is a few percent faster, if it is."""

_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "conv": ("stride", "padding", "dilation", "act", "pre_act", "tf32", "out_dtype"),
    "cudnn_conv": ("stride", "padding", "dilation", "groups", "act", "tf32"),
    "cudnn_graph": ("stride", "padding", "dilation", "groups", "act", "tf32"),
    "cublaslt": ("stride", "padding", "dilation", "act", "tf32"),
    "grouped": ("stride", "padding", "dilation", "groups", "act", "tf32"),
    "depthwise": ("stride", "padding", "dilation", "act"),
    "stem": ("stride", "padding", "act", "tf32"),
    "stem_pool": ("stride", "padding", "act", "pool_padding", "ceil_mode", "tf32"),
    "pool": ("kind", "kernel", "stride", "padding", "ceil_mode", "count_include_pad", "pre_act"),
    "global_pool": ("pre_act", "out_dtype"),
    "pointwise": ("pre_act", "act", "out_dtype"),
    "join": ("stride2", "act", "next_act", "tf32"),
    "separable": ("stride", "padding", "dilation", "dw_act", "act", "pre_act"),
    "head": ("pre_act", "out_dtype"),
}
_WEIGHTS: dict[str, tuple[str, ...]] = {
    "join": ("weight", "weight2", "next_weight"), "separable": ("dw_weight", "weight"), "squeeze_excite": ("weight1", "weight2"),
}  # fmt: skip
_VECTORS: dict[str, tuple[str, ...]] = {
    "join": ("bias", "next_bias"), "separable": ("dw_bias", "bias"), "squeeze_excite": ("bias1", "bias2"),
    "pool": ("scale", "shift"), "global_pool": ("scale", "shift"), "pointwise": ("scale", "shift"),
    "conv": ("bias", "scale", "shift"), "head": ("bias", "scale", "shift"),
}  # fmt: skip


_NEEDED: dict[str, tuple[tuple[str, str], ...]] = {
    "join": (("bias", "weight"), ("next_bias", "next_weight")), "head": (("bias", "weight"),),
    "separable": (("dw_bias", "dw_weight"), ("bias", "weight")), "squeeze_excite": (("bias1", "weight1"), ("bias2", "weight2")),
}  # fmt: skip
"""Biases that a kernel can't do without, and the weight whose outputs they belong to."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel and its launch parameters."""

    op: str
    config: dict[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return self.op if not self.config else f"{self.op} {json.dumps(self.config, sort_keys=True, separators=(',', ':'))}"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all steps of a plan share."""

    device: torch.device
    dtype: torch.dtype
    tf32: bool = False


Bound = Callable[[list[Any], Any], Any]
"""A step bound to a kernel: (inputs in the order of the node's roles, `out` or None) -> value, or (value, second value)."""


def op_names(node: Node) -> list[str]:
    """Name the ops that have a kernel for steps of this kind, the most promising first."""
    if node.op == "conv":
        if is_depthwise(node):
            return ["depthwise", "cudnn_conv"]
        if node.attrs["groups"] > 1:
            return ["grouped", "cudnn_graph", "cudnn_conv"]
        stem = ["stem"] if is_stem(node) else []
        pointwise = node.attrs["weight"].shape[2:] == (1, 1)
        return stem + (["conv", "cublaslt", "cudnn_conv", "cudnn_graph"] if pointwise else ["cudnn_conv", "cudnn_graph", "conv"])
    return {"mean": ["global_pool"], "depthwise_squeeze": ["depthwise_squeeze"]}.get(node.op, [node.op] if node.op in _KINDS else [])


_KINDS = ("pool", "pointwise", "join", "separable", "stem_pool", "squeeze_excite", "head")


class Weights:
    """Folded, packed weights on the device, made once and shared by the plans of all shapes."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Tensor] = {}
        self.means: dict[tuple[Any, ...], Tensor] | None = None
        """What `balance.mean_inputs` measured, for all shapes."""

    def get(self, key: tuple[Any, ...], make: Callable[[], Tensor], keep: bool = True) -> Tensor:
        """Return the tensor of this key, made at the first request."""
        if key not in self._made:
            made = make()
            if not keep:
                return made
            self._made[key] = made
        return self._made[key]

    def clear(self) -> None:
        """Forget everything."""
        self._made.clear()
        self.means = None


class Workspace:
    """Memory for the partial sums of split products, shared by the steps of one plan, which run one after the other."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def get(self, size: int, device: torch.device) -> Tensor:
        """Return at least `size` bytes; kernels find the counters at their beginning zero, and leave them so."""
        if self._memory is None or self._memory.numel() < size:
            self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        return self._memory


def arguments(node: Node, op: str, setting: Setting, out_dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return the arguments of `ops.<op>` for a step but its inputs; weights in the plan's dtype, vectors in float32, unpacked."""
    attrs = dict(node.attrs)
    attrs.update(tf32=setting.tf32, out_dtype=out_dtype)
    found: dict[str, Any] = {name: attrs[name] for name in _ARGUMENTS.get(op, ())}
    for name in _WEIGHTS.get(op, ("weight",)):
        value = attrs.get(name)
        if name in attrs or op not in _WEIGHTS:
            found[name] = None if value is None else value.to(setting.device, setting.dtype)
    for name in _VECTORS.get(op, ("bias",)):
        value = attrs.get(name)
        found[name] = None if value is None else value.to(setting.device, torch.float32)
    if op in ("pool", "global_pool", "pointwise"):
        found.pop("weight", None)
    for bias, weight in _NEEDED.get(op, ()):
        if found[bias] is None and found[weight] is not None:
            found[bias] = torch.zeros(found[weight].shape[0], device=setting.device)
    if op == "stem_pool":
        found["pool_padding"] = found["pool_padding"][0]
    if op == "squeeze_excite":
        found |= {"act": attrs["act"], "gate_act": attrs["gate_act"], "scale": 1.0}
    return found


def bind(
    node: Node,
    candidate: Candidate,
    setting: Setting,
    weights: Weights | None = None,
    out_dtype: torch.dtype | None = None,
    workspace: Workspace | None = None,
) -> Bound:
    """Make a step ready to run with a candidate; constants are cast and packed here, once."""
    if node.op == "depthwise_squeeze":
        return _bind_depthwise_squeeze(node, candidate, setting, weights)
    if node.op == "squeeze_excite":
        return _bind_squeeze(node, candidate, setting, weights)
    plain = candidate.op == ATEN
    name = reference_op(node) if plain else candidate.op
    module = ops.load(name)
    static = arguments(node, name, setting, out_dtype)
    if plain:
        dense = {
            k: v.contiguous(memory_format=torch.channels_last) if isinstance(v, Tensor) and v.dim() == 4 else v for k, v in static.items()
        }
        return _reference_caller(module, list(node.roles), dense)
    image = candidate.op in IMAGE_OPS
    static = _packed_stem(candidate.op, node, static, weights) if image else packed(module, node, static, weights)
    if candidate.op in ("cudnn_conv", "cudnn_graph", "cublaslt") and static["bias"] is not None:
        static["bias"] = static["bias"].to(setting.dtype)
    return _caller(module, list(node.roles), static, candidate, workspace or Workspace())


def reference_op(node: Node) -> str:
    """Name the op whose `reference` defines this step."""
    if node.op == "conv":
        return "cudnn_conv" if node.attrs["groups"] > 1 else "conv"
    return {"mean": "global_pool"}.get(node.op, node.op)


def packed(module: Any, node: Node, static: dict[str, Any], weights: Weights | None) -> dict[str, Any]:
    """Lay constant arguments out as the op's kernel wants them."""
    packs: dict[str, Callable[..., Tensor]] = getattr(module, "PACK", {})
    result = dict(static)
    for name, value in static.items():
        if not isinstance(value, Tensor):
            continue
        pack = packs.get(name)

        def make(pack: Callable[..., Tensor] | None = pack, value: Tensor = value) -> Tensor:
            return value if pack is None else pack(value)

        key = (
            node.layers,
            node.attrs.get("source", ""),
            name,
            tuple(value.shape),
            value.dtype,
            getattr(pack, "__qualname__", ""),
            module.__name__ if pack else "",
        )
        result[name] = make() if weights is None else weights.get(key, make)
    return result


def _dense(value: Any) -> Any:
    """Put a kernel into the memory format that ATen reads beside channels_last maps."""
    return value.contiguous(memory_format=torch.channels_last) if isinstance(value, Tensor) and value.dim() == 4 else value


def packed_image(node: Node, image: Tensor) -> Tensor:
    """Pack the image for a stem kernel."""
    stem = ops.load("stem")
    how = stem.packing(node.attrs["weight"].shape, node.attrs["stride"], node.attrs["padding"], tuple(image.shape))
    return ops.load("image").launch(image, **how, dtype=image.dtype)


def empty(source: Node, places: dict[Node, Place], setting: Setting) -> Tensor:
    """Return memory for a value as a plan lays it out, maybe a channel slice of its buffer; nothing is written."""
    spot = places.get(source)
    shape = source.shape if spot is None else (source.shape[0], spot.buffer.shape[1], *source.shape[2:])
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    whole = torch.empty(shape, dtype=setting.dtype, device=setting.device, memory_format=layout)
    return whole if spot is None else whole[:, spot.offset : spot.offset + source.shape[1]]


def _packed_stem(op: str, node: Node, static: dict[str, Any], weights: Weights | None) -> dict[str, Any]:
    """Lay the first convolution's weights out for packed images, and say how large its map is, which those don't tell."""
    stem = ops.load("stem")
    outputs = 1 if op == "stem_pool" else stem.outputs_of_run(static["stride"])
    result = dict(static)
    key = (node.layers, node.attrs.get("source", ""), "stem", tuple(static["weight"].shape), static["weight"].dtype, outputs)
    make = partial(stem.pack_weight, static["weight"], static["stride"], outputs)
    result["weight"] = make() if weights is None else weights.get(key, make)
    size = stem.map_size(torch.empty(node.inputs[0].shape, device="meta"), static["weight"], static["stride"], static["padding"])
    result["size" if op == "stem" else "map_size"] = size
    result.pop("padding")
    return result


def _reference_caller(module: Any, roles: list[str], static: dict[str, Any]) -> Bound:
    return lambda inputs, out: _into(out, module.reference(**named(roles, inputs), **static))


def _caller(module: Any, roles: list[str], static: dict[str, Any], candidate: Candidate, workspace: Workspace) -> Bound:
    config = candidate.config or None
    sized = getattr(module, "workspace", None)
    if sized is None or config is None:
        return lambda inputs, out: module.launch(**named(roles, inputs), **static, out=out, config=config)
    size: int | None = None

    def run(inputs: list[Any], out: Any) -> Any:
        nonlocal size
        args = named(roles, inputs) | static
        if size is None:
            size = sized(config, **args)
        space = workspace.get(size, inputs[0].device) if size else None
        return module.launch(**args, out=out, config=config, workspace=space)

    return run


def named(roles: list[str], inputs: list[Any]) -> dict[str, Any]:
    """Return a step's inputs as arguments; gates are maps of one pixel in the graph, and (N, C) to the kernels."""
    return {role: value.flatten(1) if role == "gate" else value for role, value in zip(roles, inputs, strict=True)}


def _into(out: Any, value: Any) -> Any:
    """Copy what a reference has computed to where it belongs, pixel by pixel in memory."""
    if isinstance(value, tuple):
        return tuple(_into(o, v) for o, v in zip(out or (None,) * len(value), value, strict=True))
    if out is not None:
        out.copy_(value)
        return out
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


def _bind_squeeze(node: Node, candidate: Candidate, setting: Setting, weights: Weights | None) -> Bound:
    """From a map to its gate, (N, C, 1, 1): mean over the pixels, then the two layers."""
    pool, squeeze = ops.load("global_pool"), ops.load("squeeze_excite")
    static = arguments(node, "squeeze_excite", setting)
    if candidate.op == ATEN:

        def plain(inputs: list[Any], out: Any) -> Any:
            pooled = pool.reference(inputs[0], pre_act="none", out_dtype=torch.float32).flatten(1).unsqueeze(1)
            return _as_map(squeeze.reference(pooled, **static))

        return plain
    static = packed(squeeze, node, static, weights)

    def run(inputs: list[Any], out: Any) -> Any:
        pooled = pool.launch(inputs[0], pre_act="none", out_dtype=torch.float32).flatten(1).unsqueeze(1)
        return _as_map(squeeze.launch(pooled, **static, config=candidate.config or None))

    return run


def _bind_depthwise_squeeze(node: Node, candidate: Candidate, setting: Setting, weights: Weights | None) -> Bound:
    depthwise, squeeze = ops.load("depthwise"), ops.load("squeeze_excite")
    inner = Node("squeeze_excite", [node], node.attrs["squeeze"], (*node.shape[:2], 1, 1), node.dtype, ["x"], node.layers)
    first, second = arguments(node, "depthwise", setting), arguments(inner, "squeeze_excite", setting)
    second["scale"] = 1.0 / (node.shape[2] * node.shape[3])
    plain = candidate.op == ATEN
    if not plain:
        first, second = packed(depthwise, node, first, weights), packed(squeeze, node, second, weights)
    call = (depthwise.reference, squeeze.reference) if plain else (depthwise.launch, squeeze.launch)
    configs = ({}, {}) if plain else tuple({"config": candidate.config.get(part)} for part in ("depthwise", "squeeze"))

    def run(inputs: list[Any], out: Any) -> Any:
        y, sums = call[0](inputs[0], **first, sums=True, **configs[0])
        y = y.contiguous(memory_format=torch.channels_last)  # ATen may choose
        return y, _as_map(call[1](sums, **second, **configs[1]))

    return run


def _as_map(gate: Tensor) -> Tensor:
    return gate.view(*gate.shape, 1, 1)


def candidates(node: Node, inputs: list[Tensor], setting: Setting, limits: dict[str, int] | int | None) -> Iterator[Candidate]:
    """Yield what could compute this step with these inputs, the most promising first; of an op's configurations at most its limit."""
    for name in op_names(node):
        limit = limits.get(name, limits[OTHERS]) if isinstance(limits, dict) else limits
        if node.op in ("squeeze_excite", "depthwise_squeeze"):
            yield from _squeezes(node, inputs, setting, limit)
            continue
        module = ops.load(name)
        args = named(node.roles, inputs) | arguments(node, name, setting)
        prologue = node.op == "conv" and (node.attrs.get("scale") is not None or node.attrs["pre_act"] != "none")
        if (prologue and name != "conv") or not _accepts(module, args) or module.supports(**args):
            continue
        for config in _affordable(module, module.configs(**args), args, limit):
            yield Candidate(name, config)


def _affordable(module: Any, configs: list[dict[str, Any]], args: dict[str, Any], limit: int | None) -> list[dict[str, Any]]:
    """Return the first configurations, where there is a limit only those that compile in seconds, if any does."""
    effort = getattr(module, "effort", None)
    if limit is None or effort is None:
        return configs[:limit]
    return ([config for config in configs if effort(config, **args) <= EFFORT] or configs[:1])[:limit]


def _accepts(module: Any, args: dict[str, Any]) -> bool:
    """Tell whether an op has all the optional inputs that a step uses."""
    code = module.reference.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return all(name in known for name in args)


def _squeezes(node: Node, inputs: list[Tensor], setting: Setting, limit: int | None) -> Iterator[Candidate]:
    squeeze = ops.load("squeeze_excite")
    inner = node.attrs.get("squeeze", node.attrs)
    pooled = torch.empty((node.inputs[0].shape[0], 1, node.inputs[0].shape[1]), device=setting.device)
    proxy = Node("squeeze_excite", [], inner, (), node.dtype)
    args = {"pooled": pooled} | arguments(proxy, "squeeze_excite", setting)
    if squeeze.supports(**args):
        return
    seconds = squeeze.configs(**args)[:limit]
    if node.op == "squeeze_excite":
        yield from (Candidate("squeeze_excite", config) for config in seconds)
        return
    depthwise = ops.load("depthwise")
    args = {"x": inputs[0]} | arguments(node, "depthwise", setting) | {"sums": True}
    if depthwise.supports(**args):
        return
    firsts = _affordable(depthwise, depthwise.configs(**args), args, limit)
    yield from (Candidate("depthwise_squeeze", {"depthwise": first, "squeeze": seconds[0]}) for first in firsts)
    yield from (Candidate("depthwise_squeeze", {"depthwise": firsts[0], "squeeze": second}) for second in seconds[1:])
