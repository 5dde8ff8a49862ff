"""What one embedding job is: its facts, and how its images are cut into batches and parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from weights import Preprocessing

PART_ROWS = 1024
"""Images in a part at least: what a killed run computes again at most."""
CHUNK = 32
"""Images that a decoding process takes at once."""
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The facts that decide every number of the result; two runs with equal plans write equal bytes.

    Attributes:
        model: the network's name.
        options: constructor keywords that its weights need.
        tag: the checkpoint's name.
        weights: BLAKE3 of the parameters and buffers as they are in memory.
        place: where the weights were read from: a run's folder, a file, a URL. The same weights may move, so it decides nothing.
        at: the taps.
        preprocessing: of the checkpoint.
        source: where the images are, as it was given.
        fingerprint: of the source: names, labels, sizes and times of its images.
        images: how many there are.
        batch_size: images that go through the network at once; another size may change the last bits.
        device: "cpu" or "cuda"; that it is the same kind of GPU is for the probe to see.
        dtype: that the network computes in.
        kernels: "fast" or "plain".
        decode: "cpu" or "gpu".
        dedupe: whether images whose bytes occurred before are left out.
    """

    model: str
    options: dict[str, Any]
    tag: str | None
    weights: str
    at: tuple[str, ...]
    preprocessing: Preprocessing
    place: str
    source: str
    fingerprint: str
    images: int
    batch_size: int
    device: str
    dtype: str
    kernels: str
    decode: str
    dedupe: bool

    def parts(self, least: int | None = None) -> list[range]:
        """List the parts, each a range of indices: whole batches, of `least` images or more, `PART_ROWS` if left out."""
        rows = -(-(least or PART_ROWS) // self.batch_size) * self.batch_size
        return [range(start, min(start + rows, self.images)) for start in range(0, self.images, rows)]

    def batches(self, part: range) -> Iterator[range]:
        """Give the batches of a part."""
        for start in range(part.start, part.stop, self.batch_size):
            yield range(start, min(start + self.batch_size, part.stop))

    def facts(self) -> dict[str, Any]:
        """Return what a manifest holds."""
        return {"format": FORMAT, **json.loads(json.dumps(asdict(self)))}

    def notes(self) -> dict[str, str]:
        """Return what the finished file says about itself: nothing that changes from run to run."""
        left_out = ("fingerprint", "format")
        return {"kernelzoo.embedding": json.dumps({k: v for k, v in self.facts().items() if k not in left_out}, sort_keys=True)}


def chunks(batch: range) -> Iterator[range]:
    """Cut a batch into what a decoding process takes at once."""
    for start in range(batch.start, batch.stop, CHUNK):
        yield range(start, min(start + CHUNK, batch.stop))
