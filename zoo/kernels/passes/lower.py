"""Second pass: say of ATen operators what they mean for a network, so that later passes see layers instead of operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.passes.aten import bound
from zoo.kernels.passes.constants import constant, evaluate, follows, from_nothing
from zoo.kernels.passes.graph import Graph, Node, const_value
from zoo.kernels.passes.kinds import is_pointwise
from zoo.kernels.passes.pixels import SECOND, as_map, map_of, share, shown, viewed

aten = torch.ops.aten

_ACTS: dict[Any, str] = {
    aten.relu.default: "relu", aten.relu_.default: "relu",
    aten.hardswish.default: "hardswish", aten.hardswish_.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid", aten.hardsigmoid_.default: "hardsigmoid",
    aten.silu.default: "silu", aten.silu_.default: "silu",
    aten.sigmoid.default: "sigmoid", aten.sigmoid_.default: "sigmoid",
}  # fmt: skip


def lower(graph: Graph) -> None:
    """Replace every ATen node that has a meaning here by a node of that kind; constants are computed, others stay as they are."""
    done: dict[Node, Node] = {}
    several = {node.inputs[0] for node in graph.nodes if node.op == "item" and node.attrs["index"] > 0}
    tuples = {node.inputs[0] for node in graph.nodes if node.op == "item"}
    values: dict[Node, Any] = {}
    device = next((value.device for node in graph.nodes if (value := const_value(node)) is not None), torch.device("cpu"))
    for node in graph.nodes:
        node.inputs = [done.get(source, source) for source in node.inputs]
        new = node
        if (made := from_nothing(node, device)) is not None:
            new = made
        elif follows(node):
            if node in tuples:
                values[node] = evaluate(node)
            else:
                new = constant(node, evaluate(node), node.inputs[0])
        elif node.op == "item" and node.inputs[0] in values:
            whole = node.inputs[0]
            new = constant(node, values[whole][node.attrs["index"]], whole.inputs[0])
        elif (
            node.op == "aten"
            and node.dtype.is_floating_point
            and node not in several
            and (rule := _RULES.get(node.attrs["func"])) is not None
        ):
            new = rule(node, *bound(node)) or node
        elif node.op == "item" and node.inputs[0] not in tuples:
            new = node.inputs[0]
        done[node] = new
    graph.outputs = [done.get(leaf, leaf) if isinstance(leaf, Node) else leaf for leaf in graph.outputs]
    graph.prune()
    share(graph)
    for node in graph.nodes:
        if node.op == "affine":  # what was made here is multiplied by what came with the network
            node.attrs |= {name: node.attrs[name].to(device) for name in ("scale", "shift")}


def _like(node: Node, op: str, inputs: list[Node], roles: list[str], shape: tuple[int, ...] | None = None, **attrs: Any) -> Node:
    return Node(op, inputs, attrs, node.shape if shape is None else shape, node.dtype, roles, node.layers)


def _both(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _conv(
    node: Node, x: Node, weight: Node, bias: Node | None, stride: Any, padding: Any, dilation: Any, transposed: bool, _: Any, groups: int
) -> Node | None:
    held = _held(weight, bias)
    if transposed or held is None or held[0].dim() != 4 or len(x.shape) != 4:
        return None
    top, left = _both(padding)
    w, b = held
    made = conv_node(node, x, w, b, _both(stride), (top, top, left, left), _both(dilation), groups)
    made.attrs["source"] = weight.attrs["name"]
    return made


def conv_node(
    node: Node, x: Node, w: Tensor, b: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int, shape: tuple[int, ...] = ()
) -> Node:
    """Make a "conv" node with nothing fused yet, in the place of `node`, of the shape of its map unless another is given."""
    shape = shape or (node.shape[0], node.shape[1], *(node.shape[2:] or (1, 1)))
    return _like(
        node, "conv", [x], ["x"], shape,
        weight=w, bias=b, stride=stride, padding=padding, dilation=dilation, groups=groups, act="none", pre_act="none",
    )  # fmt: skip


def _permute(node: Node, x: Node, dims: list[int]) -> Node | None:
    """A map whose channels went last and come back is the map."""
    source = map_of(x)
    return source if source is not None and len(x.shape) == 4 and [dim % 4 for dim in dims] == SECOND else None


def _transpose(node: Node, x: Node, first: int, second: int) -> Node | None:
    """What is transposed twice is what it was."""
    if x.op != "aten" or x.attrs["func"] is not aten.transpose.int:
        return None
    source, *dims = bound(x)
    count = len(node.shape)
    return source if {first % count, second % count} == {dim % count for dim in dims} else None


def _held(*nodes: Node | None) -> list[Any] | None:
    """Return the tensors of constants, None for one that is not there; None where one is no constant."""
    values = [None if node is None else const_value(node) for node in nodes]
    return None if any(n is not None and v is None for n, v in zip(nodes, values, strict=True)) else values


def _batch_norm(
    node: Node, x: Node, weight: Node | None, bias: Node | None, mean: Node, var: Node, momentum: float, eps: float
) -> Node | None:
    values = _held(weight, bias, mean, var)
    if values is None or values[2] is None or values[3] is None or len(x.shape) not in (2, 4):
        return None
    wide: list[Any] = [None if value is None else value.double() for value in values]
    w, b, m, v = wide
    scale = torch.rsqrt(v + eps) if w is None else w * torch.rsqrt(v + eps)
    shift = -m * scale if b is None else b - m * scale
    if len(x.shape) == 2:
        pixel = _pixels(x)
        return flat(_like(node, "affine", [pixel], ["x"], pixel.shape, scale=scale, shift=shift))
    return _like(node, "affine", [x], ["x"], x.shape, scale=scale, shift=shift)


def _running_batch_norm(
    node: Node, x: Node, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, *_: Any
) -> Node | None:
    return None if training else _batch_norm(node, x, weight, bias, mean, var, momentum, eps)


def _apply(node: Node, x: Node, name: str) -> Node | None:
    """An activation, of the map itself where `x` is the flat view of one, or shows its channels last."""
    if (pixel := _one_pixel(x)) is not None:
        return flat(_like(node, "act", [pixel], ["x"], pixel.shape, act=name))
    if (source := map_of(x)) is not None:
        return shown(_like(node, "act", [source], ["x"], source.shape, act=name), node.shape)
    return _like(node, "act", [x], ["x"], act=name) if len(x.shape) == 4 else None


def _one_pixel(x: Node) -> Node | None:
    """Return the map (N, C, 1, 1) that `x`, (N, C), is a view of, if it is one."""
    return x.inputs[0] if x.op == "view" and x.inputs[0].shape == (*x.shape, 1, 1) else None


def _pixels(x: Node) -> Node:
    """See (N, C) as a map of one pixel."""
    return _one_pixel(x) or viewed(x, (*x.shape, 1, 1))


def _hardtanh(node: Node, x: Node, low: float = -1.0, high: float = 1.0) -> Node | None:
    return _apply(node, x, "relu6") if (low, high) == (0, 6) else None


def _clamp(node: Node, x: Node, low: Any = None, high: Any = None) -> Node | None:
    act = {(0, 6): "relu6", (0, None): "relu"}.get((low, high))
    return None if act is None else _apply(node, x, act)


def _leaky(node: Node, x: Node, slope: float = 0.01) -> Node | None:
    name = f"leaky_relu_{slope:g}"
    return _apply(node, x, name) if name in ("leaky_relu_0.1", "leaky_relu_0.01") else None


def _gelu(node: Node, x: Node, approximate: str = "none") -> Node | None:
    return _apply(node, x, "gelu") if approximate == "none" else None


def _add(node: Node, a: Any, b: Any, alpha: Any = 1) -> Node | None:
    """Two maps of the same shape, or a map with a constant for each of its channels, which go last; MobileOnes begin sums with 0."""
    if isinstance(a, Node) and isinstance(b, int | float) and b == 0 and a.dtype == node.dtype:
        return a
    if not (isinstance(a, Node) and isinstance(b, Node)) or alpha != 1 or len(node.shape) not in (3, 4) or a.dtype != b.dtype:
        return None
    maps = [map_of(a), map_of(b)]
    if a.shape == b.shape == node.shape:
        if maps != [None, None]:
            maps = [as_map(a), as_map(b)]
            return shown(_like(node, "add", maps, ["x", "residual"], maps[0].shape), node.shape)
        return _like(node, "add", [a, b], ["x", "residual"]) if len(node.shape) == 4 else None
    for source, held in ((maps[0], const_value(b)), (maps[1], const_value(a))):
        if source is not None and held is not None and held.shape[-1:] == (held.numel(),) == source.shape[1:2]:
            shift = held.double().flatten()
            return shown(_like(node, "affine", [source], ["x"], source.shape, scale=torch.ones_like(shift), shift=shift), node.shape)
    return None


def _sub(node: Node, a: Any, b: Any, alpha: Any = 1) -> Node | None:
    """The difference of two maps is a sum with what has the other sign, where a pool or a convolution can take that in."""
    if not (isinstance(a, Node) and isinstance(b, Node)) or alpha != 1 or not a.shape == b.shape == node.shape or len(a.shape) < 3:
        return None
    seen = map_of(b)
    if a.dtype != b.dtype or "const" in (a.op, b.op) or (seen is None and len(b.shape) != 4):
        return None
    if not any((map_of(one) or one).op in ("pool", "conv", "affine") for one in (a, b)):  # else it parts what the compiler runs as one
        return None
    source = b if seen is None else as_map(b)
    scale = -torch.ones(source.shape[1], dtype=torch.float64)
    negated = _like(node, "affine", [source], ["x"], source.shape, scale=scale, shift=torch.zeros_like(scale))
    return _add(node, a, negated if source is b else shown(negated, b.shape))


def _layer_norm(node: Node, x: Node, normalized: list[int], weight: Node | None, bias: Node | None, eps: float) -> Node | None:
    """A norm over the last dimension, of the channels of a map that shows them last, or of a map of one pixel."""
    values = _held(weight, bias)
    if values is None or len(normalized) != 1 or len(x.shape) not in (2, 3, 4):
        return None
    scale, shift = (None if v is None else v.float() for v in values)
    flat_map = len(x.shape) == 2
    source = _pixels(x) if flat_map else as_map(x)
    made = _like(node, "layer_norm", [source], ["x"], source.shape, scale=scale, shift=shift, eps=eps)
    return flat(made) if flat_map else shown(made, x.shape)


def _mul(node: Node, a: Any, b: Any) -> Node | None:
    """A map times a gate of its images and channels, or times a constant of its channels, which may go last."""
    if not (isinstance(a, Node) and isinstance(b, Node)) or a.dtype != b.dtype:
        return None
    for x, g in ((a, b), (b, a)):
        source, factors = map_of(x), const_value(g)
        if source is not None and factors is not None and factors.shape[-1:] == (factors.numel(),) == source.shape[1:2]:
            scale = factors.double().flatten()
            return shown(_like(node, "affine", [source], ["x"], source.shape, scale=scale, shift=torch.zeros_like(scale)), node.shape)
    if len(node.shape) != 4:
        return None
    n, c = node.shape[:2]
    for x, g in ((a, b), (b, a)):
        if x.shape == node.shape and g.shape == (n, c, 1, 1) and g.op != "const":
            return _like(node, "gate", [x, g], ["x", "gate"])
        factors = const_value(g)
        if x.shape == node.shape and x.op != "const" and factors is not None and g.shape in ((c, 1, 1), (1, c, 1, 1)):
            scale = factors.double().flatten()
            return _like(node, "affine", [x], ["x"], scale=scale, shift=torch.zeros_like(scale))
    return None


def _cat(node: Node, parts: list[Node], dim: int = 0) -> Node | None:
    if len(node.shape) != 4 or dim % 4 != 1 or any(len(p.shape) != 4 or p.op == "const" or p.dtype != node.dtype for p in parts):
        return None
    return _like(node, "cat", list(parts), [f"part{i}" for i in range(len(parts))])


def _max_pool(
    node: Node, x: Node, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Node | None:
    kernel = _both(kernel)
    if len(x.shape) != 4 or _both(dilation) != (1, 1):
        return None
    return _pool(node, x, "max", kernel, _both(stride) if stride else kernel, _both(padding), ceil_mode, True)


def _avg_pool(
    node: Node, x: Node, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False, include: bool = True, divisor: Any = None
) -> Node | None:
    kernel = _both(kernel)
    if len(x.shape) != 4 or divisor is not None:
        return None
    return _pool(node, x, "avg", kernel, _both(stride) if stride else kernel, _both(padding), ceil_mode, include)


def _adaptive(node: Node, x: Node, size: Any) -> Node | None:
    if len(x.shape) != 4:
        return None
    (h, w), (oh, ow) = x.shape[2:], _both(size)
    if (oh, ow) == (1, 1):
        return _like(node, "mean", [x], ["x"], pre_act="none")
    if h % oh or w % ow:
        return None
    if (h, w) == (oh, ow):
        return x
    return _pool(node, x, "avg", (h // oh, w // ow), (h // oh, w // ow), (0, 0), False, True)


def _pool(node: Node, x: Node, kind: str, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, include: bool) -> Node:
    top, left = padding
    shape = node.shape or _pool_shape(x.shape, kernel, stride, padding, ceil_mode)
    return _like(
        node, "pool", [x], ["x"], shape,
        kind=kind, kernel=kernel, stride=stride, padding=(top, top, left, left), ceil_mode=ceil_mode,
        count_include_pad=include, pre_act="none",
    )  # fmt: skip


def _pool_shape(shape: tuple[int, ...], kernel: Any, stride: Any, padding: Any, ceil_mode: bool) -> tuple[int, ...]:
    empty = torch.empty(shape, device="meta")
    return tuple(torch.nn.functional.max_pool2d(empty, kernel, stride, padding, ceil_mode=ceil_mode).shape)


def _mean(node: Node, x: Node, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Node | None:
    if len(x.shape) != 4 or dims is None or {d % 4 for d in dims} != {2, 3} or dtype is not None:
        return None
    pooled = _like(node, "mean", [x], ["x"], (*x.shape[:2], 1, 1), pre_act="none")
    return pooled if keepdim else flat(pooled)


def flat(x: Node) -> Node:
    """View a map of one pixel, (N, C, 1, 1), as (N, C)."""
    return viewed(x, x.shape[:2])


def _view(node: Node, x: Node, *_: Any) -> Node:
    return _in_rows(node, x.inputs[0] if x.op == "view" else x) or viewed(x, node.shape, node.layers)


def _in_rows(node: Node, made: Node) -> Node | None:
    """A dense layer of rows that turn out to be tokens, or pixels, by the view of what it made, is one of their map."""
    c = node.shape[-1] if len(node.shape) in (3, 4) else 0
    if not is_pointwise(made) or made.shape[1:] != (c, 1, 1) or node.shape[0] == made.shape[0] or made.inputs[0].op != "view":
        return None
    pixels = as_map(viewed(made.inputs[0], (*node.shape[:-1], made.inputs[0].shape[1])))
    shape = (pixels.shape[0], c, *pixels.shape[2:])
    return shown(Node("conv", [pixels], dict(made.attrs), shape, made.dtype, ["x"], made.layers), node.shape)


def _addmm(node: Node, bias: Node, x: Node, weight_t: Node, beta: Any = 1, alpha: Any = 1) -> Node | None:
    held = _held(weight_t, bias)
    if held is None or beta != 1 or alpha != 1 or held[1].shape != (node.shape[-1],):
        return None
    return _dense(node, x, held[0].t(), held[1], weight_t.attrs["name"])


def _mm(node: Node, x: Node, weight_t: Node) -> Node | None:
    w = const_value(weight_t)
    return None if w is None else _dense(node, x, w.t(), None, weight_t.attrs["name"])


def _linear(node: Node, x: Node, weight: Node, bias: Node | None = None) -> Node | None:
    held = _held(weight, bias)
    return None if held is None else _dense(node, x, held[0], held[1], weight.attrs["name"])


def _bmm(node: Node, x: Node, weights: Node) -> Node | None:
    """A dense layer whose input lies in strides that no product of two matrices takes: the same weight for each of a batch."""
    w = const_value(weights)
    if w is None or not (w.shape[0] == 1 or w.stride(0) == 0):
        return None
    return _dense(node, x, w[0].t(), None, weights.attrs["name"])


def _dense(node: Node, x: Node, w: Tensor, b: Tensor | None, name: str) -> Node | None:
    """A dense layer is a 1x1 convolution: of the map whose pixels, or tokens, it gets as rows, else of a map of one pixel.

    Behind a flatten it is one of the map's memory as it lies.
    """
    if len(x.shape) not in (2, 3) or w.dim() != 2:
        return None
    rows = x if len(x.shape) == 3 else x.inputs[0] if x.op == "view" else None
    if rows is not None and len(rows.shape) in (3, 4) and rows.shape[-1] == x.shape[-1] and (rows is x or rows.shape[0] != x.shape[0]):
        pixels = as_map(rows)
        shape = (pixels.shape[0], w.shape[0], *pixels.shape[2:])
        made = conv_node(node, pixels, w.reshape(*w.shape, 1, 1), b, (1, 1), (0, 0, 0, 0), (1, 1), 1, shape)
        made.attrs["source"] = name
        return shown(made, node.shape)
    pixel = (*x.shape, 1, 1)
    if x.op == "view" and len(x.inputs[0].shape) == 4 and x.inputs[0].shape[0] == x.shape[0]:
        source = x.inputs[0]
        if source.shape[2:] != (1, 1):  # rows of H W C here, of C H W in the weight
            c, height, width = source.shape[1:]
            w = w.reshape(-1, c, height, width).permute(0, 2, 3, 1).reshape(w.shape)
            name = f"{name} {height}x{width}"  # another permutation of the same weight is another weight
            source = Node("rows", [source], {}, pixel, x.dtype, ["x"], x.layers)
    else:
        source = viewed(x, pixel)
    made = conv_node(node, source, w.reshape(*w.shape, 1, 1), b, (1, 1), (0, 0, 0, 0), (1, 1), 1)
    made.attrs["source"] = name
    return flat(made)


def _pad(node: Node, x: Node, amounts: Any, value: Any = 0) -> Node | None:
    if not any(amounts):
        return x
    if len(x.shape) != 4 or len(amounts) != 4 or min(amounts) < 0:
        return None
    left, right, top, bottom = amounts
    return _like(node, "pad", [x], ["x"], padding=(top, bottom, left, right), value=float(value))


_RULES: Mapping[Any, Callable[..., Node | None]] = {
    aten.convolution.default: _conv,
    aten.native_batch_norm.default: _running_batch_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten._native_batch_norm_legit.default: _running_batch_norm,
    aten.native_layer_norm.default: _layer_norm,
    aten.hardtanh.default: _hardtanh, aten.hardtanh_.default: _hardtanh,
    aten.clamp.default: _clamp, aten.clamp_.default: _clamp,
    aten.leaky_relu.default: _leaky, aten.leaky_relu_.default: _leaky,
    aten.gelu.default: _gelu,
    aten.add.Tensor: _add, aten.add_.Tensor: _add,
    aten.sub.Tensor: _sub, aten.sub_.Tensor: _sub,
    aten.mul.Tensor: _mul, aten.mul_.Tensor: _mul,
    aten.cat.default: _cat,
    aten.max_pool2d_with_indices.default: _max_pool, aten.max_pool2d.default: _max_pool,
    aten.avg_pool2d.default: _avg_pool,
    aten._adaptive_avg_pool2d.default: _adaptive, aten.adaptive_avg_pool2d.default: _adaptive,
    aten.mean.dim: _mean,
    aten.view.default: _view, aten._unsafe_view.default: _view, aten.reshape.default: _view, aten.flatten.using_ints: _view,
    aten.squeeze.dims: _view, aten.squeeze.dim: _view, aten.unsqueeze.default: _view,
    aten.addmm.default: _addmm, aten.mm.default: _mm, aten.bmm.default: _bmm, aten.linear.default: _linear,
    aten.constant_pad_nd.default: _pad, aten.permute.default: _permute, aten.transpose.int: _transpose,
} | {func: partial(_apply, name=name) for func, name in _ACTS.items()}  # fmt: skip
