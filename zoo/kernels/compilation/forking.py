"""How PyTorch's compiler starts its workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Let the compiler fork its workers: new processes died of a broken pipe on a machine with H200s."""
    from torch._inductor import config

    with config.patch(worker_start_method="fork") if hasattr(config, "worker_start_method") else contextlib.nullcontext():
        yield
