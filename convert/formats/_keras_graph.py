"""The graph of a Keras model, from its config alone: Sequential and Functional, of every generation, models within models unfolded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from convert._guard import MAX_DEPTH
from convert.formats._keras_config import children, is_operation, kind_of, name_of, settings
from convert.formats._keras_layers import Era
from convert.formats._keras_ops import Setting, operations
from convert.graph import Graph, Node
from convert.kinds import is_list, is_mapping, is_row
from convert.source import Stored
from weights.errors import LimitExceeded

MAX_NODES = 20_000

Reference = tuple[str, int, int]
"""A value: the layer, which of its calls, which of that call's results."""


class NotUnderstood(Exception):
    """A config states something that a graph can't say; the file's weights are read all the same."""


def graph(model: Mapping[str, Any], era: Era, tensor: Callable[[str], Stored | None]) -> Graph:
    """Build the graph of a model.

    Args:
        model: the config, with "class_name" and "config".
        era: of the file.
        tensor: finds a tensor of the file by its name here.

    Raises:
        NotUnderstood: a subclassed model, or a config that makes no sense; the message says what.
        LimitExceeded: models that call models make more layers than any network has.
    """
    if children(model) is None:
        raise NotUnderstood(f"a {kind_of(model) or 'model'} states no layers: what it computes is in its code")
    build = _Build(era, tensor, "nchw" if _channels_first(model, 0) else "nhwc")
    outputs = build.model(model, "", None, 0)
    return Graph(tuple(build.nodes), tuple(dict.fromkeys(outputs)))


@dataclass(slots=True)
class _Build:
    era: Era
    tensor: Callable[[str], Stored | None]
    layout: str
    nodes: list[Node] = field(default_factory=list[Node])
    names: set[str] = field(default_factory=set[str])
    calls: Counter[str] = field(default_factory=Counter[str])

    def add(self, name: str, op: str, inputs: Sequence[str], attrs: Mapping[str, Any]) -> str:
        unique = name
        while unique in self.names:
            self.calls[name] += 1
            unique = f"{name}/call{self.calls[name]}"
        if len(self.nodes) >= MAX_NODES:
            raise LimitExceeded(f"the model config makes more than {MAX_NODES} layers")
        if unique != name and op in ("conv", "depthwise", "transposed", "dense", "norm", "prelu"):
            op, attrs = f"unknown:another call of {name}", {}
        self.names.add(unique)
        self.nodes.append(Node(unique, op, tuple(inputs), dict(attrs)))
        return unique

    def model(self, model: Mapping[str, Any], prefix: str, given: Sequence[str] | None, depth: int) -> list[str]:
        if depth > MAX_DEPTH:
            raise LimitExceeded(f"models nest more than {MAX_DEPTH} deep")
        if kind_of(model) == "Sequential" or not any("inbound_nodes" in layer for layer in children(model) or ()):
            return self.sequence(model, prefix, given, depth)
        return self.functional(model, prefix, given, depth)

    def sequence(self, model: Mapping[str, Any], prefix: str, given: Sequence[str] | None, depth: int) -> list[str]:
        values = list(given or ())
        for layer in children(model) or ():
            if kind_of(layer) == "InputLayer":
                values = values or [self.input(prefix + name_of(layer), _input_shape(layer))]
                continue
            if not values:
                values = [self.input(f"{prefix}input", _input_shape(layer) or _input_shape(model))]
            values = self.layer(layer, prefix, values, depth)
        if not values:
            raise NotUnderstood("a Sequential model without layers")
        return values

    def functional(self, model: Mapping[str, Any], prefix: str, given: Sequence[str] | None, depth: int) -> list[str]:
        config = settings(model)
        done: dict[tuple[str, int], list[str]] = {}
        entrances = _references(config.get("input_layers"))
        for number, (name, call, _) in enumerate(entrances):
            if given is not None:
                if number >= len(given):
                    raise NotUnderstood(f"the model of {prefix or 'the file'} gets {len(given)} inputs and has {len(entrances)}")
                done[name, call] = [given[number]]
        waiting: list[tuple[Mapping[str, Any], int, list[Reference], Any]] = []
        for layer in children(model) or ():
            calls: Any = layer.get("inbound_nodes") or []
            if kind_of(layer) == "InputLayer" or not calls:
                if (name_of(layer), 0) not in done:
                    done[name_of(layer), 0] = [self.input(prefix + name_of(layer), _input_shape(layer))]
                continue
            if not is_list(calls):
                raise NotUnderstood("inbound nodes that are no list")
            waiting.extend((layer, number, list(_inputs_of(call)), call) for number, call in enumerate(calls))
        while waiting:
            later: list[tuple[Mapping[str, Any], int, list[Reference], Any]] = []
            for layer, number, inputs, stated in waiting:
                if not inputs or any((name, call) not in done for name, call, _ in inputs):
                    later.append((layer, number, inputs, stated))
                    continue
                values = [_pick(done[name, call], which) for name, call, which in inputs]
                done[str(layer.get("name") or name_of(layer)), number] = self.layer(layer, prefix, values, depth, _number_of(stated))
            if len(later) == len(waiting):
                raise NotUnderstood(f"layer {name_of(later[0][0])!r} reads what no layer before it gives")
            waiting = later
        exits = _references(config.get("output_layers"))
        if not exits or any((name, call) not in done for name, call, _ in exits):
            raise NotUnderstood("its outputs are no layers")
        return [_pick(done[name, call], which) for name, call, which in exits]

    def layer(
        self, layer: Mapping[str, Any], prefix: str, values: Sequence[str], depth: int, number: tuple[int, float] | None = None
    ) -> list[str]:
        name = prefix + name_of(layer)
        if children(layer) is not None:
            return self.model(layer, f"{name}.", values, depth + 1)
        setting = Setting(kind_of(layer), settings(layer), self.era, self.layout, is_operation(layer), len(values), number)
        current: Sequence[str] = values
        for suffix, op, attrs in operations(setting, lambda leaf: self.tensor(f"{name}.{leaf}")):
            current = [self.add(name + suffix, op, current, attrs)]
        return list(current)

    def input(self, name: str, shape: Sequence[int | None] | None) -> str:
        attrs: dict[str, Any] = {"layout": self.layout}
        if shape is not None:
            attrs["shape"] = tuple(shape)
        return self.add(name, "input", (), attrs)


