"""A way to run a network on a CPU, and what is known of the one that was chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zoo.kernels.engines.export import EngineError

EAGER = "eager"


class NotFinite(RuntimeError):
    """NaN or infinity arose inside of an engine that could lose it: only the network itself can answer."""


@dataclass(frozen=True)
class Engine:
    """A way to run a network on the CPU.

    Attributes:
        name: "openvino", "onnxruntime", "compile", "channels_last" or "eager"; "openvino/2" for two images at a time.
        precision: the type it computes in, which may be wider than the one asked for.
        copies_weights: whether it holds a second copy of the weights, and does not follow changes of the network's.
        why_not: why it can't be built here; empty if it can.
        note: what the reader of a report should know.
        make: builds it; called by `build`.
    """

    name: str
    precision: torch.dtype
    copies_weights: bool
    make: Callable[[], Callable[..., Any]]
    why_not: str = ""
    note: str = ""

    def build(self) -> Callable[..., Any]:
        """Make it ready to run.

        Returns:
            What takes the network's inputs (float tensors of any type, any memory format, the example's shapes) and returns its output:
            the same structure and types, in tensors that no later call overwrites. Threads may call it at once.

        Raises:
            EngineError: it is not installed, or can't run this network.
        """
        if self.why_not:
            raise EngineError(self.why_not)
        return self.make()


@dataclass(frozen=True)
class Chosen:
    """The engine that won.

    Attributes:
        call: the engine, built; see `Engine.build`.
        name: its name.
        precision: the type it computes in.
        copies_weights: whether it holds a copy of the weights.
        seconds: of one call, as `undisturbed` says, by the name of each engine that was timed.
        errors: (relative error, largest allowed) by the name of each engine that ran; (0, 0) of an "eager" that compares only with itself.
        eager: plain eager's own relative error in that type.
        refused: why not, by the name of each engine that was absent, failed or was wrong.
        notes: what a report should say.
    """

    call: Callable[..., Any]
    name: str
    precision: torch.dtype
    copies_weights: bool
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    eager: float = 0.0


class Plain:
    """The network itself, without gradients, on copies: it may write into what it is given, and hand it on."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __call__(self, *given: Tensor) -> Any:
        with torch.no_grad():
            return self.network(*(tensor.clone() for tensor in given))
