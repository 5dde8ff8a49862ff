"""A plan in bfloat16 whose certificate holds: made by an engine that computes in it, and compared with what was certified."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.copies import tensors_of
from zoo.kernels.engines.build import build_cpu
from zoo.kernels.quantizing.certificate import answers, distance
from zoo.kernels.quantizing.quantized import LEAST, answers_alike, state_of
from zoo.kernels.quantizing.tolerance import allowed_error
from zoo.kernels.reports.built_plan import Built
from zoo.kernels.tuning.choices import Choice
from zoo.kernels.tuning.request import Request

ENGINE = "openvino"
"""The engine that computes in bfloat16 where a CPU has it; onnxruntime would compute in float32."""
WORSE = 1.5
"""Times the certified plan's error on the kept images that another plan's error on them may be."""


class Forced:
    """Stands for the choices of a machine where one engine has won: only that one is built, and the others if it fails."""

    def get(self, key: str, level: str = "none") -> Choice:
        """Return that engine, for whatever is asked."""
        return Choice(ENGINE, {}, 0.0, 0.0, 0)

    def put(self, key: str, choice: Choice) -> None:
        """Keep nothing: it was not timed against others."""

    def save(self) -> None:
        """Write nothing."""


@dataclass(frozen=True, slots=True)
class Bfloat16:
    """What was certified of a network in bfloat16, for one size of image.

    Attributes:
        shape: (C, H, W) of an image.
        witness: a few of the images that were compared on.
        right: float32's answers to these.
        error: relative error of the certified plan's answers to these.
        asked: the largest error that was asked for; None where none was.
        state: digest of the weights.
    """

    shape: tuple[int, ...]
    witness: Tensor
    right: tuple[Tensor, ...]
    error: float
    asked: float | None
    state: str

    def made_of(self, network: nn.Module) -> bool:
        """Tell whether a network has the weights that were certified, and still answers the kept images as it did in float32."""
        return state_of(network) == self.state and answers_alike(network, self.witness, self.right)

    def off(self, run: Any, batch: int) -> float:
        """Return the relative error of a plan for a batch on the kept images."""
        count = len(self.witness)
        some = self.witness[torch.arange(-(-count // batch) * batch) % count]
        found = [one[:count] for one in answers(run, some, batch)]
        return distance(found, self.right)


def build_bfloat16(certified: Bfloat16, request: Request) -> Built:
    """Answer calls of the certified size in bfloat16 where that is as near to float32 as what was certified; others in float32."""
    given = tensors_of((request.args, request.kwargs))
    shape = list(given[0].shape) if given else []
    if len(pytree.tree_leaves((request.args, request.kwargs))) != 1 or shape[1:] != list(certified.shape) or shape[0] == 0:
        why = f"bfloat16 was certified for images of {'x'.join(map(str, certified.shape))} alone"
    else:
        known: Any = Forced() if shape[0] == 1 else request.choices
        built = build_cpu(replace(request, choices=known))
        off = certified.off(lambda part: built.run([part]), shape[0])
        if off <= allowed_error(certified.error, max(WORSE * certified.error, LEAST), certified.asked):
            return built
        why = f"bfloat16 has an error of {off:.2g} here, and {certified.error:.2g} where it was certified"
    built = build_cpu(replace(request, options=replace(request.options, dtype=torch.float32)))
    built.report.notes.append(f"computed in float32: {why}")
    return built
