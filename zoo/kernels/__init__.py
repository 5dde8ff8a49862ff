"""The kernel backend: `fast(model)` runs a network on kernels chosen for it, `plain` gives it back, `why` explains.

The way of a call, in reading order:

    fast       what a user calls; `asked` reads the arguments, `detection` knows networks of which only a part can be fast
    network    the module that answers calls, by a plan for each kind of them
    passes/    the network as a graph of steps: trace, lower, fold, fuse, place, and what may be merged
    tuning/    a kernel for each step: which could compute it, which is the fastest
    plans/     on a GPU: the steps run one after the other, compared with the network, captured as a CUDA graph
    engines/   on a CPU: the fastest engine for the whole network
    ops/       the kernels, one op a file

`training/` is `fast(model, train=True)` and `fast_step`; it calls `differentiable/`, the ops with their gradients.

`ahead` compiles a network's kernels on a machine that has no GPU.

Beside them lie what several of these use: `parity` (the comparison with the plain network), `copies` and `images` to compare on,
`precision`, `elsewhere` (where cuDNN's guesses are left), `growing` and `workspaces` (memory of graphs), `compiling` (in processes of
their own), `timing`, `choices` (what was found by timing, in a file), `roofline`, `progress`, `stopwatch` (what making a plan took),
`built` and `report` (what a plan is, what `why` prints), `errors`; and what `python -m zoo.kernels` does: `__main__` and `checking`.
"""

from zoo.kernels.api.fast import fast, plain, why
from zoo.kernels.api.network import Fast

__all__ = ["Fast", "fast", "plain", "why"]
