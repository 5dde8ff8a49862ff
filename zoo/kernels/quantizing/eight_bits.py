"""A network in int8 or fp8 on a GPU: what was measured of it, its certificate, and a few answers by which every plan is checked."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.copies import on_device, tensors_of
from zoo.kernels.comparing.parity import Parity
from zoo.kernels.comparing.precision import products
from zoo.kernels.errors import Untraceable, first_line
from zoo.kernels.measuring.timing import alternate
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.passes.place import Place
from zoo.kernels.plans.narrowing import Scales, measure, narrow
from zoo.kernels.quantizing.certificate import Certificate, Reference, answers, compare
from zoo.kernels.quantizing.images import Images
from zoo.kernels.quantizing.quantize import KEEP, KEPT_FILES, NotCertified
from zoo.kernels.quantizing.quantized import LEAST, SAME_FLOAT, WITNESSES, state_of, version_of
from zoo.kernels.quantizing.tolerance import Tolerance
from zoo.kernels.reports.built_plan import Built
from zoo.kernels.reports.report import Row
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.choices import folder
from zoo.kernels.tuning.request import Request

CAPABLE = {"int8": (8, 0), "fp8": (8, 9)}
"""Compute capability from which on a GPU multiplies such numbers."""
AT_A_TIME = 8
"""Calibration images in float32 at a time."""
WORSE = 1.5
"""Times the certified error on the kept images that a plan's error on them may be."""
FORMAT = 1

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Nearness(Parity):
    """How near a plan in 8 bits is to float32 on the kept images, and how near it has to be."""

    kind: str = "int8"

    def __str__(self) -> str:
        limit = "nothing is certified yet" if self.floor == float("inf") else f"up to {self.floor:.2e} is what was certified"
        return f"{self.kind}: relative error {self.fast:.2e} of float32 on {self.images} images; {limit}"


