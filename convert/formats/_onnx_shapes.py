"""The ONNX operators that move numbers and leave them as they are: shapes, axis orders, cuts, margins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from convert.formats._onnx_fold import axes, cuts, squeezed
from convert.formats._onnx_graph import Builder, Dims, Value
from convert.formats._onnx_proto import Operator


def pad(b: Builder, operator: Operator) -> bool:
    x = b.value(operator)
    read = operator.attrs.get("pads") or (b.constants.integers(operator.inputs[1]) if len(operator.inputs) > 1 else None)
    if x is None or x.layout not in ("nchw", "nhwc") or read is None or operator.attrs.get("mode", "constant") != "constant":
        return False
    value = operator.attrs.get("value", 0.0)
    if len(operator.inputs) > 2 and operator.inputs[2]:
        value = b.constants.number(operator.inputs[2])
    numbers = [n for n in read if n is not None]
    at = axes(operator, b.constants, place=3) or [0, 1, 2, 3]
    if value is None or len(numbers) != 2 * len(at):
        return False
    before, after = [0] * 4, [0] * 4
    for place, axis in enumerate(at):
        before[axis % 4], after[axis % 4] = numbers[place], numbers[len(at) + place]
    rows, columns = x.layout.index("h"), x.layout.index("w")
    more = (before[x.layout.index("c")], after[x.layout.index("c")])
    if any(more) and value == 0 and not any(before[a] or after[a] for a in range(4) if a != x.axis("c")):
        return _empty_channels(b, operator, x, *more)
    if any(before[a] or after[a] for a in range(4) if a not in (rows, columns)):
        return False
    pads = (before[rows], before[columns], after[rows], after[columns])
    sizes = {letter: None if (n := x.dim(letter)) is None else n + before[a] + after[a] for letter, a in (("h", rows), ("w", columns))}
    if max(pads) <= 0 and min(pads) < 0:
        return b.layer(operator, "crop", [x], {"pads": tuple(-n for n in pads)}, x.sized(**sizes), x.layout)
    return min(pads) >= 0 and b.layer(operator, "pad", [x], {"pads": pads, "value": float(value)}, x.sized(**sizes), x.layout)


def _empty_channels(b: Builder, operator: Operator, x: Value, front: int, behind: int) -> bool:
    """Channels of zeros, as the shortcut without parameters has them: channels of its own map, times zero."""
    width = x.dim("c")
    if width is None or not min(front, behind) >= 0 or max(front, behind) > width:
        return False
    joined: list[Value] = [x]
    for place, count in ((0, front), (len(joined), behind)):
        if count:
            first = b.emit(f"{operator.name or 'Pad'} (channels)", "slice", [x], {"start": 0, "stop": count})
            part = Value(first, x.sized(c=count), x.layout)
            zeros = b.emit(f"{operator.name or 'Pad'} (zeros)", "affine", [part], {"scale": 0.0, "offset": 0.0})
            joined.insert(0 if place == 0 else len(joined), Value(zeros, part.shape, x.layout))
    return b.layer(operator, "concat", joined, {}, x.sized(c=width + front + behind), x.layout)


def resize(b: Builder, operator: Operator) -> bool:
    x = b.value(operator)
    place = 1 if operator.op == "Upsample" or b.model.opset < 11 else 2
    factors = operator.attrs.get("scales")
    held = b.constants.small(operator.inputs[place]) if len(operator.inputs) > place else None
    if factors is None and held is not None and held.size:
        factors = [float(n) for n in held.reshape(-1)]
    if factors is None and len(operator.inputs) > 3 and x is not None and x.shape is not None:
        sizes = b.constants.integers(operator.inputs[3]) or []
        if len(sizes) == len(x.shape):
            factors = [1.0 if a < 2 else (n or 0) / (x.shape[a] or math.inf) for a, n in enumerate(sizes)]
    if x is None or x.layout != "nchw" or factors is None or len(factors) != 4 or list(factors[:2]) != [1, 1]:
        return False
    tall, wide = factors[2:]
    if (
        not (math.isfinite(tall) and math.isfinite(wide))
        or tall != int(tall)
        or wide != int(wide)
        or min(tall, wide) < 1
        or max(tall, wide) > 64
    ):
        return False
    mode, way = operator.attrs.get("mode", "nearest"), operator.attrs.get("coordinate_transformation_mode", "half_pixel")
    if operator.op == "Upsample" or b.model.opset < 11:
        way = "asymmetric"
    rounding = operator.attrs.get("nearest_mode", "round_prefer_floor")
    nearest = mode == "nearest" and (
        (way == "asymmetric" and (operator.op == "Upsample" or b.model.opset < 11 or rounding == "floor"))
        or (way in ("half_pixel", "pytorch_half_pixel") and rounding.startswith("round"))
    )
    if not nearest and not (mode == "linear" and way in ("half_pixel", "pytorch_half_pixel")):
        return False
    larger = {letter: None if (n := x.dim(letter)) is None else n * int(f) for letter, f in (("h", tall), ("w", wide))}
    attrs = {"factor": (int(tall), int(wide)), "mode": "nearest" if nearest else "bilinear"}
    return b.layer(operator, "upsample", [x], attrs, x.sized(**larger), x.layout)


def transpose(b: Builder, operator: Operator) -> bool:
    perm: Sequence[int] = operator.attrs.get("perm") or ()
    x, order = b.value(operator), list(perm)
    if x is None or sorted(order) != list(range(len(order))):
        return False
    if order == list(range(len(order))):
        return b.gives(operator, x)
    if len(order) != 4 or x.layout not in ("nchw", "nhwc"):
        return False
    turned = "".join(x.layout[a] for a in order)
    shape = tuple(x.shape[a] for a in order) if x.shape is not None and len(x.shape) == 4 else None
    return turned in ("nchw", "nhwc") and b.gives(operator, Value(x.node, shape, turned))


def reshape(b: Builder, operator: Operator) -> bool:
    x = b.value(operator)
    if x is None:
        return False
    if operator.op == "Flatten":
        if operator.attrs.get("axis", 1) not in (1, -3 if x.layout in ("nchw", "nhwc") else -1):
            return False
        wanted: list[int | None] = [x.dim("n"), -1]
    elif operator.op in ("Squeeze", "Unsqueeze"):
        if x.shape is None:
            return False
        wanted = squeezed(operator.op, x.shape, axes(operator, b.constants))
    else:
        read = operator.attrs.get("shape") or (b.constants.integers(operator.inputs[1]) if len(operator.inputs) > 1 else None)
        if read is None:
            return False
        wanted = [x.shape[i] if n == 0 and x.shape is not None and i < len(x.shape) else n for i, n in enumerate(read)]
    return _to_shape(b, operator, x, wanted)


def _to_shape(b: Builder, operator: Operator, x: Value, wanted: list[int | None]) -> bool:
    count = math.prod(n for n in x.shape[1:] if n is not None) if x.shape is not None and None not in x.shape[1:] else None
    free = [i for i, n in enumerate(wanted) if n == -1]
    if free and count is not None and None not in wanted[1:]:
        rest = math.prod(n for n in wanted[1:] if n is not None and n != -1)
        if free == [0] and rest == count:
            wanted[0] = x.shape[0] if x.shape is not None else None
        elif free != [0] and rest:
            wanted[free[0]] = count // rest
    batch = x.dim("n") if x.layout else None
    if not wanted or (wanted[0] not in (None, batch) and not (batch is None and wanted[0] == 1)):
        return False  # images would be mixed
    shape: Dims = (batch, *(None if n == -1 else n for n in wanted[1:]))
    if len(shape) == 2 and x.layout == "flat":
        return b.gives(operator, Value(x.node, shape, "flat"))
    if len(shape) == 2 and x.layout in ("nchw", "nhwc"):
        return b.layer(operator, "flatten", [x], {"order": x.layout[1:]}, shape, "flat")
    if shape == x.shape:
        return b.gives(operator, x)
    if x.layout not in ("flat", "nchw", "nhwc"):
        return False
    last = len(shape) == 4 and shape[1] == shape[2] == 1 and shape[3] != 1
    layout = x.layout if x.layout != "flat" else "nhwc" if last else "nchw"
    sizes = tuple(-1 if n is None else n for n in shape[1:])
    attrs = {"shape": sizes, "layout": layout}
    return sizes.count(-1) <= 1 and b.layer(operator, "reshape", [x], attrs, shape, layout if len(shape) == 4 else "")


def cut(b: Builder, operator: Operator) -> bool:
    x, found = b.value(operator), cuts(operator, b.constants)
    if x is None or not found or not x.layout:
        return False
    rank = 2 if x.layout == "flat" else 4
    found = {axis % rank: taken for axis, taken in found.items()}
    width = x.dim("c")
    if list(found) == [x.axis("c")] and width is not None and next(iter(found.values()))[2] == 1:
        start, stop, _ = slice(*next(iter(found.values()))).indices(width)
        return b.layer(operator, "slice", [x], {"start": start, "stop": stop}, x.sized(c=max(stop - start, 0)), x.layout)
    return _cut_pixels(b, operator, x, found)


def _cut_pixels(b: Builder, operator: Operator, x: Value, found: dict[int, tuple[int, int, int]]) -> bool:
    """Taking every other pixel is a pool of windows of one pixel; taking a part of them is a crop."""
    pads, strides = [0, 0, 0, 0], [1, 1]
    sizes: dict[str, int] = {}
    for axis, taken in found.items():
        letter = x.layout[axis] if x.layout != "flat" else ""
        size = x.dim(letter) if letter in ("h", "w") else None
        if letter == "c" and size is None and taken[0] == 0 and taken[1] >= (x.dim("c") or math.inf) and taken[2] == 1:
            continue
        if letter not in ("h", "w") or size is None or taken[2] < 1:
            return False
        start, stop, step = slice(*taken).indices(size)
        place = "hw".index(letter)
        pads[place], pads[place + 2], strides[place] = start, max(size - stop, 0), step
        sizes[letter] = len(range(start, stop, step))
    if any(pads):
        gone = {letter: pads[place] + pads[place + 2] for place, letter in enumerate("hw")}
        cropped = {letter: max((x.dim(letter) or 0) - gone[letter], 0) for letter in sizes}
        node = b.emit(f"{operator.name or 'Slice'} (crop)", "crop", [x], {"pads": tuple(pads)})
        x = Value(node, x.sized(**cropped), x.layout)
    if strides == [1, 1]:
        return b.gives(operator, x)
    attrs = {"kernel": (1, 1), "stride": tuple(strides), "pads": (0, 0, 0, 0), "rounding": "floor"}
    return b.layer(operator, "maxpool", [x], attrs, x.sized(**sizes), x.layout)


def split(b: Builder, operator: Operator) -> bool:
    x, parts = b.value(operator), len(operator.outputs)
    sizes = operator.attrs.get("split") or (b.constants.integers(operator.inputs[1]) if len(operator.inputs) > 1 else None)
    width = x.dim("c") if x is not None else None
    if x is None or not x.layout or width is None or not parts:
        return False
    if operator.attrs.get("axis", 0) % (2 if x.layout == "flat" else 4) != x.axis("c"):
        return False
    each = -(-width // parts)
    sizes = [n for n in sizes if n is not None] if sizes else [min(each, width - i * each) for i in range(parts)]
    if len(sizes) != parts or sum(sizes) != width or min(sizes) < 0:
        return False
    start = 0
    for output, size in zip(operator.outputs, sizes, strict=True):
        node = b.emit(f"{operator.name or 'Split'}_{start}", "slice", [x], {"start": start, "stop": start + size})
        b.values[output] = Value(node, x.sized(c=size), x.layout)
        start += size
    return True


def gather(b: Builder, operator: Operator) -> bool:
    x, order = b.value(operator), b.constants.integers(operator.inputs[1]) if len(operator.inputs) > 1 else None
    width = x.dim("c") if x is not None else None
    if x is None or order is None or width is None or not x.layout:
        return False
    if operator.attrs.get("axis", 0) % (2 if x.layout == "flat" else 4) != x.axis("c"):
        return False
    if sorted(n for n in order if n is not None) != list(range(width)) or len(order) != width:
        return False
    return b.layer(operator, "permute_channels", [x], {"order": tuple(order)}, x.shape, x.layout)


HANDLERS: dict[str, Callable[[Builder, Operator], bool]] = {
    "Pad": pad,
    **dict.fromkeys(("Resize", "Upsample"), resize),
    "Transpose": transpose,
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), reshape),
    "Slice": cut,
    "Split": split,
    "Gather": gather,
}