def _pick(values: Sequence[str], which: int) -> str:
    if not 0 <= which < len(values):
        raise NotUnderstood(f"result {which} of a layer that gives {len(values)}")
    return values[which]


def _input_shape(layer: Mapping[str, Any]) -> tuple[int | None, ...] | None:
    config = settings(layer)
    built = layer.get("build_config")
    for shape in (
        config.get("batch_input_shape"),
        config.get("batch_shape"),
        config.get("build_input_shape"),
        built.get("input_shape") if is_mapping(built) else None,
    ):
        if is_row(shape) and all(size is None or isinstance(size, int) for size in shape):
            return tuple(shape[1:])
    return None


def _references(stated: Any) -> list[Reference]:
    """Read a list of values in any of the forms that Keras writes: one, a list, or a dict of them."""
    if is_mapping(stated):
        return [found for value in stated.values() for found in _references(value)]
    if not is_row(stated):
        return []
    if _is_reference(stated):
        return [(stated[0], stated[1], stated[2])]
    return [found for value in stated for found in _references(value)]


def _is_reference(value: Any) -> TypeGuard[Sequence[Any]]:
    return is_row(value) and len(value) >= 3 and isinstance(value[0], str) and all(type(v) is int for v in value[1:3])


def _inputs_of(call: Any) -> Iterator[Reference]:
    """List what one call of a layer reads, in order."""
    if is_mapping(call):  # Keras 3
        yield from _tensors(call.get("args"), 0)
        yield from _tensors(call.get("kwargs"), 0)
        return
    references = [call] if _is_reference(call) else call if is_list(call) else []
    for reference in references:
        if not _is_reference(reference):
            raise NotUnderstood("an inbound node of an unknown form")
        yield reference[0], reference[1], reference[2]
        if len(reference) > 3 and is_mapping(reference[3]):
            yield from ((v[0], v[1], v[2]) for v in reference[3].values() if _is_reference(v))


def _number_of(call: Any) -> tuple[int, float] | None:
    """Find the number that a function is called with beside its one tensor, and its place: x + 3 or 1 - x."""
    if is_mapping(call):
        stated = call.get("args")
    else:
        reference = call if _is_reference(call) else call[0] if is_list(call) and call else ()
        stated = [None, reference[3].get("y") if len(reference) > 3 and is_mapping(reference[3]) else None]
    if not is_list(stated) or len(stated) != 2:
        return None
    numbers = ((n, float(value)) for n, value in enumerate(stated) if isinstance(value, int | float) and not isinstance(value, bool))
    return next(numbers, None)


def _tensors(value: Any, depth: int) -> Iterator[Reference]:
    if depth > MAX_DEPTH:
        raise LimitExceeded("arguments nest deeper than any network's")
    if is_mapping(value):
        if value.get("class_name") == "__keras_tensor__":
            history = settings(value).get("keras_history")
            if not _is_reference(history):
                raise NotUnderstood("a tensor without a history")
            yield history[0], history[1], history[2]
            return
        value = list(value.values())
    if is_list(value):
        for inner in value:
            yield from _tensors(inner, depth + 1)


def _channels_first(model: Mapping[str, Any], depth: int) -> bool:
    if depth > MAX_DEPTH:
        return False
    for layer in children(model) or ():
        config = settings(layer)
        if kind_of(layer) == "Flatten":
            continue
        if config.get("data_format") == "channels_first" or config.get("dim_ordering") == "th" or _channels_first(layer, depth + 1):
            return True
    return False
