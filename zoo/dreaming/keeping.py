"""Unfinished dreams on the disk: a killed one resumes where it was, and a resumed one has the bytes of one that never stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from weights.whole import whole
from zoo.networks.fingerprint import digest_of, state_digest

log = logging.getLogger("zoo")
EVERY_S = 60.0
"""Seconds between copies on the disk; an interrupt writes one at once."""


@dataclass
class Kept:
    """Where a dream is kept while it is unfinished.

    Attributes:
        path: a safetensors file; None keeps nothing.
        key: says which dream it is: another's file is not taken up.
    """

    path: Path | None
    key: str
    _last: float = field(default_factory=time.monotonic)

    def found(self) -> tuple[int, int, Tensor] | None:
        """Return octave, steps done in it, and the picture of this dream; None where there is none that can be used."""
        if self.path is None or not self.path.is_file():
            return None
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, "pt") as file:
                notes = file.metadata() or {}
                if notes.get("dream") != self.key:
                    log.warning("'%s' keeps a dream of another picture, network or setting, so this one begins anew", self.path)
                    return None
                return int(notes["octave"]), int(notes["step"]), file.get_tensor("picture").clone()
        except (SafetensorError, OSError, ValueError, KeyError):
            log.warning("'%s' is no dream, or is damaged, so the dream begins anew", self.path)
            return None

    def due(self) -> bool:
        """Tell whether the last copy is old."""
        return self.path is not None and time.monotonic() - self._last >= EVERY_S

    def keep(self, octave: int, step: int, picture: Tensor) -> None:
        """Write a copy, whole or not at all."""
        if self.path is None:
            return
        from safetensors.torch import save_file

        with whole(self.path) as unfinished:
            save_file(
                {"picture": picture.detach().cpu().contiguous()}, unfinished, {"dream": self.key, "octave": str(octave), "step": str(step)}
            )
        self._last = time.monotonic()

    def done(self) -> None:
        """Remove it."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def key(settings: Mapping[str, Any], tensors: list[Tensor], network: nn.Module) -> str:
    """Say which dream it is: its settings, its pictures, and every number of the network."""
    told = f"{sorted(settings.items())} {state_digest(network)}"
    return digest_of({str(number): tensor for number, tensor in enumerate(tensors)}, told)
