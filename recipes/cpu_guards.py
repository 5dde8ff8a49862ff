"""Measure what `fast` adds to a call of the engine that it runs on a CPU: looking for changed weights, and for NaN.

    python recipes/cpu_guards.py [MobileNetV2 EfficientNetLite0 ...] [--threads 2] [--rounds 16] --out guards.json

For each network, with random weights and one image, in float32 and in bfloat16: OpenVINO's own conversion, the engine of `fast` alone, and
`fast` itself, in turns in one process, medians of calls one behind another. Beside them stand the guards, each timed right behind a call of
the engine, when caches hold nothing of theirs. Only networks that run in OpenVINO are measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import zoo
from recipes.int8_cpu import openvino_as
from zoo import fast, why
from zoo.kernels.engines import openvino
from zoo.kernels.engines.export import finite, within
from zoo.kernels.engines.keep_nan import LARGEST
from zoo.kernels.quantizing.quantized import machine

CALLS = 60
"""Calls of a turn; the first five do not count."""


def engine_of(build: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what a function builds, and the OpenVINO engine that was made last on the way."""
    made: list[Any] = []
    usual = openvino.compiled

    def noted(*given: Any, **more: Any) -> Any:
        made.append(usual(*given, **more))
        return made[-1]

    openvino.compiled = noted
    try:
        built = build()
        return built, made[-1] if made else None
    finally:
        openvino.compiled = usual


def measured(network: nn.Module, image: Tensor, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Time the three ways to call it, and the guards; microseconds."""
    quick, engine = engine_of(lambda: fast(network, "cpu", dtype, example=image, progress=False))
    if (kernel := why(quick).rows[0].kernel) != "openvino":
        return {"left out": f"it runs in {kernel}"}
    own = openvino_as(network, image, openvino.PRECISION[dtype])
    answer = engine.flat(image)[0]
    calls: dict[str, Callable[[], Any]] = {
        "OpenVINO's own": lambda: own(image),
        "engine": lambda: engine.flat(image),
        "fast": lambda: quick(image),
    }
    guards: dict[str, Callable[[], Any]] = {
        "weights": quick._changed,
        "image": lambda: within(image, LARGEST),
        "answer": lambda: finite(answer),
    }
    taken: dict[str, list[float]] = {name: [] for name in (*calls, *guards)}
    with torch.no_grad():
        for _ in range(rounds):
            for name, call in calls.items():
                taken[name] += [_us(call) for _ in range(CALLS)][5:]
            for _ in range(CALLS):
                for name, call in guards.items():
                    engine.flat(image)
                    taken[name].append(_us(call))
    return {name: float(np.median(times)) for name, times in taken.items()}


def _us(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def main() -> None:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("names", nargs="*", default=["MobileNetV2", "EfficientNetLite0"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    record: dict[str, Any] = {"machine": machine("openvino"), "threads": asked.threads, "rows": {}}
    for name in asked.names:
        cls = zoo.CATALOGUE[name]
        network = cls(**({"padding": "same"} if "EfficientNet" in name else {})).eval()
        image = torch.randn(1, 3, network.input_size, network.input_size)
        for dtype in (torch.float32, torch.bfloat16):
            row = record["rows"][f"{name} {str(dtype).removeprefix('torch.')}"] = measured(network, image, dtype, asked.rounds)
            asked.out.write_text(json.dumps(record, indent=1))
            print(name, dtype, {key: round(one) if isinstance(one, float) else one for key, one in row.items()})


if __name__ == "__main__":
    main()
