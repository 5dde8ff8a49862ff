"""A program at one input shape, captured as a CUDA graph, with buffers for what comes in."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.kernels import ops
from zoo.kernels.comparing.precision import products
from zoo.kernels.measuring.timing import recording
from zoo.kernels.memory.graph_pool import growing
from zoo.kernels.memory.workspaces import clear_workspaces
from zoo.kernels.ops._layout import reachable
from zoo.kernels.passes.graph import Node
from zoo.kernels.plans.arena import Changed, Layout, Piece, Served, Watched, asked_at_once, layouts, segment
from zoo.kernels.plans.program import Program
from zoo.kernels.plans.replayed import Replayed

PACKED_INSIDE = 8 << 20
"""Bytes of an input up to which packing it is part of the graph: at batch 1 one more launch by the CPU costs more than one more copy."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a run that is recorded has its memory.

    Attributes:
        layout: of an arena; None where the allocator is asked for each map.
        room: bytes that the graph's memory begins with, in one piece from which the arena is cut too, and all but small ones; 0 to let it
            grow by what is asked for, beside the arena.
    """

    layout: Layout | None
    room: int

    @property
    def least(self) -> int:
        """The bytes that this takes at least."""
        return segment(self.room) if self.room else 0 if self.layout is None else self.layout.nbytes


def _ways(pieces: list[Piece], held: int) -> list[Way]:
    """Return the ways to try, first the one that needs no knowledge of a run; see `layouts` for the arguments."""
    found = layouts(pieces, held)
    if torch.cuda.get_allocator_backend() != "native":  # which says neither what it holds nor what it does with what is left to it
        return [Way(None, 0), *(Way(each, 0) for each in found[-1:])]
    return [Way(None, 0), *(Way(each, 0) for each in found), *(Way(each, each.nbytes + each.beside) for each in found)]


class Plan(Replayed):
    """What a fast network does for one input shape on a GPU."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.setting.device)
        self.program, self.setting = program, program.setting
        self._graph: torch.cuda.CUDAGraph | None = None
        self.note = ""
        self._outputs: list[Any] = []
        self._memory: Tensor | None = None
        self._buffers = self._made()
        self._raw = [self._raw_buffer(node) for node in program.graph.inputs]

    def _raw_buffer(self, node: Node) -> Tensor | None:
        """Make room for an image as it comes where the graph packs it."""
        size = torch.Size(node.shape).numel() * self.setting.dtype.itemsize
        packed = any(kind == "packed" for kind, _ in self.program.forms[node])
        return torch.zeros(node.shape, dtype=self.setting.dtype, device=self.setting.device) if packed and size <= PACKED_INSIDE else None

    def _made(self) -> list[list[Tensor]]:
        """Make room for what comes in, in the forms that the first layers read."""
        forms = self.program.forms
        return [[self._buffer(node.shape, node.dtype, *form) for form in forms[node]] for node in self.program.graph.inputs]

    def _made_anew(self) -> Iterator[list[Tensor]]:
        """Make that room as a run asks for memory: what comes in needs it no longer than until it is read."""
        for buffers in self._buffers:
            yield [torch.empty(b.shape, dtype=b.dtype, device=b.device, memory_format=_form(b)) for b in buffers]

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype, kind: str, how: dict[str, Any]) -> Tensor:
        if kind == "packed":
            blank = torch.zeros((shape[0], shape[1], 1, 1), dtype=self.setting.dtype, device=self.setting.device).expand(shape)
            return ops.load("image").launch(blank, **how, dtype=self.setting.dtype)
        kept = self.setting.dtype if dtype.is_floating_point else dtype
        form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        return torch.zeros(shape, dtype=kept, device=self.setting.device).contiguous(memory_format=form)

    def fill(self, tensors: list[Tensor]) -> None:
        """Copy the caller's tensors into the buffers, in the forms that the first layers read; what was written there stays."""
        for number, tensor in enumerate(tensors):
            raw = self._raw[number]
            if raw is None:
                self._pack(number, tensor, self._buffers[number])
            elif tensor is not raw:
                raw.copy_(tensor)

    def _pack(self, number: int, tensor: Tensor, buffers: list[Tensor]) -> None:
        forms = self.program.forms[self.program.graph.inputs[number]]
        for (kind, how), buffer in zip(forms, buffers, strict=True):
            if kind == "packed":
                if not reachable(tensor):  # a view into something vast
                    tensor = tensor.contiguous()
                ops.load("image").launch(tensor, **how, dtype=self.setting.dtype, out=buffer)
            else:
                buffer.copy_(tensor)

    def _run(self, buffers: Iterable[list[Tensor]], probe: Any = None) -> list[Any]:
        return self.program.run(self._packed(buffers), probe)

    def _packed(self, buffers: Iterable[list[Tensor]]) -> Iterator[list[Tensor]]:
        """Hand the buffers on and keep none, with images in them that came as they are."""
        for number, forms in enumerate(buffers):
            raw = self._raw[number]
            if raw is not None:
                self._pack(number, raw, forms)
            yield forms

    def eager(self, tensors: list[Tensor], probe: Any = None) -> list[Any]:
        """Run without the graph: to check, and to warm up."""
        self.fill(tensors)
        with self.flags():
            return self._run(self._buffers, probe)

    def flags(self) -> contextlib.AbstractContextManager[None]:
        """Let cuDNN choose its own plans by timing; the capture keeps what it chose."""
        return products(self.setting.tf32, benchmark=True)

    def capture(self, arena: bool = True) -> None:
        """Record the run; everything must have run once before.

        Args:
            arena: lay the run's maps out in one piece of memory where that takes less.
        """
        stream = torch.cuda.Stream(self.setting.device)
        torch.cuda.synchronize(self.setting.device)
        torch.cuda.empty_cache()  # inside of the capture nothing can be freed
        collecting = gc.isenabled()
        gc.disable()  # a tensor of another plan that is collected while capturing would end up in the graph
        try:
            watched = Watched(self.setting.device) if arena else None
            with torch.cuda.stream(stream), self.flags():
                if watched is not None:
                    self._run(self._buffers)  # what it makes once and keeps is no part of what each run asks for
                with watched or contextlib.nullcontext():
                    self._run(self._buffers if watched is None else self._made_anew())
            torch.cuda.synchronize(self.setting.device)
            torch.cuda.empty_cache()  # of the run's own pieces
            pieces = [] if watched is None else watched.pieces
            self._arrange(stream, _ways(pieces, held=sum(map(len, self._buffers))))
        finally:
            if collecting:
                gc.enable()
            with contextlib.suppress(RuntimeError):  # of a capture that failed; its own error is on the way
                torch.cuda.synchronize(self.setting.device)
            clear_workspaces()
        torch.cuda.current_stream(self.setting.device).wait_stream(stream)

    def _arrange(self, stream: torch.cuda.Stream, ways: list[Way]) -> None:
        """Record the run in the way that takes least memory; one that can't take less than another took is not tried.

        What lies outside of the graph's memory counts by its own bytes: others are given the rest of its segment.
        """
        best = last = ways[0]
        least: float | None = None
        for way in ways:
            if least is not None and way.least >= least:
                continue
            last, taken = way, self._taken(stream, way, fails=len(ways) == 1)
            if taken is not None and (least is None or taken <= least):
                best, least = way, taken
        if best is last and self._graph is not None:
            return
        if self._taken(stream, best, fails=least is None) is None:
            raise Changed("a run that was recorded asks for other memory, or for more than there is, the second time")

    def _taken(self, stream: torch.cuda.Stream, way: Way, fails: bool) -> float | None:
        """Record the run, anew, and return the bytes that it holds; None, and nothing is recorded, where it can't be.

        In an arena it can't where a kernel keeps memory from call to call, and in any way where there is no room. The error that says why
        is let out if it `fails`.
        """
        if self._graph is not None:
            self._forget()
        try:
            self._record(stream, way)
        except (Changed, torch.OutOfMemoryError):
            if fails:
                raise
        except BaseException:
            self._forget()
            raise
        if self._graph is None:  # outside of the except clause, whose traceback holds the run's maps
            self._forget()
            return None
        outside = [b for forms in self._buffers for b in forms] if way.layout is None else [self._memory] if not way.room else []
        return pool_bytes(self._graph) + sum(held.nbytes for held in outside if held is not None)

    def _forget(self) -> None:
        """Let go of what was recorded, and of its memory, before the buffers are made anew that lay there."""
        inside = self.shares
        self._graph, self._outputs, self._memory = None, [], None
        if inside:
            self._buffers = []
        torch.cuda.empty_cache()
        if inside or not self._buffers:
            self._buffers = self._made()

    def _record(self, stream: torch.cuda.Stream, way: Way) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), self.flags():
            clear_workspaces()  # cuBLAS's is made anew in the graph's own memory; another's could be freed under it
            if way.layout is not None and not way.room:
                self._memory = self._bytes(way.layout.nbytes)
            try:
                with growing(not way.room), recording(graph):
                    if way.room:
                        self._bytes(asked_at_once(way.room))  # and let it go: what is asked for is cut from it
                    if way.layout is None:
                        self._outputs = self._run(self._buffers)
                    else:
                        self._serve(way.layout)
            finally:
                clear_workspaces()  # while the graph lives: PyTorch 2.11 crashes where one is freed whose pool is gone
        self._graph = graph

    def _serve(self, layout: Layout) -> None:
        """Run in an arena, what comes in included."""
        if self._memory is None:
            self._memory = self._bytes(layout.nbytes)
        served = Served(layout, self._memory)
        with served:
            self._buffers = list(self._made_anew())
            self._outputs = self._run(self._buffers)
        served.done()

    def _bytes(self, count: int) -> Tensor:
        """Make room and write nothing there: a graph would do so in each call, where PyTorch is told to fill what is empty."""
        device = self.setting.device
        return torch.empty(0, dtype=torch.uint8, device=device).set_(torch.UntypedStorage(count, device=device))  # pyright: ignore[reportArgumentType]

    @property
    def shares(self) -> bool:
        """Whether its maps lie in one piece of memory, one over the other."""
        return self._memory is not None

    def close(self) -> None:
        """Give up the graph and its memory, when nothing of it runs any more."""
        torch.cuda.synchronize(self.setting.device)
        self._forget()

    def release(self) -> None:
        """Drop the unpacked weights, which only making the plan needed."""
        for node in self.program.graph.nodes:
            if node in self.program.bound:
                node.attrs = {name: value for name, value in node.attrs.items() if not isinstance(value, Tensor | dict)}

    @property
    def captured(self) -> bool:
        """Whether its graph is there."""
        return self._graph is not None

    def _rooms(self) -> list[Tensor | None]:
        return [*self._raw]  # what lies in an arena is overwritten by later maps

    def _own_memory(self) -> Iterator[Tensor]:
        for held in (self._memory, *self._raw, *(buffer for forms in self._buffers for buffer in forms)):
            if held is not None:
                yield held

    def _constants(self) -> Iterator[Tensor]:
        return self.program.constants()

    def _replay(self, tensors: list[Tensor]) -> list[Any]:
        self.fill(tensors)
        if self._graph is None:
            with self.flags():
                self._outputs = self._run(self._buffers)
        else:
            self._graph.replay()
        return self._outputs


def pool_bytes(graph: torch.cuda.CUDAGraph | None) -> float:
    """Return how much the allocator holds for a graph, in bytes; infinity where it is none of PyTorch's own, which can't say."""
    if graph is None:
        return 0
    if torch.cuda.get_allocator_backend() != "native":
        return math.inf
    pool = tuple(graph.pool())
    return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == pool)


def _form(tensor: Tensor) -> torch.memory_format:
    """Return the memory format to ask for another like a buffer with."""
    return torch.contiguous_format if tensor.is_contiguous() else torch.channels_last
