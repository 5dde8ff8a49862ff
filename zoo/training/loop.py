"""A loop that learns from photographs, can be killed at any time, and then ends with the same numbers as if it had not been."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch import distributed as dist

from weights.errors import MalformedFile
from weights.places import at_home
from weights.whole import whole
from zoo.finetuning.progress import Epoch, Show, show_of

STATE, MODEL, LABELS = "state.safetensors", "model.safetensors", "labels.tsv"
KEY = "training"


@dataclass(frozen=True, slots=True)
class LearningSettings:
    """How a detector or segmenter learns.

    Attributes:
        epochs: how often each photograph is seen.
        batch_size: photographs of a step.
        lr: the highest learning rate; it rises over the first `warmup_steps` and falls to 0 as a half cosine.
        momentum: of the gradients, 0..1.
        weight_decay: part of each weight that a step takes away, times the learning rate.
        warmup_steps: in which the learning rate rises.
        clip: longest gradient, over all parameters; a longer one is shortened.
        flip: whether half of the photographs are mirrored.
        seed: of the order, the mirroring and the network's own draws.
        save_every: steps between two states on the disk.
    """

    epochs: int = 12
    batch_size: int = 4
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup_steps: int = 100
    clip: float = 10.0
    flip: bool = True
    seed: int = 0
    save_every: int = 200

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is 1 or more, got {getattr(self, name)}")
        for name in ("lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is above 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a training came to.

    Attributes:
        folder: of the run.
        model: the file of the weights, which `trained` reads.
        steps: how many there were.
        resumed: how many of them an earlier call had done; 0 where there was none.
        losses: of every step, the sum of all.
    """

    folder: Path
    model: Path
    steps: int
    resumed: int
    losses: tuple[float, ...]


class Diverged(FloatingPointError):
    """The loss is no number any more; the message says at which step, and what to do."""


def learn(
    model: nn.Module,
    count: int,
    losses: Callable[[Sequence[int], torch.Generator], Mapping[str, Tensor]],
    out: str | Path,
    settings: LearningSettings,
    facts: Mapping[str, Any],
    *,
    classes: Sequence[str],
    restart: bool = False,
    progress: bool | Show = True,
) -> Learnt:
    """Train a network, or go on where an earlier call was interrupted.

    Where the caller's processes are one group of `torch.distributed`, each learns from its part of every batch, gradients are summed over
    all, and the first process writes. BatchNorm's statistics are each process's own, and the first one's are kept. So that each process
    has two photographs for them, a last batch of fewer is added to the one before it.

    Args:
        model: in place, on its own device; it is left in eval mode.
        count: of photographs.
        losses: returns the losses of the photographs of these numbers, in train mode, by draws from a generator.
        out: the folder of the run, made where it is not there.
        settings: how.
        facts: what else must be the same for a run to go on, as JSON has it.
        classes: names of the classes, written beside the weights.
        restart: throw away what an earlier call did.
        progress: whether a terminal sees a bar; or what shows the steps instead, a `zoo.finetuning.progress.Show`.

    Raises:
        ValueError: the folder has a run of other photographs, classes or settings.
        MalformedFile: its state is damaged.
        Diverged: the loss is no number.
    """
    folder = at_home(out)
    folder.mkdir(parents=True, exist_ok=True)
    together = Group()
    before = model.training
    model.train()
    told = json.loads(json.dumps({**asdict(settings), **facts, "photographs": count, "classes": list(classes), "processes": together.size}))
    each = batches(count, settings.batch_size, 2 * together.size if _estimates(model) else 1)
    steps = each * settings.epochs
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(parameters.values(), settings.lr, settings.momentum, weight_decay=settings.weight_decay)
    try:
        history: list[float] = [] if restart else _resumed(folder / STATE, told, model, optimizer, parameters)
    except BaseException:
        model.train(before)
        raise
    resumed = len(history)
    with show_of(progress, together.first)(steps, resumed) as shown:
        for step in range(resumed, steps):
            begun = time.monotonic()
            epoch, at = divmod(step, each)
            order = torch.randperm(count, generator=torch.Generator().manual_seed(settings.seed * 7919 + epoch)).tolist()
            numbers = order[at * settings.batch_size : (at + 1) * settings.batch_size if at + 1 < each else count]
            seed = settings.seed * 1_000_003 + step + together.rank * 999_999_937
            torch.manual_seed(seed)  # what the network itself draws is the same again after an interruption
            optimizer.zero_grad()
            value = together.learn(numbers, lambda some, seed=seed: losses(some, torch.Generator().manual_seed(seed)), parameters.values())
            if not math.isfinite(value):
                raise Diverged(f"the loss is {value} at step {step + 1} of {steps}: give a smaller lr than {settings.lr}")
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * _share(step, steps, settings.warmup_steps)
            torch.nn.utils.clip_grad_norm_(parameters.values(), settings.clip)
            optimizer.step()
            history.append(value)
            if (step + 1) % settings.save_every == 0 and step + 1 < steps and together.first:
                _save(folder / STATE, told, model, optimizer, parameters, history)
            shown.step(step + 1, value, len(numbers) / (time.monotonic() - begun))
            if at + 1 == each:
                shown.epoch(Epoch(step + 1, epoch + 1, settings.epochs, sum(history[-each:]) / each, None))
    model.eval()
    if together.first:
        _save(folder / STATE, told, model, optimizer, parameters, history)
        with whole(folder / LABELS) as unfinished:
            unfinished.write_text("".join(f"\t{name}\n" for name in classes), encoding="utf-8")
        with whole(folder / MODEL, sync=True) as unfinished:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}, unfinished)
    return Learnt(folder, folder / MODEL, steps, resumed, tuple(history))


