"""How much of what a network makes is still there."""

from __future__ import annotations

from zoo.kernels.plans.arena import Watched


class Alive(Watched):
    """Counts the bytes of the maps that are made inside on a device and still there."""

    @property
    def bytes(self) -> int:
        self._let_go()
        made = [self._made[number] for number, _ in self._alive.values()]
        return sum(nbytes for (size, _, _), nbytes, _ in made if len(size) == 4)
