"""What a process that compiles does: it launches kernels on memory that it never touches, and stops before the launch itself.

It needs no GPU, and leaves what it makes in Triton's cache on disk. `workers` starts such processes and tells them what to compile.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import IO, Any, Protocol

import torch

from zoo.kernels.compilation import fingerprint
from zoo.kernels.compilation.fork_server import serve

BEGIN = f"from {fingerprint.__name__} import begin; begin(); from {__name__} import main; main()"
"""What a process that forks runs: the fingerprint is made while torch is imported."""


class Work(Protocol):
    """Something to compile."""

    @property
    def name(self) -> str:
        """What progress shows."""
        ...

    @property
    def key(self) -> str:
        """What tells its kernels from others; the same in every process."""
        ...

    def portable(self) -> Work:
        """Return what a process is sent: no tensor with data is in it."""
        ...

    def compile(self) -> None:
        """Compile, in a process whose launches stop before they launch (`stop_at_launch`)."""
        ...


def send(pipe: IO[bytes], value: Any) -> None:
    """Tell another process something."""
    pipe.write(pickle.dumps(value))
    pipe.flush()


_share: list[int] = []
"""Where `only` holds: which of every so many launches is compiled, how many that is, and launches so far."""


@contextmanager
def only(share: int, shares: int) -> Iterator[None]:
    """Compile one of every so many launches of what runs meanwhile: other processes that run the same compile the rest."""
    _share[:] = share, shares, 0
    try:
        yield
    finally:
        _share.clear()


def _is_ours() -> bool:
    """Tell whether this process compiles the launch that comes."""
    if not _share:
        return True
    share, shares, count = _share
    _share[2] += 1
    return count % shares == share


def stop_at_launch(capability: int) -> None:
    """Make every launch of this process compile for a GPU of this capability, and do no more."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from zoo.kernels.ops import _overlap

    absent: Any = SimpleNamespace(  # answers what Triton asks of a driver before it compiles
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    driver.set_active(absent)
    _overlap.assume(capability >= 90)
    launched = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        if not _is_ours():
            return None
        kernel = launched(self, *args, grid=grid, warmup=True, **kwargs)
        _build_launcher(kernel)
        return kernel

    JITFunction.run = run  # pyright: ignore[reportAttributeAccessIssue]


def _build_launcher(kernel: Any) -> None:
    """Leave what calls a kernel in the cache too: Triton up to 3.6 has a C compiler make one for each signature, at the first launch."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        with suppress(Exception):  # no compiler, or no driver to link to: the first launch will say so
            driver.CudaLauncher(kernel.src, kernel.metadata)


def main() -> None:
    """Import what compiling takes. Then fork a process that compiles each time one is asked for."""
    from zoo.kernels import ops

    stop_at_launch(int(sys.argv[1]))
    torch.set_num_threads(1)
    ops.discover()
    for name in sys.argv[2:]:
        with suppress(ImportError):  # whoever needs it says so
            importlib.import_module(name)
    fingerprint.finish()
    serve(_compile_what_comes)


def _compile_what_comes(tasks: IO[bytes], answers: IO[bytes]) -> None:
    """Compile until nothing more comes in; answer each task with nothing, or with why it could not be compiled."""
    while True:
        try:
            task: Work = pickle.load(tasks)
        except EOFError:
            return
        try:
            task.compile()
            send(answers, ("", True))
        except Exception as error:  # the compiler's own errors share no base
            send(answers, (f"{task.name}: {type(error).__name__}: {error}", not isinstance(error, (OSError, MemoryError))))
