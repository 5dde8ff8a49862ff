"""The float64 executor: every operation against PyTorch and SciPy, and the numbers by which each trap is known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import signal
from torch.nn import functional as F

from convert import _ops, _windows, execute, formats
from convert.graph import OPS, Graph, Node
from convert.source import Source, in_memory
from weights.errors import ConvertError, LimitExceeded

RANDOM = np.random.default_rng(5)
SQUARE = np.arange(16.0).reshape(1, 1, 4, 4)
TAPS = np.arange(1.0, 10.0).reshape(1, 1, 3, 3)


def source(nodes: list[Node], tensors: Mapping[str, np.ndarray] | None = None, **facts: Any) -> Source:
    stored = {name: in_memory(name, array) for name, array in (tensors or {}).items()}
    return Source(Path("by hand"), "none", "none", stored, graph=Graph(tuple(nodes), (nodes[-1].name,)), **facts)


def one(op: str, x: np.ndarray, tensors: Mapping[str, np.ndarray] | None = None, **attrs: Any) -> np.ndarray:
    """Execute one layer alone; its tensors are named by leaf."""
    nodes = [Node("x", "input"), Node("layer", op, ("x",), attrs)]
    return execute.run(source(nodes, {f"layer.{leaf}": a for leaf, a in (tensors or {}).items()}), x)["layer"]


def conv(
    x: np.ndarray, weight: np.ndarray, op: str = "conv", layout: str = "OIHW", convention: str = "correlation", **attrs: Any
) -> np.ndarray:
    return one(op, x, {"weight": weight}, layout=layout, convention=convention, **attrs)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape)


def t(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def close(ours: np.ndarray, theirs: Any, rtol: float = 1e-12) -> None:
    theirs = np.asarray(theirs)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=1e-12)


# the traps of kernels


def test_correlation_and_convolution_of_the_known_kernel() -> None:
    assert conv(SQUARE, TAPS).ravel().tolist() == [303, 348, 483, 528]
    assert conv(SQUARE, TAPS, convention="convolution").ravel().tolist() == [147, 192, 327, 372]


def test_convolution_along_one_axis() -> None:
    x, k = np.arange(1.0, 7.0).reshape(1, 1, 1, 6), np.arange(1.0, 4.0).reshape(1, 1, 1, 3)
    assert conv(x, k, convention="convolution").ravel().tolist() == [10, 16, 22, 28]
    assert conv(x, k).ravel().tolist() == [14, 20, 26, 32]


def test_a_half_flip_and_a_transposition_give_other_numbers() -> None:
    assert conv(SQUARE, TAPS[:, :, ::-1]).ravel().tolist() == [159, 204, 339, 384]
    assert conv(SQUARE, TAPS[:, :, :, ::-1]).ravel().tolist() == [291, 336, 471, 516]
    assert conv(SQUARE, TAPS, layout="OIWH").ravel().tolist() == [267, 312, 447, 492]


@pytest.mark.parametrize("convention", ["correlation", "convolution"])
@pytest.mark.parametrize("layout", ["OIHW", "HWIO", "WHIO", "OIWH"])
def test_every_layout_of_an_oblong_kernel_means_the_same(layout: str, convention: str) -> None:
    x, kernel = normal(2, 3, 7, 10), normal(4, 3, 3, 5)
    raw = kernel.transpose(["OIHW".index(letter) for letter in layout])
    operation = signal.convolve2d if convention == "convolution" else signal.correlate2d
    expected = [[sum(operation(image[c], kernel[o, c], "valid") for c in range(3)) for o in range(4)] for image in x]
    close(conv(x, raw, layout=layout, convention=convention), expected)


@pytest.mark.parametrize(("size", "pads"), [(8, (0, 1)), (7, (1, 1))])
def test_same_padding_is_one_sided_on_even_sizes(size: int, pads: tuple[int, int]) -> None:
    assert _windows.resolve("same_upper", (size, size), (3, 3), (2, 2)) == (pads[0], pads[0], pads[1], pads[1])
    x, k = np.arange(float(size * size)).reshape(1, 1, size, size), TAPS / 10 - 0.1  # 0 to .8
    same, usual = conv(x, k, pads="same_upper", stride=(2, 2)), conv(x, k, pads=(1, 1, 1, 1), stride=(2, 2))
    first = {8: (47.4, 13.3), 7: (11.8, 11.8)}[size]
    assert (float(same[0, 0, 0, 0]), float(usual[0, 0, 0, 0])) == pytest.approx(first)


def test_same_padding_of_large_kernels_and_strides() -> None:
    assert _windows.resolve("same_upper", (224, 224), (7, 7), (2, 2)) == (2, 2, 3, 3)
    assert _windows.resolve("same_upper", (8, 8), (5, 5), (3, 3)) == (1, 1, 2, 2)
    assert _windows.resolve("same_lower", (8, 8), (5, 5), (3, 3)) == (2, 2, 1, 1)
    assert _windows.resolve("same_upper", (5, 5), (1, 1), (2, 2)) == (0, 0, 0, 0)


def test_an_even_kernel_padded_in_front_differs_from_one_padded_behind() -> None:
    k = np.array([[1.0, 2.0], [3.0, 4.0]])[None, None]
    front, behind = conv(SQUARE, k, pads="same_lower"), conv(SQUARE, k, pads="same_upper")
    close(front, F.conv2d(F.pad(t(SQUARE), (1, 0, 1, 0)), t(k)))
    close(behind, F.conv2d(F.pad(t(SQUARE), (0, 1, 0, 1)), t(k)))
    assert not np.allclose(front, behind)


@pytest.mark.parametrize("convention", ["correlation", "convolution"])
@pytest.mark.parametrize(
    ("shape", "kernel", "groups", "stride", "dilation", "pads"),
    [
        ((1, 4, 9, 11), (6, 4, 3, 5), 1, (1, 1), (1, 1), (0, 0, 0, 0)),
        ((2, 4, 8, 11), (6, 4, 3, 5), 1, (2, 3), (1, 1), (1, 2, 1, 2)),
        ((2, 4, 10, 9), (6, 2, 3, 3), 2, (2, 1), (2, 1), (2, 1, 2, 1)),
        ((2, 6, 7, 8), (6, 1, 3, 2), 6, (1, 2), (1, 3), (1, 1, 1, 1)),
        ((2, 3, 7, 8), (6, 1, 3, 3), 3, (2, 2), (1, 1), (1, 1, 1, 1)),
        ((1, 5, 6, 6), (3, 5, 1, 1), 1, (2, 2), (1, 1), (1, 1, 1, 1)),
        ((1, 2, 40, 3), (2, 2, 33, 2), 1, (1, 1), (1, 1), (0, 0, 0, 0)),
    ],
)
def test_convolutions_agree_with_torch(
    shape: tuple[int, ...],
    kernel: tuple[int, ...],
    groups: int,
    stride: tuple[int, int],
    dilation: tuple[int, int],
    pads: tuple[int, int, int, int],
    convention: str,
) -> None:
    x, w, b = normal(*shape), normal(*kernel), normal(kernel[0])
    attrs = {"layout": "OIHW", "convention": convention, "stride": stride, "dilation": dilation, "groups": groups, "pads": pads}
    turned = t(w).flip(2, 3) if convention == "convolution" else t(w)
    close(one("conv", x, {"weight": w, "bias": b}, **attrs), F.conv2d(t(x), turned, t(b), stride, pads[:2], dilation, groups))


def test_a_long_convolution_in_small_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = normal(2, 4, 13, 9), normal(6, 2, 3, 3)
    whole = conv(x, w, groups=2)
    monkeypatch.setattr(_windows, "PATCH_BYTES", 2000)
    close(conv(x, w, groups=2), whole)


def test_grouped_kernels_of_keras_see_their_own_channels_only() -> None:
    x, w = normal(1, 4, 5, 5), normal(3, 3, 2, 6)  # (h, w, I / groups, O)
    close(conv(x, w, layout="HWIO", groups=2), F.conv2d(t(x), t(w.transpose(3, 2, 0, 1)), groups=2))


def test_a_depthwise_multiplier_keeps_a_channels_maps_together() -> None:
    x, w = normal(1, 3, 6, 7), normal(3, 2, 3, 2)  # (h, w, C, M)
    expected = np.stack([signal.correlate2d(x[0, c], w[:, :, c, m], "valid") for c in range(3) for m in range(2)])
    close(conv(x, w, op="depthwise", layout="HWCM"), expected[None])


@pytest.mark.parametrize("convention", ["correlation", "convolution"])
@pytest.mark.parametrize(
    ("stride", "dilation", "groups", "pad", "more"),
    [((1, 1), (1, 1), 1, (0, 0), (0, 0)), ((2, 3), (1, 2), 2, (1, 0), (1, 2)), ((2, 2), (1, 1), 1, (1, 1), (1, 1))],
)
def test_transposed_convolutions_agree_with_torch(
    stride: tuple[int, int], dilation: tuple[int, int], groups: int, pad: tuple[int, int], more: tuple[int, int], convention: str
) -> None:
    x, w, b = normal(2, 4, 5, 6), normal(4, 3, 3, 2), normal(3 * groups)
    turned = t(w).flip(2, 3) if convention == "convolution" else t(w)
    attrs = {"layout": "IOHW", "convention": convention, "stride": stride, "dilation": dilation, "groups": groups}
    ours = one("transposed", x, {"weight": w, "bias": b}, **attrs, pads=(*pad, *pad), output_padding=more)
    close(ours, F.conv_transpose2d(t(x), turned, t(b), stride, pad, more, groups, dilation))


@pytest.mark.parametrize("kernel", [2, 3, 4, 5])
def test_a_transposed_convolution_is_the_gradient_of_the_same_padded_one(kernel: int) -> None:
    x, w = normal(1, 3, 5, 4), normal(kernel, kernel, 2, 3)  # Keras: (h, w, O, I)
    large = torch.zeros(1, 2, 10, 8, dtype=torch.float64, requires_grad=True)
    top, left, bottom, right = _windows.resolve("same_upper", (10, 8), (kernel, kernel), (2, 2))
    forward = F.conv2d(F.pad(large, (left, right, top, bottom)), t(w.transpose(3, 2, 0, 1)), stride=2)
    (expected,) = torch.autograd.grad(forward, large, t(x))
    close(conv(x, w, op="transposed", layout="HWOI", stride=(2, 2), pads="same_upper"), expected)


def test_flax_and_keras_lay_a_transposed_kernel_the_other_way_round() -> None:
    x, w = normal(1, 2, 4, 4), normal(2, 3, 3, 3)
    plain, turned = (conv(x, w, op="transposed", layout="IOHW", convention=c) for c in ("correlation", "convolution"))
    close(turned, conv(x, w[:, :, ::-1, ::-1], op="transposed", layout="IOHW"))
    assert not np.allclose(plain, turned)


def test_the_fast_path_is_checked_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _windows.convolve
    monkeypatch.setattr(_windows, "convolve", lambda *a: right(*a) * (1 + 1e-9))
    with pytest.raises(ConvertError, match=r"'layer'.*disagree"):
        conv(SQUARE, TAPS)


def test_a_kernel_of_unknown_convention_is_not_executed() -> None:
    with pytest.raises(ConvertError, match="'layer' computes correlation or convolution"):
        conv(SQUARE, TAPS, convention="unknown")
    assert conv(SQUARE, TAPS[:, :, :1, :1], convention="unknown").shape == (1, 1, 4, 4)


# pools


def test_averages_at_the_border_count_padding_or_not() -> None:
    x = np.arange(36.0).reshape(1, 1, 6, 6)
    window = {"kernel": (3, 3), "stride": (2, 2), "pads": "same_upper"}
    close(one("avgpool", x, **window, count_pad="none").ravel(), [7, 9, 10.5, 19, 21, 22.5, 28, 30, 31.5])
    zeros = one("avgpool", x, **window, count_pad="all").ravel()
    assert zeros.round(2).tolist() == [7, 9, 7, 19, 21, 15, 18.67, 20, 14]


def test_rounding_up_keeps_the_last_window() -> None:
    x = np.arange(36.0).reshape(1, 1, 6, 6)
    window = {"kernel": (3, 3), "stride": (2, 2)}
    assert one("maxpool", x, **window, rounding="floor").ravel().tolist() == [14, 16, 26, 28]
    assert one("maxpool", x, **window, rounding="ceil").ravel().tolist() == [14, 16, 17, 26, 28, 29, 32, 34, 35]
    large = np.zeros((1, 1, 112, 112))
    sizes = [one("maxpool", large, **window, pads=(1, 1, 1, 1), rounding=r).shape[2] for r in ("floor", "caffe")]
    assert sizes == [56, 57]


@pytest.mark.parametrize("size", [(5, 6), (7, 9), (8, 8), (112, 5)])
@pytest.mark.parametrize(("kernel", "stride", "pad"), [((2, 2), (2, 2), 0), ((3, 3), (2, 2), 1), ((3, 2), (2, 3), 1), ((1, 1), (3, 3), 0)])
@pytest.mark.parametrize("ceil", [False, True])
def test_pools_agree_with_torch(size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], pad: int, ceil: bool) -> None:
    x = normal(2, 3, *size)
    window: dict[str, Any] = {"kernel": kernel, "stride": stride, "pads": (pad,) * 4, "rounding": "ceil" if ceil else "floor"}
    close(one("maxpool", x, **window), F.max_pool2d(t(x), kernel, stride, pad, ceil_mode=ceil))
    for counted in (False, True):
        ours = one("avgpool", x, **window, count_pad="all" if counted else "none")
        close(ours, F.avg_pool2d(t(x), kernel, stride, pad, ceil, counted))


# norms


NORM = {"weight": np.array([2.0]), "bias": np.array([0.5]), "running_mean": np.array([1.0])}


@pytest.mark.parametrize(
    ("eps", "moment", "stored", "expected"),
    [
        (1e-5, "variance", 4e-4, 198.046),
        (1e-3, "variance", 4e-4, 107.404),
        (1e-6, "sqrt+eps", 4e-4, 200.490),  # Darknet
        (1e-4, "inv_std", (4e-4 + 1e-4) ** -0.5, 179.385),  # Lasagne
        (1e-8, "std", 0.02, 200.5),  # Flux 2018
        (1e-6, "std+eps", 0.02, 200.490),  # Keras 0.3
    ],
)
def test_each_second_moment_is_used_as_its_framework_does(eps: float, moment: str, stored: float, expected: float) -> None:
    x = np.full((1, 1, 1, 1), 3.0)
    assert float(one("norm", x, {**NORM, "running_var": np.array([stored])}, eps=eps, moment=moment).item()) == pytest.approx(
        expected, abs=6e-4
    )


def test_the_four_vectors_of_a_norm_are_told_apart() -> None:
    filled = {leaf: np.array([value]) for leaf, value in (("weight", 1.0), ("bias", 2.0), ("running_mean", 3.0), ("running_var", 4.0))}
    assert one("norm", np.full((1, 1, 1, 1), 13.0), filled, eps=0.0).item() == (13 - 3) / 2 * 1 + 2


def test_caffes_sums_are_divided_by_their_factor() -> None:
    x, n = normal(2, 3, 4, 4), {leaf: abs(normal(3)) for leaf in ("weight", "bias", "running_mean", "running_var")}
    sums = {**n, "running_mean": n["running_mean"] * 999.98, "running_var": n["running_var"] * 999.98}
    close(one("norm", x, sums, eps=1e-5, factor=999.98), one("norm", x, n, eps=1e-5))
    close(one("norm", x, {"running_mean": n["weight"], "running_var": n["weight"]}, eps=1.0, factor=0.0), x)


def test_a_norm_agrees_with_torch_and_its_scale_may_lack() -> None:
    x, (w, b, m), v = normal(2, 3, 4, 5), normal(3, 3), abs(normal(3))
    expected = F.batch_norm(t(x), t(m), t(v), t(w), t(b), eps=1e-3)
    close(one("norm", x, {"weight": w, "bias": b, "running_mean": m, "running_var": v}, eps=1e-3), expected)
    close(one("norm", x, {"bias": b, "running_mean": m, "running_var": v}, eps=1e-3), F.batch_norm(t(x), t(m), t(v), bias=t(b), eps=1e-3))
    flat = normal(4, 3)
    close(one("norm", flat, {"running_mean": m, "running_var": v}, eps=1e-3), F.batch_norm(t(flat), t(m), t(v), eps=1e-3))
    close(one("scale", x, {"weight": w, "bias": b}), x * w[:, None, None] + b[:, None, None])


# everything without a window


@pytest.mark.parametrize(
    ("op", "attrs", "torchs"),
    [
        ("relu", {}, F.relu),
        ("relu6", {}, F.relu6),
        ("leaky_relu", {"slope": 0.1}, lambda x: F.leaky_relu(x, 0.1)),
        ("elu", {"alpha": 0.7}, lambda x: F.elu(x, 0.7)),
        ("sigmoid", {}, torch.sigmoid),
        ("hardsigmoid", {}, F.hardsigmoid),
        ("hardsigmoid", {"alpha": 0.2, "beta": 0.5}, lambda x: (x * 0.2 + 0.5).clamp(0, 1)),
        ("hardswish", {}, F.hardswish),
        ("tanh", {}, torch.tanh),
        ("silu", {}, F.silu),
        ("gelu", {"approximate": False}, F.gelu),
        ("gelu", {"approximate": True}, lambda x: F.gelu(x, approximate="tanh")),
        ("softplus", {}, F.softplus),
        ("softmax", {}, lambda x: F.softmax(x, 1)),
        ("clip", {"low": -0.5, "high": 1.5}, lambda x: x.clamp(-0.5, 1.5)),
        ("global_avgpool", {}, lambda x: x.mean((2, 3))),
        ("global_maxpool", {"keepdims": True}, lambda x: x.amax((2, 3), keepdim=True)),
        ("pad", {"pads": (1, 2, 3, 0), "value": 0.5}, lambda x: F.pad(x, (2, 0, 1, 3), value=0.5)),
        ("crop", {"pads": (1, 2, 0, 1)}, lambda x: x[:, :, 1:, 2:-1]),
        ("slice", {"start": 1, "stop": 4}, lambda x: x[:, 1:4]),
        ("flatten", {"order": "chw"}, lambda x: x.flatten(1)),
        ("flatten", {"order": "hwc"}, lambda x: x.permute(0, 2, 3, 1).flatten(1)),
        ("reshape", {"shape": (2, -1, 7), "layout": "nchw"}, lambda x: x.reshape(2, 2, -1, 7)),
        ("reshape", {"shape": (7, 3, -1), "layout": "nhwc"}, lambda x: x.permute(0, 2, 3, 1).reshape(2, 7, 3, -1).permute(0, 3, 1, 2)),
        ("upsample", {"factor": (2, 3), "mode": "nearest"}, lambda x: F.interpolate(x, scale_factor=(2.0, 3.0), mode="nearest")),
        ("upsample", {"factor": (3, 2), "mode": "bilinear"}, lambda x: F.interpolate(x, scale_factor=(3.0, 2.0), mode="bilinear")),
        ("lrn", {"size": 5, "alpha": 0.3, "beta": 0.75, "k": 2.0}, lambda x: F.local_response_norm(x, 5, 0.3, 0.75, 2.0)),
        ("affine", {"scale": 2.0, "offset": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}, lambda x: x * 2 + torch.arange(1.0, 7.0)[:, None, None]),
        ("permute_channels", {"order": (5, 4, 3, 2, 1, 0)}, lambda x: x.flip(1)),
        ("identity", {}, lambda x: x),
    ],
)
def test_operations_agree_with_torch(op: str, attrs: dict[str, Any], torchs: Any) -> None:
    x = normal(2, 6, 3, 7) * 4
    close(one(op, x, **attrs), torchs(t(x)))


def test_a_slope_for_each_channel() -> None:
    x, slopes = normal(2, 3, 4, 4), np.array([0.1, 0.5, -0.2])
    close(one("prelu", x, {"weight": slopes}), F.prelu(t(x), t(slopes)))


@pytest.mark.parametrize(
    ("op", "torchs"),
    [
        ("add", lambda a, b: a + b),
        ("sub", lambda a, b: a - b),
        ("mul", lambda a, b: a * b),
        ("maximum", torch.maximum),
        ("average", lambda a, b: (a + b) / 2),
        ("concat", lambda a, b: torch.cat((a, b), 1)),
    ],
)
def test_joins_agree_with_torch(op: str, torchs: Any) -> None:
    x = normal(2, 3, 4, 5)
    nodes = [Node("x", "input"), Node("r", "relu", ("x",)), Node("layer", op, ("r", "x"))]
    close(execute.run(source(nodes), x)["layer"], torchs(t(x).relu(), t(x)))


def test_a_gate_multiplies_all_pixels_of_its_channel() -> None:
    x = normal(2, 3, 4, 5)
    for keep in (True, False):
        nodes = [Node("x", "input"), Node("g", "global_avgpool", ("x",), {"keepdims": keep}), Node("layer", "mul", ("x", "g"))]
        close(execute.run(source(nodes), x)["layer"], t(x) * t(x).mean((2, 3), keepdim=True))


@pytest.mark.parametrize("layout", ["IO", "OI"])
def test_dense_layers_agree_with_torch_in_blocks_too(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = normal(3, 7), normal(5, 7), normal(5)
    tensors = {"weight": w.T if layout == "IO" else w, "bias": b}
    close(one("dense", x, tensors, layout=layout), F.linear(t(x), t(w), t(b)))
    monkeypatch.setattr(_ops, "DENSE_BYTES", 2 * 8 * 7)
    close(one("dense", x, tensors, layout=layout), F.linear(t(x), t(w), t(b)))


def test_a_dense_layer_on_a_map_works_on_each_pixel() -> None:
    x, w = normal(2, 3, 4, 5), normal(6, 3)
    close(one("dense", x, {"weight": w}, layout="OI"), F.conv2d(t(x), t(w)[:, :, None, None]))


def test_caffes_dense_weight_of_four_axes_is_read() -> None:
    x, w = normal(2, 3, 2, 2), normal(1, 1, 5, 12)
    close(one("dense", x, {"weight": w}, layout="OI"), F.linear(t(x).flatten(1), t(w[0, 0])))


def test_flatten_orders_of_a_known_map() -> None:
    x = np.arange(12.0).reshape(1, 3, 2, 2)
    assert one("flatten", x, order="chw")[0].tolist() == list(range(12))
    assert one("flatten", x, order="hwc")[0].tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]


def test_every_operation_of_the_graph_is_executed() -> None:
    assert set(_ops.OPERATIONS) == set(OPS)


# the run


def two_layers(**facts: Any) -> Source:
    nodes = [
        Node("x", "input", (), {"layout": "nhwc", "shape": (None, None, 2)}),
        Node("a", "conv", ("x",), {"layout": "OIHW", "convention": "correlation", "pads": (0, 1, 0, 1)}),
        Node("b", "relu", ("a",)),
        Node("c", "flatten", ("b",), {"order": "chw"}),
        Node("d", "unknown:Lambda", ("c",)),
    ]
    made = source(nodes, {"a.weight": np.random.default_rng(1).normal(size=(3, 2, 2, 3))}, **facts)
    made.graph = Graph(tuple(nodes), ("d",))
    return made


def test_only_what_is_wanted_is_computed() -> None:
    seen: list[tuple[int, int, str]] = []
    kept = execute.run(two_layers(), normal(1, 2, 4, 5), keep=["a", "b"], progress=lambda *said: seen.append(said))
    assert set(kept) == {"a", "b"}
    assert seen == [(0, 3, "x"), (1, 3, "a"), (2, 3, "b")]
    close(kept["b"], np.maximum(kept["a"], 0))


def test_an_operation_that_nothing_executes_is_named() -> None:
    with pytest.raises(ConvertError, match="Lambda"):
        execute.run(two_layers(), normal(1, 2, 4, 5))


def test_a_network_that_sees_its_images_turned_gives_maps_that_are_turned_back() -> None:
    x = normal(1, 2, 4, 5)
    turned = execute.run(two_layers(spatial="wh"), x, keep=["a", "c"])
    plain = execute.run(two_layers(), x.swapaxes(2, 3), keep=["a", "c"])
    close(turned["a"], plain["a"].swapaxes(2, 3))
    close(turned["c"], plain["c"])
    with pytest.raises(ConvertError, match="height or the width"):
        execute.run(two_layers(spatial="unknown"), x, keep=["a"])


def test_what_is_wrong_is_said_with_the_layers_name() -> None:
    with pytest.raises(ConvertError, match=r"'x' .*takes 2 channels, and the images have 3"):
        execute.run(two_layers(), normal(1, 3, 4, 5), keep=["a"])
    with pytest.raises(ConvertError, match=r"needs layer\.weight"):
        one("conv", SQUARE, layout="OIHW", convention="correlation")
    with pytest.raises(ConvertError, match=r"'layer' \(norm\).*lacks 'eps'"):
        one("norm", SQUARE, {"running_mean": np.zeros(1), "running_var": np.ones(1)})
    with pytest.raises(ConvertError, match="no layer 'zzz'"):
        execute.run(two_layers(), SQUARE, keep=["zzz"])
    with pytest.raises(ConvertError, match="carry no graph"):
        execute.run(Source(Path("a"), "npz", "none", {}), SQUARE)


@pytest.mark.parametrize(
    ("op", "attrs"),
    [("upsample", {"factor": (10**6, 10**6)}), ("pad", {"pads": (0, 0, 10**9, 10**9)}), ("lrn", {"size": 10**12, "alpha": 1, "beta": 1})],
)
def test_a_map_beyond_all_networks_is_refused(op: str, attrs: dict[str, Any]) -> None:
    with pytest.raises(LimitExceeded, match="larger than any network's"):
        one(op, SQUARE, **attrs)


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("maxpool", {"kernel": (0, 0)}),
        ("maxpool", {"kernel": (2, 2), "stride": (0, 0)}),
        ("avgpool", {"kernel": (9, 9)}),
        ("pad", {"pads": (-1, 0, 0, 0)}),
        ("reshape", {"shape": (5, 5, 5), "layout": "nhwc"}),
        ("upsample", {"factor": "x"}),
    ],
)
def test_numbers_that_make_no_sense_are_a_convert_error(op: str, attrs: dict[str, Any]) -> None:
    with pytest.raises(ConvertError, match="layer"):
        one(op, SQUARE, **attrs)


# what other programs computed from real files


def maps(array: np.ndarray) -> np.ndarray:
    return array.transpose(0, 3, 1, 2).astype(np.float64)


@pytest.mark.real
@pytest.mark.parametrize(
    ("fixture", "op", "attrs"),
    [
        ("dw", "depthwise", {"layout": "HWCM"}),
        ("gr", "conv", {"layout": "HWIO", "groups": 2}),
        ("ct", "transposed", {"layout": "HWOI", "stride": (2, 2), "pads": "valid"}),
        ("flaxdw", "conv", {"layout": "HWIO", "groups": 3}),
        ("flaxct", "transposed", {"layout": "HWIO", "stride": (2, 2), "pads": "valid", "convention": "convolution"}),
    ],
)
def test_single_layers_of_keras_and_flax(real: Path, fixture: str, op: str, attrs: dict[str, Any]) -> None:
    stored = np.load(real / "real" / "fixtures" / f"{fixture}.npz")
    np.testing.assert_allclose(conv(maps(stored["x"]), stored["k"], op=op, **attrs), maps(stored["y"]), atol=3e-6)


@pytest.mark.real
@pytest.mark.parametrize(("fixture", "file"), [("resnet8", "mlperf_tiny_pretrainedResnet.h5"), ("vww", "mlperf_tiny_vww_96.h5")])
def test_whole_networks_of_keras(real: Path, fixture: str, file: str) -> None:
    stored = np.load(real / "real" / "fixtures" / f"{fixture}.npz")
    with formats.read(real / "real" / "keras" / file) as network:
        (ours,) = execute.run(network, maps(stored["x"])).values()
    assert np.abs(ours - stored["y"]).max() < 1e-6


@pytest.mark.real
@pytest.mark.reference
def test_a_whole_network_of_caffe(real: Path) -> None:
    import cv2

    folder = real / "real" / "caffe"
    model = folder / "squeezenet_v1.0_deepcompression_decoded.caffemodel"
    images = np.random.default_rng(0).normal(0, 60, (1, 3, 227, 227)).astype(np.float32)
    reference = cv2.dnn.readNetFromCaffe(str(folder / "SqueezeNet_deploy.prototxt"), str(model))
    reference.setInput(images)
    theirs = reference.forward("pool_final")
    with formats.read(model) as network:
        ours = execute.run(network, images)["pool_final"]
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()
