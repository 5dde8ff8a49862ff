"""What every operation of `convert.graph.OPS` computes, in float64, on maps (B, C, H, W) and vectors (B, N).

An operation reads its tensors raw, as the file stores them, and applies the source's own conventions to them. Nothing here
knows `convert.steps`: where both agree, they agree as two independent witnesses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert import _windows
from convert.graph import Node
from weights.errors import ConvertError

DENSE_BYTES = 64 * 2**20
AGREEMENT = 1e-10


@dataclass(frozen=True, slots=True)
class Call:
    """One layer about to be computed.

    Attributes:
        node: it.
        values: of its inputs.
        raw: reads a tensor of its module by leaf, as the file stores it; None where there is none.
        random: chooses the channel that is computed twice.
    """

    node: Node
    values: tuple[np.ndarray, ...]
    raw: Callable[[str], np.ndarray | None]
    random: np.random.Generator

    @property
    def x(self) -> np.ndarray:
        """The first input."""
        return self.values[0]

    @property
    def attrs(self) -> Mapping[str, Any]:
        return self.node.attrs

    def draw(self, count: int) -> int:
        """Choose one of so many."""
        return int(self.random.integers(count))

    def stored(self, leaf: str) -> np.ndarray:
        """Read a tensor that the layer can't do without, as the file stores it."""
        array = self.raw(leaf)
        if array is None:
            raise ConvertError(f"layer {self.node.name!r} ({self.node.op}) needs {self.node.name}.{leaf}, which the file has not")
        return array

    def needed(self, leaf: str) -> np.ndarray:
        """Read a tensor that the layer can't do without, in float64."""
        return self.stored(leaf).astype(np.float64)

    def vector(self, leaf: str, default: float) -> np.ndarray:
        """Read a number per channel, or take `default` for all."""
        array = self.raw(leaf)
        return np.full(1, default) if array is None else array.astype(np.float64).reshape(-1)

    def per_channel(self, vector: Any) -> np.ndarray:
        """Shape a number, or one per channel, so that it broadcasts over the first input."""
        vector = np.asarray(vector, np.float64).reshape(-1)
        if vector.size not in (1, self.x.shape[1]):
            raise ValueError(f"{vector.size} numbers for {self.x.shape[1]} channels")
        return vector.reshape(1, -1, *(1,) * (self.x.ndim - 2))


def kernel(node: Node, raw: np.ndarray) -> np.ndarray:
    """Put a kernel's axes into the order that the executor slides it in, OIHW or, transposed, IOHW; the taps stay as they are."""
    layout = node.attrs["layout"]
    if len(layout) != raw.ndim:
        raise ValueError(f"layout {layout!r} names {len(layout)} axes, the kernel has {raw.ndim}: {raw.shape}")
    if "M" in layout:
        channels_first = raw.transpose([layout.index(letter) for letter in "CMHW"])
        return channels_first.reshape(-1, 1, *channels_first.shape[2:])
    return raw.transpose([layout.index(letter) for letter in ("IOHW" if node.op == "transposed" else "OIHW")])


def dense(node: Node, raw: np.ndarray) -> np.ndarray:
    """Put the axes of a dense weight into the order (out, in); Caffe's old one has two axes of 1 in front."""
    weight = raw.reshape(raw.shape[-2], raw.shape[-1])
    return weight.T if node.attrs.get("layout", "OI") == "IO" else weight


def backwards(node: Node, size: tuple[int, ...]) -> bool:
    """Tell whether the layer computes the true convolution; ConvertError where nobody knows and it matters."""
    convention = node.attrs.get("convention", "correlation")
    if convention not in ("correlation", "convolution") and max(size) > 1:
        raise ConvertError(f"nothing says whether layer {node.name!r} computes correlation or convolution; settle it first")
    return convention == "convolution"


def groups(node: Node, channels: int) -> int:
    """Read the number of groups; a depthwise layer has one per channel."""
    return channels if node.op == "depthwise" else int(node.attrs.get("groups", 1))


