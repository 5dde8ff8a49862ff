"""What Ctrl-C does to the command: one line and exit code 130, from the first import on."""

import contextlib
import os
import signal
import sys

INTERRUPTED = "interrupted; what was finished or downloaded is kept for next time, nothing is left half-done"


def answer_at_once() -> bool:
    """Let SIGINT end this process with one line, until the command can answer it itself; False where somebody else handles it."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, behind nohup or `&` of a script: it stays so
        return signal.getsignal(signal.SIGINT) is _end
    signal.signal(signal.SIGINT, _end)
    return True


def heard() -> bool:
    """Tell whether Ctrl-C came while the command answered it: what went wrong since may be what became of it in a library's C code."""
    return bool(_heard)


_heard: list[int] = []


def answer_by_exception() -> None:
    """Let SIGINT raise KeyboardInterrupt, from here on, so that a command can put its things in order."""
    _heard.clear()
    _said.clear()
    signal.signal(signal.SIGINT, _raise)


def _raise(number: int, _: object) -> None:
    _heard.append(number)
    raise KeyboardInterrupt


def start_torch() -> None:
    """Import torch, which takes seconds. Ctrl-C ends the process at once meanwhile: torch's C code may swallow an exception."""
    before = signal.getsignal(signal.SIGINT)
    if before in (signal.default_int_handler, _raise):
        signal.signal(signal.SIGINT, _end)
    try:
        import torch  # noqa: F401
    finally:
        signal.signal(signal.SIGINT, before)


def has_said() -> None:
    """Note that the command has said itself what an interrupt leaves, so that no general line is written behind it."""
    _said.append(True)


_said: list[bool] = []


def say_interrupted() -> int:
    """Write the line, unless the command has written one of its own; returns the exit code."""
    if _said:
        _said.clear()
        return 130
    with contextlib.suppress(OSError):  # where nobody listens any more
        sys.stderr.write(f"{INTERRUPTED}\n")
        sys.stderr.flush()
    return 130


def _end(*_: object) -> None:
    """End without an exception: one in the middle of an import may be swallowed, or become another, in a library's C code."""
    with contextlib.suppress(OSError):
        os.write(2, f"{INTERRUPTED}\n".encode())  # sys.stderr may be in the middle of a line of its own
    os._exit(130)
