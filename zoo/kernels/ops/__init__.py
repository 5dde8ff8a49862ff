"""Kernels, one op a file; `discover` finds them, and tests and `python -m zoo.kernels` iterate what it finds.

Which steps an op may compute, and with which of their arguments, is said in `zoo.kernels.tuning.steps`.

An op's module has

    reference(...)               plain PyTorch, any floating dtype, any device: what the op means, and what its arguments are. On the meta
                                 device it tells the shapes and dtypes of what `launch` makes
    OUT                          memory format of the results that have four dimensions, where it is not channels_last; few ops have it
    supports(**args)             "" where the kernel takes these arguments, else the reason why not
    configs(**args)              launch parameters to try, the best guess first; JSON-able dicts
    launch(**args, out, config)  runs the kernel; `out` may be a channel slice of a larger map; the first of `configs` if none is given
    cost(**args)                 (floating-point operations, bytes that must move): the floor of any kernel
    PACK, or prepare(**args)     argument -> function that lays it out for the kernel; done once, before `launch`
    rival(**args)                PyTorch's own way to the same result, to time beside it, where that is not the reference
    workspace(config)            bytes that a launch finds zero and leaves zero, for kernels that split a sum; few ops have it
    CASES, make(case, *how)      awkward shapes, and the arguments of one, drawn by `Drawing(*how)`; LARGE_CASES: real ones, to time
    TOLERANCE                    dtype -> allowed relative error against `reference` in float32

Only `reference` says types and defaults of its arguments. The functions that take `**args` are bound to its signature, see `_arguments.py`,
and name what they read.

Kernels are Python by syntax only: constants are passed as plain values, constant branches decide what is bound, and a launch takes more
than the kernel's parameters. Each file silences what pyright says of that.

Maps are logical (N, C, H, W) in channels_last memory, maybe a channel slice of a wider map: see `_layout.py`.
Files that begin with an underscore are no ops but parts of several.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def discover() -> dict[str, ModuleType]:
    """Import every op and return them by name, sorted."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def load(name: str) -> ModuleType:
    """Import one op by its name."""
    return importlib.import_module(f"{__name__}.{name}")