@dataclass(frozen=True, slots=True)
class EightBits:
    """A network in 8 bits for one size of image, and what was proven of it.

    Attributes:
        kind: "int8" or "fp8".
        shape: (C, H, W) of an image.
        scales: what was measured on the calibration images.
        keep: numbers of the layers that stay wide.
        clip: whether int8's ranges end where its squared error is least.
        witness: a few of the held-out images.
        right: float32's answers to these.
        state: digest of the weights.
        slow: those of them that 8 bits would have made slower.
        error: relative error of the certified plan on the kept images; infinite before there is one.
        certificate: what was proven; None before.
        digest: of weights, images, versions and options: the name in the cache.
    """

    kind: str
    shape: tuple[int, ...]
    scales: Scales
    keep: frozenset[int]
    clip: bool
    witness: Tensor
    right: tuple[Tensor, ...]
    state: str
    slow: frozenset[int] = frozenset()
    error: float = float("inf")
    certificate: Any = None
    digest: str = ""
    eager: float = field(default=0.0, init=False)
    """Plain eager has no such type to compare with."""

    def apply(self, graph: Graph, places: dict[Node, Place]) -> None:
        """Let a graph's layers compute in 8 bits."""
        narrow(graph, places, self.scales, self.kind, self.keep, clip=self.clip)

    def batches(self, count: int, device: torch.device) -> list[Any]:
        """Return the kept images in batches of a size, the first ones again where they are too few."""
        of = len(self.witness)
        index = torch.arange(-(-of // count) * count) % of
        return [((self.witness[some].to(device),), {}) for some in index.split(count)]

    def compare(self, outputs: list[list[Tensor]]) -> Nearness:
        """Compare a plan's answers to `batches` with float32's."""
        of = len(self.witness)
        found = [torch.cat(column)[:of].cpu() for column in zip(*outputs, strict=True)]
        off = compare(Reference(list(self.right), False), found, "", "", Tolerance(), calibrated=0, digest="").error
        floor = float("inf") if self.error == float("inf") else max(WORSE * self.error, LEAST)
        return Nearness(off, 0.0, of, floor, self.kind)

    def made_of(self, network: nn.Module) -> bool:
        """Tell whether a network has the weights that were certified, and still answers the kept images as it did in float32."""
        if state_of(network) != self.state:
            return False
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        try:
            single = on_device(network, device, torch.float32)
            with products(tf32=False):
                found = [one.float().cpu() for one in answers(single, self.witness.to(device), len(self.witness))]
        except Exception:  # a network that was edited fails in any way whatever
            return False
        if [one.shape for one in found] != [one.shape for one in self.right]:
            return False
        off = compare(Reference(list(self.right), False), found, "", "", Tolerance(), calibrated=0, digest="").error
        return off <= SAME_FLOAT

    def checked(self) -> EightBits:
        """Return it: on whatever GPU, each plan is compared with the kept answers before it is used."""
        return self

    def save(self, path: Path) -> None:
        """Write it as one safetensors file, whole or not at all."""
        from safetensors.torch import save_file

        tensors = {"witness": self.witness.contiguous()}
        tensors |= {f"right.{index}": tensor.clone().contiguous() for index, tensor in enumerate(self.right)}
        tensors |= {f"mean.{index}": tensor.contiguous() for index, tensor in self.scales.means.items()}
        numbers = {name: [*getattr(self.scales, name).items()] for name in ("largest", "clipped", "lost")}
        facts = {
            "format": FORMAT,
            "kind": self.kind,
            "shape": self.shape,
            "keep": sorted(self.keep),
            "clip": self.clip,
            "slow": sorted(self.slow),
        }
        facts |= {"state": self.state, "error": self.error, "digest": self.digest, "steps": self.scales.steps, "outputs": len(self.right)}
        facts |= {"certificate": self.certificate.facts(), **numbers}
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        os.close(handle)
        try:
            save_file(tensors, unfinished, {"eight_bits": json.dumps(facts)})
            Path(unfinished).replace(path)
        finally:
            Path(unfinished).unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> EightBits:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is damaged, or of another version.
            OSError: it can't be read.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as opened:
                facts = json.loads((opened.metadata() or {})["eight_bits"])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
            if facts["format"] != FORMAT:
                raise ValueError(f"{path.name} is of format {facts['format']}, this version reads {FORMAT}")
            numbers = {name: {int(index): float(value) for index, value in facts[name]} for name in ("largest", "clipped", "lost")}
            means = {int(name.partition(".")[2]): value for name, value in tensors.items() if name.startswith("mean.")}
            steps = [(op, tuple(layers)) for op, layers in facts["steps"]]
            return cls(
                facts["kind"],
                tuple(facts["shape"]),
                Scales(steps, numbers["largest"], numbers["clipped"], means, numbers["lost"]),
                frozenset(facts["keep"]),
                facts["clip"],
                tensors["witness"],
                tuple(tensors[f"right.{index}"] for index in range(facts["outputs"])),
                facts["state"],
                frozenset(facts["slow"]),
                facts["error"],
                Certificate.of(facts["certificate"]),
                facts["digest"],
            )
        except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path.name} is no network in 8 bits, or it is damaged: {first_line(error)}") from error


def begin_narrow(certified: EightBits, request: Request) -> Callable[[], Built]:
    """Begin a plan in 8 bits for calls of the certified size, in the network's half precision for others."""
    from zoo.kernels.plans.build import begin_gpu

    half = str(request.options.dtype).removeprefix("torch.")

    def wide(why: str) -> Callable[[], Built]:
        if request.weights.wide is None:
            request.weights.wide = Weights()
        finish = begin_gpu(replace(request, weights=request.weights.wide))

        def finished() -> Built:
            built = finish()
            built.report.notes.append(f"computed in {half}: {why}")
            return built

        return finished

    given = tensors_of((request.args, request.kwargs))
    shape: Any = tuple(given[0].shape) if given else ()
    if len(pytree.tree_leaves((request.args, request.kwargs))) != 1 or shape[1:] != certified.shape or shape[0] == 0:
        return wide(f"{certified.kind} was certified for images of {'x'.join(map(str, certified.shape))} alone")
    try:
        finish = begin_gpu(request, contest=False, narrowing=certified)
    except Untraceable as error:
        if certified.certificate is None:
            raise
        return wide(first_line(error))

    def finished() -> Built:
        built = finish()
        built.report.notes += [] if certified.certificate is None else certified.certificate.lines()
        return built

    return finished


def candidates(network: nn.Module, images: Images, kind: str, device: torch.device, reference: Reference, say: Say) -> list[EightBits]:
    """Measure a network and return what may be tried of it, nothing of it certified: ranges of two kinds, then layers that stay wide.

    Args:
        network: takes one tensor of images; not changed.
        images: to calibrate on.
        kind: "int8" or "fp8".
        device: a GPU.
        reference: float32's answers to the held-out images.
        say: is told what is being done.

    Raises:
        Untraceable: it can't be traced, or has no layer for 8 bits.
    """
    say(f"measuring ranges for {kind}")
    count = min(AT_A_TIME, len(images.calibration))
    whole = len(images.calibration) // count * count
    batches = [[part.to(device)] for part in images.calibration[:whole].split(count)]
    graph, places = understand(network, (batches[0][0],), {}, device, islands=True)
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
    tolerance: Tolerance,
    reference: Reference,
    device: torch.device,
    shape: tuple[int, ...],
    build: Callable[[EightBits | None], Any],
    say: Say,
) -> tuple[Any, EightBits | None]:
    """Return a fast network in 8 bits whose certificate keeps the tolerance, and what it was made of; None of it where it is slower.

    Args:
        network: as of `candidates`, and so are `images`, `kind`, `device`, `reference` and `say`.
        tolerance: what the certificate has to show.
        shape: of the images that plans are made for and timed with.
        build: makes a fast network of a candidate, or without 8 bits of None, its plan made; that has `report()`.

    Raises:
        NotCertified: no candidate keeps it.
        ValueError: the network can't be computed in 8 bits.
    """
    key = _digest(network, images, kind, tolerance, device, shape)
    try:
        if (known := _cached(key)) is not None and known.made_of(network):
            fast = build(known)
            if isinstance(fast.report().plans[-1].parity, Nearness):  # else it is not as it was, and another plan was made
                return fast, known
        refused: list[Certificate] = []
        tried = candidates(network, images, kind, device, reference, say)
        slow = _slow(tried[0], build, say)
        if slow is None:
            return build(None), None
        layers = set(tried[0].scales.means)
        found = {(one.keep | slow, one.clip): replace(one, keep=one.keep | slow, slow=slow) for one in reversed(tried)}
        tried = [one for one in reversed(found.values()) if one.keep < layers]
        for made in tried:
            say(f"comparing {kind}, {len(made.keep)} layers wide" if made.keep else f"comparing {kind}")
            fast = build(made)
            batch = fast.report().plans[-1].shapes[0][0]
            found = _answers(fast, images.check.to(device), batch)
            certificate = _certificate(made, network, reference, found, images, tolerance, device, len(refused) + 1)
            if certificate.holds():
                some = slice(len(made.witness))
                off = compare(
                    Reference(list(made.right), False), [one[some] for one in found], "", "", Tolerance(), calibrated=0, digest=""
                )
                done = replace(made, error=off.error, certificate=certificate, digest=key)
                _keep(done)
                return _told(fast, done), done
            refused.append(certificate)
    except Untraceable as error:
        raise ValueError(f"{type(network).__name__} can't be computed in {kind}: {first_line(error)}") from error
    if not refused:
        return build(None), None
    best = max(refused, key=lambda one: (one.top1 or 0, -one.error))
    found = (
        f"{kind} is refused for {type(network).__name__}: of {len(refused)} candidates the nearest to float32 has {best.shares()} on "
        f"{best.images} held-out images, and the tolerance asks for a {tolerance}"
    )
    raise NotCertified(f"{found}. Give more calibration images, or a wider tolerance=, or use dtype=torch.bfloat16", refused, found)


