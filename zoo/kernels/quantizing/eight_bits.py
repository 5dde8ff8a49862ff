"""A network in int8 or fp8 on a GPU: what was measured of it, its certificate, and a few answers by which every plan is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.copies import tensors_of
from zoo.kernels.comparing.parity import Parity
from zoo.kernels.errors import Untraceable, first_line
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.place import Place
from zoo.kernels.plans.narrowing import narrow
from zoo.kernels.plans.ranges import Scales
from zoo.kernels.quantizing import keeping
from zoo.kernels.quantizing.certificate import Certificate, distance
from zoo.kernels.quantizing.quantized import LEAST, answers_alike, state_of
from zoo.kernels.quantizing.tolerance import allowed_error
from zoo.kernels.reports.built_plan import Built
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.request import Request

WORSE = 1.5
"""Times the certified error on the kept images that a plan's error on them may be."""
FORMAT = 3
KIND = "eight_bits"
"""Its folder in the cache, and the name of its facts in a file."""
NUMBERS = ("largest", "clipped", "lost")
"""Of `Scales`."""


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

    @property
    def eager(self) -> float:
        """0: plain eager has no such type to compare with."""
        return 0.0

    @property
    def proof(self) -> Certificate | None:
        """What was proven; each plan is compared with it again, so that it holds on every GPU."""
        return self.certificate

    @property
    def limit(self) -> float:
        """The largest error on the kept images with which a plan passes; before there is a certificate any does."""
        asked = None if self.certificate is None else self.certificate.tolerance.error
        return allowed_error(self.error, max(WORSE * self.error, LEAST), asked)

    def apply(self, graph: Graph, places: dict[Node, Place]) -> None:
        """Let a graph's layers compute in 8 bits."""
        narrow(graph, places, self.scales, self.kind, self.keep, clip=self.clip)

    def batches(self, count: int, device: torch.device) -> list[Any]:
        """Return the kept images in batches of a size, the first ones again where they are too few."""
        return [((self.witness[some].to(device),), {}) for some in filled(len(self.witness), count)]

    def compare(self, outputs: list[list[Tensor]]) -> Nearness:
        """Compare a plan's answers to `batches` with float32's."""
        of = len(self.witness)
        found = [torch.cat(column)[:of].cpu() for column in zip(*outputs, strict=True)]
        return Nearness(distance(found, self.right), self.eager, of, self.limit, self.kind)

    def made_of(self, network: nn.Module) -> bool:
        """Tell whether a network has the weights that were certified, and still answers the kept images as it did in float32."""
        if state_of(network) != self.state:
            return False
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return answers_alike(network, self.witness, self.right, device)

    def checked(self) -> EightBits:
        """Return it: on whatever GPU, each plan is compared with the kept answers before it is used."""
        return self

    def save(self, path: Path) -> None:
        """Write it as one safetensors file, whole or not at all."""
        tensors = {"witness": self.witness.contiguous()}
        tensors |= {f"right.{index}": tensor.clone().contiguous() for index, tensor in enumerate(self.right)}
        tensors |= {f"mean.{index}": tensor.contiguous() for index, tensor in self.scales.means.items()}
        facts: dict[str, Any] = {"format": FORMAT, "kind": self.kind, "shape": self.shape, "clip": self.clip, "error": self.error}
        facts |= {"keep": sorted(self.keep), "slow": sorted(self.slow), "state": self.state, "digest": self.digest}
        facts |= {"steps": self.scales.steps, "outputs": len(self.right), "certificate": self.certificate.facts()}
        facts |= {name: [*getattr(self.scales, name).items()] for name in NUMBERS}
        keeping.write(path, KIND, tensors, facts)

    @classmethod
    def load(cls, path: Path) -> EightBits:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is damaged, or of another version.
            OSError: it can't be read.
        """
        with keeping.read(path, KIND, FORMAT, "network in 8 bits") as (facts, tensors):
            numbers = {name: {int(index): float(value) for index, value in facts[name]} for name in NUMBERS}
            means = {int(name.partition(".")[2]): value for name, value in tensors.items() if name.startswith("mean.")}
            steps = [(op, tuple(layers)) for op, layers in facts["steps"]]
            return cls(
                facts["kind"],
                tuple(facts["shape"]),
                Scales(steps, means=means, **numbers),
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


def filled(count: int, batch: int) -> list[Tensor]:
    """Return the indices of so many images in batches that are all full: the first ones come again at the end."""
    return [*(torch.arange(-(-count // batch) * batch) % count).split(batch)]
