"""Time detectors and segmenters: fast(model) beside plain PyTorch, torchvision's own network and torch.compile, in turns, medians.

    python recipes/detection_speed.py                       on the current GPU, bfloat16
    python recipes/detection_speed.py --device cpu --tiny   small images and few rounds, to see that it runs
    python recipes/detection_speed.py --json figures.json   the figures as JSON too
    python recipes/detection_speed.py --profile 12          and what a call of fast(model) spends its time on, the 12 longest

Each case is a batch of photographs of one size, already on the device. All answer before any is timed, and what they find is compared
with the plain network in float32. A figure is the median of the rounds; in each round every contestant runs once. Weights are drawn, and
the last layers scaled so that many boxes are found, as trained networks find them. A torchvision detector is timed with its boxes chosen.
Of a Darknet network and of a segmenter the maps are timed, which are what `model(images)` returns.

The rivals are as strong as they can be: channels_last; a network of tensors alone in the dtype itself, without autocast; torch.compile as
one graph where the network allows that; and beside our own detector torchvision's, with the same tensors. The ratio is over the fastest.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from zoo import fast
from zoo.catalogue import any_class

CASES: dict[str, tuple[int, int, int]] = {
    "FasterRCNN_ResNet50_FPN": (8, 800, 1333),
    "RetinaNet_ResNet50_FPN": (8, 800, 1333),
    "SSDlite320_MobileNet_V3_Large": (32, 320, 320),
    "DeepLabV3_ResNet50": (8, 520, 520),
    "YOLOv3": (32, 416, 416),
    "YOLOv4Tiny": (32, 416, 416),
}
"""Batch, height and width by network."""
TINY = (2, 96, 128)
SPREAD = 1.5
"""Standard deviation of the logits of the drawn networks."""


def lively(network: Any, photographs: list[Tensor]) -> None:
    """Scale the last layers of a drawn detector so that its classes differ."""
    hooks: list[Any] = []

    def scaled(layer: Any, arguments: Any, output: Tensor) -> Tensor | None:
        found = float(output.float().std())
        if found <= SPREAD * 1.001 and getattr(layer, "scaled", False):
            return None
        layer.weight.data *= SPREAD / max(found, 1e-6)
        layer.scaled = True
        return layer(*arguments)

    scores = [name for name in network.classifiers if not name.endswith("bbox_pred")]
    hooks += [network.get_submodule(name).register_forward_hook(scaled) for name in scores]
    with torch.no_grad():
        network(photographs)
    for hook in hooks:
        hook.remove()


def made(name: str, batch: int, height: int, width: int, device: str) -> tuple[nn.Module, Any]:
    """Build a network on the device, and what it is called with."""
    torch.manual_seed(0)
    network: Any = any_class(name)().eval().to(device)
    random = torch.Generator().manual_seed(1)
    images = torch.rand(batch, 3, height, width, generator=random).to(device)
    if not hasattr(network, "fast_parts"):
        return network, images.contiguous(memory_format=torch.channels_last)
    photographs = list(images)
    lively(network, photographs[:1])
    return network, photographs


def answer(found: Any) -> Any:
    """Return the part of an answer that is compared."""
    return found["out"] if isinstance(found, dict) else found


def rivals(name: str, network: nn.Module, given: Any, device: str, dtype: torch.dtype, compiled: bool) -> dict[str, Callable[[], Any]]:
    """Return the other ways to compute a network, each as strong as it can be."""
    last = torch.channels_last
    if isinstance(given, Tensor):  # tensors alone: the whole in the dtype, and no autocast
        eager = copy.deepcopy(network).to(dtype, memory_format=last)  # pyright: ignore[reportCallIssue]
        narrow = given.to(dtype)
        found: dict[str, Callable[[], Any]] = {"eager": lambda: answer(eager(narrow))}
        if compiled:
            graph: Any = torch.compile(eager, fullgraph=True)
            found["compile"] = lambda: answer(graph(narrow))
        return found

    def cast(model: Any) -> Callable[[], Any]:
        def call() -> Any:
            with torch.autocast(device.partition(":")[0], dtype, enabled=dtype != torch.float32):
                return model(given)

        return call

    eager = copy.deepcopy(network).to(memory_format=last)  # pyright: ignore[reportCallIssue]
    found = {"eager": cast(eager)}
    builder = getattr(torchvision.models.detection, name.lower(), None)
    if builder is not None:
        theirs = builder(weights=None, weights_backbone=None).eval().to(device)
        theirs.load_state_dict(network.state_dict())
        found["torchvision"] = cast(theirs.to(memory_format=last))
    if compiled:  # in pieces, for what is kept depends on values
        found["compile"] = cast(torch.compile(copy.deepcopy(eager)))
    return found


def agreement(found: Any, expected: Any) -> float:
    """Return which part of the expected answers was found: classes of pixels, boxes by their number, or of maps 1 less their distance."""
    if isinstance(expected, Tensor):
        return float((found.argmax(1) == expected.argmax(1)).float().mean())
    if isinstance(expected[0], Tensor):
        pairs = zip(found, expected, strict=True)
        return 1 - max(float((one.float() - other).norm() / other.norm()) for one, other in pairs)
    pairs = [(len(one["boxes"]), len(other["boxes"])) for one, other in zip(found, expected, strict=True)]
    return sum(min(pair) for pair in pairs) / max(1, sum(max(pair) for pair in pairs))


def timed(call: Callable[[], Any], device: str) -> float:
    """Return the milliseconds of one call."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def profiled(call: Callable[[], Any], most: int) -> list[str]:
    """Return a call's kernels by their time, the longest ones, and how long the GPU had nothing to do."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        ms = timed(call, "cuda")
    rows = sorted(found.key_averages(), key=lambda row: -row.device_time_total)
    busy = sum(row.device_time_total for row in rows) / 1e3
    lines = [f"{ms:.2f} ms with the profiler, in {sum(row.count for row in rows)} kernels and copies of {busy:.2f} ms together"]
    return lines + [f"{row.device_time_total / 1e3:8.2f} ms {row.count:5} x {row.key[:100]}" for row in rows[:most]]


@torch.no_grad()
def measure(
    name: str, shape: tuple[int, int, int], device: str, dtype: torch.dtype, rounds: int, compiled: bool, profile: int = 0
) -> dict[str, Any]:
    """Time one network's contestants in turns."""
    network, given = made(name, *shape, device)
    expected = answer(network(given))
    quick = fast(network, device, dtype, example=(given,))
    contestants = {"fast": lambda: answer(quick(given))} | rivals(name, network, given, device, dtype, compiled)
    agree, failed = {}, {}
    for which, one in list(contestants.items()):
        try:
            agree[which] = agreement(one(), expected)
            one()
        except Exception as error:  # a rival that can't is told, and is none
            if which == "fast":
                raise
            failed[which] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            del contestants[which]
    times: dict[str, list[float]] = {which: [] for which in contestants}
    for number in range(rounds):
        order = list(contestants) if number % 2 else list(contestants)[::-1]
        for which in order:
            times[which].append(timed(contestants[which], device))
    medians = {which: statistics.median(some) for which, some in times.items()}
    rival = min(value for which, value in medians.items() if which != "fast")
    covers = str(quick.unchanged)
    return {
        "network": name, "shape": shape, "ms": medians, "agreement": agree, "failed": failed, "ratio": rival / medians["fast"],
        "covers": covers, "profile": profiled(contestants["fast"], profile) if profile and device.startswith("cuda") else [],
    }  # fmt: skip


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"some of {', '.join(CASES)}; all if left out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="bfloat16 on a GPU and float32 on a CPU if left out")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="small images and two rounds")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="print the longest kernels of a call, on a GPU")
    parser.add_argument("--json", type=Path, default=None, help="write the figures there, too")
    asked = parser.parse_args()
    dtype = getattr(torch, asked.dtype or ("bfloat16" if asked.device.startswith("cuda") else "float32"))
    machine = torch.cuda.get_device_name() if asked.device.startswith("cuda") else "CPU"
    print(f"{machine}, torch {torch.__version__}, {dtype}")
    found: list[dict[str, Any]] = []
    for name in asked.networks or CASES:
        shape = TINY if asked.tiny else CASES[name]
        found.append(measure(name, shape, asked.device, dtype, 2 if asked.tiny else asked.rounds, not asked.no_compile, asked.profile))
        row = found[-1]
        figures = ", ".join(f"{which} {value:.2f} ms (agrees {row['agreement'][which]:.3f})" for which, value in row["ms"].items())
        print(f"{name} {'x'.join(map(str, shape))}: {figures}; {row['ratio']:.2f}x the fastest rival", flush=True)
        for which, why in row["failed"].items():
            print(f"  {which} can't: {why}")
        if row["covers"]:
            print(f"  {row['covers']}")
        print(*(f"  {line}" for line in row["profile"]), sep="\n", end="\n" if row["profile"] else "")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "dtype": str(dtype), "rows": found}, indent=1))


if __name__ == "__main__":
    main()
