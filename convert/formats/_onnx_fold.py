"""Constants of an ONNX graph: what exporters do to a weight between its initialiser and its layer, as steps or folded in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.formats._onnx_proto import DTYPES, Model, Operator
from convert.source import Stored, in_memory
from convert.steps import Cast, Reshape, Shape, Transpose
from weights.errors import MalformedFile

SMALL = 65_536
"""Numbers of a constant that is computed while the file is read: shapes, factors, a number per channel."""
LONGEST_CHAIN = 32

Known = list[int | None]
"""Integers of which some are free, such as the batch in a shape."""


class Constants:
    """Values that don't depend on the images, by name; and shapes as far as they are known."""

    def __init__(self, model: Model) -> None:
        self.opset = model.opset
        self.stored: dict[str, Stored] = {}
        self.roots: dict[str, str] = {}
        self.sources: dict[str, tuple[str, ...]] = {}
        """Of what was computed from several tensors, all of their names; `roots` has the first."""
        self.known: dict[str, Known | int | None] = {}
        for name, tensor in model.tensors.items():
            self.add(name, tensor)

    def add(self, name: str, tensor: Stored) -> None:
        """Keep an initialiser or what a Constant holds."""
        self.stored[name] = replace(tensor, origin=tensor.origin or name)
        self.roots[name] = tensor.origin or name

    def small(self, name: str) -> np.ndarray | None:
        """Read a constant if it is small; None if it isn't, or is none."""
        found = self.stored.get(name)
        return found.array() if found is not None and math.prod(found.shape) <= SMALL else None

    def integers(self, name: str) -> Known | None:
        """Read a list of integers, None for those that depend on the images' number."""
        held = self.known.get(name)
        if isinstance(held, list):
            return held
        if name in self.known:
            return [held]
        array = self.small(name)
        return [int(n) for n in array.reshape(-1)] if array is not None and array.dtype.kind in "iu" else None

    def number(self, name: str) -> float | None:
        array = self.small(name)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 and array.dtype.kind in "iuf" else None

    def fold(self, node: Operator, shape_of: Callable[[str], Sequence[int | None] | None]) -> bool:
        """Compute an operator whose inputs are constants or shapes; tell whether that was possible."""
        if node.domain not in ("", "ai.onnx") or not node.outputs:
            return False
        if node.op == "Constant":
            return self._constant(node)
        if node.op == "Shape" and node.inputs and (shape := shape_of(node.inputs[0])) is not None:
            self.known[node.outputs[0]] = list(shape)[slice(node.attrs.get("start") or 0, node.attrs.get("end"))]
            return True
        if not node.inputs:
            return False
        first = self.stored.get(node.inputs[0])
        given = [name for name in node.inputs if name]
        if first is not None and all(name in self.stored for name in given):
            made = _weight(node, first, [self.stored[name] for name in given[1:]], self)
            if made is not None:
                self.stored[node.outputs[0]], self.roots[node.outputs[0]] = made, self.roots[node.inputs[0]]
                if node.inputs[0] in self.sources:
                    self.sources[node.outputs[0]] = self.sources[node.inputs[0]]
                return True
            return self._small(node, given)
        return all(name in self.stored or name in self.known for name in given) and self._integers(node)

    def _constant(self, node: Operator) -> bool:
        names = ("value", "value_float", "value_floats", "value_int", "value_ints")
        held = next((node.attrs[name] for name in names if name in node.attrs), None)
        if isinstance(held, Stored):
            self.add(node.outputs[0], held)
        elif isinstance(held, int | float | list):
            self.add(node.outputs[0], in_memory("", np.array(held, np.float32 if any("float" in key for key in node.attrs) else np.int64)))
        return isinstance(held, Stored | int | float | list)

    def _small(self, node: Operator, given: Sequence[str]) -> bool:
        """Compute with small constants: what is left of a BatchNorm that was taken apart, sizes, axes."""
        arrays = [array for name in given if (array := self.small(name)) is not None]
        compute = ARITHMETIC.get(node.op)
        if compute is None or len(arrays) < len(given) or not _broadcasts(node.op, arrays):
            return False
        with np.errstate(all="ignore"):
            result = np.asarray(compute(node, arrays))
        name = node.outputs[0]
        self.stored[name] = Stored(f"{node.op} of {self.roots[given[0]]}", result.shape, result.dtype, lambda: result)
        self.roots[name] = self.roots[given[0]]
        self.sources[name] = tuple(dict.fromkeys(root for one in given for root in self.of(one)))
        return True

    def of(self, name: str) -> tuple[str, ...]:
        """Name the tensors of the file that a constant was made of."""
        return self.sources.get(name) or (self.roots[name],)

    def _integers(self, node: Operator) -> bool:
        """Compute with shapes of which a part is free."""
        lists = [self.integers(name) for name in node.inputs if name]
        if not lists or any(values is None or len(values) > 64 for values in lists):
            return False
        first, rest = lists[0] or [], [values or [] for values in lists[1:]]
        result: Known | int | None
        if node.op in ("Identity", "Cast", "Unsqueeze", "Reshape"):
            result = first
        elif node.op == "Squeeze" and len(first) == 1:
            result = first[0]
        elif node.op == "Concat":
            result = [n for values in (first, *rest) for n in values]
        elif node.op == "Gather" and rest and all(n is not None and -len(first) <= n < len(first) for n in rest[0]):
            result = [first[n] for n in rest[0] if n is not None]
            result = result if len(result) != 1 or node.inputs[1] not in self.stored or self.stored[node.inputs[1]].shape else result[0]
        elif node.op == "Slice" and (cut := cuts(node, self)) is not None and len(cut) == 1:
            result = first[slice(*next(iter(cut.values())))]
        elif node.op in ("Add", "Sub", "Mul", "Div") and rest and len(first) == len(rest[0]):
            result = [_arithmetic(node.op, a, b) for a, b in zip(first, rest[0], strict=True)]
        else:
            return False
        self.known[node.outputs[0]] = result
        return True


