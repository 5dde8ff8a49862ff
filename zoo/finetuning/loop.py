"""The steps of a run: train, measure, save, and stop where it must."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from weights.documents import MISREAD, read_json
from weights.whole import room, write_whole
from zoo.finetuning import checkpoint
from zoo.finetuning.average import Average
from zoo.finetuning.batches import Batch, Batches, Unreadable
from zoo.finetuning.chance import seed_of
from zoo.finetuning.distributed import World, spread
from zoo.finetuning.evaluating import Measured, evaluate
from zoo.finetuning.metrics import Metrics
from zoo.finetuning.norms import share_norms
from zoo.finetuning.plan import Plan, log_every
from zoo.finetuning.progress import Epoch, Told
from zoo.finetuning.schedule import freeze, layers, make_optimizer, rate_at, set_rate, training_mode
from zoo.finetuning.settings import Settings
from zoo.finetuning.stepping import Stepper
from zoo.networks.model import Model

FLUSH = {"cpu": 1, "cuda": 20}
"""Steps after which a loss is looked at: a GPU would have to wait each time."""


class NotFinite(FloatingPointError):
    """The loss became NaN or infinite; the message says at which step, what is kept and what to try."""


class Stopped(KeyboardInterrupt):
    """Somebody stopped the run; its state is saved, and the message says how it goes on."""


@dataclass(eq=False)
class Trainer:
    """A run between its first and its last step.

    Args:
        model: the network, on its device.
        train: what it learns from.
        val: what it is measured on, or None.
        settings: of the run.
        plan: of the run.
        here: the processes.
        folder: where checkpoints and the log go.
        unreadable: the images that can't be read.
        told: what is called now and then: with steps, with what takes long, and with the end of each epoch.

    Attributes:
        how: in which way the steps of each phase were done.
        kernels: what each layer ran on, where it was on kernels.
        replayed: steps that a CUDA graph has replayed.
    """

    model: Model
    train: Batches
    val: Batches | None
    settings: Settings
    plan: Plan
    here: World
    folder: Path
    unreadable: Unreadable
    told: Told

    def __post_init__(self) -> None:
        self.half = in_half(self.settings, self.here)
        if self.here.size > 1 and not self.settings.freeze_norm:
            share_norms(self.model)
        if self.settings.fsdp:
            spread(self.model, self.here, layers(self.model), True)
        self.average = Average(self.model, self.settings.ema) if self.settings.ema else None
        self.step, self.since, self.done = 0, 0, False
        self.best: dict[str, float] | None = None
        self._pending: list[float] = []
        self._epoch: list[float] = []
        self._fresh: list[Tensor] = []
        self._saved, self._flushed = time.monotonic(), (time.monotonic(), 0)
        self._interrupted = self._preparing = False
        self._stepper: Stepper | None = None
        self.how: list[str] = []
        self.kernels, self.replayed = "", 0
        self._phase()

    def resume(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Go on from what `checkpoint.read` gave."""
        self.step, self.since, self.done = facts["step"], facts["since"], facts["done"]
        self.best, self._pending = facts["best"], facts["pending"]
        for key, reason in facts["unreadable"].items():
            self.unreadable.add(key, reason)
        start, _, _ = self._phase()
        checkpoint.restore(tensors, self.model, self.optimizer if self.step > start else None, self.average)
        if self.here.first:
            self._trim()

    def run(self) -> None:
        """Train to the end, or until the figures stop to improve.

        Raises:
            NotFinite: the loss is no number any more.
            Stopped: Ctrl-C; the state is saved.
            TooManyUnreadable: as it says.
        """
        with self._interruptible():
            try:
                while not self.done:
                    self._train(self._phase()[1])
            except BaseException:
                with suppress(RuntimeError):  # a device that failed fails again, and hides what it failed of
                    self._close()
                raise
            self._close()
            self._check_all()

    def _phase(self) -> tuple[int, int, bool]:
        """Set up the optimiser for the phase of the present step: (its first step, its end, only the head)."""
        head_only = self.step < self.plan.head
        phase = (0, self.plan.head, True) if head_only else (self.plan.head, self.plan.total, False)
        if getattr(self, "phase", None) == phase:
            return phase
        self._close()  # an older DistributedDataParallel has to let go first
        self.phase = phase
        freeze(self.model, head_only and not self.settings.fsdp)  # a divided parameter can't change its mind later
        self.optimizer = make_optimizer(self.model, self.settings, head_only)
        return phase

    def _prepare(self) -> Stepper:
        """Return what does the steps of the present phase."""
        _, end, head_only = self.phase
        dtype, side = torch.bfloat16 if self.half else None, self.train.side
        stepper = Stepper(self.model, self.optimizer, self.settings, self.here, dtype, end - self.step, not head_only)
        images = torch.empty(self.plan.batch // (self.here.size * self.settings.accumulate), self.model.in_channels, side, side)
        if not stepper.reason:
            self.told.busy("preparing kernels")
        self._preparing = True
        try:
            stepper.prepare(self._laid_out(images.to(self.here.device)))
        except KeyboardInterrupt:
            self.save(best=False)
            raise self._stopped() from None
        finally:
            self._preparing = False
            self.told.busy("")
            self._flushed = (time.monotonic(), self.step)
        return stepper

    def _close(self) -> None:
        """Keep what there is to say of the phase that ends, and let go what did its steps."""
        if (stepper := self._stepper) is not None:
            if stepper.done:
                self.how.append(stepper.how)
                self.kernels, self.replayed = stepper.kernels or self.kernels, self.replayed + stepper.replayed
            stepper.close()
        self._stepper = None

    def _train(self, stop: int) -> None:
        begin, end, head_only = self.phase
        batches = self.train.training(self.step, stop, self.plan.batch)
        training_mode(self.model, head_only or self.settings.freeze_norm)
        every = FLUSH.get(self.here.device.type, 1)
        while self.step < stop and not self.done:
            set_rate(self.optimizer, self.plan.rate * rate_at(self.step, begin, end, self.settings))
            self._fresh.append(self._one(batches))
            self.step += 1
            if self.average is not None:
                self.average.update(self.model, self.step - 1)
            measure_now = self.step % self.plan.eval_every == 0 or self.step == self.plan.total
            save_now = self.settings.save_steps is not None and self.step % self.settings.save_steps == 0
            ends = self.step % self.plan.per_epoch == 0 or self.step == self.plan.total
            leave, agree = False, self.step % every == 0 or (self.here.size == 1 and self._interrupted)
            if measure_now or save_now or agree or ends:
                self._flush()
            if agree:  # all processes have to stop and save at the same step
                late = time.monotonic() - self._saved > 60 * self.settings.save_minutes
                told = self.here.gather((self._interrupted, late))
                leave, save_now = any(t[0] for t in told), save_now or told[0][1]
            measured = None
            if measure_now:
                measured = self._judge()
                training_mode(self.model, head_only or self.settings.freeze_norm)
            elif save_now or leave:
                self.save(best=False)
            if ends or self.done:
                self._tell_epoch(measured)
            if leave and not self.done:
                raise self._stopped()

    def _one(self, batches: Iterator[Batch]) -> Tensor:
        """Do one step; return its loss, not yet looked at."""
        self._stepper = self._stepper or self._prepare()
        parts = [batch._replace(images=self._laid_out(batch.images)) for batch in islice(batches, self.settings.accumulate)]
        loss = self._stepper(parts, seed_of(self.settings.seed, "step", self.step, self.here.rank))
        self.model.zero_grad(set_to_none=True)  # FSDP gives gradients to parameters that the optimiser doesn't have
        return loss

    def _flush(self) -> None:
        """Look at the losses since the last time, and write them down."""
        if not self._fresh:
            return
        losses = torch.stack(self._fresh)
        if self.here.size > 1:
            dist.all_reduce(losses)
            losses /= self.here.size
        values, first = losses.tolist(), self.step - len(self._fresh)
        self._fresh = []
        now, before = time.monotonic(), self._flushed
        self._flushed = (now, self.step)
        for number, value in enumerate(values):
            step = first + number + 1
            if not math.isfinite(value):
                raise NotFinite(self._not_finite(step, value))
            self._pending.append(value)
            self._epoch.append(value)
            if step % log_every(self.plan) == 0 or step == self.plan.total:
                rate = self.plan.rate * rate_at(step - 1, self.phase[0], self.phase[1], self.settings)
                mean = sum(self._pending) / len(self._pending)
                self._pending, now_s = [], round(time.time(), 3)
                self._log(
                    {"kind": "train", "step": step, "epoch": round(step / self.plan.per_epoch, 4), "loss": mean, "lr": rate, "time": now_s}
                )
        speed = (self.step - before[1]) * self.plan.batch / max(1e-9, now - before[0])
        self.told.step(self.step, values[-1], speed)

    def _tell_epoch(self, measured: Metrics | None) -> None:
        """Tell whoever watches that an epoch is over."""
        each = self.plan.per_epoch
        loss = sum(self._epoch) / max(1, len(self._epoch))
        self.told.epoch(Epoch(self.step, self.step / each, self.plan.total / each, loss, measured))
        self._epoch = []

    def _judge(self) -> Metrics | None:
        """Measure, keep the state, and decide whether it is the best and whether to stop; returns what was measured."""
        better, metrics = self.val is None, None
        if self.val is not None:
            metrics = self.evaluate().metrics
            figure = metrics.figure(self.settings.monitor)
            sign = -1 if self.settings.monitor == "loss" else 1
            better = self.best is None or sign * figure > sign * self.best["figure"]
            self.since = 0 if better else self.since + 1
            if better:
                self.best = {"step": self.step, "figure": figure}
            self._log({"kind": "eval", "step": self.step, "epoch": round(self.step / self.plan.per_epoch, 4), **metrics.summary()})
        else:
            self.best = {"step": self.step, "figure": 0.0}
        self._check_all()
        patience = self.settings.patience
        self.done = self.step >= self.plan.total or (patience is not None and self.since >= patience)
        self.save(better)
        self._flushed = (time.monotonic(), self.step)
        return metrics

    def evaluate(self, precise: bool = False) -> Measured:
        """Measure the network, or the mean of its weights, on the images to measure on; every process gets all figures.

        Args:
            precise: compute in float32, as `predict` does.
        """
        assert self.val is not None
        self.model.eval()
        size = max(1, min(256, 2 * self.plan.batch // self.here.size))
        inside = self.average.inside(self.model) if self.average is not None else nullcontext()
        casting = torch.autocast(self.here.device.type, torch.bfloat16, enabled=self.half and not precise)
        with inside, torch.no_grad(), casting:
            measured = evaluate(self.model, self.val, self.here, size, self._laid_out)
        if not np.isfinite(measured.probabilities).all():
            raise NotFinite(self._not_finite(self.step, math.nan))
        return measured

    def save(self, best: bool) -> None:
        """Write the state, as the best one too if it is; every process has to call it."""
        tensors = checkpoint.collect(self.model, self.optimizer, self.average) if self.here.first or self.settings.fsdp else {}
        if not all(bool(value.isfinite().all()) for value in tensors.values()):
            raise NotFinite(self._not_finite(self.step, math.nan))
        if self.here.first:
            facts = {"step": self.step, "since": self.since, "best": self.best, "done": self.done, "pending": self._pending}
            checkpoint.write(self.folder, tensors, facts | {"unreadable": self.unreadable.reasons}, best)
        self._saved = time.monotonic()

    def _check_all(self) -> None:
        """Let every process know what any could not read."""
        if self.here.size > 1:
            for reasons in self.here.gather(self.unreadable.reasons):
                for key, reason in reasons.items():
                    self.unreadable.add(key, reason)

    def _laid_out(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if channels_last(self.settings, self.here) else x

    def _stopped(self) -> Stopped:
        return Stopped(f"stopped after step {self.step} of {self.plan.total}; go on with: zoo finetune --resume {self.folder}")

    def _not_finite(self, step: int, value: float) -> str:
        rate = self.plan.rate * rate_at(step - 1, self.phase[0], self.phase[1], self.settings)
        kept = "nothing was saved before"
        last = self.folder / checkpoint.LAST
        if last.is_file():
            kept = f"the last good state is kept: step {checkpoint.read(last)[1]['step']}, {last}"
        bf16 = ", dtype='float32'" if self.half else ""
        return (
            f"the loss is {value} at step {step} of {self.plan.total} (epoch {step / self.plan.per_epoch:.2f}, rate {rate:.3g}); "
            f"{kept}. Try lr={self.plan.rate / 10:.2g}, clip=1{bf16}, or look for a rate with `zoo finetune --find-lr`; a resumed run "
            f"takes a new lr, clip and dtype: zoo finetune --resume {self.folder} --lr {self.plan.rate / 10:.2g}"
        )

    def _log(self, row: dict[str, Any]) -> None:
        if self.here.first:
            log = self.folder / "log.jsonl"
            with room(log), log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def _trim(self) -> None:
        """Forget what the log says of steps that will be done again."""
        path = self.folder / "log.jsonl"
        if path.is_file():
            kept = []
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(*MISREAD):  # the line that the kill cut
                    if read_json(line, path)["step"] <= self.step:
                        kept.append(line)
            write_whole(path, "".join(f"{line}\n" for line in kept))

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C, or a polite kill, end the run after its step; the second ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: Any) -> None:
            del frame
            if self._interrupted or self._preparing:  # nothing is lost by then, and a step may be a minute away
                raise KeyboardInterrupt
            self._interrupted = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def in_half(settings: Settings, here: World) -> bool:
    """Say whether steps are autocast to bfloat16."""
    return settings.dtype == "bfloat16" or (settings.dtype == "auto" and here.device.type == "cuda")


def channels_last(settings: Settings, here: World) -> bool:
    """Say which memory format a run's images have; its weights too, unless FSDP divides them, which takes contiguous ones only."""
    return here.device.type == "cuda" if settings.channels_last is None else settings.channels_last
