"""Compile every kernel for a GPU that isn't there, at all cases of its op: what Triton's interpreter takes, its compiler may refuse.

    PYTHONPATH=. python tests/compile_kernels.py [--ops cross_entropy,stem] [--dtypes bfloat16,float32,float16] [--capability 90]

An integer argument of 1 is a constant to the compiler, types are stricter, and `ptxas` has the last word. Nothing is launched. About two
minutes a dtype on one core; the exit status is 1 where something was refused.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import ModuleType

import torch
import typer

from zoo.kernels import ops
from zoo.kernels.comparing import op_checks as checking
from zoo.kernels.compilation.compiler_process import stop_at_launch

LIBRARIES = {"cudnn_conv", "cudnn_graph", "cublaslt", "narrow_cudnn", "narrow_cublaslt"}
"""Ops that a library computes, which asks for the GPU itself."""


def refused(op: ModuleType, dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    """Yield, for each case of an op that it takes, its name and why it can't be compiled, "" where it can."""
    for case in op.CASES:
        args = checking.draw(op, case, dtype, "cpu")
        if op.supports(**args):
            continue
        try:
            op.launch(**checking.packed(op, args))
        except Exception as error:  # the compiler's own errors share no base
            *_, said = (repr(error), *filter(None, map(str.strip, str(error).splitlines())))  # Triton's begin with the place
            yield case["name"], f"{type(error).__name__}: {said}"
        else:
            yield case["name"], ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the named ops' kernels, and name each that is refused."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--ops", default="", help="names with commas between; all if left out")
    parser.add_argument("--dtypes", default="bfloat16", help="of the maps")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU, times ten: 90 is an H100 or H200")
    asked = parser.parse_args(arguments)
    names = [name for name in (asked.ops.split(",") if asked.ops else ops.discover()) if name not in LIBRARIES]
    stop_at_launch(asked.capability)
    begun, count, faults = time.perf_counter(), 0, list[str]()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # what lies in another cache would not be compiled
        for name in names:
            for dtype in asked.dtypes.split(","):
                for case, reason in refused(ops.load(name), getattr(torch, dtype)):
                    count += 1
                    if reason:
                        faults.append(f"{name}, {case}, {dtype}: {reason}")
                        typer.echo(faults[-1], err=True)
    seconds = time.perf_counter() - begun
    typer.echo(f"{count} cases of {len(names)} ops compiled for sm_{asked.capability} in {seconds:.0f} s, {len(faults)} refused")
    return 1 if faults or not count else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
