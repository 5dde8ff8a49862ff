"""Random small networks for the passes: chains and joins of what convolutional networks are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.bench.subject import settle
from zoo.kernels.comparing.sample_images import natural_images

ACTS = {
    "relu": nn.ReLU, "relu_": lambda: nn.ReLU(inplace=True), "relu6": nn.ReLU6, "silu": nn.SiLU, "hardswish": nn.Hardswish,
    "sigmoid": nn.Sigmoid, "leaky": lambda: nn.LeakyReLU(0.1), "gelu": nn.GELU, "tanh": nn.Tanh,
}  # fmt: skip


KINDS = (
    "conv", "conv", "conv1", "bn", "bn", "act", "act", "add", "cat", "pool", "avgpool", "depthwise", "grouped", "se", "pad",
    "bottleneck", "pointwise_pair",
)  # fmt: skip


@dataclass(frozen=True)
class Op:
    """One layer: its kind, which earlier values it reads (counted back from the last), and its own numbers."""

    kind: str
    reads: tuple[int, ...]
    channels: int
    kernel: int
    stride: int
    flag: bool
    act: str


def ops() -> st.SearchStrategy[list[Op]]:
    kinds = st.sampled_from(KINDS)
    one = st.builds(
        Op,
        kinds,
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.sampled_from([4, 6, 8, 12]),
        st.sampled_from([1, 3, 5]),
        st.sampled_from([1, 1, 2]),
        st.booleans(),
        st.sampled_from(sorted(ACTS)),
    )
    return st.lists(one, min_size=1, max_size=9)


class Random(nn.Module):
    """Runs the drawn layers; a layer that does not fit its input's shape is left out when the network is built."""

    def __init__(self, drawn: list[Op], in_channels: int, size: int, head: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList()
        self.plan: list[tuple[str, tuple[int, ...], Any]] = []
        shapes = [(in_channels, size, size)]
        for op in drawn:
            made = self._make(op, shapes)
            if made is not None:
                shapes.append(made)
        self.head = head
        c, h, w = shapes[-1]
        self.fc = nn.Linear(c * h * w if head == "flat" else c, 5, bias=seed % 2 == 0) if head != "map" else None
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.running_mean, 0, 0.3)
                nn.init.uniform_(module.running_var, 0.5, 2)
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.3)
        self.eval()

    def _add(self, kind: str, reads: tuple[int, ...], module: nn.Module | None = None, extra: Any = None) -> None:
        if module is not None:
            self.layers.append(module)
        self.plan.append((kind, reads, (len(self.layers) - 1 if module is not None else None, extra)))

    def _make(self, op: Op, shapes: list[tuple[int, int, int]]) -> tuple[int, int, int] | None:
        source = max(0, len(shapes) - 1 - op.reads[0])
        c, h, w = shapes[source]
        pad, out = op.kernel // 2, op.channels
        if op.kind in ("conv", "conv1", "grouped", "depthwise"):
            groups = {"depthwise": c, "grouped": 2 if c % 2 == 0 else 1}.get(op.kind, 1)
            out = c if op.kind == "depthwise" else out
            kernel, padding = (1, 0) if op.kind == "conv1" else (op.kernel, pad)
            conv = nn.Conv2d(c, out, kernel, op.stride, padding, groups=groups, bias=op.flag)
            self._add("module", (source,), conv)
            return (out, (h + 2 * padding - kernel) // op.stride + 1, (w + 2 * padding - kernel) // op.stride + 1)
        if op.kind == "bn":
            self._add("module", (source,), nn.BatchNorm2d(c))
            return (c, h, w)
        if op.kind == "act":
            self._add("act" if op.act == "relu_" else "module", (source,), ACTS[op.act]())
            return (c, h, w)
        if op.kind in ("pool", "avgpool"):
            if min(h, w) < 3:
                return None
            pool = nn.MaxPool2d(3, 2, 1, ceil_mode=op.flag) if op.kind == "pool" else nn.AvgPool2d(2, op.stride, ceil_mode=op.flag)
            self._add("module", (source,), pool)
            side = pool(torch.empty(1, 1, h, w, device="meta")).shape
            return (c, side[2], side[3])
        if op.kind == "se":
            gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, 2, 1), nn.ReLU(), nn.Conv2d(2, c, 1), nn.Sigmoid())
            self._add("gate", (source,), gate)
            return (c, h, w)
        if op.kind == "pad":
            self._add("pad", (source,), extra=(op.kernel // 2, 1, 0, op.stride))
            return (c, h + op.stride, w + op.kernel // 2 + 1)
        if op.kind == "bottleneck":
            branch = nn.Sequential(nn.Conv2d(c, 4, 1), nn.ReLU(), nn.Conv2d(4, c, 1, bias=op.flag), nn.BatchNorm2d(c))
            self._add("bottleneck", (source,), branch)
            return (c, h, w)
        if op.kind == "pointwise_pair":
            depthwise = [nn.Conv2d(c, c, 3, padding=1, groups=c), nn.BatchNorm2d(c), nn.ReLU6()]
            pair = nn.Sequential(*depthwise, nn.Conv2d(c, out, 1, bias=False), nn.BatchNorm2d(out))
            self._add("module", (source,), pair)
            return (out, h, w)
        other = max(0, len(shapes) - 1 - op.reads[1])
        fits = [i for i in range(len(shapes)) if shapes[i][1:] == (h, w) and (op.kind == "cat" or shapes[i][0] == c)]
        if other not in fits:
            other = fits[-1]
        self._add(op.kind, (source, other))
        return (c + shapes[other][0] if op.kind == "cat" else c, h, w)

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for kind, reads, (index, extra) in self.plan:
            inputs = [values[i] for i in reads]
            layer = self.layers[index] if index is not None else None
            if kind == "act":
                values.append(layer(inputs[0].clone()))  # in place on a copy: earlier values stay readable
            elif kind == "gate":
                values.append(inputs[0] * layer(inputs[0]))
            elif kind == "bottleneck":
                values.append(torch.relu(layer(inputs[0]) + inputs[0]))
            elif kind == "pad":
                values.append(F.pad(inputs[0], extra))
            elif kind == "add":
                values.append(inputs[0] + inputs[1])
            elif kind == "cat":
                values.append(torch.cat(inputs, 1))
            else:
                values.append(layer(inputs[0]))
        last = values[-1]
        if self.fc is None:
            return {"last": last, "all": values[1:]}
        return self.fc(last.flatten(1) if self.head == "flat" else last.mean((2, 3)))


def settled(cls: type[nn.Module], seed: int = 0) -> nn.Module:
    """Build a network whose BatchNorms have statistics of their own: fresh ones hide a fold that is wrong."""
    torch.manual_seed(seed)
    model = cls().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def calibrated(cls: type[nn.Module], device: str) -> nn.Module:
    """Build a network whose BatchNorms have nearly the statistics of maps of pictures, as trained ones have.

    With those of `settled` deep maps vanish or explode: an EfficientNetB0's answer depends on its image by 1e-14 of itself.
    """
    torch.manual_seed(0)
    model = cls().eval().to(device)
    settle(model, natural_images((8, 3, model.input_size, model.input_size), torch.device(device), seed=100))
    return model.cpu()
