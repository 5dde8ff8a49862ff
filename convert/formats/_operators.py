"""Other formats' graphs, said in ONNX's words: one builder follows names, shapes and axis orders for all of them.

A reader writes down each of its operators as the ONNX operator that computes the same, with transposes where its axes lie otherwise;
what ONNX has no word for keeps its own name and is executed by nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from convert import _guard
from convert.formats import _onnx_graph, _onnx_ops
from convert.formats._onnx_pixels import preparation
from convert.formats._onnx_proto import MAX_NODES, Model, Operator
from convert.graph import Graph
from convert.source import Source, Stored, in_memory
from convert.steps import Shape
from weights.errors import LimitExceeded, MalformedFile

TO_FIRST, TO_LAST = (0, 3, 1, 2), (0, 2, 3, 1)
OPSET = 17
"""Of ONNX, whose words these are."""


class Transcript:
    """A graph that is being said in ONNX's words.

    Attributes:
        model: what has been said.
        weights: the shapes of constants, and of what transposes make of them.
    """

    def __init__(self, *, channels_last: bool = False, named: bool = False) -> None:
        self.model = Model(opset=OPSET, channels_last=channels_last, named=named)
        self.weights: dict[str, Shape] = {}
        self.origins: set[str] = set()
        self.count = 0

    def fresh(self) -> str:
        """Make a name that no file has."""
        self.count += 1
        return f"\0{self.count}"

    def input(self, name: str, shape: Sequence[int | None]) -> str:
        """Say which value the images are; the batch is free whatever the file says."""
        if len(shape) > _guard.MAX_RANK:
            raise LimitExceeded(f"{name} has {len(shape)} axes; at most {_guard.MAX_RANK} are read")
        self.model.inputs[name] = tuple(None if n is None or n < 1 or not place else n for place, n in enumerate(shape))
        return name

    def constant(self, name: str, stored: Stored) -> str:
        """Keep a tensor of the file."""
        if name in self.model.tensors:
            raise MalformedFile(f"there are two tensors called {name!r:.100}")
        if len(self.model.tensors) >= 2 * _guard.MAX_TENSORS:
            raise LimitExceeded(f"there are more than {_guard.MAX_TENSORS} tensors")
        if stored.origin in self.origins:  # one name for two tensors would make them one
            stored = replace(stored, origin=f"{stored.origin}#{len(self.model.tensors)}")
        self.origins.add(stored.origin)
        self.model.tensors[name] = stored
        self.weights[name] = stored.shape
        return name

    def numbers(self, values: Any, dtype: Any = np.int64) -> str:
        """Keep a few numbers that the file says elsewhere: a shape, a factor."""
        name = self.fresh()
        return self.constant(name, in_memory(name, np.asarray(values, dtype)))

    def held(self, name: str, most: int = 65_536) -> np.ndarray | None:
        """Read a small constant; None if it is none, or large."""
        stored = self.model.tensors.get(name)
        return stored.array() if stored is not None and math.prod(stored.shape) <= most else None

    def add(self, op: str, inputs: Sequence[str], output: str = "", *, name: str = "", module: str = "", **attrs: Any) -> str:
        """Say an operator, and name what it gives."""
        return self.several(op, inputs, [output or self.fresh()], name=name, module=module, **attrs)[0]

    def several(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], *, name: str = "", module: str = "", **attrs: Any
    ) -> list[str]:
        """Say an operator that gives several values."""
        if len(self.model.operators) >= MAX_NODES:
            raise LimitExceeded(f"there are more than {MAX_NODES} operators")
        self.model.operators.append(Operator(op, name or module, "", list(inputs), list(outputs), attrs, module))
        order: Sequence[int] = attrs.get("perm", ()) if op == "Transpose" else ()
        if order and (shape := self.weights.get(inputs[0])) is not None and sorted(order) == list(range(len(shape))):
            self.weights[outputs[0]] = tuple(shape[axis] for axis in order)
        return list(outputs)

    def unknown(self, op: str, inputs: Sequence[str], outputs: Sequence[str], name: str = "") -> None:
        """Keep the place of what ONNX has no word for; a domain of its own keeps it from being taken for a namesake of ONNX's."""
        self.several(op, inputs, outputs or [self.fresh()], name=name)
        self.model.operators[-1].domain = "?"

    def first(self, value: str) -> str:
        """Put a map's channels first."""
        return self.add("Transpose", [value], perm=TO_FIRST)

    def last(self, value: str, output: str = "") -> str:
        """Put a map's channels last."""
        return self.add("Transpose", [value], output, perm=TO_LAST)

    def turned(self, value: str, perm: Sequence[int]) -> str:
        """Put the axes of a weight into another order."""
        return self.add("Transpose", [value], perm=tuple(perm))

    def on_maps(self, op: str, value: str, output: str = "", **how: Any) -> str:
        """Say an operator that has its channels first of a map that has them last."""
        return self.last(self.add(op, [self.first(value)], **how), output)

    def _constants_first(self) -> None:
        """Put what is done to constants alone in front: a layer looks for its bias behind itself, where that must be known."""
        known, first, rest = set(self.model.tensors), list[Operator](), list[Operator]()
        for operator in self.model.operators:
            constant = bool(operator.inputs) and not operator.domain and all(name in known for name in operator.inputs if name)
            (first if constant else rest).append(operator)
            known.update(operator.outputs if constant else ())
        self.model.operators = [*first, *rest]

    def finished(
        self,
        path: Path,
        format: str,
        framework: str,
        size_bytes: int,
        what: str,
        *,
        facts: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
        close: Callable[[], None] = lambda: None,
        beside: tuple[str, ...] = (),
        preprocessing: Callable[[Graph | None], dict[str, Any]] = preparation,
    ) -> Source:
        """Build the graph and its tensors, check them, and describe the file.

        Args:
            path, format, framework, facts, notes, close, beside: as `convert.source.Source` has them.
            size_bytes: of the file and its companions.
            what: "TFLite file", for the messages of what fails later.
            preprocessing: reads what the graph does to its pixels.
        """
        self._constants_first()
        builder = _onnx_graph.Builder(self.model)
        graph = builder.build(_onnx_ops.HANDLERS)
        if not builder.tensors:
            raise MalformedFile(f"{path} holds no weights" + (f": {', '.join(self.model.left_out[:5])}" if self.model.left_out else ""))
        _guard.check(path, builder.tensors.values(), size_bytes)
        flattened = {str(node.attrs["order"]) for node in graph.nodes if node.op == "flatten"} if graph is not None else set[str]()
        mixed = ["some dense layers read maps in CHW order, some in HWC"] if len(flattened) > 1 else []
        return Source(
            path,
            format,
            framework,
            {name: _guard.guarded(stored, path, what) for name, stored in builder.tensors.items()},
            graph=graph,
            flatten="hwc" if flattened == {"hwc"} or (self.model.channels_last and not flattened) else "chw",
            facts={key: value[: _guard.MAX_FACT] for key, value in (facts or {}).items()},
            preprocessing=preprocessing(graph),
            notes=[*notes, *builder.notes, *mixed],
            beside=beside,
            close=close,
        )


