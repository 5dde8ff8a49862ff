"""Which layer of a network to dream of when nobody names one."""

from __future__ import annotations

import re
from collections import Counter

from zoo.extraction.taps import Places
from zoo.networks.model import Model

USUAL = "stride/16"
LAYERS = {
    "AlexNet": "relu4",
    "CIFARDenseNet": "features.denseblock2",
    "CIFARResNet": "layer2",
    "DenseNet": "features.denseblock3",
    "GoogLeNet": "inception4c",
    "InceptionV3": "Mixed_6b",
    "ResNet": "layer3",
    "SqueezeNet": "fire8",
    "VGG": "relu5_1",
}
"""By family: layers whose dreams are known to look good. GoogLeNet's is that of the original program; every other family takes the last map
at stride 16."""


def usual_layer(places: Places) -> str:
    """Name the layer to dream of: that of the family, else the last map at stride 16, else the block in the middle.

    The blocks are those of the longest row of numbered ones, a transformer's layers for example.
    """
    network: Model = places.network
    chosen = LAYERS.get(network.family().__name__)
    if chosen in places.names or chosen in places.paper:
        return chosen
    if network.first_patch is None and 16 in places.strides:
        return USUAL
    body = list(places.trace.outputs)[: places.trace.body_end]
    numbered = {name: found for name in body if (found := re.fullmatch(r"(.*?\D|)(\d+)", name))}
    if not numbered:
        return "body"
    row, count = Counter(found[1] for found in numbered.values()).most_common(1)[0]
    return [name for name, found in numbered.items() if found[1] == row][count // 2]
