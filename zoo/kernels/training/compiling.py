"""Compile what chains launch before they are checked and timed, in processes beside each other: one after the other takes minutes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.compilation.compiler_process import only
from zoo.kernels.compilation.workers import Compilers
from zoo.kernels.training import kernels
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.record import Recording
from zoo.kernels.training.replay import Chain

SHARES = 3
"""Processes that compile one chain's launches, every third each."""

LONGEST_S = 300.0
"""Seconds after which what is not compiled is left to its first call: a compiler may hang."""

Blank = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape, dtype, and whether a gradient is asked of it."""


@dataclass(frozen=True, slots=True)
class ChainWork:
    """A chain, there and back, on tensors without data.

    Attributes:
        name: the chain's.
        run: as the chain's, without a group of processes.
        reads: what it takes.
        makes: what it gives.
        row: whether it can be told statistics: both ways are compiled.
        share: which launches it compiles, and of how many that is one: the way there and the gradients of a depthwise convolution take
            seconds each.
    """

    name: str
    run: Callable[..., Any]
    reads: tuple[Blank, ...]
    makes: Blank
    row: bool
    share: tuple[int, int] = (0, 1)

    @property
    def key(self) -> str:
        """What is run on which tensors."""
        return f"training {self.name} {_told(self.run)} {self.reads} {self.makes} {self.row} {self.share}"

    def portable(self) -> ChainWork:
        """Return itself: there is no data in it."""
        return self

    def compile(self) -> None:
        """Run it, in a process whose launches stop before they launch."""
        with only(*self.share), torch.enable_grad():
            self._run()

    def _run(self) -> None:
        for options in ({}, {"row": torch.empty((3, self.reads[0][0][1]), device="meta")}) if self.row else ({},):
            given = [_tensor(blank) for blank in self.reads]
            made = self.run(*given, **options)
            made = made[0] if isinstance(made, tuple) else made
            torch.autograd.grad(made, [t for t in given if t.requires_grad], _tensor(self.makes).detach(), allow_unused=True)


def _told(value: Any) -> str:
    """Return a text of a function, what is bound to it, or an argument: the same in every process."""
    if isinstance(value, partial):
        return f"{_told(value.func)}({_told(value.args)}, {_told(dict(sorted(value.keywords.items())))})"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_told, value))})"
    if isinstance(value, dict):
        return f"({', '.join(f'{name}={_told(inner)}' for name, inner in value.items())})"
    name = getattr(value, "__qualname__", None)
    return repr(value) if name is None else f"{value.__module__}.{name}"


def _tensor(blank: Blank) -> Tensor:
    shape, dtype, learns = blank
    return kernels.stand_in(shape, dtype).detach().requires_grad_(learns)


@contextmanager
def compiled_chains(*recordings: Recording) -> Iterator[Callable[[], None]]:
    """Compile the kernels of all chains of recordings on one GPU, as many beside each other as there are cores.

    Those of the first recording are there when the block begins. The others are compiled beside it, and the function that it gets waits for
    them.
    """
    if not recordings or not kernels.on_kernels(recordings[0].device):
        yield lambda: None
        return
    with closing(Compilers(torch.cuda.get_device_capability(recordings[0].device))) as compilers:
        compilers.compile(_longest_first(recordings[:1]), LONGEST_S)
        others = _longest_first(recordings[1:])
        if others:
            compilers.begin(others, LONGEST_S)

        def wait() -> None:
            if others:
                compilers.compile(())  # which joins what was begun

        yield wait


def _longest_first(recordings: Sequence[Recording]) -> list[ChainWork]:
    """Return what there is to compile, depthwise convolutions first, which take longest."""
    return sorted((work for recording in recordings for work in _works(recording)), key=lambda work: "depthwise" not in work.name)


def _works(recording: Recording) -> Iterator[ChainWork]:
    """Yield what there is to compile, of every chain; of those that can't be sent, nothing."""
    waiting = list(steps_of(recording, {})[1])
    while waiting:
        chain = waiting.pop()
        waiting += [piece for piece in chain.pieces if isinstance(piece, Chain)]
        run: Any = chain.run
        if isinstance(run, partial) and run.keywords.get("group") is not None:
            run = partial(run.func, *run.args, **{**run.keywords, "group": None})
        reads = tuple(_blank(recording, n, learns=n not in chain.drawn) for n in chain.reads)
        works = [
            ChainWork(chain.op, run, reads, _blank(recording, chain.makes), bool(chain.norm), (share, SHARES)) for share in range(SHARES)
        ]
        try:
            pickle.dumps(works)
        except (pickle.PicklingError, AttributeError, TypeError):  # it is compiled when it is called first
            continue
        yield from works


def _blank(recording: Recording, number: int, learns: bool = True) -> Blank:
    value = recording.values[number]
    still = value.place is not None and value.place[1].startswith("running_")
    return tuple(value.shape), value.dtype, learns and value.dtype.is_floating_point and not still
