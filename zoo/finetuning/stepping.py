"""How the steps of a phase are done: on the zoo's kernels, each replayed as one CUDA graph, or as PyTorch does them; and why."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.finetuning.batches import Batch, Target
from zoo.finetuning.distributed import World, spread
from zoo.finetuning.losses import loss_of
from zoo.finetuning.settings import Settings
from zoo.kernels import fast, why
from zoo.kernels.training import FastTraining
from zoo.kernels.training.step import EAGER_STEPS, FastStep, fast_step

log = logging.getLogger("zoo")

LEAST_STEPS = 2000
"""Steps of a phase from which kernels are prepared unasked. On an H200 that took 14 to 76 s where no earlier run had left any, 42 for a
ResNet50 with 32 images and 7 the next time; its step then takes 5.6 ms instead of 21, with 256 images 27 instead of 55, VGG19's with 32
8.2 instead of 13.6: what that cost is made up for after 1,000 to 3,000 steps."""

FIRST_STEPS = EAGER_STEPS + 1
"""Steps in which a kernel that was prepared can fail: behind them the same graph runs again."""


def declined(settings: Settings, device: torch.device, steps: int) -> str:
    """Say why the steps of a phase are done as PyTorch does them; empty where kernels are to be prepared.

    Args:
        settings: of the run.
        device: where it runs.
        steps: that the phase has still to do.
    """
    if settings.fsdp:
        return "FSDP gathers parameters outside of a graph"
    if settings.compile:
        return "torch.compile makes them"
    if settings.fast is False:
        return "the run was told so"
    if settings.fast is None and device.type != "cuda":
        return "a CPU has no CUDA graphs"
    if settings.fast is None and steps < LEAST_STEPS:
        return f"preparing kernels pays from {LEAST_STEPS:,} steps on, and there are {steps:,}; --fast prepares them anyway"
    return ""


class Stepper:
    """Does the steps of a phase; nothing that goes wrong with kernels ends a run of one process.

    Args:
        model: the network, in the mode to train in.
        optimizer: of the phase.
        settings: of the run.
        here: the processes.
        dtype: of autocast, None for none.
        steps: that the phase has still to do.
        says: whether a decision against kernels is said that nobody asked for.

    Attributes:
        reason: why they are done as PyTorch does them; empty where they run on kernels.
        done: steps so far.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        here: World,
        dtype: torch.dtype | None,
        steps: int,
        says: bool,
    ) -> None:
        self._model, self._optimizer, self._settings, self._here, self._dtype = model, optimizer, settings, here, dtype
        self.reason, self.done = declined(settings, here.device, steps), 0
        self._says_no_faster = says and here.device.type != "cuda"
        self._quick: FastTraining | None = None
        self._step: FastStep | None = None
        if self.reason and says and settings.fast is None and here.device.type == "cuda" and not settings.compile:
            log.warning("the zoo's kernels are left out: %s", self.reason)

    def prepare(self, images: Tensor) -> None:
        """Prepare the kernels, if there are to be some, and what does a step.

        Args:
            images: of the shape and memory format of a part of a step; their values don't matter.
        """
        if not self.reason:
            reason = ""
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", ".* trains unchanged")  # it is said below
                    self._quick = fast(self._model, train=True, dtype=self._dtype or torch.float32, example=images)
                reason = self._quick.unchanged
            except Exception as error:  # whatever it is, PyTorch can train without
                reason = _words(error)
            if reason := next(filter(None, self._here.gather(reason)), ""):  # all processes have to do the same
                self._give_up(reason)
            elif self._says_no_faster:
                log.warning("no step is faster for --fast on a CPU: chains run PyTorch's own functions there")
        self._build()

    def __call__(self, parts: Sequence[Batch], seed: int) -> Tensor:
        """Do a step with the draws that belong to a seed; return its loss, which nobody has looked at yet."""
        careful = self._quick is not None and self.done < FIRST_STEPS and self._here.size == 1  # others would wait for what failed here
        self.done += 1
        return self._try(parts, seed) if careful else self._go(parts, seed)

    def close(self) -> None:
        """Let the graphs go, which processes that part would wait for."""
        if self._step is not None:
            self._step.close()

    @property
    def replayed(self) -> int:
        """Steps that a CUDA graph has replayed."""
        return 0 if self._step is None else self._step.replayed

    @property
    def how(self) -> str:
        """How the steps were done, for people."""
        if self.reason:
            return f"{self.done:,} as PyTorch does them: {self.reason}"
        told = (self._step is not None and self._step.unchanged) or f"{self.replayed:,} of them replayed as a CUDA graph"
        return f"{self.done:,} on the zoo's kernels; {told}"

    @property
    def kernels(self) -> str:
        """What each layer runs on, as `why` shows it; empty without kernels."""
        return "" if self._quick is None else str(why(self._quick))

    def _go(self, parts: Sequence[Batch], seed: int) -> Tensor:
        torch.manual_seed(seed)
        assert self._step is not None
        return self._step(*parts[0], *parts[1:])

    def _try(self, parts: Sequence[Batch], seed: int) -> Tensor:
        """Do a step that may fail, for a kernel is launched the first time; if it does, do it as PyTorch does."""
        before = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "fast_step runs its calls one by one|.* trains unchanged")
                loss = self._go(parts, seed)
        except Exception as error:  # weights change at the end of a step, so up to here only statistics have
            reason = _words(error)
        else:
            graph = self._step.unchanged if self._step is not None and self._here.device.type == "cuda" else ""
            if reason := graph or (self._quick.unchanged if self._quick is not None else ""):
                self._give_up(reason)
                self._build()
            return loss
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
        self._give_up(reason)
        self._build()
        return self._go(parts, seed)

    def _give_up(self, reason: str) -> None:
        self.reason, self._quick = reason, None
        log.warning("the zoo's kernels are left out, the run goes on as PyTorch computes it: %s", reason)

    def _build(self) -> None:
        self.close()
        settings = self._settings
        network = self._model if settings.fsdp else spread(self._quick or self._model, self._here, [], False)
        called: nn.Module = torch.compile(network) if settings.compile else network  # pyright: ignore[reportAssignmentType]
        self._step = fast_step(called, self._loss, self._optimizer, dtype=self._dtype, clip=settings.clip, unchanged=self.reason)

    def _loss(self, outputs: Any, target: Target) -> Tensor:
        return loss_of(outputs, target, self._settings.label_smoothing)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