def _told(fast: Any, made: EightBits) -> Any:
    """Let the report of a plan that was made before there was a certificate show that."""
    plan = fast.report().plans[-1]
    plan.notes += made.certificate.lines()
    if isinstance(plan.parity, Nearness):
        plan.parity = replace(plan.parity, floor=max(WORSE * made.error, LEAST))
    return fast


def _slow(made: EightBits, build: Callable[[EightBits | None], Any], say: Say) -> frozenset[int] | None:
    """Return the layers to leave wide for speed; None where 8 bits make no plan faster.

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
    return [*tried][us.index(min(us))]


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
    index = torch.arange(-(-len(images) // batch) * batch) % len(images)
    return [one[: len(images)].float().cpu() for one in answers(fast, images[index.to(images.device)], batch)]


def _certificate(
    made: EightBits,
    network: nn.Module,
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


def _cached(key: str) -> EightBits | None:
    """Return what was made before; None where nothing was, or it can't be read."""
    path = folder() / "eight_bits" / f"{key}.safetensors"
    try:
        found = EightBits.load(path)
        path.touch()
    except (OSError, ValueError):
        return None
    return found if found.digest == key else None


def _keep(made: EightBits) -> None:
    """Write into the cache; a folder that can't be written is no error."""
    path = folder() / "eight_bits" / f"{made.digest}.safetensors"
    with contextlib.suppress(OSError):
        made.save(path)
        old = sorted(path.parent.glob("*.safetensors"), key=lambda one: one.stat().st_mtime)
        for each in old[:-KEPT_FILES]:
            each.unlink()
