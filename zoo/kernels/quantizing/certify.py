"""From a network and a caller's images to int8 or fp8 on a GPU whose certificate holds, and which is faster there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from zoo.kernels.errors import Untraceable, called, first_line
from zoo.kernels.measuring.timing import alternate
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans.ranges import Scales, measure
from zoo.kernels.quantizing import keeping
from zoo.kernels.quantizing.certificate import Certificate, Reference, answers, compare
from zoo.kernels.quantizing.eight_bits import FORMAT, KIND, EightBits, Nearness, filled
from zoo.kernels.quantizing.images import Images
from zoo.kernels.quantizing.quantize import KEEP, NotCertified, Say
from zoo.kernels.quantizing.quantized import WITNESSES, state_of, version_of
from zoo.kernels.quantizing.tolerance import Tolerance
from zoo.kernels.reports.report import Row

CAPABLE = {"int8": (8, 0), "fp8": (8, 9)}
"""Compute capability from which on a GPU multiplies such numbers."""
AT_A_TIME = 8
"""Calibration images in float32 at a time."""


def candidates(
    network: nn.Module, images: Images, kind: str, half: torch.dtype, device: torch.device, reference: Reference, say: Say
) -> list[EightBits]:
    """Measure a network and return what may be tried of it, nothing of it certified: ranges of two kinds, then layers that stay wide.

    Args:
        network: takes one tensor of images; not changed.
        images: to calibrate on.
        kind: "int8" or "fp8".
        half: what the rest is computed in, as in the plan that is made of a candidate: scales are numbered by its steps.
        device: a GPU.
        reference: float32's answers to the held-out images.
        say: is told what is being done.

    Raises:
        Untraceable: it can't be traced, or has no layer for 8 bits.
    """
    say(f"measuring ranges for {kind}")
    count = min(AT_A_TIME, len(images.calibration))
    batches = [[images.calibration[some].to(device)] for some in filled(len(images.calibration), count)]
    graph, places = understand(network, (batches[0][0],), {}, device, islands=True, dtype=half)
    scales = measure(graph, places, batches, kind, device)
    some = slice(WITNESSES)
    right = tuple(one[some].float().cpu().clone() for one in reference.outputs)
    shape = tuple(images.check.shape[1:])
    first = EightBits(kind, shape, scales, frozenset(), kind == "int8", images.check[some].clone(), right, state_of(network))
    ranked = sorted(scales.lost, key=lambda index: scales.lost[index], reverse=True)
    more = [replace(first, keep=frozenset(ranked[:count])) for count in KEEP if count <= max(1, len(ranked) // 3)]
    return [first, *([replace(first, clip=False)] if kind == "int8" else []), *more]


def certified(
    network: nn.Module,
    images: Images,
    kind: str,
    half: torch.dtype,
    tolerance: Tolerance,
    reference: Reference,
    device: torch.device,
    shape: tuple[int, ...],
    build: Callable[[EightBits | None], Any],
    say: Say,
) -> tuple[Any, EightBits | None]:
    """Return a fast network in 8 bits whose certificate keeps the tolerance, and what it was made of; None of it where it is slower.

    Args:
        network: as of `candidates`, and so are `images`, `kind`, `half`, `device`, `reference` and `say`.
        tolerance: what the certificate has to show.
        shape: of the images that plans are made for and timed with.
        build: makes a fast network of a candidate, or without 8 bits of None, its plan made; that has `report()`.

    Raises:
        NotCertified: no candidate keeps it.
        ValueError: the network can't be computed in 8 bits.
    """
    key = _digest(network, images, kind, tolerance, device, shape)
    try:
        if (known := keeping.cached(KIND, key, EightBits.load)) is not None and known.made_of(network):
            fast = build(known)
            if isinstance(fast.report().plans[-1].parity, Nearness):  # else it is not as it was, and another plan was made
                return fast, known
        refused: list[Certificate] = []
        tried = candidates(network, images, kind, half, device, reference, say)
        slow, first = _slow(tried[0], build, say)
        if slow is None:
            return first, None
        layers = set(tried[0].scales.means)
        different = {(one.keep | slow, one.clip): replace(one, keep=one.keep | slow, slow=slow) for one in reversed(tried)}
        for made in (one for one in reversed(different.values()) if one.keep < layers):
            say(f"comparing {kind}, {len(made.keep)} layers wide" if made.keep else f"comparing {kind}")
            fast = first if (made.keep, made.clip) == (slow, tried[0].clip) else build(made)
            found = _answers(fast, images.check.to(device), shape[0])
            certificate = _certificate(made, reference, found, images, tolerance, device, len(refused) + 1)
            if certificate.holds():
                some = slice(len(made.witness))
                off = compare(
                    Reference(list(made.right), False), [one[some] for one in found], "", "", Tolerance(), calibrated=0, digest=""
                )
                done = replace(made, error=off.error, certificate=certificate, digest=key)
                keeping.keep(KIND, done)
                return _told(fast, done), done
            refused.append(certificate)
    except Untraceable as error:
        raise ValueError(f"{called(network)} can't be computed in {kind}: {first_line(error)}") from error
    if not refused:
        return build(None), None
    best = max(refused, key=lambda one: (one.top1 or 0, -one.error))
    said = (
        f"{kind} is refused for {called(network)}: of {len(refused)} candidates the nearest to float32 has {best.shares()} on "
        f"{best.images} held-out images, and the tolerance asks for a {tolerance}"
    )
    raise NotCertified(f"{said}. Give more calibration images, or a wider tolerance=, or use dtype=torch.bfloat16", refused, said)


def _told(fast: Any, made: EightBits) -> Any:
    """Let the report of a plan that was made before there was a certificate show that."""
    plan = fast.report().plans[-1]
    plan.notes += made.certificate.lines()
    if isinstance(plan.parity, Nearness):
        plan.parity = replace(plan.parity, floor=made.limit)
    return fast


def _slow(made: EightBits, build: Callable[[EightBits | None], Any], say: Say) -> tuple[frozenset[int] | None, Any]:
    """Return the layers to leave wide for speed, None where 8 bits make no plan faster, and the fastest network.

    A layer that is slower alone may save what rounding its neighbours' maps would take, so that plans are compared as a whole.
    """
    say("timing without 8 bits")
    wide, whole = build(None), build(made)
    slow = slower(wide.report().plans[-1].rows, whole.report().plans[-1].rows, made.scales)
    tried = {None: wide, frozenset[int](): whole}
    if slow and slow < set(made.scales.means):
        tried[slow] = build(replace(made, keep=slow))
    say(f"timing {made.kind}")
    images = torch.zeros(wide.report().plans[-1].shapes[0], device=wide.device, dtype=wide.dtype)
    calls = {str(number): partial(fast, images) for number, fast in enumerate(tried.values())}
    us = [median(times) for times in alternate(calls, rounds=8).values()]
    return [*tried.items()][us.index(min(us))]


def slower(wide: Sequence[Row], narrow: Sequence[Row], scales: Scales) -> frozenset[int]:
    """Return the layers that 8 bits make slower, what rounds their maps counted.

    One kernel may compute several layers, others in one report than in the other: those that a kernel joins are compared together.

    Args:
        wide: timed steps of a plan without 8 bits.
        narrow: of one with them.
        scales: what is measured of the network, which names its steps.
    """
    group: dict[str, str] = {}

    def whose(name: str) -> str:
        while group.setdefault(name, name) != name:
            name = group[name]
        return name

    names = [[row.layers.split(", ") for row in rows] for rows in (wide, narrow)]
    for layers in (*names[0], *names[1]):
        for name in layers[1:]:
            group[whose(name)] = whose(layers[0])
    gained: dict[str, float] = {}
    for rows, sign in ((wide, 1), (narrow, -1)):
        for row in rows:
            head = whose(row.layers.split(", ")[0])
            gained[head] = gained.get(head, 0.0) + sign * (row.us or 0.0)
    layers = {index: scales.steps[index][1] for index in scales.means}
    return frozenset(index for index, named in layers.items() if named and gained.get(whose(named[0]), 0.0) < 0)


def _answers(fast: Any, images: Tensor, batch: int) -> list[Tensor]:
    """Return a fast network's answers, always in batches of the size that has a plan."""
    index = torch.cat(filled(len(images), batch)).to(images.device)
    return [one[: len(images)].float().cpu() for one in answers(fast, images[index], batch)]


