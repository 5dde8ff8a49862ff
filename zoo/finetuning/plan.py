"""How long a run is and how it is divided."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.finetuning.network import Subject
from zoo.finetuning.settings import Settings


@dataclass(frozen=True, slots=True)
class Plan:
    """How long a run is and how it is divided.

    Attributes:
        batch: images of a step, over all processes.
        per_epoch: steps of an epoch.
        total: steps of the run.
        head: of those, the first in which only the classifier learns.
        rate: the highest learning rate.
        eval_every: steps between evaluations.
    """

    batch: int
    per_epoch: int
    total: int
    head: int
    rate: float
    eval_every: int


def plan_of(settings: Settings, images: int, processes: int, built: Subject) -> Plan:
    """Decide how many steps of how many images a run has.

    Raises:
        ValueError: the images or the batch can't be divided among processes and turns.
    """
    unit = processes * settings.accumulate * (2 if settings.mixes else 1)
    batch = settings.batch_size if settings.batch_size is not None else min(64, images) // unit * unit
    if batch > images or batch < unit:
        raise ValueError(f"a step of {max(batch, unit)} images needs as many, and there are {images} to learn from; give a smaller batch")
    if batch % unit:
        pairs = ", and mixing needs pairs" if settings.mixes else ""
        raise ValueError(
            f"batch_size={batch} can't be divided by {processes} processes x {settings.accumulate} turns{pairs}: take {unit}'s multiples"
        )
    per_epoch = images // batch
    total = settings.steps if settings.steps is not None else settings.epochs * per_epoch
    usual = total // 10 if built.new_head else 0
    head = usual if settings.head_epochs is None else settings.head_epochs * per_epoch
    eval_every = settings.eval_every or per_epoch
    return Plan(batch, per_epoch, total, min(head, total), settings.rate(batch, fresh=built.base is None), eval_every)


def log_every(plan: Plan) -> int:
    """Return after how many steps a line goes into the log."""
    return max(1, min(50, plan.per_epoch // 10))