def batches(count: int, size: int, least: int) -> int:
    """Return how many batches an epoch has; what is left is a batch of its own, and part of the last one where it is fewer than `least`.

    Example:
        >>> batches(11, 4, least=1), batches(11, 4, least=4)
        (3, 2)
    """
    whole_ones, left = divmod(count, size)
    return whole_ones + (left >= least) if whole_ones and left else max(1, whole_ones)


def _estimates(model: nn.Module) -> bool:
    """Tell whether a BatchNorm takes its statistics from the photographs of a process, of which it needs two."""
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training for layer in model.modules())


class Group:
    """The processes that learn together: those of `torch.distributed` where the caller has begun it, else this one alone."""

    def __init__(self) -> None:
        """Look whether there are others."""
        together = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)

    @property
    def first(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def learn(
        self, numbers: Sequence[int], losses: Callable[[Sequence[int]], Mapping[str, Tensor]], parameters: Iterable[nn.Parameter]
    ) -> float:
        """Leave the gradients of a batch in the parameters, and return its loss: of all processes the mean over the photographs.

        A process without photographs, of which the last batch may have too few for all, adds nothing.
        """
        own = list(numbers[self.rank :: self.size])
        wanted = list(parameters)
        loss = torch.zeros((), device=wanted[0].device)
        if own:
            try:
                terms = losses(own)
            except ValueError as error:
                if len(own) > 1 or "more than 1 value per channel" not in str(error):
                    raise
                least = f"{2 * self.size} or more" + (f", 2 for each of {self.size} processes" if self.size > 1 else "")
                raise ValueError(
                    f"a BatchNorm needs two photographs at once, and {len(numbers)} are too few: give a batch_size of {least}"
                ) from error
            loss = torch.stack(list(terms.values())).sum() * (len(own) / len(numbers))
            loss.backward()
        if self.size == 1:
            return float(loss.detach())
        flat = torch.cat([(torch.zeros_like(one) if one.grad is None else one.grad).flatten() for one in wanted] + [loss.detach()[None]])
        dist.all_reduce(flat)
        for one, gradient in zip(wanted, flat[:-1].split([one.numel() for one in wanted]), strict=True):
            one.grad = gradient.view_as(one).clone()
        return float(flat[-1])


def _share(step: int, steps: int, warmup: int) -> float:
    rising = min(1.0, (step + 1) / max(1, min(warmup, steps // 4)))
    return rising * 0.5 * (1 + math.cos(math.pi * step / steps))


def _save(
    path: Path, told: Mapping[str, Any], model: nn.Module, optimizer: Any, parameters: Mapping[str, nn.Parameter], history: list[float]
) -> None:
    tensors = {f"model.{name}": tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    for name, parameter in parameters.items():
        held = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if held is not None:
            tensors[f"momentum.{name}"] = held.cpu().contiguous()
    with whole(path, sync=True) as unfinished:
        save_file(tensors, unfinished, {KEY: json.dumps({"told": told, "losses": history})})


def _resumed(path: Path, told: Mapping[str, Any], model: nn.Module, optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> list[float]:
    """Take up the state of an earlier call, and return the losses that it had; none where there is no state."""
    if not path.is_file():
        return []
    try:
        with safe_open(path, framework="pt") as file:
            known = json.loads((file.metadata() or {})[KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
        before, history = dict(known["told"]), [float(loss) for loss in known["losses"]]
    except Exception as error:  # safetensors has an error of its own, and damage can look like anything
        raise MalformedFile(f"{path} is no state of a training ({error}); restart=True begins anew") from error
    if (count := before.get("processes")) != told["processes"]:
        todo = f"start it with torchrun --nproc-per-node {count}, or restart=True throws it away"
        raise ValueError(f"{path.parent} has a run of another number of processes, {count}: {todo}")
    if differ := sorted(name for name in {*before, *told} if before.get(name) != told.get(name)):
        raise ValueError(f"{path.parent} has a run with another {', '.join(differ)}; restart=True throws it away, or name another folder")
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")})
    for name, parameter in parameters.items():
        held = tensors.get(f"momentum.{name}")
        if held is not None:
            optimizer.state[parameter]["momentum_buffer"] = held.to(parameter.device)
    return history
