"""`device="auto"`: a CPU and a GPU are timed once, and the faster is taken: which it is for a small network depends on both."""

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
from zoo.kernels.errors import Untraceable, first_line

WARMUPS, LEAST, MOST, SECONDS = 6, 5, 50, 0.5
"""Calls before the first that counts, at which a step is captured too; how many count at least and at most; and for how long they go on."""
IMAGES = 16
"""Images of a step that is timed where no example is given."""
ALONE = 'device="auto": no CUDA device is there, so the CPU was taken'


def devices() -> list[torch.device]:
    """Return the CPU, and the current GPU if there is one."""
    cuda = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    return [torch.device("cpu"), *cuda]


def answering(build: Callable[[torch.device], Fast], arguments: Callable[[torch.device], tuple[Any, ...]]) -> Fast:
    """Make a network fast on each device, time a call that is waited for, and return the faster; `why` says both times.

    Without arguments to call it with, nothing is timed, and it is made for the GPU.

    Args:
        build: makes it fast on a device.
        arguments: of the call, on a device; Untraceable where nothing tells what the network takes.
    """
    found = devices()
    try:
        given = {device: arguments(device) for device in found} if len(found) > 1 else {}
    except Untraceable as error:
        model = build(found[-1])
        model.told.append(f'device="auto": nothing was timed, so {found[-1]} was taken: {first_line(error)}')
        return model
    made = {device: build(device) for device in found}
    taken, said = fastest({device: _answer(made[device], args) for device, args in given.items()}, "call") if given else (found[0], ALONE)
    made[taken].told.append(said)
    return made[taken]


def training(network: nn.Module, example: Any, dtype: torch.dtype | None, tune: str, recompute: bool | None) -> tuple[torch.device, str]:
    """Return where a step of training is faster, and what there is to say: plain PyTorch on a CPU, and `fast_step` on a GPU.

    Where no step can be timed it is the device that the network lies on. Nobody's random numbers are used up.
    """
    asked.check(network)
    found = devices()
    if len(found) == 1:
        return found[0], ALONE
    there = next((p.device for p in (*network.parameters(), *network.buffers())), found[0])
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng([d for d in found if d.type == "cuda"]):
            args = asked.example_of(network, example, found[0], IMAGES)
            return fastest({device: _step(network, args, device, dtype, tune, recompute) for device in found}, "step")
    except Exception as error:  # whatever the network or an example stumbles over: who prepares it on one device says more
        return there, f'device="auto": no step could be timed, so {there} stays: {type(error).__name__}: {first_line(error)}'


def fastest(calls: Mapping[torch.device, Callable[[], object]], what: str) -> tuple[torch.device, str]:
    """Time calls in turns, and return the device of the fastest and a line with the median of each."""
    for device, call in calls.items():
        for _ in range(WARMUPS):
            _milliseconds(call, device)
    found: dict[torch.device, list[float]] = {device: [] for device in calls}
    until = time.perf_counter() + SECONDS
    for number in range(MOST):
        if number >= LEAST and time.perf_counter() > until:
            break
        for device, call in calls.items():
            found[device].append(_milliseconds(call, device))
    times = {device: median(several) for device, several in found.items()}
    taken = min(times, key=lambda device: times[device])
    shown = " and ".join(f"{ms:.3g} ms on {device}" for device, ms in times.items())
    return taken, f'device="auto": a {what} takes {shown}, so {taken} was taken'


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Time a call that is waited for."""
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - begun)


def _answer(model: Fast, args: tuple[Any, ...]) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return model(*args)

    return call


def _step(
    network: nn.Module, args: tuple[Any, ...], device: torch.device, dtype: torch.dtype | None, tune: str, recompute: bool | None
) -> Callable[[], object]:
    """Return a step of a copy, which learns nothing: there and back, and an optimiser with a rate of 0."""
    from zoo.kernels.training.beginning import begin
    from zoo.kernels.training.step import fast_step

    if len(args) != 1 or not isinstance(args[0], Tensor):
        raise ValueError("only steps of networks that take one tensor are timed")
    twin, given, target = copy.deepcopy(network).to(device).train(), args[0].to(device), torch.zeros((), device=device)
    optimizer = torch.optim.SGD(twin.parameters(), 0.0)
    if device.type == "cuda":
        model = begin(twin, None, dtype, given, tune, recompute)
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
