"""One image through Yolo-Fastest 1.1 on a CPU: `fast` beside OpenCV's dnn and onnxruntime, in turns, after all three agreed.

    python recipes/detect_speed.py FOLDER [--size 320] [--rounds 200] [--threads 1]

FOLDER holds yolo-fastest-1.1.cfg and yolo-fastest-1.1.weights. Only the network is timed: no file is decoded, and no box. Both times are
printed: the clock's, and the processor's of all threads together, which other programs on a shared machine hardly change.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo import YoloFastest, fast, trained, why

WARM = 20
"""Calls before any is timed."""
AGREE = 2e-3
"""Largest difference between the ways; OpenCV adds another epsilon to variances."""


def ways(folder: Path, size: int, threads: int) -> tuple[dict[str, Callable[[], Any]], str]:
    """Build each way to compute the maps of one image, and say what `fast` chose."""
    import cv2
    import onnxruntime

    weights = folder / "yolo-fastest-1.1.weights"
    model = trained(YoloFastest, weights)
    image = torch.rand(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    quick = fast(model, "cpu", example=image, progress=False)
    cv2.setNumThreads(threads)
    net = cv2.dnn.readNetFromDarknet(str(folder / "yolo-fastest-1.1.cfg"), str(weights))
    ends = [f"conv_{end}" for end in model.ends]

    def opencv() -> list[np.ndarray]:
        net.setInput(image.numpy())
        return list(net.forward(ends))

    with tempfile.TemporaryDirectory() as place:
        file = str(Path(place, "net.onnx"))
        torch.onnx.export(model, (image,), file, dynamo=True, verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    found: dict[str, Callable[[], Any]] = {
        "fast": lambda: quick(image),
        "plain PyTorch": lambda: model(image),
        "OpenCV dnn": opencv,
        "onnxruntime": lambda: session.run(None, {name: image.numpy()}),
    }
    return found, str(why(quick))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with torch.no_grad():
        found, chosen = ways(asked.folder, asked.size, asked.threads)
        print(chosen)
        first = [np.concatenate([np.asarray(one).ravel() for one in way()]) for way in found.values()]
        for name, made in zip(found, first, strict=True):
            worst = float(np.abs(made - first[1]).max() / np.abs(first[1]).max())
            print(f"{name}: {worst:.1e} of the largest number from plain PyTorch")
            if worst > AGREE:
                raise SystemExit(f"{name} computes something else")
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
        for turn in range(WARM + asked.rounds):
            for name, way in found.items():
                begun = time.perf_counter(), time.process_time()
                way()
                if turn >= WARM:
                    times[name].append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    for kind, what in enumerate(("clock", "processor")):
        own = statistics.median(pair[kind] for pair in times["fast"])
        for name, pairs in times.items():
            seconds = [pair[kind] for pair in pairs]
            middle = statistics.median(seconds)
            least = f"fastest {1000 * min(seconds):.2f} ms"
            print(f"{what:9} {name:14} {1000 * middle:7.2f} ms, {middle / own:.2f} times that of fast; {least}")


if __name__ == "__main__":
    main()
