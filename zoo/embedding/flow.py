"""The flow of a local run: chunks come in, batches go through the network, finished parts go out, all three at once."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from zoo.embedding.decoding import Chunk, Decoding
from zoo.embedding.feeding import Feeder, Running
from zoo.embedding.parts import Part
from zoo.embedding.plan import Plan, chunks
from zoo.embedding.report import Report
from zoo.images import Source

IN_FLIGHT = 3
"""Batches that a GPU is given before the first one's vectors are waited for."""
UNSAVED, WRITERS = 8, 2
"""Parts that may wait for the disk, and threads that write them: a slow `fsync` holds nothing up."""


class Rows:
    """The rows of a part, filled batch by batch.

    Args:
        part: the range of indices.
        name: gives an index the key that a message uses.
    """

    def __init__(self, part: range, name: Callable[[int], str]) -> None:
        self.range, self.name, self.filled = part, name, 0
        self._digests = np.zeros((len(part), 32), np.uint8)
        self._readable = np.ones(len(part), np.bool_)
        self._vectors: dict[str, np.ndarray] = {}
        self._problems: dict[int, str] = {}

    def take(self, taken: Sequence[Chunk], vectors: Mapping[str, Tensor]) -> None:
        """Add a batch.

        NumPy does it, in this thread: torch would wake a thread a core, and these are decoding.

        Raises:
            FloatingPointError: an image's vector is not finite.
        """
        begun = place = self.filled
        for chunk in taken:
            self._digests[place : place + len(chunk.rows)] = chunk.digests
            place += len(chunk.rows)
            self._problems |= chunk.problems
            for index in chunk.problems:
                self._readable[index - self.range.start] = False
        gone = np.flatnonzero(~self._readable[begun:place])
        for tap, value in vectors.items():
            if tap not in self._vectors:
                self._vectors[tap] = np.zeros((len(self.range), value.shape[1]), np.float32)
            rows = self._vectors[tap][begun:place]
            rows[:] = value[: place - begun].numpy()
            rows[gone] = 0
            finite = np.isfinite(rows)
            if not finite.all():
                index = self.range.start + begun + int(np.flatnonzero(~finite.all(1))[0])
                raise FloatingPointError(
                    f"{tap} of {self.name(index)} is NaN or infinite: the dtype is too narrow for this network; ask for float32"
                )
        self.filled = place

    def part(self) -> Part:
        """Return what is ready to be saved."""
        vectors = {tap: torch.from_numpy(rows) for tap, rows in self._vectors.items()}
        return Part(torch.from_numpy(self._digests), torch.from_numpy(self._readable), vectors, dict(sorted(self._problems.items())))


class Meter:
    """Counts what flows, from the moment in which the first image was begun: what came before was waiting for processes to start.

    A clock that begins later, with the first batch, counts images that were decoded before it began.
    """

    def __init__(self) -> None:
        self.busy = 0.0
        self.decoded = self.done = 0
        self._begun = math.inf
        self._last = 0.0

    def watch(self, incoming: Iterable[Chunk]) -> Iterator[Chunk]:
        """Pass chunks on, and stop the run where one says so, or where the process that made it has died."""
        chunks = iter(incoming)
        while True:
            try:
                chunk = next(chunks, None)
            except (
                RuntimeError,
                ConnectionError,
                EOFError,
                FileNotFoundError,
            ) as error:  # as torch finds out, or its shared memory before it
                if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                    raise
                why = (str(error).splitlines() or ["it left"])[0]
                raise ChildProcessError(
                    f"a decoding process died ({why}). Often it is memory: take fewer with --workers. "
                    "What is finished is kept: the same call goes on"
                ) from error
            if chunk is None:
                return
            if chunk.failure:
                raise OSError(f"{chunk.failure}; what is finished is kept: the same call goes on")
            self.busy += chunk.seconds
            self._begun = min(self._begun, chunk.begun)
            self.decoded += len(chunk.rows)
            yield chunk

    def finished(self, images: int) -> None:
        """Count a batch whose vectors are there."""
        self.done += images
        self._last = time.monotonic()

    def tell(self, report: Report, network_s: float, begun: float) -> None:
        """Write the rates into a report of a run that began at `begun` of `time.monotonic`."""
        if not self.done:
            return
        report.preparing_s = max(0.0, self._begun - begun)
        report.images_s = self.done / max(self._last - self._begun, 1e-9)
        report.decoder_images_s = self.decoded / self.busy * max(1, report.workers) if self.busy else 0.0
        report.model_images_s = self.done / network_s if network_s else 0.0


def flow(
    feeder: Feeder,
    source: Source,
    plan: Plan,
    todo: Sequence[range],
    incoming: Decoding,
    save: Callable[[range, Part], None],
    advance: Callable[[int], None],
) -> Meter:
    """Compute parts and save each as soon as it is complete.

    Args:
        feeder: the network.
        source: the images; only their names are used here.
        plan: the job.
        todo: the parts, in order.
        incoming: the chunks of their batches, in order; each is given back when its batch is done.
        save: is called in threads of their own.
        advance: is told how many images are done.

    Returns:
        What was counted.
    """
    meter = Meter()
    arriving = meter.watch(incoming)
    with ThreadPoolExecutor(WRITERS) as writer:
        saving: deque[Future[None]] = deque()
        rows: Rows | None = None
        for part, running in _running(feeder, plan, todo, arriving):
            rows = rows or Rows(part, lambda index: source[index].key)
            before = rows.filled
            rows.take(running.chunks, feeder.finish(running))
            incoming.done(running.chunks)
            meter.finished(rows.filled - before)
            advance(rows.filled - before)
            if rows.filled == len(part):
                saving.append(writer.submit(save, part, rows.part()))
                rows = None
            while len(saving) > UNSAVED:
                saving.popleft().result()
        for done in saving:
            done.result()
    return meter


def held(plan: Plan, gpu: bool) -> int:
    """Return how many chunks `flow` holds at a time at most: those of the batches under way and of the one that is being gathered."""
    return ((IN_FLIGHT if gpu else 0) + 1) * len(list(chunks(range(plan.batch_size))))


def _running(feeder: Feeder, plan: Plan, todo: Sequence[range], arriving: Iterator[Chunk]) -> Iterator[tuple[range, Running]]:
    """Give batches in order, on a GPU with the next ones under way."""
    ahead = IN_FLIGHT if feeder.gpu else 0
    under_way: deque[tuple[range, Running]] = deque()
    for part in todo:
        for batch in plan.batches(part):
            taken = list(islice(arriving, len(list(chunks(batch)))))
            under_way.append((part, feeder.start(taken)))
            if len(under_way) > ahead:
                yield under_way.popleft()
    yield from under_way
