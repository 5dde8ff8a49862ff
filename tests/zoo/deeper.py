"""Networks that a short run leaves to the long one."""

from __future__ import annotations

import pytest

from zoo import CATALOGUE

DEEPER = {
    *("ResNet44", "ResNet56", "ResNet101", "ResNet110", "ResNet152", "SEResNet101", "SEResNet152", "WideResNet101_2"),
    *("ResNeXt101_32x8d", "ResNeXt101_64x4d", "DenseNet161", "DenseNet169", "DenseNet201", "DenseNet264"),
    *("EfficientNetB2", "EfficientNetB3", "EfficientNetB4", "EfficientNetB5", "EfficientNetB6", "EfficientNetB7"),
}
"""More, or wider, of the blocks that a smaller network has: what these compute at odd sizes, that computes too."""

every_size = pytest.mark.parametrize(
    "cls",
    [pytest.param(cls, marks=pytest.mark.long) if name in DEEPER else cls for name, cls in CATALOGUE.items()],
    ids=CATALOGUE,
)
