"""The named networks of Darknet, section by section, as tables of widths and what repeats.

A plan is written as the text of a .cfg, which the reader of Darknet's files and the network are both built from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SMALL = (10, 14, 23, 27, 37, 58, 81, 82, 135, 169, 344, 319)
LARGE = (10, 13, 16, 30, 33, 23, 30, 61, 62, 45, 59, 119, 116, 90, 156, 198, 373, 326)
FOURTH = (12, 16, 19, 36, 40, 28, 36, 75, 76, 55, 72, 146, 142, 110, 192, 243, 459, 401)
FASTEST = (12, 18, 37, 49, 52, 132, 115, 73, 119, 199, 242, 238)
CELLS = (0.57273, 0.677385, 1.87446, 2.06253, 3.33843, 5.47434, 7.88282, 3.52778, 9.77052, 9.16828)
"""Anchors of YOLOv2, in cells of its grid; all others are in pixels of the network's image."""


class Plan:
    """Sections in order, each under the number that route and shortcut count with."""

    def __init__(self, side: int) -> None:
        """Begin a network for images of `side` x `side` pixels."""
        self.lines = ["[net]", f"width={side}", f"height={side}", "channels=3"]
        self.last = -1

    def add(self, kind: str, **settings: object) -> int:
        """Add a section, and return its number."""
        self.lines += [f"[{kind}]", *(f"{name}={value}" for name, value in settings.items())]
        self.last += 1
        return self.last

    def conv(self, filters: int, size: int = 1, stride: int = 1, act: str = "leaky", groups: int = 1) -> int:
        """Add a convolution that keeps the size but for its stride, with BatchNorm."""
        more = {"groups": groups} if groups > 1 else {}
        return self.add("convolutional", batch_normalize=1, filters=filters, size=size, stride=stride, pad=1, **more, activation=act)

    def convs(self, *widths: int, act: str = "leaky") -> int:
        """Add convolutions whose kernels are 1x1 and 3x3 in turn."""
        for place, filters in enumerate(widths):
            self.conv(filters, 3 if place % 2 else 1, act=act)
        return self.last

    def route(self, *layers: int) -> int:
        """Join maps, named by their numbers."""
        return self.add("route", layers=",".join(map(str, layers)))

    def half(self, layer: int) -> int:
        """Take the second half of a map's channels."""
        return self.add("route", layers=layer, groups=2, group_id=1)

    def shortcut(self, layer: int) -> int:
        """Add a map to the last one."""
        return self.add("shortcut", **{"from": layer, "activation": "linear"})

    def pool(self, size: int = 2, stride: int = 2) -> int:
        """Add a maximum pool."""
        return self.add("maxpool", size=size, stride=stride)

    def pyramid_pool(self, *sizes: int) -> int:
        """Join the last map with its maxima over windows of these sizes."""
        start = self.last
        found = [self.pool(sizes[0], 1)]
        for size in sizes[1:]:
            self.route(start)
            found.append(self.pool(size, 1))
        return self.route(*reversed(found), start)

    def residuals(self, count: int, width: int, inner: int, act: str = "leaky") -> int:
        """Add blocks of a 1x1 and a 3x3 convolution, each with its shortcut."""
        for _ in range(count):
            start = self.last
            self.convs(inner, width, act=act)
            self.shortcut(start)
        return self.last

    def yolo(self, anchors: Sequence[int], mask: Iterable[int], act: str = "linear", **settings: object) -> int:
        """Add the convolution of a head and the head."""
        mask = list(mask)
        self.add("convolutional", filters=85 * len(mask), size=1, stride=1, pad=1, activation=act)
        listed = {"mask": ",".join(map(str, mask)), "anchors": ",".join(map(str, anchors))}
        return self.add("yolo", **listed, classes=80, num=len(anchors) // 2, **settings)

    def text(self) -> str:
        """Return the text of the .cfg."""
        return "\n".join(self.lines) + "\n"


def yolov2() -> str:
    """Redmon & Farhadi 2016: Darknet-19, and a finer map through a reorganisation."""
    plan = Plan(608)
    plan.conv(32, 3)
    plan.pool()
    plan.conv(64, 3)
    fine = 0
    for width, depth in ((128, 3), (256, 3), (512, 5), (1024, 5)):
        fine = plan.last
        plan.pool()
        for place in range(depth):
            plan.conv(width // 2 if place % 2 else width, 1 if place % 2 else 3)
    plan.conv(1024, 3)
    coarse = plan.conv(1024, 3)
    plan.route(fine)
    plan.conv(64)
    finer = plan.add("reorg", stride=2)
    plan.route(finer, coarse)
    plan.conv(1024, 3)
    return region(plan)


def yolov2_tiny() -> str:
    """The small network of the same authors."""
    plan = Plan(416)
    for width in (16, 32, 64, 128, 256):
        plan.conv(width, 3)
        plan.pool()
    plan.conv(512, 3)
    plan.pool(2, 1)
    plan.conv(1024, 3)
    plan.conv(512, 3)
    return region(plan)


def region(plan: Plan) -> str:
    """Add YOLOv2's head."""
    plan.add("convolutional", filters=425, size=1, stride=1, pad=1, activation="linear")
    plan.add("region", anchors=",".join(map(str, CELLS)), bias_match=1, classes=80, coords=4, num=5, softmax=1)
    return plan.text()


def yolov3(pools: bool = False) -> str:
    """Redmon & Farhadi 2018: Darknet-53 and three heads; `pools` puts a pyramid of pools before the first."""
    plan = Plan(608)
    plan.conv(32, 3)
    maps: list[int] = []
    for width, count in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
        plan.conv(width, 3, 2)
        maps.append(plan.residuals(count, width, width // 2))
    for width, mask, beside in ((512, (6, 7, 8), maps[3]), (256, (3, 4, 5), maps[2]), (128, (0, 1, 2), None)):
        plan.convs(width, 2 * width, width)
        if pools and width == 512:
            plan.pyramid_pool(5, 9, 13)
            plan.conv(width)
            plan.conv(2 * width, 3)
            split = plan.conv(width)
        else:
            plan.conv(2 * width, 3)
            split = plan.conv(width)
        plan.conv(2 * width, 3)
        plan.yolo(LARGE, mask)
        if beside is not None:
            plan.route(split)
            plan.conv(width // 2)
            plan.route(plan.add("upsample", stride=2), beside)
    return plan.text()


def yolov3_tiny() -> str:
    """The small network of the same authors."""
    plan = Plan(416)
    fine = 0
    for width in (16, 32, 64, 128, 256):
        fine = plan.conv(width, 3)
        plan.pool()
    plan.conv(512, 3)
    plan.pool(2, 1)
    plan.conv(1024, 3)
    split = plan.conv(256)
    plan.conv(512, 3)
    plan.yolo(SMALL, (3, 4, 5))
    plan.route(split)
    plan.conv(128)
    plan.route(plan.add("upsample", stride=2), fine)
    plan.conv(256, 3)
    plan.yolo(SMALL, (0, 1, 2))
    return plan.text()


def yolov4() -> str:
    """Bochkovskiy et al. 2020: CSPDarknet-53 with mish, a pyramid of pools, and maps joined on the way up and down again."""
    plan = Plan(608)
    plan.conv(32, 3, act="mish")
    maps: list[int] = []
    for width, count in ((64, 1), (128, 2), (256, 8), (512, 8), (1024, 4)):
        start = plan.conv(width, 3, 2, "mish")
        half = width if width == 64 else width // 2
        beside = plan.conv(half, act="mish")
        plan.route(start)
        plan.conv(half, act="mish")
        plan.residuals(count, half, width // 2, "mish")
        plan.route(plan.conv(half, act="mish"), beside)
        maps.append(plan.conv(width, act="mish"))
    plan.convs(512, 1024, 512)
    plan.pyramid_pool(5, 9, 13)
    coarse = plan.convs(512, 1024, 512)
    middle = _up(plan, 256, maps[3])
    _up(plan, 128, maps[2])
    split = plan.last
    plan.conv(256, 3)
    plan.yolo(FOURTH, (0, 1, 2), scale_x_y=1.2, nms_kind="greedynms", beta_nms=0.6)
    for width, beside, mask, scale in ((256, middle, (3, 4, 5), 1.1), (512, coarse, (6, 7, 8), 1.05)):
        plan.route(split)
        plan.route(plan.conv(width, 3, 2), beside)
        split = plan.convs(width, 2 * width, width, 2 * width, width)
        plan.conv(2 * width, 3)
        plan.yolo(FOURTH, mask, scale_x_y=scale, nms_kind="greedynms", beta_nms=0.6)
    return plan.text()


def _up(plan: Plan, width: int, beside: int) -> int:
    plan.conv(width)
    above = plan.add("upsample", stride=2)
    plan.route(beside)
    plan.route(plan.conv(width), above)
    return plan.convs(width, 2 * width, width, 2 * width, width)


def yolov4_tiny() -> str:
    """Wang et al. 2020: a body whose blocks let half of their channels pass."""
    plan = Plan(416)
    plan.conv(32, 3, 2)
    plan.conv(64, 3, 2)
    fine = 0
    for width in (64, 128, 256):
        start = plan.conv(width, 3)
        plan.half(start)
        first = plan.conv(width // 2, 3)
        plan.route(plan.conv(width // 2, 3), first)
        fine = plan.conv(width)
        plan.route(start, fine)
        plan.pool()
    plan.conv(512, 3)
    split = plan.conv(256)
    plan.conv(512, 3)
    settings = {"scale_x_y": 1.05, "nms_kind": "greedynms", "beta_nms": 0.6}
    plan.yolo(SMALL, (3, 4, 5), **settings)
    plan.route(split)
    plan.conv(128)
    plan.route(plan.add("upsample", stride=2), fine)
    plan.conv(256, 3)
    plan.yolo(SMALL, (1, 2, 3), **settings)
    return plan.text()


def yolov7_tiny() -> str:
    """Wang et al. 2022: blocks that join the maps after every other convolution, and boxes without exponentials."""
    plan = Plan(416)
    plan.conv(32, 3, 2)
    plan.conv(64, 3, 2)
    maps = [_joined(plan, 32, 64)]
    for width in (64, 128, 256):
        plan.pool()
        maps.append(_joined(plan, width, 2 * width))
    start = plan.last
    beside = plan.conv(256)
    plan.route(start)
    plan.conv(256)
    plan.pyramid_pool(5, 9, 13)
    plan.route(beside, plan.conv(256))
    coarse = plan.conv(256)
    found = [coarse]
    for width, other in ((128, maps[2]), (64, maps[1])):
        plan.conv(width)
        above = plan.add("upsample", stride=2)
        plan.route(other)
        plan.route(plan.conv(width), above)
        found.append(_joined(plan, width // 2, width))
    fine, middle = found[2], found[1]
    plan.route(plan.conv(128, 3, 2), middle)
    middle = _joined(plan, 64, 128)
    plan.route(plan.conv(256, 3, 2), coarse)
    coarse = _joined(plan, 128, 256)
    for place, (layer, width) in enumerate(((fine, 128), (middle, 256), (coarse, 512))):
        plan.route(layer)
        plan.conv(width, 3)
        settings = {"scale_x_y": 2.0, "nms_kind": "diounms", "beta_nms": 0.6, "new_coords": 1}
        plan.yolo(LARGE, range(3 * place, 3 * place + 3), "logistic", **settings)
    return plan.text()


def _joined(plan: Plan, width: int, out: int) -> int:
    start = plan.last
    beside = plan.conv(width)
    plan.route(start)
    first = plan.conv(width)
    second = plan.conv(width, 3)
    plan.route(beside, first, second, plan.conv(width, 3))
    return plan.conv(out)


def yolo_fastest(wide: int = 1, drop: float = 0.15, fine: int = 120) -> str:
    """dog-qiuqiu 2021, version 1.1: inverted residuals of depthwise convolutions; `wide` multiplies the body's widths.

    Args:
        wide: 1, or 2 for the network that is called xl.
        drop: share of a block's numbers that training drops.
        fine: channels of the finer head.
    """
    plan = Plan(320)
    plan.conv(8 * wide, 3, 2)
    _inverted(plan, 8 * wide, 4 * wide)
    _inverted(plan, 8 * wide, 4 * wide, drop)
    middle = 0
    # (inner, out) of the first block, which may halve the map, and (inner, how many) of those behind it
    for inner, out, stride, behind in (
        (24, 8, 2, (32, 32)),
        (32, 8, 2, (48, 48)),
        (48, 16, 1, (96, 96, 96, 96)),
        (96, 24, 2, (136, 136, 136, 136)),
        (136, 48, 2, (224, 224, 224, 224, 224)),
    ):
        middle = plan.last if stride == 2 else middle
        _inverted(plan, inner * wide, out * wide, stride=stride)
        for width in behind:
            _inverted(plan, width * wide, out * wide, drop)
    plan.pyramid_pool(3, 5, 9)
    split = plan.conv(96)
    _separable(plan, 96)
    settings = {"scale_x_y": 1.0, "nms_kind": "greedynms"}
    plan.yolo(FASTEST, (3, 4, 5), **settings)
    plan.route(split)
    plan.route(plan.add("upsample", stride=2), middle)
    _separable(plan, fine)
    plan.yolo(FASTEST, (0, 1, 2), **settings)
    return plan.text()


def _inverted(plan: Plan, inner: int, out: int, drop: float = 0.0, stride: int = 1) -> int:
    """Add a block; with `drop` it has a shortcut."""
    start = plan.last
    plan.conv(inner)
    plan.conv(inner, 3, stride, groups=inner)
    plan.conv(out, act="linear")
    if drop:
        plan.add("dropout", probability=drop)
        plan.shortcut(start)
    return plan.last


def _separable(plan: Plan, width: int) -> int:
    for _ in range(2):
        plan.conv(width, 5, groups=width)
        plan.conv(width, act="linear")
    return plan.last
