"""Every option of a run, checked before anything is read or built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from weights.arguments import python_scalar, unknown_keyword

OPTIMISERS = {"sgd": (0.01, 5e-4), "adamw": (5e-4, 0.05)}
"""Their learning rate for 64 images a step, and their weight decay, where the user gives none."""
SCRATCH = {"sgd": 5.0, "adamw": 2.0}
"""How many times that rate a network takes whose weights are fresh."""
CHOICES = {
    "optimizer": tuple(OPTIMISERS),
    "dtype": ("auto", "float32", "bfloat16"),
    "augment": ("auto", "none", "pad", "resized"),
    "monitor": ("accuracy", "balanced_accuracy", "f1", "kappa", "loss"),
    "layout": ("classes", "studies"),
}

WORDS = {
    "pretrained": "it trains from the default checkpoint, from weights=TAG, or from_scratch=True",
    "learning_rate": "did you mean lr?",
    "num_classes": "your images say how many classes there are",
    "classes": "your images say which classes there are",
}
"""What to do instead of other libraries' words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a run trains. Everything here is written into the run's `settings.json`, and a resumed run reads it from there.

    Attributes:
        epochs: passes over the training images.
        steps: optimiser steps instead of epochs.
        head_epochs: epochs of those in which only the classifier learns, before all of it does; None takes one of ten where the
            classifier is new and the body trained.
        batch_size: images of one optimiser step, over all processes; None takes 64, or fewer if there are fewer images.
        accumulate: parts that a process computes one after the other for one step, to need less memory.
        optimizer: "sgd" with Nesterov's momentum of 0.9, or "adamw".
        lr: the highest learning rate; None takes `OPTIMISERS`, scaled by batch_size / 64, and more where the weights are fresh.
        weight_decay: of weights; biases and norms have none. None takes `OPTIMISERS`.
        warmup: share of the steps in which the rate rises; afterwards it falls as a cosine to `final_lr` times the highest.
        final_lr: as above.
        layer_decay: factor of the rate from one layer to the one before it; 1 treats all alike.
        label_smoothing: share of a target that is spread over all classes.
        augment: "pad" (pad, crop), "resized" (a random part, resized), "none", or "auto": pad up to 64 pixels, resized above.
        flip: whether half of the images are mirrored.
        randaugment: magnitude 1..30 of RandAugment's two operations; 0 has none.
        rotate: degrees up to which images are turned either way.
        mixup: alpha of mixup's Beta distribution; 0 has none.
        cutmix: alpha of CutMix's; where both are there, a coin decides at each step.
        balance: whether a rare class counts more in the loss, each class the same in sum.
        ema: decay of the running mean of the weights, which is then what is measured and kept; 0 has none.
        freeze_norm: whether BatchNorm keeps the statistics that it came with.
        clip: greatest norm of the gradient; None doesn't clip.
        dtype: "bfloat16" by autocast, "float32", or "auto": bfloat16 on a GPU.
        channels_last: memory format; None takes it on a GPU.
        compile: whether torch.compile is to make the steps faster.
        fast: whether steps run on the zoo's kernels, replayed as one CUDA graph each; None does so on a GPU, in phases of at least
            `stepping.LEAST_STEPS` steps. Where that can't be done the run goes on as PyTorch computes it, and says why.
        monitor: what decides on the best state and on stopping.
        patience: evaluations without a better one after which the run stops; None never does.
        eval_every: steps between evaluations; None takes an epoch.
        save_steps: steps between checkpoints, besides one at each evaluation.
        save_minutes: minutes between checkpoints.
        val_share: share of each class that is set aside where the data have no val or test folder.
        max_unreadable: share of the images that may be unreadable; three may always.
        size: side in pixels of the images that the network reads, instead of the checkpoint's.
        layout: "classes", a folder a class; "studies", MURA's folders, see `zoo.finetuning.studies`.
        workers: processes that decode, of each training process; None takes one a core, at most 8.
        device: "cpu", "cuda" or "cuda:1"; None takes a GPU where there is one.
        fsdp: whether parameters and optimiser are divided among the processes.
        seed: of everything random.
    """

    epochs: int = 10
    steps: int | None = None
    head_epochs: int | None = None
    batch_size: int | None = None
    accumulate: int = 1
    optimizer: str = "sgd"
    lr: float | None = None
    weight_decay: float | None = None
    warmup: float = 0.05
    final_lr: float = 0.0
    layer_decay: float = 1.0
    label_smoothing: float = 0.0
    augment: str = "auto"
    flip: bool = True
    randaugment: int = 0
    rotate: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    balance: bool = False
    ema: float = 0.0
    freeze_norm: bool = False
    clip: float | None = None
    dtype: str = "auto"
    channels_last: bool | None = None
    compile: bool = False
    fast: bool | None = None
    monitor: str = "accuracy"
    patience: int | None = None
    eval_every: int | None = None
    save_steps: int | None = None
    save_minutes: float = 5.0
    val_share: float = 0.2
    max_unreadable: float = 0.05
    size: int | None = None
    layout: str = "classes"
    workers: int | None = None
    device: str | None = None
    fsdp: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _of_kind(field.name, str(field.type), getattr(self, field.name)))
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("epochs", "steps", "batch_size", "accumulate", "patience", "eval_every", "save_steps", "size"):
            _within(name, getattr(self, name), 1, math.inf)
        for name in ("head_epochs", "workers", "mixup", "cutmix", "seed", "weight_decay"):
            _within(name, getattr(self, name), 0, math.inf)
        for name in ("warmup", "final_lr", "max_unreadable"):
            _within(name, getattr(self, name), 0, 1)
        for name in ("lr", "clip", "save_minutes"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} is a number above 0, got {value!r}")
        for name, below in (("label_smoothing", 1), ("ema", 1), ("val_share", 1)):
            if not 0 <= (value := getattr(self, name)) < below:
                raise ValueError(f"{name} is at least 0 and below {below}, got {value!r}")
        if self.fast and (self.compile or self.fsdp):
            raise ValueError(f"fast and {'compile' if self.compile else 'fsdp'} exclude each other; leave one out")
        if self.head_epochs is not None and self.steps is None and self.head_epochs > self.epochs:
            raise ValueError(f"head_epochs is at most epochs, which is {self.epochs}, got {self.head_epochs}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay is above 0 and at most 1, got {self.layer_decay!r}")
        _within("randaugment", self.randaugment, 0, 30)
        _within("rotate", self.rotate, 0, 180)

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs."""
        return self.mixup > 0 or self.cutmix > 0

    def rate(self, batch: int, fresh: bool) -> float:
        """Return the highest learning rate for steps of `batch` images."""
        usual = OPTIMISERS[self.optimizer][0] * (SCRATCH[self.optimizer] if fresh else 1)
        return self.lr if self.lr is not None else usual * batch / 64

    @property
    def decay(self) -> float:
        """The weight decay."""
        return self.weight_decay if self.weight_decay is not None else OPTIMISERS[self.optimizer][1]

    def table(self) -> dict[str, Any]:
        """Return all options as JSON has them."""
        return asdict(self)

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Settings:
        """Read options by name.

        Raises:
            TypeError: there is no option of a name; the message names the nearest one.
        ValueError: a value is out of its range.
        """
        known = [field.name for field in fields(cls)]
        for name in table:
            if name not in known:
                raise unknown_keyword("finetune()", name, known, WORDS)
        return cls(**table)


def _of_kind(name: str, declared: str, value: Any) -> Any:
    """Return an option's value as Python's own, where it is of the kind that is declared."""
    kind, _, none = declared.partition(" | ")
    kinds = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}[kind]
    value = python_scalar(value)
    if (value is None and none) or (isinstance(value, kinds) and (kind == "bool" or not isinstance(value, bool))):
        return value
    raise ValueError(f"{name} is a {declared}, got {value!r}")


def _within(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        raise ValueError(f"{name} is at least {least}{f' and at most {most}' if most < math.inf else ''}, got {value!r}")
