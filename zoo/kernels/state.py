"""What a network keeps from one call for the next outside its parameters and buffers, which what is recorded once would not."""

from __future__ import annotations

import random
import sys
from typing import Any

from torch import nn

_PLAIN = (type(None), bool, int, float, str)


def attributes(network: nn.Module, *, whole: bool = True) -> dict[str, Any]:
    """Note what of a network's attributes a forward could change: numbers and words as they are, lists and dictionaries by their length.

    Args:
        network: any module.
        whole: also which object each attribute is, so that one which is put in anew counts as changed.
    """
    found: dict[str, Any] = {}
    for path, module in network.named_modules():
        for name, value in module.__dict__.items():
            if name.startswith("_"):
                continue
            key = f"{path}.{name}" if path else name
            if isinstance(value, _PLAIN):
                found[key] = repr(value) if isinstance(value, float) else value  # NaN is not itself
            elif whole or isinstance(value, list | dict):
                found[key] = (id(value) if whole else 0, len(value)) if isinstance(value, list | dict) else id(value)
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Name an attribute that came or changed; empty if none did."""
    return next((name for name, value in after.items() if before.get(name, ()) != value), "")


class Draws:
    """The places of Python's and NumPy's own sequences of random numbers."""

    def __init__(self) -> None:
        self.python, self.numpy = random.getstate(), self._numpy()

    @staticmethod
    def _numpy() -> Any:
        numpy = sys.modules.get("numpy")
        return None if numpy is None else numpy.random.get_state()

    def moved(self) -> str:
        """Say whose random numbers were drawn since, and put them back; empty if none were."""
        found = []
        if random.getstate() != self.python:
            random.setstate(self.python)
            found.append("Python's")
        now = self._numpy()
        if self.numpy is not None and (now[2] != self.numpy[2] or (now[1] != self.numpy[1]).any()):
            sys.modules["numpy"].random.set_state(self.numpy)
            found.append("NumPy's")
        return " and ".join(found)
