"""Triton's fingerprint, which is a part of every kernel's name in its cache: a hash of all of Triton, half a second of each process.

It is made in a thread while other modules are imported, or a network is traced. Triton keeps it for its process and those forked from it.
"""

from __future__ import annotations

import threading
from contextlib import suppress

_thread: threading.Thread | None = None


def begin() -> None:
    """Have it made, once a process."""
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_make, name="zoo fingerprint", daemon=True)
        _thread.start()


def finish() -> None:
    """Wait for it, if it was begun: two threads would both make it, and a process that forks must have no other thread."""
    if _thread is not None:
        _thread.join()


def _make() -> None:
    with suppress(Exception):  # where Triton has it elsewhere, the first kernel makes it
        from triton.runtime.cache import triton_key

        triton_key()
