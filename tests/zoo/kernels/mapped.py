"""Small networks whose maps come and go in the ways that plans must get right, and their programs."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans.arena import Watched
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.choose import guess
from zoo.kernels.tuning.steps import ATEN, COMPUTED, Candidate, Setting


class Joined(nn.Module):
    """Shortcuts, a concatenation, a view that outlives its map's name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 24, 1)
        self.narrow, self.back = nn.Conv2d(24, 8, 3, padding=1), nn.Conv2d(8, 24, 1)
        self.last = nn.Conv2d(32, 5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.first(x))
        wide = self.wide(x)
        narrow = torch.relu(self.narrow(torch.relu(wide)))
        wide = torch.relu(self.back(narrow) + wide)
        y = self.last(torch.cat([narrow, wide], 1))
        return y.flatten(2), y.mean((2, 3))


class Bottleneck(nn.Module):
    """A wide map, which is read by the next layer and by the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.narrow = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 24, 1), nn.Conv2d(24, 12, 1)
        self.inner, self.back = nn.Conv2d(12, 16, 3, padding=1), nn.Conv2d(16, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.relu(self.wide(torch.relu(self.first(x))))
        return torch.relu(self.back(torch.relu(self.inner(torch.relu(self.narrow(wide))))) + wide)


class Gated(nn.Module):
    """A map that makes its own gate, and is read for the last time where that is applied."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.first, self.inner, self.gate = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        y = self.inner(x)
        z = torch.relu(y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True))) + x)
        out = self.last(z)
        return out + y[:, :4, 1:-1, 1:-1] if self.again else out


class Collecting(Watched):
    """Lets go of what Triton's interpreter keeps until it is collected; of what was there before, nothing is looked through each time."""

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty.memory_format:
            gc.collect()
        return super().__torch_dispatch__(func, types, args, kwargs)


def program(network: nn.Module, x: Tensor, theirs: Callable[[Node], bool] = lambda node: False) -> Program:
    """Make a program of guesses; `theirs` says which steps are left to PyTorch's own operators."""
    setting = Setting(x.device, torch.float32)
    graph, places = understand(network, (x,), {})
    chosen = {node: Candidate(ATEN) if theirs(node) else guess(node, places, setting) for node in graph.steps() if node.op in COMPUTED}
    return Program(graph, places, chosen, setting, Weights())


def counted(graph: Graph) -> Counter[str]:
    """Count the steps of a graph by their kinds, those that no pass knows by PyTorch's operators."""
    return Counter(node.attrs["func"]._overloadpacket.__name__ if node.op == "aten" else node.op for node in graph.steps())