def axes(node: Operator, constants: Constants, place: int = 1) -> list[int] | None:
    """Read an operator's axes, which were an attribute in older sets and are an input in newer ones; None where there are none."""
    held = node.attrs.get("axes")
    if held is None and len(node.inputs) > place and node.inputs[place]:
        held = constants.integers(node.inputs[place])
    return [int(a) for a in held if a is not None] if held is not None else None


def cuts(node: Operator, constants: Constants) -> dict[int, tuple[int, int, int]] | None:
    """Read what a Slice takes: of each axis from where to where in which steps."""
    if "starts" in node.attrs:
        starts, ends = list(node.attrs["starts"]), list(node.attrs.get("ends") or [])
        at, steps = list(node.attrs.get("axes") or range(len(starts))), [1] * len(starts)
    else:
        read = [constants.integers(name) if name else None for name in node.inputs[1:]]
        if len(read) < 2 or read[0] is None or read[1] is None:
            return None
        starts, ends = read[0], read[1]
        at = read[2] if len(read) > 2 and read[2] is not None else list(range(len(starts)))
        steps = read[3] if len(read) > 3 and read[3] is not None else [1] * len(starts)
    if not len(starts) == len(ends) == len(at) == len(steps) or any(n is None for n in (*starts, *ends, *at, *steps)):
        return None
    return {int(a): (int(b), int(c), int(d)) for a, b, c, d in zip(at, starts, ends, steps, strict=True)}  # pyright: ignore[reportArgumentType]


def squeezed(op: str, shape: Sequence[int | None], at: Sequence[int] | None) -> list[int | None]:
    """Tell the shape behind a Squeeze or an Unsqueeze."""
    if op == "Squeeze":
        gone = {a % len(shape) for a in at} if at is not None and shape else {a for a, n in enumerate(shape) if n == 1}
        return [n for a, n in enumerate(shape) if a not in gone]
    rank = len(shape) + len(at or ())
    new, rest = {a % rank for a in at or ()}, iter(shape)
    if len(new) != len(at or ()):
        raise MalformedFile(f"an Unsqueeze names an axis twice: {at}")
    return [1 if a in new else next(rest) for a in range(rank)]


