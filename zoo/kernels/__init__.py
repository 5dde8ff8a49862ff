"""The kernel backend: `fast(model)` runs a network on kernels chosen for it, `plain` gives it back, `why` explains.

The rooms, from what a user calls down to the kernels:

    api/             `fast`, `plain`, `why`; `network` answers calls, by a plan for each kind of them; kernels compiled ahead of time
    training/        `fast(model, train=True)` and `fast_step`
    plans/           on a GPU: steps one after the other, compared with the network, captured as a CUDA graph
    engines/         on a CPU: the fastest engine for the whole network
    quantizing/      on a CPU: int8, calibrated on a caller's images and compared with float32 on others
    tuning/          a kernel for each step: which could compute it, which is the fastest, and what was found, kept in a file
    passes/          the network as a graph of steps: trace, lower, fold, fuse, place, and what may be merged
    reports/         what `why` prints, and what a plan is
    compilation/     kernels compiled by processes of their own, and notes of what is compiled already
    differentiable/  ops with their gradients
    ops/             the kernels, one op a file
    comparing/       parity with the plain network, copies and images to compare on, ops against their references
    memory/          memory of CUDA graphs, and cuBLAS's workspaces
    measuring/       clocks, and the roofline

`arguments` reads what a caller asks for; `boxes` says what suppression means; `errors` holds what `fast` raises. `python -m zoo.kernels`
checks and times every op.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.kernels.api.fast import fast, plain, why
    from zoo.kernels.api.network import Fast

__all__ = ["Fast", "fast", "plain", "why"]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: errors and sample images need neither passes nor Triton."""
    if name not in __all__:
        raise AttributeError(f"module 'zoo.kernels' has no attribute {name!r}")
    return getattr(import_module("zoo.kernels.api.network" if name == "Fast" else "zoo.kernels.api.fast"), name)
