"""`python killed_at.py STEP ARGUMENTS`: the command `zoo`, whose process kills itself behind a step of teaching; 0 lets it end."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from zoo.commands.app import main
from zoo.training import loop

STEP = int(sys.argv[1])
learn = loop.Group.learn
seen: list[int] = []


def learning(*given: Any) -> float:
    """Learn from a batch, if it is not one that this process no longer sees."""
    if len(seen) == STEP > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    seen.append(1)
    return learn(*given)


loop.Group.learn = learning  # pyright: ignore[reportAttributeAccessIssue]
sys.exit(main(sys.argv[2:]))
