"""Memory that decoding processes share with this one: pixels are written once, where a GPU fetches them from."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


class Shelf:
    """Places in shared memory, each for the pixels of one chunk; a place is taken before its chunk is asked for.

    Nothing but small facts then goes through a pipe, and no pixel is copied between processes.

    Args:
        places: how many.
        place_bytes: of each.
        pinned: whether a GPU fetches from it.

    Raises:
        OSError: the system gives no process so much shared memory.
    """

    def __init__(self, places: int, place_bytes: int, pinned: bool) -> None:
        try:
            self.memory = torch.empty(places, place_bytes, dtype=torch.uint8).share_memory_()
        except RuntimeError as error:
            needed = f"{places * place_bytes / 2**20:,.0f} MiB"
            raise OSError(
                f"decoding processes need {needed} of shared memory, and there is less ({str(error).splitlines()[0]}): take fewer with "
                "--workers (workers=…), a smaller --batch-size, or give a container more: docker run --shm-size=2g"
            ) from error
        self._free = deque(range(places))
        self._pinned = pinned and self._pin()

    def take(self) -> int:
        """Take a free place."""
        return self._free.popleft()

    def give(self, place: int) -> None:
        """Let another chunk have a place."""
        self._free.append(place)

    def pixels(self, place: int, rows: int, side: int, channels: int) -> Tensor:
        """Return a place as uint8 (rows, side, side, channels)."""
        return pixels_at(self.memory, place, rows, side, channels)

    def close(self) -> None:
        """Unpin the memory; nothing may fetch from it any more."""
        if self._pinned:
            with suppress(RuntimeError):  # a GPU that failed says so elsewhere
                torch.cuda.synchronize()
            _cuda().cudaHostUnregister(self.memory.data_ptr())
            self._pinned = False

    def _pin(self) -> bool:
        """Pin the memory; where the system allows no more of that, copies are slower and the same."""
        return int(_cuda().cudaHostRegister(self.memory.data_ptr(), self.memory.numel(), 0)) == 0


def _cuda() -> Any:
    return torch.cuda.cudart()


def pixels_at(memory: Tensor, place: int, rows: int, side: int, channels: int) -> Tensor:
    """Return a place of a shelf's memory as uint8 (rows, side, side, channels)."""
    return memory[place, : rows * side * side * channels].view(rows, side, side, channels)
