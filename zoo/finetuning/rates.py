"""The learning-rate finder: a short run whose rate rises, and the rate at which its loss fell fastest."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weights.arguments import forgiving
from zoo.finetuning.batches import Unreadable
from zoo.finetuning.chance import seed_of
from zoo.finetuning.distributed import world
from zoo.finetuning.drawing import Curve, chart
from zoo.finetuning.loop import in_half
from zoo.finetuning.losses import loss_of
from zoo.finetuning.network import subject
from zoo.finetuning.plan import plan_of
from zoo.finetuning.run import batches_of, quiet_random
from zoo.finetuning.schedule import make_optimizer, set_rate, training_mode
from zoo.finetuning.settings import Settings
from zoo.finetuning.splits import classes_of, open_data, split
from zoo.images import Source
from zoo.images.canvas import save
from zoo.kernels.training.step import fast_step
from zoo.networks.model import Model

LOW, HIGH = 1e-6, 3.0
LEAST = 3
"""Points without which there is nothing to see."""
SMOOTH, EXPLODED = 0.9, 4.0
"""What stays of the running mean of losses at each step, and how many times the least loss ends the search."""
SKIPPED, WINDOW, FALLEN = 0.1, 0.1, 0.1
"""Share of the points at the beginning that don't count, whose mean is of too few losses; share over which the slope is averaged; and
how much of its way down the loss must have gone where a fall counts: before, it is noise."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the finder saw.

    Attributes:
        rates: the learning rate of each step.
        losses: its loss, smoothed.
        suggested: a highest rate for a run.
    """

    rates: list[float]
    losses: list[float]
    suggested: float

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw losses over rates as a PNG, the suggestion marked."""
        points = list(zip(self.rates, self.losses, strict=True))
        return save(chart("Loss over learning rate", [Curve("smoothed loss", points)], "learning rate", True, self.suggested), Path(path))


@forgiving
def find_rate(
    model: type[Model] | Model | str,
    data: str | os.PathLike[str] | Source,
    *,
    val: str | os.PathLike[str] | Source | None = None,
    weights: str | os.PathLike[str] | None = None,
    from_scratch: bool = False,
    options: Mapping[str, Any] | None = None,
    tries: int = 100,
    **settings: Any,
) -> Rates:
    """Try rising learning rates on a copy of a network; the arguments are those of `finetune`, and nothing is kept.

    Args:
        model: as the others, see `finetune`.
        data: see there.
        val: see there.
        weights: see there.
        from_scratch: see there.
        options: see there.
        tries: steps, from a rate of 1e-6 up to 3.
        **settings: see `Settings`; the batch and the optimiser matter, as a rate fits those only.

    Raises:
        ValueError: as `finetune` raises, or the loss was no number from the first step on.

    Source: Smith 2015, https://arxiv.org/abs/1506.01186, section 3.3; the suggestion is where the smoothed loss falls fastest.

    Example:
        >>> find_rate(MobileNetV2, "photos/").suggested  # doctest: +SKIP
        0.012
    """
    wanted = Settings.of(settings)
    with world(wanted.device) as here, quiet_random():
        if here.size > 1:
            raise ValueError("the learning-rate finder needs one process: start it without torchrun")
        train, measured = open_data(data, val, wanted.layout)
        built = subject(
            model, classes_of(train, measured), wanted, named=weights, from_scratch=from_scratch, options=options or {}, preprocessing=None
        )
        part, _ = split(train, measured, built.classes, wanted)
        unreadable = Unreadable(len(part), wanted.max_unreadable)
        batches = batches_of(part, built, wanted, here, unreadable)
        plan = plan_of(wanted, len(batches), 1, built)
        network = built.network.to(here.device)
        for parameter in network.parameters():
            parameter.requires_grad_(True)
        optimizer = make_optimizer(network, wanted, head_only=False)
        training_mode(network, wanted.freeze_norm)
        rates: list[float] = []
        losses: list[float] = []
        mean = 0.0
        step_once = fast_step(
            network,
            lambda outputs, target: loss_of(outputs, target, wanted.label_smoothing),
            optimizer,
            dtype=torch.bfloat16 if in_half(wanted, here) else None,
            unchanged="there are few of them",
        )
        stream = batches.training(0, tries, plan.batch)
        for step in range(tries):
            rate = LOW * (HIGH / LOW) ** (step / max(1, tries - 1))
            set_rate(optimizer, rate)
            first, *others = islice(stream, wanted.accumulate)
            torch.manual_seed(seed_of(wanted.seed, "step", step, 0))
            mean = SMOOTH * mean + (1 - SMOOTH) * float(step_once(*first, *others))
            smooth = mean / (1 - SMOOTH ** (step + 1))
            if not math.isfinite(smooth) or (losses and smooth > EXPLODED * min(losses)):
                break
            rates.append(rate)
            losses.append(smooth)
    if len(losses) < LEAST:
        raise ValueError("the loss was no number, or exploded, from the first steps on: look at the images and the weights")
    return Rates(rates, losses, suggest(rates, losses))


def suggest(rates: list[float], losses: list[float]) -> float:
    """Return the rate at which the loss falls fastest over the logarithm of the rate, before its least value.

    The slope is averaged over neighbours, and counts only where the loss is on its way down: on few images single losses jump, and the
    steepest of these jumps may be anywhere, at the first point too.

    Raises:
        ValueError: the loss fell nowhere.
    """
    values, skipped = np.array(losses), int(SKIPPED * len(losses))
    least = skipped + int(np.argmin(values[skipped:]))
    start = float(np.median(values[: max(1, 2 * skipped)]))
    if least - skipped < 2 or values[least] >= start:
        raise ValueError(
            f"the loss fell at none of the rates from {rates[0]:.1g} to {rates[-1]:.1g}, so none can be suggested: the images may be too "
            "few or the network done with them; take a larger batch, more steps (tries=…), or the usual rate, which is the default"
        )
    slopes = np.gradient(values, np.log(np.array(rates)))
    half = max(1, int(WINDOW * len(losses)) // 2)
    smooth = np.array([slopes[max(0, i - half) : i + half + 1].mean() for i in range(len(slopes))])
    falling = [i for i in range(skipped, least + 1) if values[i] <= start - FALLEN * (start - values[least])]
    return rates[min(falling, key=lambda i: smooth[i])]
