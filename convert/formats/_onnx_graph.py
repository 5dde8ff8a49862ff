"""An ONNX graph as ours: each layer under its module's name, each weight under its layer's, shapes and axis orders followed."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convert.core import COUNTER
from convert.formats._onnx_fold import Constants
from convert.formats._onnx_proto import Model, Operator
from convert.graph import Graph, Node
from convert.source import Stored
from convert.steps import Transpose, from_layout
from weights.wording import counted

KEY = re.compile(r"[\w.]*\.[A-Za-z_]\w*$")
"""How a state dict names a tensor."""
KERAS = re.compile(r"(.+)/(?:kernel|depthwise_kernel|pointwise_kernel|bias|gamma|beta|moving_mean|moving_variance|weights|biases)(?::0)?$")
TF2ONNX = re.compile(r"(?:StatefulPartitionedCall/)?(?:[^/]+/)?(.+)/[^/]+/ReadVariableOp(?:/resource)?(?::0)?$")

Dims = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """What flows through the graph.

    Attributes:
        node: which of our layers computes it.
        shape: as ONNX has it, the batch in front; None where nothing is known, also for a single dimension.
        layout: "nchw" or "nhwc" for a map, as ONNX has it; "flat" for vectors; "" for anything else.
    """

    node: str
    shape: Dims | None
    layout: str

    def dim(self, letter: str) -> int | None:
        """The size of one axis of a map, or the width of a vector."""
        axis = self.axis(letter)
        return self.shape[axis] if self.shape is not None and axis is not None and axis < len(self.shape) else None

    def axis(self, letter: str) -> int | None:
        if self.layout == "flat":
            return {"n": 0, "c": 1}.get(letter)
        return self.layout.index(letter) if letter in self.layout and self.layout else None

    def sized(self, **sizes: int | None) -> Dims | None:
        """The shape with some axes changed."""
        if self.shape is None:
            return None
        changed = {self.axis(letter): size for letter, size in sizes.items()}
        return tuple(changed.get(axis, size) for axis, size in enumerate(self.shape))


class Builder:
    """Walk the operators in order, and write down a layer for each that computes on images."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.constants = Constants(model)
        self.values: dict[str, Value] = {}
        self.nodes: list[Node] = []
        self.tensors: dict[str, Stored] = {}
        self.ops: dict[str, str] = {}
        self.numbers: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.used: set[str] = set()
        self.done: set[int] = set()
        self.notes: list[str] = []
        self.readers: dict[str, list[Operator]] = {}
        for operator in model.operators:
            for name in operator.inputs:
                self.readers.setdefault(name, []).append(operator)
        self.kept = set(model.outputs)

    def build(self, handlers: Mapping[str, Callable[[Builder, Operator], bool]]) -> Graph | None:
        """Build the graph; None where the file has no operators."""
        for name, shape in self.model.inputs.items():
            last = self.model.channels_last or self._channels_last(name)
            layout = ("nhwc" if last else "nchw") if len(shape) in (0, 4) else "flat" if len(shape) == 2 else ""
            self.values[name] = Value(
                self.emit(name, "input", (), {"layout": "nhwc" if last else "nchw", "shape": shape[1:] or None}), shape or None, layout
            )
        for operator in self.model.operators:
            if id(operator) in self.done or self.constants.fold(operator, self._shape):
                continue
            handler = handlers.get(operator.op) if operator.domain in ("", "ai.onnx") else None
            if handler is None or not handler(self, operator):
                self._unknown(operator)
        self._rest()
        outputs = tuple(dict.fromkeys(self.values[name].node for name in self.model.outputs if name in self.values))
        return Graph(tuple(self.nodes), outputs) if self.model.operators else None

    # what handlers use

    def value(self, operator: Operator, place: int = 0) -> Value | None:
        """An input that is computed from the images."""
        return self.values.get(operator.inputs[place]) if place < len(operator.inputs) else None

    def constant(self, operator: Operator, place: int) -> Stored | None:
        """An input that is a constant."""
        return self.constants.stored.get(operator.inputs[place]) if place < len(operator.inputs) else None

    def emit(self, name: str, op: str, inputs: Sequence[Value], attrs: Mapping[str, Any] | None = None) -> str:
        """Write a layer down under a name that nothing else has."""
        unique = self._unique(name or op)
        self.ops[unique] = op
        self.nodes.append(Node(unique, op, tuple(value.node for value in inputs), dict(attrs or {})))
        return unique

    def layer(
        self, operator: Operator, op: str, inputs: Sequence[Value], attrs: Mapping[str, Any] | None, shape: Dims | None, layout: str
    ) -> bool:
        """Write down a layer without tensors, and what it gives."""
        name = operator.name or f"{operator.op}_{self._count(operator)}"
        self.gives(operator, Value(self.emit(name, op, inputs, attrs), shape, layout))
        return True

    def gives(self, operator: Operator, value: Value) -> bool:
        """Say what an operator's first output is."""
        if operator.outputs:
            self.values[operator.outputs[0]] = value
        return True

    def only_reader(self, operator: Operator) -> Operator | None:
        """The one operator that reads an operator's output, if there is one and the output is not the network's."""
        if not operator.outputs or operator.outputs[0] in self.kept:
            return None
        readers = self.readers.get(operator.outputs[0], [])
        return readers[0] if len(readers) == 1 else None

    def module(self, operator: Operator, roles: Mapping[str, str], also: Operator | None = None) -> str | None:
        """Name the module whose tensors these are, by leaf and by name in the file; None if another layer, or several, have them."""
        if any(len(self._own_sources(name)) > 1 for name in roles.values()):
            return None
        roots = {leaf: self.constants.roots[name] for leaf, name in roles.items()}
        if "weight" in roots and roots["weight"] in self.used and len(self.constants.stored[roles["weight"]].shape) > 1:
            return None
        name = (
            operator.module
            or next((root.removesuffix(f".{leaf}") for leaf, root in roots.items() if root.endswith(f".{leaf}")), "")
            or next((found[1] for root in roots.values() if (found := KERAS.match(root) or TF2ONNX.match(root))), "")
            or scope(operator)
            or (scope(also) if also is not None else "")
            or f"{operator.op}_{self._count(operator)}"
        )
        return self._unique(name)

    def _own_sources(self, value: str) -> list[str]:
        """List the tensors, named as in a state dict, that a constant was made of."""
        return [root for root in self.constants.of(value) if KEY.match(root)]

    def own(self, value: str, *, single: bool) -> bool:
        """Tell whether a tensor is called as a state dict calls one that is its module's own: no weight or bias of channels.

        Other frameworks' names say no such thing: Core ML's layers have a "scale" too.
        """
        root = self.constants.roots[value]
        if not self.model.named:
            return False
        return KEY.match(root) is not None and (single or root.rpartition(".")[2] not in ("weight", "bias"))

    def keep(self, module: str, leaf: str, value: str, kind: str = "", letters: str = "") -> str:
        """Keep a tensor, with the steps to PyTorch's form, and tell the letters of its stored layout."""
        stored = self.constants.stored[value]
        self.used.add(self.constants.roots[value])
        raw = list(letters)
        for step in reversed(stored.steps):
            if isinstance(step, Transpose) and letters:
                before = [""] * len(raw)
                for axis, source in enumerate(step.axes):
                    before[source] = raw[axis]
                raw = before
        if kind == "linear":
            stored = stored.then(*from_layout("linear", letters, stored.shape))
        if leaf != "weight" or not letters:
            stored = stored if len(stored.shape) == 1 else stored.reshape(math.prod(stored.shape))
        convention = "correlation" if leaf == "weight" and kind in ("conv", "transposed") else None
        self.tensors[f"{module}.{leaf}"] = replace(stored, convention=convention)
        return "".join(raw)

    # the builder's own

    def _unique(self, name: str) -> str:
        unique = name
        while unique in self.ops:
            self.numbers[name] += 1
            unique = f"{name}#{self.numbers[name] + 1}"
        return unique

    def _shape(self, name: str) -> Dims | None:
        if (value := self.values.get(name)) is not None:
            return value.shape
        stored = self.constants.stored.get(name)
        return stored.shape if stored is not None else None

    def _count(self, operator: Operator) -> int:
        self.counts[operator.op] += 1
        return self.counts[operator.op] - 1

    def _channels_last(self, name: str) -> bool:
        """Follow an input through what works on pixels one by one to a transpose that puts its channels first."""
        for _ in range(16):
            readers = self.readers.get(name, [])
            if not readers or not readers[0].outputs:
                return False
            if readers[0].op == "Transpose":
                return list(readers[0].attrs.get("perm") or []) == [0, 3, 1, 2]
            if readers[0].op not in ("Cast", "Sub", "Mul", "Div", "Add", "Identity"):
                return False
            name = readers[0].outputs[0]
        return False

    def _unknown(self, operator: Operator) -> None:
        """Keep the place of an operator that nothing here executes, and the tensors that carry a layer's name."""
        inputs = [self.values[name] for name in operator.inputs if name in self.values]
        made_of = {root: name for name in operator.inputs if name in self.constants.roots for root in self.constants.of(name)}
        keys = [root for root in made_of if KEY.match(root) and root not in self.used]
        module = keys[0].rpartition(".")[0] if keys else ""
        name = module or operator.name or f"{operator.op}_{self._count(operator)}"
        node = self.emit(name, f"unknown:{operator.op or 'nothing'}", inputs)
        for root in keys:
            stored = self.constants.stored.get(root, self.constants.stored[made_of[root]])  # as the state dict had it
            owner = root.rpartition(".")[0]
            joined = not inputs or len(self._own_sources(made_of[root])) > 1  # with another module's, of which no layer has one alone
            if self.ops.get(owner, "unknown:").startswith("unknown:") and (owner == module or joined):  # several operators may be one layer
                self.used.add(root)
                self.tensors[root] = stored
        for output in operator.outputs:
            if output:
                self.values[output] = Value(node, None, "")

    def _rest(self) -> None:
        """Keep the step counters of norms and, of a file without operators, everything; say what else is left out."""
        left = 0
        for name, tensor in self.model.tensors.items():
            if name in self.used or name in self.tensors:
                continue
            counter = name.endswith(f".{COUNTER}") and name.removesuffix(COUNTER) + "running_mean" in self.tensors
            if counter or not self.model.operators:
                self.tensors[name] = self.constants.stored[name]
            elif tensor.dtype.kind not in "iub" and name not in self.readers:
                left += 1
        if left:
            self.notes.append(f"{counted(left, 'tensor')} that no operator reads {'was' if left == 1 else 'were'} left out")
        if self.model.left_out:
            self.notes.append(f"left out, of a type that no weight has: {', '.join(self.model.left_out[:10])}")


def scope(operator: Operator) -> str:
    """Read the module from the name that PyTorch gives a node: /layer1/layer1.0/conv1/Conv is layer1.0.conv1."""
    if not operator.name.startswith("/") or not operator.name.rpartition("/")[2].startswith(operator.op):
        return ""
    path: list[str] = []
    for part in operator.name.split("/")[1:-1]:
        if path and part.startswith(f"{path[-1]}."):
            path[-1] = part
        else:
            path.append(part)
    return ".".join(path)