def _window(call: Call) -> tuple[np.ndarray, bool, _windows.Pair, _windows.Pair, _windows.Pair]:
    """Read a kernel, whether it is slid backwards, its size, and its stride and dilation."""
    taps = kernel(call.node, call.needed("weight"))
    stride, dilation = _windows.pair(call.attrs.get("stride")), _windows.pair(call.attrs.get("dilation"))
    return taps, backwards(call.node, taps.shape[2:]), (taps.shape[2], taps.shape[3]), stride, dilation


def _conv(call: Call) -> np.ndarray:
    taps, turned, size, stride, dilation = _window(call)
    pads = _windows.resolve(call.attrs.get("pads"), (call.x.shape[2], call.x.shape[3]), size, stride, dilation)
    x = _windows.pad(call.x, pads)
    count = groups(call.node, x.shape[1])
    out = _windows.convolve(x, taps, stride, dilation, count, turned)

    chosen, image = call.draw(taps.shape[0]), call.draw(x.shape[0])
    first = chosen // (taps.shape[0] // count) * taps.shape[1]
    seen = x[image, first : first + taps.shape[1]]
    _agree(call.node, out[image, chosen], _windows.definition(seen, taps[chosen], stride, dilation, turned))
    return out + call.vector("bias", 0.0).reshape(1, -1, 1, 1)


def _transposed(call: Call) -> np.ndarray:
    taps, turned, size, stride, dilation = _window(call)
    count, asked = int(call.attrs.get("groups", 1)), call.attrs.get("pads")
    full = _windows.spread(call.x, taps, stride, dilation, count, turned)

    chosen, image = call.draw(full.shape[1]), call.draw(full.shape[0])
    group, within = divmod(chosen, taps.shape[1])
    each = taps.shape[0] // count
    members = slice(group * each, (group + 1) * each)
    again = _windows.definition(call.x[image, members], taps[members, within], stride, dilation, turned, transposed=True)
    _agree(call.node, full[image, chosen], again)

    more = _windows.pair(call.attrs.get("output_padding"), 0)
    if isinstance(asked, str):  # the forward convolution would start from this size
        tall, wide = (
            n * s + (max((k - 1) * d + 1 - s, 0) if asked == "valid" else 0)
            for n, s, k, d in zip(call.x.shape[2:], stride, size, dilation, strict=True)
        )
        top, left, _, _ = _windows.resolve(asked, (tall, wide), size, stride, dilation)
    else:
        top, left, bottom, right = _windows.resolve(asked, (0, 0), size, stride, dilation)
        tall, wide = full.shape[2] - top - bottom, full.shape[3] - left - right
    tall, wide = tall + more[0], wide + more[1]
    after = (max(top + tall - full.shape[2], 0), max(left + wide - full.shape[3], 0))
    out = _windows.pad(full, (0, 0, *after))[:, :, top : top + tall, left : left + wide]
    return out + call.vector("bias", 0.0).reshape(1, -1, 1, 1)


def _agree(node: Node, fast: np.ndarray, slow: np.ndarray) -> None:
    scale = max(float(np.abs(slow).max(initial=0)), 1e-300)
    if fast.shape != slow.shape or not float(np.abs(fast - slow).max(initial=0)) <= AGREEMENT * scale:
        raise ConvertError(f"layer {node.name!r}: two ways to compute it disagree; the weights are not finite, or this is a fault of ours")


