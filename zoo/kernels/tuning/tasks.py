"""A step's kernel as work for processes that compile: sent without weights, launched on memory that it never touches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.passes.graph import Node
from zoo.kernels.passes.place import Place
from zoo.kernels.tuning.binding import bind, blanks, home, packed_image
from zoo.kernels.tuning.steps import IMAGE_OPS, Candidate, Setting, describe

DIVISIBLE = 16
"""Bytes: Triton compiles otherwise for a map that begins at no multiple of these."""


@dataclass(frozen=True, slots=True)
class Task:
    """A kernel to compile: a step, where its maps lie, what computes it, whether a kernel of ours follows, and which dtype it writes."""

    node: Node
    places: dict[Node, Place]
    setting: Setting
    candidate: Candidate
    followed: bool = True
    out_dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """The op."""
        return self.candidate.op

    @property
    def key(self) -> str:
        """The step without its place in a network, the candidate, what follows, what is written, and which maps begin unaligned."""
        spots = [self.places.get(node) for node in (*self.node.inputs, self.node)]
        begin = [0 if spot is None else spot.offset * self.setting.dtype.itemsize % DIVISIBLE for spot in spots]
        return f"{describe(self.node, self.places, self.setting)} {self.candidate} {self.followed} {self.out_dtype} {begin}"

    def portable(self) -> Task:
        """Return the task without weights, and without the rest of its graph."""
        node = self.node
        sources = {source: _alone(source, 1 if source.op == "second" else 0) for source in node.inputs}
        alone = replace(node, inputs=[sources[source] for source in node.inputs], attrs=_exchange(node.attrs, Tensor, _blank))
        places = {sources[source]: self.places[source] for source in sources if source in self.places}
        if node in self.places:
            places[alone] = self.places[node]
        return replace(self, node=alone, places=places, setting=replace(self.setting, device=torch.device("cpu")))

    def compile(self) -> None:
        """Compile; of a portable task."""
        from zoo.kernels.ops._overlap import followed_by_ours

        node = replace(self.node, attrs=_exchange(self.node.attrs, Blank, lambda blank: torch.zeros(blank.shape, dtype=blank.dtype)))
        places = {node if where is self.node else where: spot for where, spot in self.places.items()}
        inputs = blanks(node, places, self.setting)
        bound = bind(node, self.candidate, self.setting, out_dtype=self.out_dtype)
        if self.candidate.op in IMAGE_OPS:
            image, shape = inputs[0], tuple(inputs[0].shape)
            inputs[0] = packed_image(node, image)
            kept, given = (torch.empty(shape, dtype=dtype) for dtype in (image.dtype, torch.float32))
            for other in (kept, given, torch.empty((*shape[:2], 1, 1), dtype=image.dtype).expand(shape)):
                packed_image(node, other, image.dtype)  # as a plan keeps it, as a caller gives it, and as a plan makes room for it
        with followed_by_ours(self.followed), torch.no_grad():
            bound(inputs, home(node, places, self.setting))


def _alone(source: Node, depth: int) -> Node:
    """Return a node without attributes but how it is stored; of a second value also whose it is."""
    attrs = {name: value for name, value in source.attrs.items() if name == "stored"}
    return replace(source, inputs=[_alone(inner, 0) for inner in source.inputs] if depth else [], attrs=attrs)


@dataclass(frozen=True, slots=True)
class Blank:
    """A tensor of which only shape and dtype matter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _blank(tensor: Tensor) -> Blank:
    return Blank(tuple(tensor.shape), tensor.dtype)


def _exchange(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return by(value)
    return {name: _exchange(inner, kind, by) for name, inner in value.items()} if isinstance(value, dict) else value