def _weight(node: Operator, first: Stored, rest: Sequence[Stored], constants: Constants) -> Stored | None:
    """Follow a weight through one operator, without reading it."""
    if node.op == "Identity" and not rest:
        return first
    if len(first.steps) >= LONGEST_CHAIN:
        raise MalformedFile(f"{first.origin} passes through more than {LONGEST_CHAIN} operators")
    shape = first.shape
    if node.op == "Cast":
        after = DTYPES.get(node.attrs.get("to") or 0)
        return first.then(Cast(str(first.dtype), after)) if after in ("float16", "float32", "float64", "int32", "int64") else None
    if node.op == "Transpose":
        order = tuple(node.attrs.get("perm") or reversed(range(len(shape))))
        if sorted(order) != list(range(len(shape))):
            raise MalformedFile(f"{first.origin}: axes {order} of a tensor of shape {shape}")
        return first.then(Transpose(order))
    if node.op in ("Reshape", "Squeeze", "Unsqueeze", "Flatten"):
        after = _reshaped(node, shape, constants)
        return None if after is None else first if after == shape else _folded(first, Reshape(shape, after))
    if node.op == "DequantizeLinear" and rest:
        return _dequantised(node, first, rest)
    if node.op == "QuantizeLinear" and rest:
        return _quantised(node, first, rest)
    return None


def _reshaped(node: Operator, shape: Shape, constants: Constants) -> Shape | None:
    if node.op == "Flatten":
        axis = node.attrs.get("axis", 1)
        return math.prod(shape[:axis]), math.prod(shape[axis:])
    if node.op != "Reshape":
        found = squeezed(node.op, shape, axes(node, constants))
        return tuple(n for n in found if n is not None)
    wanted = node.attrs.get("shape") or (constants.integers(node.inputs[1]) if len(node.inputs) > 1 else None)
    if wanted is None or any(n is None for n in wanted):
        return None
    kept = not node.attrs.get("allowzero")
    sizes = [shape[i] if n == 0 and i < len(shape) and kept else int(n or 0) for i, n in enumerate(wanted)]
    if sizes.count(-1) == 1 and (rest := math.prod(n for n in sizes if n != -1)):
        sizes[sizes.index(-1)] = math.prod(shape) // rest
    if min(sizes, default=0) < 0 or math.prod(sizes) != math.prod(shape):
        raise MalformedFile(f"a tensor of shape {shape} is reshaped to {wanted}")
    return tuple(sizes)


def _folded(stored: Stored, step: Reshape) -> Stored:
    """Make what a tensor is behind a reshape its stored form: the layout of a kernel in front of one has no letters."""
    return Stored(f"{stored.origin}, {step}", step.after, stored.dtype, lambda: stored.array().reshape(step.after))


def _scales(node: Operator, stored: Stored, rest: Sequence[Stored]) -> Shape | None:
    """Tell how scale and zero point are to be shaped, if there is one or one for each place along an axis."""
    axis, rank, count = node.attrs.get("axis", 1), len(stored.shape), math.prod(rest[0].shape)
    if any(math.prod(other.shape) != count for other in rest) or node.attrs.get("block_size"):
        return None
    if count == 1:
        return (1,) * rank
    if not -rank <= axis < rank or stored.shape[axis] != count:
        return None
    return tuple(count if a == axis % rank else 1 for a in range(rank))


def _zero(rest: Sequence[Stored], shape: Shape) -> Any:
    return rest[1].array().reshape(shape).astype(np.float32) if len(rest) > 1 else np.float32(0)


