"""A run's state on disk: one safetensors file, replaced whole, from which a run goes on as if it had never stopped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from weights.documents import read_json, table
from weights.whole import whole as written_whole
from zoo.finetuning.average import Average
from zoo.finetuning.distributed import fill, own, whole
from zoo.pretrained.run_folder import CONFIG, LABELS, ROW, WEIGHTS, save_tensors

LAST, BEST = "last.safetensors", "best.safetensors"
KEY = "run"
"""Under this name the file's metadata hold what is no tensor, as JSON."""
RESULT = (ROW, WEIGHTS, LABELS)
SHOWN = ("log.jsonl", "metrics.json", "curves.png", "confusion.png", "report.html", "unreadable.txt")
AFRESH = "begin it anew in the same folder with restart=True"


FACTS: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "since": int,
    "done": bool,
    "best": (dict, NoneType),
    "pending": list,
    "unreadable": dict,
}
"""What a state holds beside tensors, by its kind."""


class Damaged(ValueError):
    """A checkpoint is not this run's; the message says what to do."""


def collect(model: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None) -> dict[str, Tensor]:
    """Copy all tensors of a run's state to the CPU, whole; of a divided network every process has to ask.

    The state of a parameter's optimiser is under the parameter's name. There is no state of random numbers: see
    `zoo.finetuning.chance`.
    """
    found = {f"model.{name}": whole(value) for name, value in model.state_dict().items()}
    if average is not None:
        found |= {f"ema.{name}": whole(value) for name, value in average.tensors.items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer.{name}.{key}"] = whole(value)
    return found


def restore(tensors: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer | None, average: Average | None) -> None:
    """Put a run's state back, in place: all of it, or an error and everything as it was.

    Args:
        tensors: what `collect` gave.
        model: of the same shapes.
        optimizer: fresh, over the same parameters; None leaves its state out.
        average: or None where the run has none.

    Raises:
        Damaged: tensors are missing or of other shapes.
    """
    targets = {f"model.{name}": value for name, value in model.state_dict().items()}
    if average is not None:
        targets |= {f"ema.{name}": value for name, value in average.tensors.items()}
    wrong = [name for name, value in targets.items() if name not in tensors or tensors[name].shape != value.shape]
    if wrong:
        raise Damaged(f"the checkpoint has no fitting {', '.join(wrong[:5])}: it is of another network, or the run had another setting")
    state = _state(tensors, model) if optimizer is not None else {}
    with torch.no_grad():
        before = {name: own(value).to("cpu", copy=True) for name, value in targets.items()}  # the device may have no room for two
        try:
            for name, value in targets.items():
                fill(value, tensors[name])
        except BaseException:
            for name, value in targets.items():
                own(value).copy_(before[name])
            raise
    if optimizer is not None:
        for parameter, values in state.items():
            optimizer.state[parameter].update(values)


def _state(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Make an optimiser's state of each parameter, divided as the parameter is."""
    made: dict[nn.Parameter, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        prefix = f"optimizer.{name}."
        for full, value in tensors.items():
            if not full.startswith(prefix):
                continue
            if value.shape == parameter.shape:
                held = torch.zeros_like(parameter)
                fill(held, value)
            else:
                held = value.clone()
            made.setdefault(parameter, {})[full[len(prefix) :]] = held
    return made


def write(folder: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], best: bool) -> None:
    """Write the state as the last one and, if `best`, as the best one too; a reader finds the old or the new file, never a part.

    The best one appears first: a run that is killed in between goes on from before it and finds the same best again.
    """
    with written_whole(folder / LAST) as unfinished:
        save_tensors(tensors, unfinished, {"format": "pt", KEY: json.dumps(facts)})
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        if best:
            with written_whole(folder / BEST) as copy:
                try:
                    os.link(unfinished, copy)
                except OSError:  # a file system without links
                    shutil.copyfile(unfinished, copy)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a state and its facts.

    Raises:
        Damaged: the file is none that `write` wrote.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = table(read_json((file.metadata() or {})[KEY], path), FACTS)
            if facts["best"] is not None:
                table(facts["best"], {"step": int, "figure": (int, float)})
            if not all(type(value) in (int, float) for value in facts["pending"]) or facts["step"] < 0:
                raise TypeError("a loss or a step is no number")
            if not all(isinstance(why, str) for why in facts["unreadable"].values()):
                raise TypeError("a reason is no text")
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118  # it is no dict
    except Exception as error:  # safetensors has an error of its own, and damage can look like anything
        raise Damaged(f"{path} is no checkpoint of a run ({error}), so the run can't go on; {AFRESH}") from error


def saved_step(folder: Path) -> int | None:
    """Return the step of a run's last state; None where there is no state that can be read."""
    try:
        with safe_open(folder / LAST, framework="pt") as file:
            return table(read_json((file.metadata() or {})[KEY], folder / LAST), {"step": int})["step"]
    except Exception:  # as `read`
        return None


def clear(folder: Path) -> None:
    """Delete what a run left in its folder, and nothing else; what makes it a result or a run goes first."""
    for name in (*RESULT, CONFIG, LAST, BEST, *SHOWN):
        (folder / name).unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Delete what killed processes left half-written."""
    for name in (*RESULT, CONFIG, LAST, BEST, *SHOWN):
        for left in folder.glob(f".{name}.*"):
            left.unlink(missing_ok=True)
    for left in folder.glob(".tmp??????"):  # safetensors' own
        left.unlink(missing_ok=True)
