"""`device="auto"`: a CPU and a GPU are timed once, and the faster is taken. Small networks of sequences may be faster on a CPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.kernels import arguments as asked
from zoo.kernels.api.network import Fast

WARMUPS, LEAST, MOST, SECONDS = 6, 5, 50, 0.5
"""Calls before the first that counts, at which a step is captured too; how many count at least and at most; and for how long."""
IMAGES = 16
"""Images of a step that is timed where no example is given."""


def devices() -> list[torch.device]:
    """Return the CPU, and the current GPU if there is one."""
    cuda = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *cuda]


def answering(build: Callable[[torch.device], Fast], arguments: Callable[[torch.device], tuple[Any, ...]]) -> Fast:
    """Make a network fast on each device, time a call that is waited for, and return the faster; `why` says both times.

    Args:
        build: makes it fast on a device.
        arguments: of the call, on a device.
    """
    made = {device: build(device) for device in devices()}
    calls = {device: _answer(model, arguments(device)) for device, model in made.items()} if len(made) > 1 else {}
    taken, said = fastest(calls, "call")
    model = made[taken]
    model.told.append(said)
    return model


def training(network: nn.Module, example: Any, dtype: torch.dtype | None, tune: str) -> tuple[torch.device, str]:
    """Return where a step of training is faster, and what there is to say: plain PyTorch on a CPU, and `fast_step` on a GPU.

    Raises:
        ValueError: the network takes more than one tensor.
    """
    found = devices()
    if len(found) == 1:
        return fastest({}, "step")
    cpu = torch.device("cpu")
    args = asked.example_of(network, example, cpu, IMAGES)
    if len(args) != 1 or not isinstance(args[0], Tensor):
        raise ValueError('device="auto" times steps of networks that take one tensor; move the model to a device yourself')
    return fastest({device: _step(network, args[0], device, dtype, tune) for device in found}, "step")


def fastest(calls: Mapping[torch.device, Callable[[], object]], what: str) -> tuple[torch.device, str]:
    """Time calls, and return the device of the fastest and a line with all times; without calls there is only the CPU."""
    if not calls:
        return torch.device("cpu"), 'device="auto": no CUDA device is there, so the CPU was taken'
    times = {device: _milliseconds(call, device) for device, call in calls.items()}
    taken = min(times, key=lambda device: times[device])
    shown = " and ".join(f"{ms:.3g} ms on {device}" for device, ms in times.items())
    return taken, f'device="auto": a {what} takes {shown}, so {taken} was taken'


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call that is waited for."""

    def one() -> float:
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - begun)

    for _ in range(WARMUPS):
        one()
    found, until = list[float](), time.perf_counter() + SECONDS
    while len(found) < LEAST or (len(found) < MOST and time.perf_counter() < until):
        found.append(one())
    return median(found)


def _answer(model: Fast, args: tuple[Any, ...]) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return model(*args)

    return call


def _step(network: nn.Module, example: Tensor, device: torch.device, dtype: torch.dtype | None, tune: str) -> Callable[[], object]:
    """Return a step of a copy, which learns nothing: there and back, and an optimiser with a rate of 0."""
    from zoo.kernels.training.beginning import begin
    from zoo.kernels.training.step import fast_step

    twin, given, target = copy.deepcopy(network).to(device).train(), example.to(device), torch.zeros((), device=device)
    optimizer = torch.optim.SGD(twin.parameters(), 0.0)
    if device.type == "cuda":
        model = begin(twin, None, dtype, given, tune)
        step = fast_step(model, _loss, optimizer, dtype="auto" if dtype is None else dtype)
        return lambda: step(given, target)

    def plainly() -> None:
        optimizer.zero_grad()
        _loss(twin(given), target).backward()
        optimizer.step()

    return plainly


def _loss(outputs: Any, target: Tensor) -> Tensor:
    floats = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum((leaf.float().square().mean() for leaf in floats), target)
