"""The kernel backend: `fast(model)` runs a network on kernels chosen for it, `plain` gives it back, `why` explains.

The passes are a file each, in the order in which they run:

    trace      the network's ATen operators at one input shape
    lower      what they mean: convolution, BatchNorm, pool …
    fold       BatchNorm into weights, padding into convolutions
    fuse       what one kernel does: convolution + bias + residual + activation …
    place      parts of concatenations, computed where they belong
    merge      steps that may become one kernel
    choose     candidates (`candidates`), checked and timed; kept in `choices`
    program    the bound steps; `plan` captures them into a CUDA graph
    parity     the comparison with the plain network

`ops/` holds the kernels, one op a file; `engines/` what runs on a CPU. `build` puts the passes together, `fast` is the module that
answers calls, `report` what `why` prints.
"""

from zoo.kernels.fast import Fast, fast, plain, why

__all__ = ["Fast", "fast", "plain", "why"]
