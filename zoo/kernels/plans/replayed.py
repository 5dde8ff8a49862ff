"""What answers the calls of one shape from memory of its own: one call after the other, each with outputs that are the caller's, or not."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Replayed(ABC):
    """Answers calls from several threads and streams in turn, for they share its buffers.

    Attributes:
        static: hands out the memory that the next call writes its outputs into, instead of copies of it.
    """

    static = False
    keeps_rooms = True
    """Whether a call leaves what was written into its rooms as it is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        self._raw_stream: int | None = None
        self._lasting: list[bool] | None = None
        self._shown: set[int] = set()
        self._given: list[Tensor | None] = []

    @property
    @abstractmethod
    def captured(self) -> bool:
        """Whether a call is a replay, which copies and depends on none of PyTorch's modes."""

    @abstractmethod
    def _replay(self, tensors: list[Tensor]) -> list[Any]:
        """Compute the flat outputs, in memory that the next call writes again."""

    @abstractmethod
    def _rooms(self) -> list[Tensor | None]:
        """Return where a call reads each of its tensors, if that is memory of its own that nothing else is written into; else None."""

    @abstractmethod
    def _own_memory(self) -> Iterable[Tensor]:
        """Return what a call reads and writes, and must not go while a stream still runs it."""

    @abstractmethod
    def _constants(self) -> Iterable[Tensor]:
        """Return what calls read and none writes, weights say: an output that shows one is always copied."""

    def rooms(self) -> list[Tensor | None]:
        """Return the tensors that a caller may write inputs into; one that is then given in its place is not copied."""
        self._given = self._rooms()
        return list(self._given)

    def overwrites(self, tensors: list[Tensor]) -> bool:
        """Tell whether a call may write over a tensor that it is given: where answers lie, or a room that it does not keep."""
        kept = self.keeps_rooms or not self._given
        if not self._shown and kept:
            return False
        rooms = [] if kept else [room.untyped_storage().data_ptr() for room in self._given if room is not None]
        return any((place := tensor.untyped_storage().data_ptr()) in self._shown or place in rooms for tensor in tensors)

    def __call__(self, tensors: list[Tensor]) -> list[Any]:
        """Answer one call."""
        with self._lock:
            if torch._C._cuda_getDevice() == self._device.index:
                return self._answer(tensors)
            with torch.cuda.device(self._device):
                return self._answer(tensors)

    def _answer(self, tensors: list[Tensor]) -> list[Any]:
        """Answer on the current stream. Each line here is waited for: caches are cold behind a call of a few hundred microseconds."""
        if torch._C._cuda_getCurrentRawStream(self._device.index) != self._raw_stream:
            self._change_stream()
        if not self.static:
            return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._replay(tensors)]
        if self._shown or self._given:
            tensors = [self._apart(tensor, number) for number, tensor in enumerate(tensors)]
        outputs = self._replay(tensors)
        if self._lasting is None:
            self._lasting = self._which_last(outputs)
            self._shown = {leaf.untyped_storage().data_ptr() for leaf in outputs if isinstance(leaf, Tensor)}
        return [leaf.clone() if lasts else leaf for leaf, lasts in zip(outputs, self._lasting, strict=True)]

    def _change_stream(self) -> None:
        """Go on where another stream, or none, was used before."""
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        for held in self._own_memory():  # which may still run when this is dropped
            held.record_stream(stream)
        self._stream, self._raw_stream = stream, stream.cuda_stream

    def _apart(self, tensor: Tensor, number: int) -> Tensor:
        """Return an input that lies in none of the memory that this call writes: a copy of an answer, or of the room of another input."""
        if self._given and tensor is self._given[number]:
            return tensor
        place = tensor.untyped_storage().data_ptr()
        written = place in self._shown or any(room is not None and room.untyped_storage().data_ptr() == place for room in self._given)
        return tensor.clone() if written else tensor

    def _which_last(self, outputs: list[Any]) -> list[bool]:
        """Tell which outputs show what later calls read: who writes into these would change them."""
        kept = {tensor.untyped_storage().data_ptr() for tensor in self._constants()}
        return [isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in kept for leaf in outputs]