def _dequantised(node: Operator, stored: Stored, rest: Sequence[Stored]) -> Stored | None:
    shape, dtype = _scales(node, stored, rest), rest[0].dtype
    if shape is None:
        return None

    def load() -> np.ndarray:
        return ((stored.array().astype(np.float32) - _zero(rest, shape)) * rest[0].array().reshape(shape)).astype(dtype)

    return Stored(f"{stored.origin}, dequantised from {stored.dtype}", stored.shape, dtype, load)


def _quantised(node: Operator, stored: Stored, rest: Sequence[Stored]) -> Stored | None:
    shape, target = _scales(node, stored, rest), rest[1].dtype if len(rest) > 1 else np.dtype(np.uint8)
    if shape is None or target.kind not in "iu":
        return None
    limits = np.iinfo(target)

    def load() -> np.ndarray:
        with np.errstate(all="ignore"):
            whole = np.rint(stored.array() / rest[0].array().reshape(shape)) + _zero(rest, shape)
            return np.clip(whole, limits.min, limits.max).astype(target)

    return Stored(f"{stored.origin}, quantised to {target}", stored.shape, target, load)


def _arithmetic(op: str, a: int | None, b: int | None) -> int | None:
    if a is None or b is None or max(abs(a), abs(b)) > 2**40 or (op == "Div" and b == 0):
        return None
    return {"Add": a + b, "Sub": a - b, "Mul": a * b, "Div": a // b if b else 0}[op]


def _broadcasts(op: str, arrays: Sequence[np.ndarray]) -> bool:
    if op == "Gather":
        return math.prod(array.size for array in arrays) <= SMALL
    if op in ("Concat", "Slice", "ConstantOfShape"):
        return sum(array.size for array in arrays) <= SMALL
    return math.prod(np.broadcast_shapes(*(array.shape for array in arrays))) <= SMALL


def _filled(node: Operator, arrays: Sequence[np.ndarray]) -> np.ndarray:
    value = node.attrs.get("value")
    held = value.load().reshape(-1)[:1] if isinstance(value, Stored) else np.zeros(1, np.float32)
    sizes = [int(n) for n in arrays[0].reshape(-1)]
    if len(sizes) > 8 or min(sizes, default=0) < 0 or math.prod(sizes) > SMALL:
        raise MalformedFile(f"a constant of shape {sizes[:8]}")
    return np.full(sizes, held[0] if len(held) else 0, held.dtype)


def _cut(node: Operator, arrays: Sequence[np.ndarray]) -> np.ndarray:
    attrs = [node.attrs.get(name) for name in ("starts", "ends", "axes")]
    starts, ends, at, steps = [*(a.reshape(-1).tolist() for a in arrays[1:]), None, None, None][:4] if len(arrays) > 1 else [*attrs, None]
    starts, ends = starts or [], ends or []
    where: list[Any] = [slice(None)] * arrays[0].ndim
    for axis, start, end, step in zip(at or range(len(starts)), starts, ends, steps or [1] * len(starts), strict=True):
        size = arrays[0].shape[axis]
        below = -size - 1 if step < 0 else -size  # as far back as there is: before the first
        where[axis] = slice(start, None if end < below or (step < 0 and end == below) else end, step)
    return arrays[0][tuple(where)]


ARITHMETIC: dict[str, Callable[[Operator, Sequence[np.ndarray]], Any]] = {
    "Add": lambda _, a: a[0] + a[1],
    "Sub": lambda _, a: a[0] - a[1],
    "Mul": lambda _, a: a[0] * a[1],
    "Div": lambda _, a: a[0] / a[1] if a[0].dtype.kind == "f" else a[0] // np.where(a[1] == 0, 1, a[1]),
    "Neg": lambda _, a: -a[0],
    "Sqrt": lambda _, a: np.sqrt(a[0]),
    "Reciprocal": lambda _, a: 1 / a[0],
    "Concat": lambda node, a: np.concatenate(a, axis=node.attrs.get("axis", 0)),
    "Gather": lambda node, a: np.take(a[0], a[1], axis=node.attrs.get("axis", 0)),
    "ConstantOfShape": _filled,
    "Slice": _cut,
}
