"""A Caffe file of real weights: the CIFAR ResNet-20 of akamaster with the deviation of its images folded in, for RGB of 0..255 less a mean.

Caffe has no shortcut that pads with zeros; a projection whose kernel is ones where the channels go, and a BatchNorm that does nothing, is
the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from seeds_caffe import Layer, prototxt, v2

STD = np.array([0.229, 0.224, 0.225], "f4")
FACTOR = np.array([999.98], "f4")
"""By which Caffe's moving averages are too large."""
STATISTICS = ("running_mean", "running_var")


class _Net:
    def __init__(self, state: dict[str, np.ndarray]) -> None:
        self.state, self.layers = state, list[Layer]()

    def put(self, name: str, kind: str, bottoms: list[str], blobs: list[np.ndarray], **params: dict[str, object]) -> str:
        self.layers.append(Layer(name, kind, bottoms, [name], blobs, params))
        return name

    def conv(self, name: str, bottom: str, weight: np.ndarray, stride: int) -> str:
        said = {
            "num_output": weight.shape[0],
            "bias_term": False,
            "pad": weight.shape[2] // 2,
            "kernel_size": weight.shape[2],
            "stride": stride,
        }
        return self.put(name, "Convolution", [bottom], [weight], convolution_param=said)

    def norm(self, name: str, bottom: str, mean: np.ndarray, variance: np.ndarray, scale: np.ndarray, shift: np.ndarray) -> str:
        said = {"use_global_stats": True, "eps": 1e-5}
        normed = self.put(name, "BatchNorm", [bottom], [mean * FACTOR, variance * FACTOR, FACTOR], batch_norm_param=said)
        return self.put(f"{name}_scale", "Scale", [normed], [scale, shift], scale_param={"bias_term": True})

    def both(self, name: str, bottom: str, conv: str, norm: str, stride: int = 1) -> str:
        made = self.conv(f"{name}_conv", bottom, self.state[f"{conv}.weight"], stride)
        return self.norm(f"{name}_bn", made, *(self.state[f"{norm}.{leaf}"] for leaf in (*STATISTICS, "weight", "bias")))

    def relu(self, name: str, bottom: str) -> str:
        return self.put(name, "ReLU", [bottom], [])

    def padded(self, name: str, bottom: str, channels: int) -> str:
        """Halve the map and pad its channels with zeros on both sides."""
        weight = np.zeros((channels, channels // 2, 1, 1), "f4")
        weight[range(channels // 4, 3 * channels // 4), range(channels // 2)] = 1
        ones, nothing = np.ones(channels, "f4"), np.zeros(channels, "f4")
        return self.norm(f"{name}_bn", self.conv(name, bottom, weight, 2), nothing, ones - np.float32(1e-5), ones, nothing)


def write(state: dict[str, np.ndarray], path: Path) -> Path:
    """Write the network of a state dict of ResNet20, and its description beside it, which does not say how images are prepared."""
    net = _Net({**state, "conv1.weight": state["conv1.weight"] / (255 * STD)[None, :, None, None]})
    x = net.relu("first_relu", net.both("first", "data", "conv1", "bn1"))
    for group, channels in enumerate((16, 32, 64)):
        for block in range(3):
            ours, name = f"layer{group + 1}.{block}", f"group{group}_block{block}"
            stride = 2 if group and not block else 1
            y = net.relu(f"{name}_relu0", net.both(f"{name}_0", x, f"{ours}.conv1", f"{ours}.bn1", stride))
            y = net.both(f"{name}_1", y, f"{ours}.conv2", f"{ours}.bn2")
            x = net.padded(f"{name}_proj", x, channels) if stride == 2 else x
            x = net.relu(f"{name}_relu1", net.put(f"{name}_sum", "Eltwise", [x, y], [], eltwise_param={"operation": "SUM"}))
    x = net.put("pool", "Pooling", [x], [], pooling_param={"pool": "AVE", "global_pooling": True})
    x = net.put("fc", "InnerProduct", [x], [state["fc.weight"], state["fc.bias"]], inner_product_param={"num_output": 10})
    net.put("prob", "Softmax", [x], [])
    path.write_bytes(v2(net.layers))
    path.with_suffix(".prototxt").write_text(prototxt(net.layers, (1, 3, 32, 32)))
    return path
