"""The segmenters: one class line a variant, under its paper's link, with its published parameter count.

A new variant is a new line here; `make docs-pages` writes it into the table that `zoo list` and `trained("name")` read.
"""

from __future__ import annotations

from zoo.catalogue import MobileNetV3Large, ResNet50, ResNet101
from zoo.segmentation.dilated import FCN, LRASPP, DeepLabV3


# Long et al. 2014, counted by torchvision without the auxiliary head: https://arxiv.org/abs/1411.4038
class FCN_ResNet50(FCN, body=ResNet50, params=32_957_013): ...
class FCN_ResNet101(FCN, body=ResNet101, params=51_949_141): ...

# Chen et al. 2017: https://arxiv.org/abs/1706.05587
class DeepLabV3_ResNet50(DeepLabV3, body=ResNet50, params=39_638_869): ...
class DeepLabV3_ResNet101(DeepLabV3, body=ResNet101, params=58_630_997): ...
class DeepLabV3_MobileNet_V3_Large(DeepLabV3, body=MobileNetV3Large, at=("features.16",), aux_at="features.4", output_stride=16, params=11_025_477): ...

# Howard et al. 2019, section 6.4: https://arxiv.org/abs/1905.02244
class LRASPP_MobileNet_V3_Large(LRASPP, body=MobileNetV3Large, at=("features.4", "features.16"), params=3_221_538): ...