def dequantised(stored: Stored, scales: np.ndarray, zeros: np.ndarray, axis: int) -> Stored:
    """Describe whole numbers as what they stand for, (number - zero) * scale, in float32.

    Args:
        stored: the numbers.
        scales, zeros: one for all, or one for each place along the axis.
        axis: of the tensor.

    Raises:
        MalformedFile: there are neither one nor as many of them as the axis is long.
    """
    if not len(scales) or len(zeros) not in (0, len(scales)):
        raise MalformedFile(f"{stored.origin} has {len(scales)} scales and {len(zeros)} zero points")
    shape = (1,) * len(stored.shape)
    if len(scales) > 1:
        if not 0 <= axis < len(stored.shape) or stored.shape[axis] != len(scales):
            raise MalformedFile(f"{stored.origin} of shape {stored.shape} has {len(scales)} scales along axis {axis}")
        shape = tuple(len(scales) if a == axis else 1 for a in range(len(stored.shape)))
    exact = np.float32 if stored.dtype.itemsize <= 2 else np.float64  # which holds every difference of the numbers
    wide = scales.astype(exact).reshape(shape)
    from_zero = zeros.astype(exact).reshape(shape) if len(zeros) else np.zeros((), exact)

    def load() -> np.ndarray:
        with np.errstate(all="ignore"):
            return ((stored.array().astype(exact) - from_zero) * wide).astype(np.float32)

    return Stored(f"{stored.origin}, dequantised from {stored.dtype}", stored.shape, np.dtype(np.float32), load)


def in_order(origins: Mapping[str, Sequence[str]]) -> list[str]:
    """List names so that each comes behind those that it needs, as nearly in their own order as that allows.

    Raises:
        MalformedFile: they need each other in a circle.
    """
    waits = {name: len(needed) for name, needed in origins.items()}
    readers: dict[str, list[str]] = {}
    for name, needed in origins.items():
        for origin in needed:
            readers.setdefault(origin, []).append(name)
    place = {name: number for number, name in enumerate(origins)}
    ready = [number for number, name in enumerate(origins) if not waits[name]]
    heapq.heapify(ready)
    names, found = list(origins), list[str]()
    while ready:
        name = names[heapq.heappop(ready)]
        found.append(name)
        for reader in readers.get(name, ()):
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, place[reader])
    if len(found) < len(names):
        raise MalformedFile("what it computes needs itself: loops are not read")
    return found
