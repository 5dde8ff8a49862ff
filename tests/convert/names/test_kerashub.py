"""KerasHub itself is the oracle: its classifiers' files, read by ours, compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from applications import apart, logits, logits_of_keras, randomise

import zoo
from convert import conversion, formats, names
from convert.formats._torch import as_tensor
from convert.network import layers

pytestmark = [
    pytest.mark.kerashub,
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"),
]

SHAPE = (66, 75, 3)
RESNET = {
    "input_conv_filters": [64],
    "input_conv_kernel_sizes": [7],
    "stackwise_num_filters": [64, 128, 256, 512],
    "stackwise_num_strides": [1, 2, 2, 2],
    "use_pre_activation": False,
    "image_shape": SHAPE,
}
EFFICIENTNET = {
    "stackwise_width_coefficients": [1.0] * 7,
    "stackwise_depth_coefficients": [1.0] * 7,
    "stackwise_squeeze_and_excite_ratios": [0.25] * 7,
    "stackwise_kernel_sizes": [3, 3, 5, 3, 5, 5, 3],
    "stackwise_num_repeats": [1, 2, 2, 3, 3, 4, 1],
    "stackwise_input_filters": [32, 16, 24, 40, 80, 112, 192],
    "stackwise_output_filters": [16, 24, 40, 80, 112, 192, 320],
    "stackwise_expansion_ratios": [1, 6, 6, 6, 6, 6, 6],
    "stackwise_strides": [1, 2, 2, 2, 1, 2, 1],
    "stackwise_block_types": ["v1"] * 7,
    "min_depth": None,
    "use_depth_divisor_as_min_depth": True,
    "cap_round_filter_decrease": True,
    "input_shape": SHAPE,
}
XCEPTION = {
    "stackwise_conv_filters": [[32, 64], [128, 128], [256, 256], [728, 728], *[[728] * 3] * 8, [728, 1024], [1536, 2048]],
    "stackwise_pooling": [False, True, True, True, *[False] * 8, True, False],
    "image_shape": (98, 107, 3),
}


def classifier(variant: str) -> Any:
    from keras_hub import models  # imports TensorFlow: not before somebody asks

    if variant == "VGG11":
        backbone = models.VGGBackbone([1, 1, 2, 2, 2], [64, 128, 256, 512, 512], image_shape=(224, 225, 3))
        return models.VGGImageClassifier(backbone=backbone, num_classes=10, pooling="flatten")
    if variant.startswith("ResNet"):
        kind, blocks = ("basic_block", [2, 2, 2, 2]) if variant == "ResNet18" else ("bottleneck_block", [3, 4, 6, 3])
        backbone = models.ResNetBackbone(stackwise_num_blocks=blocks, block_type=kind, **RESNET)
        return models.ResNetImageClassifier(backbone=backbone, num_classes=10)
    if variant == "DenseNet121":
        return models.DenseNetImageClassifier(backbone=models.DenseNetBackbone([6, 12, 24, 16], image_shape=SHAPE), num_classes=10)
    if variant == "Xception":
        return models.XceptionImageClassifier(backbone=models.XceptionBackbone(**XCEPTION), num_classes=10)
    return models.EfficientNetImageClassifier(backbone=models.EfficientNetBackbone(**EFFICIENTNET), num_classes=10)


def within(model: Any) -> Iterator[Any]:
    for layer in model.layers:
        if hasattr(layer, "layers"):
            yield from within(layer)
        else:
            yield layer


@pytest.mark.parametrize(
    ("variant", "ending"),
    [
        ("VGG11", ".weights.h5"),
        ("ResNet18", ".keras"),
        ("ResNet50", ".weights.h5"),
        ("DenseNet121", ".weights.h5"),
        ("Xception", ".weights.h5"),
        ("EfficientNetB0", ".keras"),
    ],
)
def test_logits_agree(variant: str, ending: str, tmp_path: Path) -> None:
    model = classifier(variant)
    randomise(SimpleNamespace(layers=list(within(model))), variant)
    path = tmp_path / f"theirs{ending}"
    model.save_weights(path) if ending == ".weights.h5" else model.save(path)
    cls = zoo.CATALOGUE[variant]
    network = cls(num_classes=10, **names.fact("kerashub", "options", cls)).eval()
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    source = formats.read(path)
    try:
        adopted = conversion.adopt(
            source, layers(network, (3, network.input_size, network.input_size)), shapes, family=cls, naming="kerashub"
        )
        assert adopted.report.ok, conversion.explain(adopted, shapes)
        state = {name: as_tensor(np.ascontiguousarray(one.array())) for name, one in adopted.tensors.items()}
    finally:
        source.close()
    network.load_state_dict({**network.state_dict(), **state})
    height, width = model.backbone.input_shape[1:3]
    x = torch.empty(2, 3, height, width).uniform_(-1, 1, generator=torch.Generator().manual_seed(0)).numpy()
    there = logits_of_keras(model, x.transpose(0, 2, 3, 1))
    assert apart(there[:1], there[1:]) > 1e-3
    assert apart(logits(network, x), there) < 1e-4
