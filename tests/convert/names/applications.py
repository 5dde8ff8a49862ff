"""Networks of keras.applications with random weights that no mistake leaves alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import zoo
from convert import names
from convert.formats._keras_model import APPLICATIONS
from zoo.networks.model import Model

LARGE = (
    "InceptionResNetV2",
    "EfficientNetB4",
    "EfficientNetB5",
    "EfficientNetB6",
    "EfficientNetB7",
    "DenseNet169",
    "DenseNet201",
    "ResNet101",
    "ResNet152",
    "ResNet101V2",
    "ResNet152V2",
    "ConvNeXt_Base",
    "ConvNeXt_Large",
    "ConvNeXt_XLarge",
    *(f"EfficientNetV2_{name}" for name in ("B1", "B2", "B3", "S", "M", "L")),
)
CLASSES = 10
SCALES = {
    "EfficientNetB7": (0.6, 1.0),
    "EfficientNetB6": (0.6, 1.0),
    "EfficientNetB0": (0.7, 1.2),
    **dict.fromkeys(("EfficientNetV2_S", "EfficientNetV2_M", "EfficientNetV2_L"), (0.5, 0.8)),
    "EfficientNet": (0.6, 1.1),
    "MobileNetV1": (0.9, 1.5),
    "MobileNet": (0.6, 1.2),
    "DenseNet": (0.9, 1.5),
}
"""Of BatchNorms' gammas and variances, where the usual ones would hide the image, or blow up every rounding error."""


def size(variant: str) -> tuple[int, int]:
    """An even height and an odd width, and most maps have one of each too; as small as the network allows."""
    if variant.startswith("VGG"):
        return 224, 225  # its first dense layer reads 7x7
    if variant in ("InceptionV3", "InceptionResNetV2", "Xception"):
        return 98, 107
    return (34, 45) if variant in LARGE else (66, 75)


def build(variant: str) -> Any:
    """Make Keras's network; it states logits."""
    import keras

    function, arguments = APPLICATIONS[variant]
    make = getattr(keras.applications, function)
    return make(weights=None, classes=CLASSES, classifier_activation=None, input_shape=(*size(variant), 3), **arguments)


def randomise(model: Any, variant: str, seed: int = 0) -> None:
    """Draw every variable, statistics and biases too, at a scale that neither dies nor explodes."""
    random = torch.Generator().manual_seed(seed)
    low, high = next((scale for family, scale in SCALES.items() if variant.startswith(family)), (0.4, 1.0))
    for layer in model.layers:
        for variable in layer.weights:
            value, name = variable.value.data, variable.path.rpartition("/")[2]
            if name == "count":
                continue
            if "kernel" in name:
                depthwise = name == "depthwise_kernel" or type(layer).__name__ == "DepthwiseConv2D"
                fan = value[..., 0, 0].numel() if depthwise else value[..., 0].numel()
                value.normal_(0, (2 / fan) ** 0.5, generator=random)
            elif name in ("gamma", "moving_variance", "variance"):
                value.uniform_(low, high, generator=random)
            else:
                value.normal_(0, 0.2, generator=random)


def ours(variant: str) -> Model:
    """Our network of the same name, with the options that the naming tells."""
    cls = zoo.CATALOGUE[variant]
    with torch.device("meta"):
        return cls(num_classes=CLASSES, **names.fact("keras", "options", cls)).eval()


def images(variant: str, count: int = 2) -> np.ndarray:
    """Patches of colour and noise, 0..1, (B, C, H, W); no two alike in any mean."""
    random = np.random.default_rng(1)
    height, width = size(variant)
    patches = random.uniform(0, 1, (count, 3, 5, 5)).repeat(-(-height // 5), 2).repeat(-(-width // 5), 3)[:, :, :height, :width]
    return (0.7 * patches + 0.3 * random.uniform(0, 1, patches.shape)).astype(np.float32)


def prepared(variant: str, model: Any, pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Prepare images for Keras's network and for ours: EfficientNet, ConvNeXt and MobileNetV3 scale their own."""
    import keras

    theirs = pictures
    if variant.startswith("ConvNeXt"):
        mean, deviation = (np.array(each).reshape(1, 3, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        theirs, pictures = pictures * 255, (pictures - mean) / deviation
    if variant in ("EfficientNetV2_S", "EfficientNetV2_M", "EfficientNetV2_L"):
        theirs, pictures = pictures * 255, pictures * (255 / 128) - 1
    elif variant.startswith("EfficientNet"):
        layer = next(layer for layer in model.layers if layer.name.startswith("normalization"))
        mean, variance = (np.asarray(keras.ops.convert_to_numpy(v)).reshape(1, 3, 1, 1) for v in (layer.mean, layer.variance))
        theirs, pictures = pictures * 255, (pictures - mean) / np.sqrt(variance)
    elif variant.startswith("MobileNetV3"):
        theirs, pictures = pictures * 255, pictures * 2 - 1
    return theirs.transpose(0, 2, 3, 1), pictures


def logits_of_keras(model: Any, inputs: np.ndarray) -> np.ndarray:
    import keras

    return np.asarray(keras.ops.convert_to_numpy(model(inputs, training=False)))


def logits(network: Model, inputs: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return network(torch.from_numpy(np.ascontiguousarray(inputs, np.float32))).numpy()


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference, as a share of the largest logit."""
    return float(np.abs(a - b).max() / np.abs(b).max())
