"""A step bound to a kernel: constants cast and packed once, so that a call needs nothing but the maps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.kernels import ops
from zoo.kernels.ops._narrow import narrowed
from zoo.kernels.passes.graph import Node
from zoo.kernels.passes.place import Place
from zoo.kernels.tuning.steps import ATEN, IMAGE_OPS, NARROW, UNPLACED, Candidate, Setting, arguments, reference_op

Bound = Callable[[list[Any], Any], Any]
"""A step bound to a kernel: (inputs in the order of the node's roles, `out` or None) -> value, or (value, second value)."""


class Weights:
    """Folded, packed weights on the device, made once and shared by the plans of all shapes."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], list[Tensor]] = {}
        self.means: dict[tuple[Any, ...], Tensor] | None = None
        """What `balance.mean_inputs` measured, for all shapes."""
        self.rounded: dict[tuple[Any, ...], Tensor] = {}
        """What `balance.balance` made of the convolutions' weights, for all shapes."""
        self.copy: nn.Module | None = None
        """Of the network, where it is on another device than its plans."""
        self.planned = False
        """Whether a shape has been planned."""
        self.wide: Weights | None = None
        """Those of plans without 8 bits, of a network that has plans with them."""

    def get(self, key: tuple[Any, ...], made: Tensor) -> Tensor:
        """Return the tensor of this key that equals what was made, which is kept if there is none."""
        known = self._made.setdefault(key, [])
        for tensor in known:
            if tensor is made or torch.equal(_bits(tensor), _bits(made)):  # functions that share a parameter share its name
                return tensor
        known.append(made)
        return made

    def clear(self) -> None:
        """Forget everything."""
        self._made.clear()
        self.rounded.clear()
        self.means, self.copy, self.planned, self.wide = None, None, False, None


def _bits(tensor: Tensor) -> Tensor:
    """Show fp8 as bytes, of which alone PyTorch tells whether they are equal."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


class Workspace:
    """Counters of split products, shared by the steps of one plan, which run one after the other."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def get(self, size: int, device: torch.device) -> Tensor:
        """Return at least `size` bytes, which kernels find zero and leave zero."""
        if self._memory is None or self._memory.numel() < size:
            self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        return self._memory


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
        roles, static = list(node.roles), {name: _dense(value) for name, value in static.items()}
        kind = None if node.op in NARROW else node.attrs.get("stored")
        return lambda inputs, out: _into(out, _stored(module.reference(**named(roles, inputs), **static), kind))
    image = candidate.op in IMAGE_OPS
    static = _packed_stem(candidate.op, node, static, weights) if image else packed(module, node, static, weights)
    if candidate.op in ("cudnn_conv", "cudnn_graph", "cublaslt") and static["bias"] is not None:
        static["bias"] = static["bias"].to(setting.dtype)
    if candidate.op == "narrow_cublaslt" and static["bias"] is not None:
        static["bias"] = static["bias"].to(torch.bfloat16)
    call = _caller(module, list(node.roles), static, candidate, workspace or Workspace())
    if "stored" in node.attrs and node.op not in NARROW:  # whose kernel knows the type by where it writes
        return lambda inputs, out: call(inputs, empty(node, {}, setting) if out is None else out)
    return call


def _stored(value: Any, dtype: torch.dtype | None) -> Any:
    """Round a value to the narrow type that it is stored in, if it is."""
    return value if dtype is None or value.dtype == dtype else narrowed(value.float(), dtype)


def packed(module: Any, node: Node, static: dict[str, Any], weights: Weights | None) -> dict[str, Any]:
    """Lay constant arguments out as the op's kernel wants them."""
    packs: dict[str, Callable[..., Tensor]] = getattr(module, "PACK", {})
    result = dict(static)
    for name, value in static.items():
        if not isinstance(value, Tensor):
            continue
        pack = packs.get(name)
        made = value if pack is None else pack(value)
        form = (getattr(pack, "__qualname__", ""), module.__name__ if pack else "")
        key = (node.layers, node.attrs.get("source", ""), name, tuple(value.shape), value.dtype, *form)
        result[name] = made if weights is None else weights.get(key, made)
    return result


def _dense(value: Any) -> Any:
    """Put a kernel into the memory format that ATen reads beside channels_last maps."""
    return value.contiguous(memory_format=torch.channels_last) if isinstance(value, Tensor) and value.dim() == 4 else value


def packed_image(node: Node, image: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Pack the image for a stem kernel that reads this dtype, the image's if None."""
    return ops.load("image").launch(image, **packing(node, tuple(image.shape)), dtype=dtype or image.dtype)


def packing(node: Node, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return how a first convolution's kernel wants images of a shape packed."""
    a = node.attrs
    return ops.load("stem").packing(a["weight"].shape, a["stride"], a["padding"], shape)


def empty(source: Node, places: dict[Node, Place], setting: Setting) -> Tensor:
    """Return memory for a value as a plan lays it out, maybe a channel slice of its buffer; nothing is written."""
    spot = places.get(source)
    shape = source.shape if spot is None else (source.shape[0], spot.buffer.shape[1], *source.shape[2:])
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    dtype = torch.promote_types(setting.dtype, torch.float32) if _is_gate(source) else source.stored(setting.dtype)
    whole = torch.empty(shape, dtype=dtype, device=setting.device, memory_format=layout)
    return whole if spot is None else whole[:, spot.offset : spot.offset + source.shape[1]]


def _is_gate(source: Node) -> bool:
    """Tell whether a value comes out of squeeze-and-excite or response normalisation, whose kernels give float32."""
    return source.op in ("squeeze_excite", "response_gate") or (source.op == "second" and source.inputs[0].op == "depthwise_squeeze")


def blanks(node: Node, places: dict[Node, Place], setting: Setting) -> list[Tensor]:
    """Return memory for each of a step's inputs, as a plan lays them out."""
    return [empty(source, places, setting) for source in node.inputs]


def home(node: Node, places: dict[Node, Place], setting: Setting) -> Tensor | None:
    """Return memory for what a step writes into a concatenation, None for a step that makes its own."""
    return empty(node, places, setting) if node in places and node.op not in UNPLACED else None


def _packed_stem(op: str, node: Node, static: dict[str, Any], weights: Weights | None) -> dict[str, Any]:
    """Lay the first convolution's weights out for packed images, and say how large its map is, which those don't tell."""
    stem = ops.load("stem")
    outputs = 1 if op == "stem_pool" else stem.outputs_of_run(static["stride"])
    result = dict(static)
    key = (node.layers, node.attrs.get("source", ""), "stem", tuple(static["weight"].shape), static["weight"].dtype, outputs)
    made = stem.pack_weight(static["weight"], static["stride"], outputs)
    result["weight"] = made if weights is None else weights.get(key, made)
    size = stem.map_size(torch.empty(node.inputs[0].shape, device="meta"), static["weight"], static["stride"], static["padding"])
    result["size" if op == "stem" else "map_size"] = size
    result.pop("padding")
    return result


def _caller(module: Any, roles: list[str], static: dict[str, Any], candidate: Candidate, workspace: Workspace) -> Bound:
    config = candidate.config or None
    size: int = module.workspace(config) if config and hasattr(module, "workspace") else 0
    if not size:
        return lambda inputs, out: module.launch(**named(roles, inputs), **static, out=out, config=config)

    def run(inputs: list[Any], out: Any) -> Any:
        return module.launch(**named(roles, inputs), **static, out=out, config=config, workspace=workspace.get(size, inputs[0].device))

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
        average, gate = pool.reference, partial(squeeze.reference, **static)
    else:
        config = candidate.config or None
        average, gate = pool.launch, partial(squeeze.launch, **packed(squeeze, node, static, weights), config=config)

    def run(inputs: list[Any], out: Any) -> Any:
        return _as_map(gate(average(inputs[0], pre_act="none", out_dtype=torch.float32).flatten(1).unsqueeze(1)))

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
