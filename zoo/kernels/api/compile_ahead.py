"""Kernels for a GPU that is not here: compiled on any machine that has Triton, into its cache, before a plan there asks for them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zoo.kernels.comparing.copies import in_own_dtype
from zoo.kernels.compilation.cache_notes import Compiled
from zoo.kernels.compilation.workers import Compilers, target
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.reports.progress_bar import bar
from zoo.kernels.tuning.choices import Choices
from zoo.kernels.tuning.choose import kernels
from zoo.kernels.tuning.steps import Setting

CPU = torch.device("cpu")


def compile_ahead(
    network: nn.Module,
    example: Tensor | tuple[Any, ...],
    *,
    dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] = (9, 0),
    tune: str = "quick",
    libraries: bool = False,
    progress: bool = True,
) -> tuple[int, int]:
    """Compile what `fast(network, "cuda", dtype, tune=tune)` would compile before it times anything, for a GPU that need not be here.

    Triton keeps it in the folder that TRITON_CACHE_DIR names, else in `~/.triton/cache`. Take that folder to the machine with the GPU: what
    has the same Triton, for the same version of Python, the same torch and this version of the zoo finds its kernels there. A kernel that a
    library's follows is another than the one that ours follows, and which of them a step will have is known only when all are timed: with
    `libraries` both are here, without it those few are compiled there, which takes as long as processes take to start. The last layer's
    kernel that writes the network's own dtype is compiled there in any case.

    Args:
        network: any module with its weights; it is neither run nor changed.
        example: a tensor, or a tuple of arguments, of the shape to plan for; of tensors only shape and dtype matter.
        dtype: what the plan is to compute in.
        capability: of the GPU: (9, 0) for an H100 or H200.
        tune: "quick" or "full": how many candidates the plan will try.
        libraries: compile each kernel as one that a library's follows too: twice as many.
        progress: show a bar on stderr, where that is a terminal.

    Returns:
        How many kernels are there now, and how many were asked for; what Triton can't compile makes the difference.

    Raises:
        Untraceable: what `fast` could not trace either.
        ValueError: `tune` is neither, or the network refuses such input.
    """
    if tune not in ("quick", "full"):
        raise ValueError(f'tune={tune!r} is neither "quick" nor "full": nothing else is timed, so nothing is compiled before')
    graph, places = understand(network, in_own_dtype(network, example if isinstance(example, tuple) else (example,)), {}, CPU, dtype=dtype)
    if any(0 in node.shape for node in graph.inputs):  # of which a plan computes nothing
        return 0, 0
    tasks = kernels(graph, places, Setting(CPU, dtype), tune, Choices(CPU))  # a CPU's file has no choices of kernels
    if libraries:
        tasks += [replace(task, followed=False) for task in tasks]
    with closing(Compilers(capability, worth=1)) as compilers, bar("compiling kernels", progress) as shown:
        compilers.compile(tasks, None, shown)
    there, keys = Compiled(target(capability)), {task.key for task in tasks}
    return sum(map(there.has, keys)), len(keys)
