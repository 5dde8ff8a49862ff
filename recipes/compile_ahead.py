"""Compile networks' kernels for a GPU on a machine that has none, so that its time goes into timing alone.

    TRITON_CACHE_DIR=kernels python recipes/compile_ahead.py --models ResNet50,VGG19 --batches 1,32,256 --capability 9.0

Take the folder to the GPU and name it there in TRITON_CACHE_DIR. Both machines need the same Python (3.12, say), Triton, torch and
version of the zoo: Triton finds nothing that its build for another Python has compiled. Interrupted, it goes on where it stopped: what
is in the folder is not compiled again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from triton import knobs

from zoo import CATALOGUE
from zoo.kernels.api.compile_ahead import compile_ahead

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile for every network and batch, and say how many kernels are there."""
    parser = argparse.ArgumentParser(
        description="Compile networks' kernels for a GPU on a machine that has none, into the folder that TRITON_CACHE_DIR names."
    )
    parser.add_argument("--models", required=True, help="networks by name, with commas; or all")
    parser.add_argument("--batches", default="1,32,256", help="images of the calls there, with commas; default %(default)s")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="that fast is asked for there; default %(default)s")
    parser.add_argument("--capability", default="9.0", help="of the GPU: 9.0 (the default) for an H100 or H200, 8.0 for an A100")
    parser.add_argument("--tune", choices=("quick", "full"), default="quick", help="that fast is asked for there; default %(default)s")
    parser.add_argument(
        "--libraries", action="store_true", help="also each kernel as one that a library's follows, as timing may decide: twice as many"
    )
    options = parser.parse_args(arguments)
    names = list(CATALOGUE) if options.models == "all" else options.models.split(",")
    if unknown := [name for name in names if name not in CATALOGUE]:
        parser.error(f"there is no network {', '.join(unknown)}; `zoo list` names them")
    try:
        major, minor = map(int, options.capability.split("."))
        batches = [int(batch) for batch in options.batches.split(",")]
    except ValueError:
        parser.error("a capability is like 9.0, batches are like 1,32,256")
    if min(batches) < 1 or not (7, 5) <= (major, minor) <= (12, 9):
        parser.error("batches are 1 or more, capabilities 7.5 to 12.9")
    for name in names:
        cls = CATALOGUE[name]
        network = cls().eval()
        for batch in batches:
            start, images = time.monotonic(), torch.empty(batch, 3, cls.input_size, cls.input_size, device="meta")
            there, asked = compile_ahead(
                network,
                images,
                dtype=DTYPES[options.dtype],
                capability=(major, minor),
                tune=options.tune,
                libraries=options.libraries,
            )
            if asked and not there:
                sys.exit(f"{name} at {batch}: none of {asked} kernels could be compiled for {options.capability}; is Triton whole?")
            print(f"{name} at {batch}: {there} of {asked} kernels, {time.monotonic() - start:.0f} s", flush=True)
    print(f"in {knobs.cache.dir}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; what is compiled is kept, start again to go on")
