"""The two rates that limit `zoo embed`: decoding without a network, and the network without decoding."""

from __future__ import annotations

import math
import statistics
import time

import numpy as np
import torch

from zoo.embedding.decoding import Chunk, Decoder, Decoding
from zoo.embedding.feeding import Feeder
from zoo.embedding.plan import Plan, chunks
from zoo.embedding.prepare import prepared
from zoo.embedding.run import make_plan
from zoo.images import Source
from zoo.networks.model import Model

BATCHES = 20
"""Of the network alone, whose median counts."""


def job(model: Model, source: Source, batch_size: int, device: torch.device) -> Plan:
    """Return what `zoo embed` would do by default."""
    return make_plan(model, source, "embedding", batch_size, device, None, True, "cpu", False)


def decoder_rate(source: Source, plan: Plan, workers: int) -> float:
    """Decode a source by processes; returns images per second from the first image's decoding to the last one's arrival."""
    ranges = [chunk for batch in plan.batches(range(len(source))) for chunk in chunks(batch)]
    begun = ended = math.inf
    with Decoding(Decoder(source, plan.preprocessing), ranges, workers, held=1, pinned=False, polite=False) as arriving:
        for chunk in arriving:
            begun, ended = min(begun, chunk.begun), time.monotonic()
            arriving.done([chunk])
    return len(source) / max(ended - begun, 1e-9)


def guessed_decoder_rate(source: Source, plan: Plan, workers: int) -> float:
    """Decode a few images here; returns images per second of so many processes, if each were as fast as this one."""
    decoder, some = Decoder(source, plan.preprocessing), range(min(32, len(source)))
    return len(some) / max(min(decoder[some].seconds for _ in range(2)), 1e-9) * workers


def network_rate(model: Model, plan: Plan, device: torch.device) -> float:
    """Run `fast()` of a network on one batch again and again; returns images per second of the median batch, normalising included."""
    side, channels = plan.preprocessing.crop or 0, len(plan.preprocessing.mean)
    noise = torch.randint(0, 256, (plan.batch_size, side, side, channels), dtype=torch.uint8)
    batch = [Chunk(range(plan.batch_size), noise.pin_memory() if device.type == "cuda" else noise, np.empty(0))]
    feeder = Feeder(prepared(model, plan, device, None), plan.preprocessing, device, plan.batch_size)
    feeder.finish(feeder.start(batch))
    times = []
    for _ in range(BATCHES):
        before = feeder.seconds
        feeder.finish(feeder.start(batch))
        times.append(feeder.seconds - before)
    return plan.batch_size / statistics.median(times)
