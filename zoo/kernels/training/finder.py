"""What may be done by one kernel without anybody noticing: questions that chains ask of a recording.

Chains are joined to larger ones by one function after the other: `pooled`, `stems`, `widened`, `join`, `shortcuts`, `squeezes`,
`dense_blocks`. Each takes the finder of a recording, the chains so far, and `without`: by their `key`, the chains to leave as they are, and
why. Each returns all chains, in the order of their last calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from zoo.kernels.training import kernels
from zoo.kernels.training.calls import NORMS, hanging_on
from zoo.kernels.training.record import Recording, Ref
from zoo.kernels.training.replay import Chain, Without

Placed = tuple[Chain, tuple[int, ...]]
"""A chain and the calls that it stands for, by their places in the recording, ascending."""


def placed(chain: Chain, indices: tuple[int, ...], without: Without) -> Placed:
    """Return a chain at its calls; one that is to be left as it is gets its note and no calls."""
    return (replace(chain, note=without[chain.key]), ()) if chain.key in without else (chain, indices)


def in_order(found: Iterable[Placed]) -> list[Placed]:
    """Sort chains by their last calls; those without calls come first."""
    return sorted(found, key=lambda place: place[1][-1] if place[1] else -1)


class Finder:
    """What rules ask of a recording."""

    def __init__(self, recording: Recording, gone: set[int]) -> None:
        self.values, self.calls, self.device = recording.values, recording.calls, recording.device
        self.readers: dict[int, list[int]] = {}
        self.taken: set[int] = set()
        """Calls that chains have."""
        for index, call in enumerate(recording.calls):
            if index not in gone:
                for number in dict.fromkeys(call.reads):
                    self.readers.setdefault(number, []).append(index)
        self.drawn = hanging_on(recording.values, recording.calls)
        """Values that hang on no parameter, buffer or input: nobody asks a gradient of them."""
        self.outputs = {leaf for leaf in recording.outputs if isinstance(leaf, Ref)}

    def like(self, number: int) -> Tensor:
        """Return a tensor without data like a value."""
        return kernels.stand_in(self.values[number].shape, self.values[number].dtype)

    def follower(self, number: int) -> int | None:
        """Return the one call that reads a value, if there is only one and no chain has it."""
        readers = self.readers.get(number, [])
        return readers[0] if len(readers) == 1 and number not in self.outputs and readers[0] not in self.taken else None

    def hidden(self, numbers: Sequence[int], last: int) -> bool:
        """Tell whether nobody but the chain sees these values before its last call: no view of them is made."""
        memory = {self.values[n].memory for n in numbers}
        own = set(numbers)
        end = max(self.calls[last].makes)
        return not any(v.memory in memory and v.number not in own and v.number < end for v in self.values)

    def untouched(self, reads: Sequence[int], indices: Sequence[int]) -> bool:
        """Tell whether a chain may be done where its last call is: what it reads isn't changed in between, nor its statistics read."""
        memory = {self.values[n].memory for n in reads}
        buffers = {n for n in reads if self.values[n].place is not None}
        for index in range(indices[0], indices[-1]):
            if index in indices:
                continue
            call = self.calls[index]
            if call.writes & memory or (call.name in NORMS and buffers & set(call.reads)):
                return False
        return True

    def written(self, number: int, last: int) -> bool:
        """Tell whether anybody may write into the memory of a value behind a call: into outputs the network's caller may."""
        memory = self.values[number].memory
        mine = {self.values[leaf].memory for leaf in self.outputs}
        return memory in mine or any(memory in call.writes for call in self.calls[last + 1 :])
