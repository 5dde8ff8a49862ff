"""A source's network executed in float64, with the source's own conventions on the file's raw tensors.

It is a second opinion on everything that `convert.steps` does to a tensor: it never uses a step, it slides true convolutions
backwards over the kernels as they are stored, and in every convolution of every run it computes one channel again with
scipy.signal, whose definition of convolution is the textbook's.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from convert import _ops
from convert.graph import Graph, Node
from convert.source import Source
from weights.errors import ConvertError

Progress = Callable[[int, int, str], None]


def run(
    source: Source, inputs: np.ndarray, *, keep: Collection[str] | None = None, progress: Progress | None = None
) -> dict[str, np.ndarray]:
    """Execute what a file says its network computes.

    Args:
        source: one with a graph.
        inputs: (B, C, H, W) as the source's network wants its images, whichever axis order its framework has.
        keep: names of the layers whose values are wanted; the graph's outputs if it is not given. Only what they need is computed.
        progress: called before each layer with its number, how many there are, and its name.

    Returns:
        Float64 values by the layers' names: maps (B, C, H, W), vectors (B, N).

    Raises:
        ConvertError: the file carries no graph; the graph has operations that nothing here executes, which the message names; or
            its numbers make no sense.
    """
    if source.graph is None:
        raise ConvertError(f"{source.path} does not say what its network computes: {source.format} files carry no graph")
    wanted = source.graph.outputs if keep is None else tuple(keep)
    nodes = needed(source.graph, wanted)
    return compute(source, nodes, {}, wanted, inputs=inputs, progress=progress)


def needed(graph: Graph, wanted: Collection[str], known: Collection[str] = ()) -> list[Node]:
    """List the layers that must be computed, in order, to have the values of `wanted` when those of `known` are there."""
    missing = set(wanted) - {node.name for node in graph.nodes}
    if missing:
        raise ConvertError(f"the graph has no layer {min(missing)!r}")
    asked = set(wanted) - set(known)
    chosen: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in asked:
            chosen.append(node)
            asked.update(name for name in node.inputs if name not in known)
    return chosen[::-1]


def compute(
    source: Source,
    nodes: Sequence[Node],
    known: Mapping[str, np.ndarray],
    wanted: Collection[str],
    *,
    inputs: np.ndarray | None = None,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """Execute some layers of a graph, perhaps changed ones, from values that are known.

    Args:
        source: whose tensors the layers have.
        nodes: in order; what they read is among them or in `known`.
        known: values by name, as this function returns them.
        wanted: whose values to return.
        inputs: the images, where a layer is the network's input.
        progress: as in `run`.

    Raises:
        ConvertError: as in `run`.
    """
    if foreign := sorted({node.op.removeprefix("unknown:") for node in nodes if node.op not in _ops.OPERATIONS}):
        raise ConvertError(f"{source.path}: nothing here executes {', '.join(foreign)}")
    if source.spatial == "unknown" and any(node.op in ("conv", "depthwise", "transposed", "flatten") for node in nodes):
        raise ConvertError(f"{source.path}: nothing says whether its first spatial axis is the height or the width; settle it first")
    turn = _exchanged if source.spatial == "wh" else np.asarray
    readers = Counter(name for node in nodes for name in node.inputs)
    values = {name: turn(np.asarray(value, np.float64)) for name, value in known.items()}
    results = {name: np.asarray(known[name], np.float64) for name in wanted if name in known}
    for number, node in enumerate(nodes):
        if progress is not None:
            progress(number, len(nodes), node.name)
        read = tuple(values[name] for name in node.inputs) if node.inputs else (_images(inputs, node, turn),)
        value = _one(source, node, read)
        if node.name in wanted:
            results[node.name] = np.ascontiguousarray(turn(value))
        if readers[node.name]:
            values[node.name] = value
        for name in set(node.inputs):
            readers[name] -= node.inputs.count(name)
            if not readers[name]:
                values.pop(name, None)
    return results


def _exchanged(array: np.ndarray) -> np.ndarray:
    return array.swapaxes(2, 3) if array.ndim == 4 else array


def _images(inputs: np.ndarray | None, node: Node, turn: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    if node.op != "input" or inputs is None:
        raise ConvertError(f"layer {node.name!r} ({node.op}) reads nothing, and is no input")
    if inputs.ndim not in (2, 4):
        raise ConvertError(f"images are (B, C, H, W), got {inputs.shape}")
    return turn(np.asarray(inputs, np.float64))


def _one(source: Source, node: Node, values: tuple[np.ndarray, ...]) -> np.ndarray:
    def raw(leaf: str) -> np.ndarray | None:
        stored = source.tensors.get(f"{node.name}.{leaf}")
        return None if stored is None else stored.load()

    call = _ops.Call(node, values, raw, np.random.default_rng(zlib.crc32(node.name.encode())))
    try:
        with np.errstate(all="ignore"):  # what is not finite shows in the comparison
            return _ops.OPERATIONS[node.op](call)
    except ConvertError as error:
        raise type(error)(f"{source.path}: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError, ArithmeticError, MemoryError) as error:
        said = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        shapes: Any = ", ".join(str(value.shape) for value in values)
        raise ConvertError(f"{source.path}: layer {node.name!r} ({node.op}) on {shapes}: {said}") from error