def _certificate(
    made: EightBits,
    reference: Reference,
    found: list[Tensor],
    images: Images,
    tolerance: Tolerance,
    device: torch.device,
    tried: int,
) -> Certificate:
    names = [layers for _, layers in made.scales.steps]
    how = "ranges of the least error" if made.clip else "whole ranges"
    layers = len(made.scales.means) - len(made.keep)
    by = f"kernelzoo's plan on {torch.cuda.get_device_name(device)}, torch {torch.__version__}, {layers} layers, {how}"
    by += f", {len(made.slow)} left wide because they are faster so" if made.slow else ""
    kept = tuple(", ".join(names[index]) for index in sorted(made.keep - made.slow))
    more: dict[str, Any] = {"unproven": images.made_up, "kept": kept, "cpu": torch.cuda.get_device_name(device), "tried": tried}
    return compare(reference, found, made.kind, by, tolerance, calibrated=len(images.calibration), digest=images.check_digest, **more)


def _digest(network: nn.Module, images: Images, kind: str, tolerance: Tolerance, device: torch.device, shape: tuple[int, ...]) -> str:
    """Name what it follows from: weights, images, tolerance, versions, GPU, and the shape that was timed."""
    made = blake3(f"{FORMAT} {kind} {type(network).__qualname__} {network} {images.digest} {tolerance} {shape}\n".encode())
    made.update(f"{torch.cuda.get_device_name(device)} {torch.__version__} {version_of('triton')} {state_of(network)}\n".encode())
    return made.hexdigest()[:32]
