"""Style networks: known answers of published files, borders, and pictures painted in strips."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.stylizing import Engstrom, Johnson, MobileStyle, StyleNetwork, style_network
from zoo.stylizing.learning import seeded
from zoo.stylizing.networks import _Reflected
from zoo.stylizing.strips import paint_in_strips

NETWORKS = {"Johnson": {"channels": 8}, "Engstrom": {}, "MobileStyle": {}}
each_network = pytest.mark.parametrize("name", NETWORKS)


def lively(name: str) -> StyleNetwork:
    """Build a network whose factors, shifts and biases are drawn too: with ones and zeros a mistake in them would not show."""
    network = seeded({"Johnson": Johnson, "Engstrom": Engstrom, "MobileStyle": MobileStyle}[name], 0, **NETWORKS[name])
    for parameter in network.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.5 * torch.randn_like(parameter)
    return network.eval()


@pytest.mark.real
@pytest.mark.parametrize(
    ("file", "key", "dtype"),
    [
        ("style_candy_nc16", "nc16/candy", np.float32),
        ("style_mosaic_nc8", "nc8/mosaic", np.float32),
        ("style_udnie_nc8", "nc8/udnie", np.float16),
    ],
)
def test_published_files_load_as_they_are_and_paint_the_known_picture(real: Path, file: str, key: str, dtype: type) -> None:
    folder = real / "real" / "fixtures" / "seeing"
    known = np.load(folder / "style_outputs.npz")
    x = torch.from_numpy(known["input_u8"]).permute(2, 0, 1)[None].float()
    with torch.no_grad():
        y = style_network(folder / f"{file}.pth")(x)[0].numpy()
    tolerance = 1e-3 if dtype is np.float32 else 0.13  # half a step of float16 at 255
    assert np.abs(y - known[key].astype(np.float32)).max() <= tolerance


@pytest.mark.parametrize(
    ("network", "parameters"), [(Johnson(32), 1_679_235), (Johnson(16), 424_899), (Johnson(8), 108_771), (MobileStyle(), 239_456)]
)
def test_parameters_are_as_many_as_published(network: StyleNetwork, parameters: int) -> None:
    assert sum(one.numel() for one in network.parameters()) == parameters


def test_engstroms_network_has_as_many_variables_as_its_files() -> None:
    assert len(Engstrom().state_dict()) == 48


@each_network
def test_strips_paint_what_the_whole_does(name: str) -> None:
    network = lively(name)
    x = 255 * torch.rand(1, 3, 104, 48)
    with torch.no_grad():
        whole = network(x)[0]
    asked: list[int] = []

    def rows(first: int, last: int) -> Tensor:
        asked.append(last - first)
        return x[:, :, first:last]

    out = torch.full_like(whole, float("nan"))
    paint_in_strips(network, rows, 104, 22, out)
    assert max(asked) < 64  # never the whole picture
    assert (out - whole).abs().max() <= 1e-5 * whole.abs().max()
    painted = torch.zeros(whole.shape, dtype=torch.uint8)
    paint_in_strips(network, rows, 104, 22, painted)
    assert (painted.int() - whole.clamp(0, 255).round().int()).abs().max() <= 1


@each_network
def test_sides_that_do_not_divide_are_refused_by_the_network(name: str) -> None:
    with pytest.raises(ValueError, match=r"sides that are multiples of 4, got \(1, 3, 30, 32\); stylize\(\) takes images of any size"):
        lively(name)(torch.zeros(1, 3, 30, 32))


def test_a_reflected_borders_gradient_is_pytorchs() -> None:
    x = torch.randn(2, 3, 6, 9, dtype=torch.float64, requires_grad=True)
    for border in (1, 4):
        y, right = _Reflected.apply(x, border), F.pad(x, (border,) * 4, mode="reflect")
        assert torch.equal(y, right)
        gradient = torch.randn_like(right)
        (ours,), (theirs,) = (torch.autograd.grad(one, x, gradient) for one in (y, right))
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_engstroms_borders_are_tensorflows() -> None:
    """A stride of 2 on even sides pads right and below alone, and its transpose cuts there: an impulse goes where TensorFlow sends it."""
    network = lively("Engstrom")
    x = torch.zeros(1, 64, 4, 4)
    x[0, 0, 1, 1] = 1
    weight = torch.zeros_like(network.conv3.weight)  # pyright: ignore
    weight[0, 0] = torch.arange(9.0).view(3, 3)
    network.conv3.weight.data = weight  # pyright: ignore
    down = network.conv3(x)[0, 0]  # pyright: ignore
    assert down.tolist() == [[4.0, 0.0], [0.0, 0.0]]  # the middle of the kernel lies on pixel 1, 1, not on 0, 0
    up = torch.zeros_like(network.up2.weight)  # pyright: ignore
    up[0, 0] = torch.arange(9.0).view(3, 3)
    network.up2.weight.data = up  # pyright: ignore
    last = torch.zeros(1, 64, 2, 2)
    last[0, 0, 1, 1] = 1
    assert network.up2(last)[0, 0].tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 3, 4]]  # pyright: ignore
