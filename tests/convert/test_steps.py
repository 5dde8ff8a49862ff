"""Every step does what it says and takes it back; the flip turns true convolution into cross-correlation in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.signal import convolve, correlate
from torch.nn import functional as F

from convert.source import in_memory
from convert.steps import (
    Cast,
    FlattenOrder,
    Flip,
    Minus,
    Moment,
    Reshape,
    Scale,
    Step,
    SwapChannels,
    Transpose,
    flip,
    from_layout,
    laid,
    stored_shape,
    undo,
)

X = np.arange(16.0).reshape(4, 4)
K = np.arange(1.0, 10.0).reshape(3, 3)


def torch_of(function: Callable[..., torch.Tensor], x: np.ndarray, kernel: np.ndarray, **options: object) -> np.ndarray:
    return function(torch.from_numpy(x.copy()), torch.from_numpy(np.ascontiguousarray(kernel)), **options).numpy()


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def true_convolution(x: np.ndarray, kernel: np.ndarray, groups: int = 1) -> np.ndarray:
    """Convolve (B, C, ...) with (O, I/groups, ...), by scipy, map by map."""
    out = []
    per_group = len(kernel) // groups
    for image in x:
        inputs = image.reshape(groups, -1, *image.shape[1:])
        out.append(
            [sum(convolve(m, k, "valid") for m, k in zip(inputs[o // per_group], kernel[o], strict=True)) for o in range(len(kernel))]
        )
    return np.array(out)


# Traps 1 to 7 of the converter's facts: numbers worked out by hand or by an independent program.


def test_correlation_and_convolution_of_one_asymmetric_kernel() -> None:
    assert torch_of(F.conv2d, X[None, None], K[None, None]).ravel().tolist() == [303, 348, 483, 528]
    assert torch_of(F.conv2d, X[None, None], flip(K[None, None])).ravel().tolist() == [147, 192, 327, 372]
    assert convolve(X, K, "valid").ravel().tolist() == [147, 192, 327, 372]
    assert correlate(X, K, "valid").ravel().tolist() == [303, 348, 483, 528]


def test_correlation_and_convolution_in_one_dimension() -> None:
    x, kernel = np.arange(1.0, 7.0)[None, None], np.arange(1.0, 4.0)[None, None]
    assert torch_of(F.conv1d, x, kernel).ravel().tolist() == [14, 20, 26, 32]
    assert torch_of(F.conv1d, x, flip(kernel, "OIW")).ravel().tolist() == [10, 16, 22, 28]


def test_a_symmetric_kernel_hides_the_flip_and_the_edge_kernel_changes_its_sign_only() -> None:
    box, sobel = np.ones((3, 3)), np.array([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    assert np.array_equal(flip(box, "HW"), box)
    assert not np.array_equal(flip(K, "HW"), K)
    right = np.tile(np.arange(4.0) * 4, (4, 1))
    assert correlate(right, sobel, "valid").ravel().tolist() == [32] * 4
    assert correlate(right, flip(sobel, "HW"), "valid").ravel().tolist() == [-32] * 4


def test_flipping_one_axis_alone_or_transposing_is_another_thing() -> None:
    def computed(kernel: np.ndarray) -> list[float]:
        return torch_of(F.conv2d, X[None, None], kernel[None, None]).ravel().tolist()

    assert computed(K[::-1]) == [159, 204, 339, 384]
    assert computed(K[:, ::-1]) == [291, 336, 471, 516]
    assert computed(K.T) == [267, 312, 447, 492]
    assert computed(flip(K, "HW")) == [147, 192, 327, 372]
    assert flip(K, "HI").tolist() == K[::-1].tolist()


def test_height_and_width_are_not_exchanged() -> None:
    oblong = np.arange(15.0).reshape(3, 5)
    assert flip(oblong, "HW").shape == (3, 5)
    assert from_layout("conv", "HWIO", (3, 5, 2, 7))[0].shape((3, 5, 2, 7)) == (7, 2, 3, 5)
    assert from_layout("conv", "WHIO", (5, 3, 2, 7))[0].shape((5, 3, 2, 7)) == (7, 2, 3, 5)
    stored = numbers(5, 3, 2, 7)
    (step,) = from_layout("conv", "WHIO", stored.shape)
    assert step.do(stored)[6, 1, 2, 4] == stored[4, 2, 1, 6]


def test_a_flipped_network_on_an_image_is_the_network_on_the_rotated_image_rotated() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 3, 5)).double()
    x = torch.randn(1, 2, 11, 11, dtype=torch.float64)
    with torch.no_grad():
        rotated = net(x.flip(2, 3)).flip(2, 3)
        wrong = net(x)
        for layer in (net[0], net[2]):
            layer.weight.copy_(flip(layer.weight))
        flipped = net(x)
    assert (flipped - rotated).abs().max() < 1e-12
    assert (flipped - wrong).abs().max() > 0.1


def test_a_depthwise_kernel_puts_each_channels_multiples_side_by_side() -> None:
    stored, x = numbers(3, 3, 3, 2), numbers(1, 3, 6, 6, seed=1)
    kernel = stored
    for step in from_layout("depthwise", "HWCM", stored.shape):
        kernel = step.do(kernel)
    wanted = np.array([[correlate(x[0, c], stored[:, :, c, m], "valid") for c in range(3) for m in range(2)]])
    assert kernel.shape == (6, 1, 3, 3)
    assert np.abs(torch_of(F.conv2d, x, kernel, groups=3) - wanted).max() < 1e-12
    wrong = stored.transpose(3, 2, 0, 1).reshape(6, 1, 3, 3)
    assert np.abs(torch_of(F.conv2d, x, wrong, groups=3) - wanted).max() > 1


@pytest.mark.real
def test_a_depthwise_kernel_computes_what_keras_computed(real: Path) -> None:
    file = np.load(real / "real" / "fixtures" / "dw.npz")
    kernel, x, y = file["k"], file["x"], file["y"]
    for step in from_layout("depthwise", "HWCM", kernel.shape):
        kernel = step.do(kernel)
    got = torch_of(F.conv2d, x.transpose(0, 3, 1, 2), kernel, groups=x.shape[-1]).transpose(0, 2, 3, 1)
    assert np.abs(got - y).max() < 1e-5


def test_a_dense_weight_behind_a_flattened_map() -> None:
    hwc = np.arange(12).reshape(3, 2, 2).transpose(1, 2, 0).ravel()
    assert hwc.tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert FlattenOrder(3, 2, 2, "hwc").do(hwc[None]).ravel().tolist() == list(range(12))


@pytest.mark.parametrize("order", ["".join(p) for p in itertools.permutations("chw")])
def test_a_dense_weight_reads_the_same_numbers_in_every_flatten_order(order: str) -> None:
    feature_map, weight = numbers(3, 2, 5), numbers(4, 30, seed=1)
    theirs = feature_map.transpose(*("chw".index(letter) for letter in order)).ravel()
    step = FlattenOrder(3, 2, 5, order)
    assert np.allclose(step.do(weight) @ feature_map.ravel(), weight @ theirs, rtol=0, atol=1e-12)
    assert np.array_equal(step.undo(step.do(weight)), weight)
    assert np.array_equal(step.do(step.undo(weight)), weight)


def test_a_map_that_does_not_fill_the_dense_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="3x2x2 does not fill"):
        FlattenOrder(3, 2, 2).shape((4, 13))


# The flip against scipy's true convolution: dense, grouped, depthwise, transposed, in every layout.

AXES_2D = "OIHW"


@pytest.mark.parametrize("layout", ["".join(p) for p in itertools.permutations(AXES_2D)])
def test_flipping_a_dense_kernel_in_any_layout_gives_true_convolution(layout: str) -> None:
    kernel, x = numbers(4, 3, 2, 3), numbers(2, 3, 6, 7, seed=1)
    stored = kernel.transpose(*(AXES_2D.index(letter) for letter in layout))
    turned = flip(stored, layout)
    for step in from_layout("conv", layout, stored.shape):
        turned = step.do(turned)
    assert np.abs(torch_of(F.conv2d, x, turned) - true_convolution(x, kernel)).max() < 1e-12


def test_flipping_a_grouped_kernel_gives_true_convolution() -> None:
    kernel, x = numbers(6, 2, 3, 2), numbers(1, 4, 6, 7, seed=1)
    assert np.abs(torch_of(F.conv2d, x, flip(kernel), groups=2) - true_convolution(x, kernel, groups=2)).max() < 1e-12


@pytest.mark.parametrize("layout", ["".join(p) for p in itertools.permutations("CMHW")])
def test_flipping_a_depthwise_kernel_in_any_layout_gives_true_convolution(layout: str) -> None:
    kernel, x = numbers(3, 2, 2, 3), numbers(1, 3, 6, 7, seed=1)
    stored = kernel.transpose(*("CMHW".index(letter) for letter in layout))
    turned = flip(stored, layout)
    for step in from_layout("depthwise", layout, stored.shape):
        turned = step.do(turned)
    assert np.abs(torch_of(F.conv2d, x, turned, groups=3) - true_convolution(x, kernel.reshape(6, 1, 2, 3), groups=3)).max() < 1e-12


@pytest.mark.parametrize("layout", ["".join(p) for p in itertools.permutations("IOHW")])
def test_flipping_a_transposed_kernel_in_any_layout_gives_the_gradient_of_true_convolution(layout: str) -> None:
    # a transposed convolution spreads each pixel with its kernel, which is scipy's full convolution; one that was trained as the
    # gradient of a true convolution spreads it backwards, which is the full correlation
    kernel, x = numbers(3, 4, 2, 3), numbers(1, 3, 5, 6, seed=1)
    stored = kernel.transpose(*("IOHW".index(letter) for letter in layout))
    turned = flip(stored, layout)
    for step in from_layout("transposed", layout, stored.shape):
        turned = step.do(turned)
    wanted = np.array([[sum(correlate(x[0, i], kernel[i, o], "full") for i in range(3)) for o in range(4)]])
    assert np.abs(torch_of(F.conv_transpose2d, x, turned) - wanted).max() < 1e-12
    plain = np.array([[sum(convolve(x[0, i], kernel[i, o], "full") for i in range(3)) for o in range(4)]])
    assert np.abs(torch_of(F.conv_transpose2d, x, kernel) - plain).max() < 1e-12


def test_flipping_kernels_of_one_and_three_dimensions_gives_true_convolution() -> None:
    kernel, x = numbers(4, 3, 5), numbers(1, 3, 9, seed=1)
    assert np.abs(torch_of(F.conv1d, x, flip(kernel, "OIW")) - true_convolution(x, kernel)).max() < 1e-12
    kernel, x = numbers(2, 3, 2, 3, 2), numbers(1, 3, 4, 5, 4, seed=1)
    assert np.abs(torch_of(F.conv3d, x, flip(kernel, "OIDHW")) - true_convolution(x, kernel)).max() < 1e-12


def test_a_flip_changes_space_alone_and_keeps_type_and_shape() -> None:
    kernel = numbers(4, 3, 2, 3).astype(np.float16)
    turned = flip(kernel)
    assert turned.dtype == np.float16
    assert np.shares_memory(turned, kernel)
    assert np.array_equal(turned[1, 2], kernel[1, 2, ::-1, ::-1])
    assert torch.equal(flip(torch.from_numpy(kernel)), torch.from_numpy(turned.copy()))


def test_a_layout_of_another_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="names 4 axes, the kernel has 3"):
        flip(np.zeros((2, 3, 4)))
    with pytest.raises(ValueError, match="names 4 axes, the tensor has 3"):
        from_layout("conv", "HWIO", (3, 3, 4))
    with pytest.raises(ValueError, match="a linear weight has axes"):
        from_layout("linear", "HW", (3, 3))


# Steps and their inverses.

STEPS: list[tuple[Step, tuple[int, ...]]] = [
    *((Transpose(axes), (2, 3, 4, 5)) for axes in itertools.permutations(range(4))),
    (Reshape((2, 3, 4, 5), (24, 5)), (2, 3, 4, 5)),
    (Flip(), (2, 3, 4, 5)),
    (Flip((2,)), (2, 3, 4)),
    (SwapChannels(), (2, 3, 4, 5)),
    (FlattenOrder(2, 3, 4), (5, 24)),
    (Cast("float32", "float64"), (2, 3)),
]


@pytest.mark.parametrize(("step", "shape"), STEPS, ids=lambda value: str(value))
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_exact_steps_give_back_every_bit(step: Step, shape: tuple[int, ...], data: st.DataObject) -> None:
    array = data.draw(hnp.arrays(np.float32, shape, elements=st.floats(width=32)))
    there = step.do(array)
    assert step.exact
    assert there.shape == step.shape(array.shape)
    back = step.undo(there)
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


@settings(max_examples=50, deadline=None)
@given(
    variance=hnp.arrays(np.float32, (5,), elements=st.floats(0.0009765625, 1024, width=32)),
    kind=st.sampled_from(["std", "inv_std"]),
    eps=st.sampled_from([1e-8, 1e-5, 1e-4, 1e-3]),
)
def test_a_variance_comes_back_from_what_a_file_keeps_of_it(variance: np.ndarray, kind: str, eps: float) -> None:
    kept = np.sqrt(variance.astype(np.float64) + eps)
    kept = kept if kind == "std" else 1 / kept
    step = Moment(kind, eps)
    assert np.allclose(step.do(kept), variance, rtol=1e-6, atol=1e-9)
    assert np.allclose(step.undo(step.do(kept)), kept, rtol=1e-6)
    assert step.do(kept.astype(np.float32)).dtype == np.float32
    assert not step.exact


@settings(max_examples=30, deadline=None)
@given(array=hnp.arrays(np.float32, (7,), elements=st.floats(-100, 100, width=32)), factor=st.floats(1e-3, 1e3))
def test_scaling_and_subtracting_come_back(array: np.ndarray, factor: float) -> None:
    scale, minus = Scale(factor), Minus(np.linspace(-5, 5, 7), "conv.bias")
    assert np.allclose(scale.do(array), array.astype(np.float64) * factor, rtol=1e-6)
    assert np.allclose(scale.undo(scale.do(array)), array, rtol=1e-5, atol=1e-30)
    assert np.allclose(minus.do(array), array - np.linspace(-5, 5, 7), atol=1e-4)
    assert np.allclose(minus.undo(minus.do(array)), array, atol=1e-4)
    assert "conv.bias" in str(minus)


@pytest.mark.parametrize(
    ("kind", "layout", "shape", "multiplier"),
    [
        *(("conv", "".join(p), (4, 3, 2, 5), 1) for p in itertools.permutations("OIHW")),
        *(("transposed", "".join(p), (4, 3, 2, 5), 1) for p in itertools.permutations("IOHW")),
        *(("depthwise", "".join(p), (6, 1, 2, 5), 2) for p in itertools.permutations("CMHW")),
        ("depthwise", "HWIO", (6, 1, 2, 5), 1),
        ("linear", "IO", (4, 3), 1),
        ("linear", "OI", (4, 3), 1),
        ("conv", "WIO", (4, 3, 5), 1),
        ("conv", "DHWIO", (4, 3, 2, 5, 6), 1),
    ],
)
def test_every_layout_leads_to_pytorchs_form_and_back(kind: str, layout: str, shape: tuple[int, ...], multiplier: int) -> None:
    ours = numbers(*shape)
    raw = stored_shape(kind, layout, shape, multiplier)
    steps = from_layout(kind, layout, raw)
    theirs = undo(steps, ours)
    assert theirs.shape == raw
    stored = in_memory("w", theirs, *steps)
    assert stored.shape == shape
    assert np.array_equal(stored.array(), ours)


def test_steps_are_taken_back_in_the_opposite_order() -> None:
    array = numbers(2, 3, 4)
    steps = (Transpose((2, 0, 1)), Reshape((4, 2, 3), (4, 6)), Cast("float64", "float32"))
    there = array
    for step in steps:
        there = step.do(there)
    assert np.allclose(undo(steps, there), array, rtol=1e-6)


def test_a_kernel_is_flipped_when_its_record_says_so_or_the_caller() -> None:
    kernel = numbers(2, 2, 3, 3)
    learnt = in_memory("w", kernel, convention="convolution")
    assert np.array_equal(learnt.as_correlation().array(), flip(kernel))
    assert np.array_equal(learnt.as_correlation("correlation").array(), kernel)
    assert np.array_equal(in_memory("w", kernel, convention="unknown").as_correlation("convolution").array(), flip(kernel))
    assert in_memory("w", kernel, convention="correlation").as_correlation().steps == ()
    assert in_memory("b", kernel[0, 0, 0]).as_correlation("convolution").steps == ()


def test_steps_print_as_a_reader_of_the_metadata_sees_them() -> None:
    said = [str(step) for step, _ in STEPS[-6:]]
    assert said[0] == "reshape(2x3x4x5 to 24x5)"
    assert said[1:4] == ["flip(2,3)", "flip(2)", "swap channels(1)"]
    assert said[4:] == ["flatten hwc to chw(2x3x4)", "float32 to float64"]
    assert str(Moment("inv_std", 1e-4)) == "variance from inv_std(eps 0.0001)"


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((3, 3, 130, 140), (3, 2, 0, 1)), ((300, 260), (1, 0)), ((2, 3, 70, 200), (3, 2, 1, 0)), ((40, 9, 250), (0, 2, 1)), ((70000,), (0,))],
)
def test_a_copy_in_tiles_is_the_copy(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for view in (array.transpose(axes), np.flip(array.transpose(axes), 0)):
        made = laid(view)
        assert made.flags.c_contiguous
        assert np.array_equal(made, view)
        room = np.empty(view.shape, view.dtype)
        assert laid(view, room) is room
        assert np.array_equal(room, view)


def test_a_flatten_order_spread_has_the_numbers_in_the_order_of_its_result() -> None:
    step = FlattenOrder(5, 3, 4, "hwc")
    array = np.arange(7 * 60, dtype=np.float32).reshape(60, 7).T
    assert np.array_equal(np.ascontiguousarray(step.spread(array)).reshape(-1), step.do(array).reshape(-1))
