"""Learn a sine with a small recurrent network, on a CPU or a GPU with the same code, and time its steps.

    python recipes/recurrent.py --picture recurrent.png      # predict a sine from its last twenty values, as a picture
    python recipes/recurrent.py --times                      # steps of the CPU, eager and compiled, and a GPU's captured one beside them

Hidden sizes, batches and lengths of the table are those at which a GPU was said to be slower. Medians of steps in turns; the CPU has one
thread, which is its fastest at these sizes. Data are made, and stay on the device.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zoo import fast, fast_step

INPUT, HIDDEN, LENGTH, RATE, EPOCHS = 7, 6, 20, 0.1, 200
SIZES = ((6, 1), (6, 32), (64, 32), (256, 32), (256, 256))
"""Hidden size and batch, of sequences of `LENGTH`."""


class Loop(nn.Module):
    """An Elman network, written as a loop: ``h = tanh(W [x, h] + b)``, and a linear layer of the last h's."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.hidden, self.cell, self.out = hidden, nn.Linear(INPUT + hidden, hidden), nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a value (N, L, 1) for each of sequences (N, L, C)."""
        h = x.new_zeros(x.shape[0], self.hidden)
        found = []
        for step in x.unbind(1):
            h = torch.tanh(self.cell(torch.cat([step, h], 1)))
            found.append(self.out(h))
        return torch.stack(found, 1)


class Layer(nn.Module):
    """The same by `nn.RNN`, `nn.LSTM` or `nn.GRU`."""

    def __init__(self, kind: Callable[..., nn.RNNBase] = nn.RNN, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.body, self.out = kind(INPUT, hidden, batch_first=True), nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a value (N, L, 1) for each of sequences (N, L, C)."""
        return self.out(self.body(x)[0])


def sines(count: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return sequences (count, 20, 7) of a sine's last seven values, and each one's next value (count, 20, 1)."""
    generator = torch.Generator().manual_seed(0)
    phases = 6.3 * torch.rand(count, 1, generator=generator)
    values = torch.sin(phases + 0.3 * torch.arange(LENGTH + INPUT))
    windows = values.unfold(1, INPUT, 1)
    return windows[:, :LENGTH].contiguous().to(device), windows[:, 1:, -1:].contiguous().to(device)


def train(network: nn.Module, x: Tensor, y: Tensor, epochs: int = EPOCHS) -> list[float]:
    """Train by `fast_step` and return the loss of each epoch."""
    model = fast(network.train(), train=True, example=x, dtype=torch.float32, progress=False)
    step = fast_step(model, nn.MSELoss(), torch.optim.SGD(network.parameters(), RATE), dtype=None)
    return [float(loss) for loss in [step(x, y) for _ in range(epochs)]]


def picture(path: Path) -> None:
    """Draw the sine and what a trained network predicts of it."""
    from zoo.finetuning.drawing import Curve, chart
    from zoo.images.canvas import save

    torch.manual_seed(0)
    network = Loop()
    x, y = sines(32)
    losses = train(network, x, y)
    with torch.no_grad():
        found = network(x[:1])[0, :, 0]
    curves = [Curve("the sine", [*enumerate(y[0, :, 0].tolist())]), Curve("predicted", [*enumerate(found.tolist())])]
    save(
        chart(f"A loop of {HIDDEN} hidden values after {EPOCHS} epochs: loss {losses[0]:.2f} to {losses[-1]:.3f}", curves, "time step"),
        path,
    )
    print(f"{path}: loss {losses[0]:.3f} to {losses[-1]:.4f}")


def _milliseconds(call: Callable[[], object], device: str) -> float:
    """Return how long ten calls took, for each."""
    begun = time.perf_counter()
    for _ in range(10):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return 100 * (time.perf_counter() - begun)


def _medians(calls: dict[str, tuple[Callable[[], object], str]], rounds: int = 30) -> dict[str, float]:
    """Return the median milliseconds of calls that take turns."""
    times: dict[str, list[float]] = {way: [] for way in calls}
    for call, _ in calls.values():
        for _ in range(5):
            call()
    for _ in range(rounds):
        for way, (call, device) in calls.items():
            times[way].append(_milliseconds(call, device))
    return {way: median(several) for way, several in times.items()}


def _step(make: Callable[[], nn.Module], batch: int, way: str) -> tuple[Callable[[], object], str]:
    device = "cuda" if way == "captured" else "cpu"
    torch.manual_seed(0)
    network = make().to(device).train()
    x, y = sines(batch, device)
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    loss = nn.MSELoss()
    if way in ("captured", "fast"):
        tune = "full" if way == "fast" else "quick"
        model = fast(network, train=True, tune=tune, example=x, dtype=torch.float32, progress=False)
        step = fast_step(model, loss, optimizer, dtype=None)
        return lambda: step(x, y), device
    run: Any = torch.compile(network) if way == "compiled" else network

    def call() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(run(x), y).backward()
        optimizer.step()

    return call, device


def times() -> None:
    """Print a table of steps: of the CPU, and of the GPU if there is one."""
    torch.set_num_threads(1)
    ways = ("eager", "compiled", "fast")
    where = "one thread of the CPU"
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        ways, where = (*ways, "captured"), torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}, float32, sequences of {LENGTH}, milliseconds of a step")
    last = ["CPU over GPU"] if "captured" in ways else []
    said = {"eager": "CPU eager", "compiled": "CPU torch.compile", "fast": "CPU fast, full", "captured": "GPU captured"}
    print(f"| network | hidden, batch | {' | '.join([*(said[way] for way in ways), *last])} |\n|---|{'--:|' * (1 + len(ways) + len(last))}")
    for name, kind in {"loop": None, "nn.RNN": nn.RNN, "nn.LSTM": nn.LSTM, "nn.GRU": nn.GRU}.items():
        for hidden, batch in SIZES:

            def make(kind: type[nn.RNNBase] | None = kind, hidden: int = hidden) -> nn.Module:
                return Loop(hidden) if kind is None else Layer(kind, hidden)

            found = _medians({way: _step(make, batch, way) for way in ways})
            shown = [f"{found[way]:.3f}" for way in ways]
            if last:
                shown.append(f"{min(value for way, value in found.items() if way != 'captured') / found['captured']:.1f}")
            print(f"| {name} | {hidden}, {batch} | {' | '.join(shown)} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw or time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, help="where to write the picture")
    parser.add_argument("--times", action="store_true", help="print the table, of the GPU too if there is one; takes minutes")
    options = parser.parse_args(arguments)
    if not (options.picture or options.times):
        parser.error("ask for --picture FILE or --times")
    if options.picture:
        picture(options.picture)
    if options.times:
        times()


if __name__ == "__main__":
    main()
