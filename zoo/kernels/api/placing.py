"""`device="auto"`: a CPU and a GPU are timed once, and the faster is taken: which it is for a small network depends on both."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
HOPEFUL = 5.0
"""How many times the fastest step a CPU's may take for PyTorch's compiler to be tried there. It made steps up to three times as fast in the
table of `recipes/recurrent.py --times`; the rest is room for other networks."""
ALONE = 'device="auto": no CUDA device is there, so the CPU was taken'


@dataclass(frozen=True, slots=True)
class Way:
    """Where something is computed, and whether PyTorch's compiler was tried on a CPU."""

    device: torch.device
    compiled: bool = False

    def __str__(self) -> str:
        return f"{self.device} compiled" if self.compiled else str(self.device)


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
    if not given:
        made[found[0]].told.append(ALONE)
        return made[found[0]]
    times = timed({Way(device): _answer(made[device], args) for device, args in given.items()})
    taken, said = fastest(times, "call")
    made[taken.device].told.append(said)
    return made[taken.device]


def training(
    network: nn.Module, example: Any, dtype: torch.dtype | None, tune: str, recompute: bool | None
) -> tuple[torch.device, str, str]:
    """Return where a step of training is fastest, what to `tune` there for the example's shape, and what there is to say.

    `fast_step` on a GPU is compared with plain PyTorch on a CPU, and with PyTorch's compiler there if that may win.
    Where no step can be timed it is the device that the network lies on. Nobody's random numbers are used up.
    """
    asked.check(network)
    found = devices()
    if len(found) == 1:
        return found[0], tune, ALONE
    there = next((p.device for p in (*network.parameters(), *network.buffers())), found[0])
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng([d for d in found if d.type == "cuda"]):
            args = asked.example_of(network, example, found[0], IMAGES)
            cpu = Way(found[0])
            made = {Way(device): _step(network, args, Way(device), dtype, tune, recompute) for device in found}
            steps = {way: step for way, step in made.items() if step is not None}
            times = timed(steps)
            failed = ""
            if tune != "none" and times[cpu] <= HOPEFUL * min(times.values()):
                compiled = Way(cpu.device, compiled=True)
                try:
                    if (step := _step(network, args, compiled, dtype, "full", recompute)) is not None:
                        times = timed({**steps, compiled: step})
                except Exception as error:  # the compiler's, which makes no other time wrong
                    failed = f"; compiled there it failed: {type(error).__name__}: {first_line(error)}"
            taken, said = fastest(times, "step")
            return taken.device, "full" if taken.compiled else tune, said + failed
    except Exception as error:  # whatever the network or an example stumbles over: who prepares it on one device says more
        return there, tune, f'device="auto": no step could be timed, so {there} stays: {type(error).__name__}: {first_line(error)}'


def timed(calls: Mapping[Way, Callable[[], object]]) -> dict[Way, float]:
    """Time calls in turns, and return the median milliseconds of each."""
    for way, call in calls.items():
        for _ in range(WARMUPS):
            _milliseconds(call, way.device)
    found: dict[Way, list[float]] = {way: [] for way in calls}
    until = time.perf_counter() + SECONDS
    for number in range(MOST):
        if number >= LEAST and time.perf_counter() > until:
            break
        for way, call in calls.items():
            found[way].append(_milliseconds(call, way.device))
    return {way: median(several) for way, several in found.items()}


def fastest(times: Mapping[Way, float], what: str) -> tuple[Way, str]:
    """Return the fastest way, and a line with the milliseconds of each."""
    taken = min(times, key=lambda way: times[way])
    *others, last = (f"{ms:.3g} ms on {way}" for way, ms in times.items())
    shown = f"{', '.join(others)} and {last}" if others else last
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
    network: nn.Module, args: tuple[Any, ...], way: Way, dtype: torch.dtype | None, tune: str, recompute: bool | None
) -> Callable[[], object] | None:
    """Return a step of a copy, which learns nothing: there and back, and an optimiser with a rate of 0.

    None where PyTorch's compiler is asked for, and was refused or is no faster.
    """
    from zoo.kernels.training.beginning import begin
    from zoo.kernels.training.planning import COMPILED
    from zoo.kernels.training.step import fast_step

    if len(args) != 1 or not isinstance(args[0], Tensor):
        raise ValueError("only steps of networks that take one tensor are timed")
    device = way.device
    twin, given, target = copy.deepcopy(network).to(device).train(), args[0].to(device), torch.zeros((), device=device)
    optimizer = torch.optim.SGD(twin.parameters(), 0.0)
    if device.type == "cuda" or way.compiled:
        model = begin(twin, None, dtype, given, tune, recompute)
        if way.compiled and not any(row.kernel == COMPILED for row in model.report().rows):
            return None
        step = fast_step(model, _loss, optimizer, dtype="auto" if dtype is None else dtype)
        return lambda: step(given, target)

    def plainly() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype, dtype not in (None, torch.float32)):
            loss = _loss(twin(given), target)
        loss.backward()
        optimizer.step()

    return plainly


def _loss(outputs: Any, target: Tensor) -> Tensor:
    floats = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum((leaf.float().square().mean() for leaf in floats), target)
