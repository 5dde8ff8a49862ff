"""Batches of pixels into the network and vectors out of it, with the next batch on its way while this one is computed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weights import Preprocessing
from zoo.embedding.decoding import Chunk, decode_on_gpu


class Feeder:
    """Runs a network on chunks of pixels; every batch has `batch_size` rows, so one plan serves all and no row's numbers depend on others.

    Args:
        network: {tap: (B, D)} of (B, C, H, W), on `device`.
        preprocessing: of the checkpoint.
        device: where it runs.
        batch_size: rows.
    """

    def __init__(self, network: nn.Module, preprocessing: Preprocessing, device: torch.device, batch_size: int) -> None:
        self.network, self.preprocessing, self.device, self.batch_size = network, preprocessing, device, batch_size
        self.gpu = device.type == "cuda"
        self.seconds = 0.0
        """That the network took, in all batches that were fetched."""
        self._batch: Tensor | None = None
        self._copies = torch.cuda.Stream(device) if self.gpu else None
        place: dict[str, Any] = {"device": device, "dtype": torch.float32}
        self._mean, self._std = (torch.tensor(v, **place).view(-1, 1, 1) for v in (preprocessing.mean, preprocessing.std))
        self._levels = torch.tensor(255.0, **place)  # a tensor: a GPU multiplies by the inverse of a plain number, which rounds otherwise

    def normalise(self, pixels: Tensor) -> Tensor:
        """Do what `zoo.images.preprocess` does after the crop, bit for bit: uint8 (B, H, W, C) to float32 (B, C, H, W)."""
        x = pixels.permute(0, 3, 1, 2)
        if self.preprocessing.channel_order == "bgr":
            x = x.flip(1)
        return x.to(torch.float32, memory_format=torch.contiguous_format).div_(self._levels).sub_(self._mean).div_(self._std)

    def start(self, chunks: Sequence[Chunk]) -> Running:
        """Begin to compute a batch; on a GPU this returns at once."""
        if self._copies is None:
            begun = time.perf_counter()
            vectors = self._run(self._stacked([chunk.pixels for chunk in chunks]))
            return Running(list(chunks), vectors, seconds=time.perf_counter() - begun)
        with torch.cuda.stream(self._copies):
            pixels = self._stacked([chunk.pixels for chunk in chunks])
            for chunk in chunks:
                if chunk.files:
                    for index, image in decode_on_gpu(chunk, self.preprocessing, self.device).items():
                        pixels[index - chunks[0].rows.start] = image
        now = torch.cuda.current_stream(self.device)
        now.wait_stream(self._copies)
        pixels.record_stream(now)
        marks = [torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(3)]  # a wait that spins takes a decoder's core
        marks[0].record(now)
        vectors = self._run(pixels)
        marks[1].record(now)
        fetched = {
            tap: torch.empty(v.shape, dtype=torch.float32, pin_memory=True).copy_(v, non_blocking=True) for tap, v in vectors.items()
        }
        marks[2].record(now)
        return Running(list(chunks), fetched, marks=marks)

    def finish(self, running: Running) -> Mapping[str, Tensor]:
        """Wait for a batch; returns {tap: float32 (B, D)} on the CPU, its first rows those of the chunks."""
        if running.marks:
            running.marks[2].synchronize()
            running.seconds = running.marks[0].elapsed_time(running.marks[1]) / 1000
        self.seconds += running.seconds
        return running.vectors

    def _stacked(self, pixels: list[Tensor]) -> Tensor:
        rows = sum(len(p) for p in pixels)
        if len(pixels) == 1 and rows == self.batch_size and not self.gpu:
            return pixels[0]
        shape = (self.batch_size, *pixels[0].shape[1:])
        if self.gpu or self._batch is None or self._batch.shape != shape:
            batch = torch.empty(shape, dtype=torch.uint8, device=self.device)
            self._batch = None if self.gpu else batch  # a CPU is done with one batch before the next: no new pages for each
        else:
            batch = self._batch
        if rows < self.batch_size:
            batch[rows:] = 0
        place = 0
        for p in pixels:
            batch[place : place + len(p)].copy_(p, non_blocking=True)
            place += len(p)
        return batch

    def _run(self, pixels: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {tap: value.float() for tap, value in self.network(self.normalise(pixels)).items()}


class Running:
    """A batch that is being computed; it holds its chunks, whose memory a GPU may still be reading."""

    def __init__(self, chunks: list[Chunk], vectors: Mapping[str, Tensor], seconds: float = 0.0, marks: Sequence[Any] = ()) -> None:
        self.chunks, self.vectors, self.seconds, self.marks = chunks, vectors, seconds, marks
