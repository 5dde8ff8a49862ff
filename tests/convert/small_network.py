"""One small network twice: as a file of another framework would describe it, with that framework's conventions, and as ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from convert.graph import Graph, Node
from convert.source import Source, in_memory
from convert.steps import FlattenOrder, from_layout

PAIRS = {
    "stem": "conv1",
    "stem_bn": "bn1",
    "left": "left",
    "right": "right",
    "down": "block.conv1",
    "down_bn": "block.bn1",
    "wide": "block.conv2",
    "wide_bn": "block.bn2",
    "dense": "fc",
    "head": "head",
}


class Block(nn.Module):
    def __init__(self, stride_on: str, eps: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(10, 6, 1, stride=2 if stride_on == "1x1" else 1, bias=False)
        self.bn1 = nn.BatchNorm2d(6, eps=eps)
        self.conv2 = nn.Conv2d(6, 6, 3, stride=2 if stride_on == "3x3" else 1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(6, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))


class Same(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(F.pad(input, (0, 1, 0, 1)), self.weight, self.bias)  # of an even size at stride 2


class Ours(nn.Module):
    """Images (B, 3, 18, 18) or thereabouts to five logits."""

    def __init__(
        self,
        stride_on: str = "3x3",
        padding: str = "symmetric",
        eps: float = 1e-3,
        ceil_mode: bool = True,
        activation: nn.Module | None = None,
        swapped: bool = False,
        stem_bias: bool = False,
        classes: int = 5,
    ) -> None:
        super().__init__()
        stem = Same(3, 8, 3, 2, bias=stem_bias) if padding == "same" else nn.Conv2d(3, 8, 3, 2, padding=1, bias=stem_bias)
        self.conv1, self.bn1 = stem, nn.BatchNorm2d(8, eps=eps)
        self.activation = activation or nn.ReLU()
        self.pool = nn.MaxPool2d(2, 2, ceil_mode=ceil_mode)
        self.left, self.right = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 6, 3, padding=1)
        self.block = Block(stride_on, eps)
        self.fc = nn.Linear(6 * 3 * 3 if ceil_mode else 6 * 2 * 2, 12)
        self.head = nn.Linear(12, classes)
        self.swapped = swapped

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.activation(self.bn1(self.conv1(x))))
        x = torch.cat((self.right(x), self.left(x)) if self.swapped else (self.left(x), self.right(x)), 1)
        return self.head(self.fc(self.block(x.relu()).flatten(1)).relu())


def ours(**options: Any) -> Ours:
    """Build a network of random, lopsided numbers, the same for the same seed and shapes."""
    torch.manual_seed(3)
    network = Ours(**options).eval()
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.copy_(torch.rand(module.num_features) + 0.5)
                module.bias.copy_(torch.randn(module.num_features) + 1.5)
                module.running_mean.copy_(torch.randn(module.num_features))
                module.running_var.copy_(torch.rand(module.num_features) * 0.3 + 0.01)
    return network


def theirs(network: Ours, eps: float = 1e-3, softmax: bool = True) -> Source:
    """Describe a network as the file of a framework with true convolution, HWIO kernels and HWC flattening describes it."""
    modules: Mapping[str, Any] = dict(network.named_modules())
    tensors: dict[str, np.ndarray] = {}
    for their_name, our_name in PAIRS.items():
        for leaf, tensor in modules[our_name].state_dict().items():
            array = tensor.numpy().copy()
            if leaf == "weight" and array.ndim == 4:
                array = array[:, :, ::-1, ::-1].transpose(2, 3, 1, 0)
            if leaf == "weight" and array.ndim == 2:
                array = (FlattenOrder(6, 3, 3, "hwc").undo(array) if our_name == "fc" else array).T
            if leaf != "num_batches_tracked":
                tensors[f"{their_name}.{leaf}"] = array

    def conv(name: str, read: str, stride: tuple[int, ...] = (1, 1), pads: Any = (0, 0, 0, 0)) -> Node:
        return Node(name, "conv", (read,), {"layout": "HWIO", "convention": "convolution", "stride": stride, "pads": pads})

    nodes = [
        Node("images", "input", (), {"layout": "nhwc", "shape": (None, None, 3)}),
        conv("stem", "images", (2, 2), "same_upper" if isinstance(network.conv1, Same) else (1, 1, 1, 1)),
        Node("stem_bn", "norm", ("stem",), {"eps": eps}),
        Node("stem_act", "relu", ("stem_bn",)),
        Node("pool", "maxpool", ("stem_act",), {"kernel": (2, 2), "stride": (2, 2), "rounding": "ceil"}),
        conv("left", "pool"),
        Node("around", "pad", ("pool",), {"pads": (1, 1, 1, 1), "value": 0.0}),
        conv("right", "around"),
        Node("both", "concat", ("left", "right")),
        Node("both_act", "relu", ("both",)),
        conv("down", "both_act", network.block.conv1.stride),
        Node("down_bn", "norm", ("down",), {"eps": eps}),
        Node("down_act", "relu", ("down_bn",)),
        conv("wide", "down_act", network.block.conv2.stride, (1, 1, 1, 1)),
        Node("wide_bn", "norm", ("wide",), {"eps": eps}),
        Node("flat", "flatten", ("wide_bn",), {"order": "hwc"}),
        Node("dense", "dense", ("flat",), {"layout": "IO"}),
        Node("dense_act", "relu", ("dense",)),
        Node("head", "dense", ("dense_act",), {"layout": "IO"}),
        Node("probabilities", "softmax", ("head",)),
    ]
    stored = {}
    for name, array in tensors.items():
        node = next(node for node in nodes if node.name == name.rpartition(".")[0])
        steps = ()
        if name.endswith("weight") and array.ndim > 1:
            steps = from_layout("conv" if array.ndim == 4 else "linear", node.attrs["layout"], array.shape)
        stored[name] = in_memory(name, array, *steps, convention="convolution" if array.ndim == 4 else None)
    graph = Graph(tuple(nodes), ("probabilities" if softmax else "head",))
    return Source(Path("theirs.h5"), "by hand", "by hand", stored, graph=graph, flatten="hwc")


def images(count: int = 2) -> np.ndarray:
    """Make images on 0..255 that look the same from no side."""
    return np.random.default_rng(7).uniform(0, 255, (count, 3, 18, 18))
