"""Time style networks: stylising 640x640, 1080p and 4K, and a step of training, each way beside eager PyTorch, turn by turn.

    python recipes/style_speed.py                                   # on the GPU: 32 channels, the sizes of the figures
    python recipes/style_speed.py --device cpu --sizes 96x128 --channels 8 --batch 2 --side 64 --rounds 3   # anywhere

Prints medians in milliseconds as lines of a table and, with `--json FILE`, writes them. A way whose output differs from eager float32 by
more than is said beside it is named, not timed: `worst` is the greatest difference in levels of 0..255.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from zoo.stylizing.learning import Learner, Weights, seeded  # noqa: E402
from zoo.stylizing.losses import TAPS, LossNetwork, StyleLoss, Taps, gram  # noqa: E402
from zoo.stylizing.networks import Johnson  # noqa: E402

Way = Callable[[], Any]
TOLERATED = {"float32": 0.5, "half": 12.0}
"""Levels of 0..255 by which a painting may differ from eager float32's, its worst pixel."""


def measure(ways: dict[str, Way], rounds: int, device: str) -> dict[str, float]:
    """Time every way in turn, several rounds, and return the medians in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3):
        for way in ways.values():
            way()
    for _ in range(rounds):
        for name, way in ways.items():
            _wait(device)
            begun = time.perf_counter()
            way()
            _wait(device)
            times[name].append(1000 * (time.perf_counter() - begun))
    return {name: statistics.median(found) for name, found in times.items()}


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@contextmanager
def tf32(on: bool) -> Any:
    """Allow TensorFloat-32 or not."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def graphed(network: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Capture a network in a CUDA graph at one shape."""
    held = x.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            network(held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        out = network(held)

    def run(image: Tensor) -> Tensor:
        held.copy_(image)
        graph.replay()
        return out

    return run


def painting(size: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time one picture by every way that works here."""
    height, width = (int(side) for side in size.split("x"))
    device = options.device
    network = seeded(Johnson, 0, channels=options.channels).to(device).eval()
    x = torch.rand(1, 3, -(-height // 4) * 4, -(-width // 4) * 4, device=device) * 255
    with torch.no_grad(), tf32(False):
        right = network(x)
    ways: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {}
    failed: dict[str, str] = {}

    def add(name: str, kind: str, make: Callable[[], Callable[[Tensor], Tensor]]) -> None:
        try:
            way = make()
            with torch.no_grad():
                way(x)
            ways[name] = way, kind
        except Exception as error:  # whatever a compiler or a kernel stumbles over: the others are timed
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"

    half = torch.float16 if device.startswith("cuda") else torch.bfloat16

    def halved(memory: torch.memory_format) -> nn.Module:
        network: Any = seeded(Johnson, 0, channels=options.channels)
        return network.to(device, half, memory_format=memory).eval()

    add("eager", "float32", lambda: network)
    add("eager half", "half", lambda: _casting(halved(torch.contiguous_format), half))
    add("eager half channels_last", "half", lambda: _casting(halved(torch.channels_last), half, torch.channels_last))
    if not options.no_compile:
        add("compile", "float32", lambda: torch.compile(network, mode="max-autotune-no-cudagraphs"))
        add(
            "compile half channels_last",
            "half",
            lambda: _casting(torch.compile(halved(torch.channels_last), mode="max-autotune-no-cudagraphs"), half, torch.channels_last),
        )
    if device.startswith("cuda"):
        add("graph", "float32", lambda: graphed(network, x))
        if not options.no_compile:
            compiled = _casting(torch.compile(halved(torch.channels_last), mode="max-autotune-no-cudagraphs"), half, torch.channels_last)
            add("graph of compile half channels_last", "half", lambda: graphed(_Module(compiled), x))
    if not options.no_fast:

        def kernels(**told: Any) -> Callable[[Tensor], Tensor]:
            from zoo.kernels import fast

            return fast(seeded(Johnson, 0, channels=options.channels).eval(), device, **told)

        add("fast", "half", kernels)
        if device.startswith("cuda"):
            add("fast half", "half", lambda: kernels(dtype=torch.float16))
    rows: list[dict[str, Any]] = []
    with torch.no_grad(), tf32(True):
        worst = {name: float((way(x).float() - right).abs().max()) for name, (way, _) in ways.items()}
        timed = {name: (lambda way=way: way(x)) for name, (way, kind) in ways.items() if worst[name] <= options.tolerated or kind == "half"}
        for name, ms in measure(timed, options.rounds, device).items():
            rows.append({"what": f"paint {size}", "way": name, "ms": ms, "worst": worst[name]})
    rows += [{"what": f"paint {size}", "way": name, "failed": why} for name, why in failed.items()]
    return rows


class _Module(nn.Module):
    def __init__(self, called: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.called = called

    def forward(self, x: Tensor) -> Tensor:
        return self.called(x)


def _casting(network: Any, dtype: torch.dtype, memory: torch.memory_format = torch.contiguous_format) -> Callable[[Tensor], Tensor]:
    return lambda x: network(x.to(dtype, memory_format=memory))


def training(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time a step: as pytorch/examples computes it in bfloat16, ours, and ours compiled. Weights are random, which costs the same."""
    from zoo import catalogue

    device, batch, side = options.device, options.batch, options.side
    model = getattr(catalogue, options.loss_network)().eval()
    measured = LossNetwork(copy.deepcopy(list(model.features)), TAPS[options.loss_network]).to(device)
    photographs = torch.rand(batch, 3, side, side, device=device) * 255
    style = torch.rand(1, 3, side, side, device=device) * 255

    def learner(compile: bool) -> Learner:
        loss = StyleLoss(measured, [style])
        return Learner(
            seeded(Johnson, 0, channels=options.channels).to(device), loss, Weights(), lr=1e-3, steps=1000, half=True, compile=compile
        )

    rows: list[dict[str, Any]] = []
    usual = _usual(model, TAPS[options.loss_network], photographs, style, options.channels)
    ways: dict[str, Way] = {"eager, as pytorch/examples": usual}
    plain = learner(False)
    ways["train_style"] = lambda: plain.step(0, photographs)
    if not options.no_compile:
        compiled = learner(True)
        try:
            compiled.step(0, photographs)
            ways["train_style(compile=True)"] = lambda: compiled.step(0, photographs)
        except Exception as error:  # as above
            rows.append({"what": "train", "way": "train_style(compile=True)", "failed": f"{type(error).__name__}: {str(error)[:200]}"})
    for name, ms in measure(ways, options.rounds, device).items():
        rows.append({"what": f"train {batch}x{side}, {options.loss_network}", "way": name, "ms": ms, "images_s": 1000 * batch / ms})
    return rows


def _usual(model: nn.Module, taps: Taps, photographs: Tensor, style: Tensor, channels: int) -> Way:
    """Return a step as pytorch/examples does it: maps as they come, and both batches through the whole loss network."""
    network = seeded(Johnson, 0, channels=channels).to(photographs.device)
    layers = copy.deepcopy(list(model.features)[: max(taps.style) + 1])  # pyright: ignore[reportArgumentType]
    layers = [layer.to(photographs.device, memory_format=torch.contiguous_format).requires_grad_(False) for layer in layers]
    mean, std = (torch.tensor(values, device=photographs.device).view(1, 3, 1, 1) for values in (taps.mean, taps.std))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

    def maps(x: Tensor) -> dict[int, Tensor]:
        x, found = (x - mean) / std, {}
        for number, layer in enumerate(layers):
            x = layer(x)
            if number in taps.style or number == taps.content:
                found[number] = x
        return found

    with torch.no_grad():
        targets = {number: gram(x) for number, x in maps(style).items()}

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(photographs.device.type, torch.bfloat16):
            painted, wanted = maps(network(photographs)), maps(photographs)
        loss = torch.nn.functional.mse_loss(painted[taps.content].float(), wanted[taps.content].float())
        for number in taps.style:
            loss = loss + torch.nn.functional.mse_loss(gram(painted[number]), targets[number].expand(len(photographs), -1, -1))
        loss.backward()
        optimizer.step()

    return step


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", default="640x640,1080x1920,2160x3840", help="of pictures, with commas; none times training alone")
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--loss-network", default="VGG16", choices=list(TAPS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tolerated", type=float, default=TOLERATED["float32"])
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-fast", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    machine = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    sizes = [] if options.sizes == "none" else options.sizes.split(",")
    rows = [row for size in sizes for row in painting(size, options)] + training(options)
    print(f"{machine}, torch {torch.__version__}, {options.channels} channels, medians of {options.rounds}")
    for row in rows:
        shown = row.get("failed") or f"{row['ms']:9.2f} ms"
        more = f"  worst {row['worst']:.2f} of 255" if "worst" in row else f"  {row['images_s']:.0f} images/s" if "images_s" in row else ""
        print(f"{row['what']:24} {row['way']:38} {shown}{more}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
