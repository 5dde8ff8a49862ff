"""Which layer a convolution is: what passes, candidates and merges ask of a step."""

from __future__ import annotations

from zoo.kernels.passes.graph import Node


def is_1x1(node: Node) -> bool:
    """Tell whether a node is a dense 1x1 convolution without padding, at any stride."""
    a = node.attrs
    return node.op == "conv" and a["weight"].shape[2:] == (1, 1) and a["padding"] == (0, 0, 0, 0) and a["groups"] == 1


def is_pointwise(node: Node) -> bool:
    """Tell whether a node is a dense 1x1 convolution of every pixel."""
    return is_1x1(node) and node.attrs["stride"] == (1, 1)


def is_depthwise(node: Node) -> bool:
    """Tell whether a node is a depthwise convolution with one output channel per input channel."""
    if node.op != "conv":
        return False
    groups = node.attrs["groups"]
    return groups > 1 and groups == node.inputs[0].shape[1] == node.shape[1]


def is_stem(node: Node) -> bool:
    """Tell whether a node is the convolution that reads the image, of at most four channels."""
    if node.op != "conv":
        return False
    image, a = node.inputs[0], node.attrs
    plain = len(node.inputs) == 1 and a["groups"] == 1 and a["dilation"] == (1, 1) and a.get("scale") is None
    return image.op == "input" and image.shape[1] <= 4 and plain
