"""Shapes that BatchNorm and its way back are checked and timed at."""

from __future__ import annotations

from typing import Any

CASES: list[dict[str, Any]] = [
    {"name": "relu", "shape": (2, 16, 5, 7), "act": "relu"},
    {"name": "odd channels, folded", "shape": (3, 7, 5, 3), "act": "relu6"},
    {"name": "20 channels, folded", "shape": (2, 20, 5, 7), "act": "hardswish"},
    {"name": "slice", "shape": (2, 24, 3, 5), "wide": 48, "act": "silu"},
    {"name": "slice at odd channels", "shape": (2, 9, 3, 5), "wide": 21, "act": "relu"},
    {"name": "residual", "shape": (2, 40, 4, 5), "residual": True, "act": "relu"},
    {"name": "residual, odd channels", "shape": (2, 7, 4, 5), "residual": True, "act": "relu6"},
    {"name": "residual, hardswish", "shape": (1, 12, 4, 5), "residual": True, "act": "hardswish", "wide": 28},
    {"name": "residual, no activation", "shape": (1, 96, 3, 3), "residual": True},
    {"name": "1x1 image", "shape": (3, 40, 1, 1), "act": "relu"},
    {"name": "batch 1, three pixels", "shape": (1, 8, 1, 3), "act": "leaky_relu_0.1"},
    {"name": "many pixels", "shape": (2, 3, 20, 17), "act": "relu"},
    {"name": "no affine part, nothing kept", "shape": (2, 16, 4, 4), "bare": True, "act": "relu"},
    {"name": "running statistics", "shape": (2, 16, 4, 3), "training": False, "act": "relu"},
    {"name": "batch 0", "shape": (0, 16, 4, 4), "act": "relu"},
]
"""`shape` (N, C, H, W); `wide`: maps are slices of maps this wide, from channel 8 on; `bare`: neither weight nor running statistics."""

_RESNET50 = ((64, 112, False), (64, 56, False), (256, 56, True), (128, 28, False), (512, 28, True), (1024, 14, True), (2048, 7, True))
LARGE_CASES: list[dict[str, Any]] = [
    {"name": "issue's: 10x100@224", "shape": (10, 100, 224, 224)},
    *(
        {"name": f"{n}x{c}@{px}{' add' * add} relu", "shape": (n, c, px, px), "act": "relu", "residual": add}
        for n in (256, 32)
        for c, px, add in _RESNET50
    ),
    *({"name": f"{n}x96@112 relu6", "shape": (n, 96, 112, 112), "act": "relu6"} for n in (256, 32)),
    {"name": "256x144@56 relu6", "shape": (256, 144, 56, 56), "act": "relu6"},
    {"name": "256x24@56", "shape": (256, 24, 56, 56)},
    {"name": "256x960@7 hardswish", "shape": (256, 960, 7, 7), "act": "hardswish"},
    {"name": "256x152 of 256@56 relu", "shape": (256, 152, 56, 56), "wide": 256, "act": "relu"},
    {"name": "64x64@224 relu", "shape": (64, 64, 224, 224), "act": "relu"},
]