def _dense(call: Call) -> np.ndarray:
    weight, x = dense(call.node, call.stored("weight")), call.x
    outs, ins = weight.shape
    if x.ndim > 2 and x.shape[1] != ins:
        x = x.reshape(x.shape[0], -1)
    if x.shape[1] != ins:
        raise ValueError(f"a dense weight of {ins} inputs does not fit {x.shape[1]}")
    out = np.empty((x.shape[0], outs, *x.shape[2:]))
    step = max(1, DENSE_BYTES // (8 * ins))
    for start in range(0, outs, step):  # VGG's first dense weight has 800 MB in float64
        block = weight[start : start + step].astype(np.float64)
        out[:, start : start + step] = np.moveaxis(np.tensordot(x, block, (1, 1)), -1, 1)
    return out + call.vector("bias", 0.0).reshape(1, -1, *(1,) * (out.ndim - 2))


def _norm(call: Call) -> np.ndarray:
    eps, factor = float(call.attrs["eps"]), float(call.attrs.get("factor", 1))
    share = 1 / factor if factor else 0.0  # Caffe: a factor of 0 says that nothing was gathered
    mean, spread = call.needed("running_mean").reshape(-1) * share, call.needed("running_var").reshape(-1) * share
    kind = call.attrs.get("moment", "variance")
    divisors: dict[str, Callable[[], np.ndarray]] = {
        "variance": lambda: np.sqrt(spread + eps),
        "std": lambda: spread,
        "std+eps": lambda: spread + eps,
        "sqrt+eps": lambda: np.sqrt(spread) + eps,
        "inv_std": lambda: 1 / spread,
    }
    if kind not in divisors:
        raise ConvertError(f"layer {call.node.name!r}: no norm keeps its second moment as {kind!r}")
    centred = (call.x - call.per_channel(mean)) / call.per_channel(divisors[kind]())
    return centred * call.per_channel(call.vector("weight", 1.0)) + call.per_channel(call.vector("bias", 0.0))


def _gelu(call: Call) -> np.ndarray:
    x = call.x
    if call.attrs.get("approximate", False):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    from convert._guard import need

    return 0.5 * x * (1 + need("scipy.special", "scipy").erf(x / np.sqrt(2)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def _softmax(x: np.ndarray) -> np.ndarray:
    raised = np.exp(x - x.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


def _global(call: Call, reduce: Callable[..., np.ndarray]) -> np.ndarray:
    return reduce(call.x, axis=(2, 3), keepdims=bool(call.attrs.get("keepdims", False)))


def _together(call: Call) -> list[np.ndarray]:
    most = max(value.ndim for value in call.values)
    return [value.reshape(*value.shape, *(1,) * (most - value.ndim)) for value in call.values]


def _reduced(call: Call, combine: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    first, *rest = _together(call)
    for value in rest:
        first = combine(first, value)
    return first


def _crop(call: Call) -> np.ndarray:
    top, left, bottom, right = (int(p) for p in call.attrs["pads"])
    return call.x[:, :, top : call.x.shape[2] - bottom, left : call.x.shape[3] - right]


def _flatten(call: Call) -> np.ndarray:
    x = call.x
    if x.ndim == 4:
        x = x.transpose(0, *(1 + "chw".index(letter) for letter in call.attrs.get("order", "chw")))
    return x.reshape(x.shape[0], -1)


def _reshape(call: Call) -> np.ndarray:
    x, last = call.x, call.attrs.get("layout", "nchw") == "nhwc"
    x = x.transpose(0, 2, 3, 1) if last and x.ndim == 4 else x
    x = x.reshape(x.shape[0], *(int(size) for size in call.attrs["shape"]))
    return x.transpose(0, 3, 1, 2) if last and x.ndim == 4 else x


def _upsample(call: Call) -> np.ndarray:
    tall, wide = _windows.pair(call.attrs["factor"])
    _windows.fits(*call.x.shape[:2], call.x.shape[2] * tall, call.x.shape[3] * wide)
    mode = call.attrs.get("mode", "nearest")
    if mode == "nearest":
        return call.x.repeat(tall, 2).repeat(wide, 3)
    if mode != "bilinear":
        raise ConvertError(f"layer {call.node.name!r}: no enlargement {mode!r} is known here")
    out: np.ndarray = call.x
    for axis, factor in ((2, tall), (3, wide)):  # pixels are areas: the centre of output i lies at (i + 1/2) / factor - 1/2
        last = int(out.shape[axis]) - 1
        at = np.minimum(np.maximum((np.arange((last + 1) * factor) + 0.5) / factor - 0.5, 0), last)
        low: np.ndarray = np.floor(at).astype(int)
        share = (at - low).reshape((-1, 1) if axis == 2 else -1)
        out = out.take(low, axis) * (1 - share) + out.take(np.minimum(low + 1, last), axis) * share
    return out


def _lrn(call: Call) -> np.ndarray:
    size = int(call.attrs["size"])
    _windows.fits(call.x.shape[1] + size)
    before, after = (size - 1) // 2, size // 2
    squares = np.pad(call.x**2, ((0, 0), (before, after), *((0, 0),) * (call.x.ndim - 2)))
    total = np.zeros_like(call.x)
    for shift in range(size):
        total += squares[:, shift : shift + call.x.shape[1]]
    return call.x / (call.attrs.get("k", 1.0) + call.attrs["alpha"] / size * total) ** call.attrs["beta"]


def _input(call: Call) -> np.ndarray:
    shape = call.attrs.get("shape")
    if shape is not None and len(shape) == 3:
        channels = shape[2] if call.attrs.get("layout") == "nhwc" else shape[0]
        if channels is not None and channels != call.x.shape[1]:
            raise ValueError(f"it takes {channels} channels, and the images have {call.x.shape[1]}")
    return call.x


OPERATIONS: dict[str, Callable[[Call], np.ndarray]] = {
    "input": _input,
    "conv": _conv,
    "depthwise": _conv,
    "transposed": _transposed,
    "dense": _dense,
    "norm": _norm,
    "scale": lambda c: c.x * c.per_channel(c.vector("weight", 1.0)) + c.per_channel(c.vector("bias", 0.0)),
    "relu": lambda c: np.maximum(c.x, 0),
    "relu6": lambda c: np.clip(c.x, 0, 6),
    "leaky_relu": lambda c: np.where(c.x > 0, c.x, c.x * c.attrs["slope"]),
    "prelu": lambda c: np.where(c.x > 0, c.x, c.x * c.per_channel(c.needed("weight"))),
    "elu": lambda c: np.where(c.x > 0, c.x, c.attrs.get("alpha", 1.0) * np.expm1(np.minimum(c.x, 0))),
    "sigmoid": lambda c: _sigmoid(c.x),
    "hardsigmoid": lambda c: np.clip(c.x * c.attrs.get("alpha", 1 / 6) + c.attrs.get("beta", 0.5), 0, 1),
    "hardswish": lambda c: c.x * np.clip(c.x / 6 + 0.5, 0, 1),
    "tanh": lambda c: np.tanh(c.x),
    "silu": lambda c: c.x * _sigmoid(c.x),
    "gelu": _gelu,
    "softplus": lambda c: np.logaddexp(c.x, 0),
    "softmax": lambda c: _softmax(c.x),
    "clip": lambda c: np.clip(c.x, c.attrs["low"], c.attrs["high"]),
    "maxpool": lambda c: _windows.pool(c.x, c.attrs, average=False),
    "avgpool": lambda c: _windows.pool(c.x, c.attrs, average=True),
    "global_avgpool": lambda c: _global(c, np.mean),
    "global_maxpool": lambda c: _global(c, np.max),
    "add": lambda c: _reduced(c, np.add),
    "sub": lambda c: _reduced(c, np.subtract),
    "mul": lambda c: _reduced(c, np.multiply),
    "maximum": lambda c: _reduced(c, np.maximum),
    "average": lambda c: _reduced(c, np.add) / len(c.values),
    "concat": lambda c: np.concatenate(c.values, axis=1),
    "pad": lambda c: _windows.pad(c.x, _windows.resolve(c.attrs["pads"], (0, 0), (1, 1), (1, 1)), float(c.attrs.get("value", 0.0))),
    "crop": _crop,
    "slice": lambda c: c.x[:, c.attrs["start"] : c.attrs["stop"]],
    "flatten": _flatten,
    "reshape": _reshape,
    "upsample": _upsample,
    "lrn": _lrn,
    "affine": lambda c: c.x * c.per_channel(c.attrs.get("scale", 1.0)) + c.per_channel(c.attrs.get("offset", 0.0)),
    "permute_channels": lambda c: c.x[:, list(c.attrs["order"])],
    "identity": lambda c: c.x,
}
