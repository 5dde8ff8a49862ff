"""Fast detectors and segmenters find what the plain ones do, on photographs of different sizes."""

from __future__ import annotations

import pytest
import torch
from torchvision_pairs import pair

from zoo import LRASPP_MobileNet_V3_Large, detect, fast, segment, why
from zoo.networks.published import Published


def photographs() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    soft = [torch.rand(1, 3, 9, 9, generator=random), torch.rand(1, 3, 9, 9, generator=random)]
    sizes = [(120, 170), (200, 130)]
    return [
        (torch.nn.functional.interpolate(one, size=size, mode="bicubic")[0].clamp(0, 1) * 255).to(torch.uint8)
        for one, size in zip(soft, sizes, strict=True)
    ]


@pytest.mark.parametrize(
    "name", ["ssdlite320_mobilenet_v3_large", pytest.param("fasterrcnn_mobilenet_v3_large_320_fpn", marks=pytest.mark.long)]
)
def test_boxes_are_the_plain_networks(name: str) -> None:
    model = pair(name, 4)[1]
    quick = fast(model, "cpu", tune="none")
    assert "only the backbone" in str(why(quick))
    expected, found = detect(model, photographs(), threshold=0.3), detect(quick, photographs(), threshold=0.3)
    for one, other in zip(expected, found, strict=True):
        assert len(one) > 5
        assert len(one) == len(other)
        torch.testing.assert_close(other.scores, one.scores, rtol=0, atol=1e-4)
        same = (one.labels[:, None] == other.labels) & ((one.scores[:, None] - other.scores).abs() < 1e-4)
        near = (one.boxes[:, None] - other.boxes).abs().amax(2) < 0.05
        assert (same & near).any(0).all()  # things of nearly the same score may change places
        assert (same & near).any(1).all()


def test_maps_are_the_plain_networks() -> None:
    torch.manual_seed(0)
    model: Published = LRASPP_MobileNet_V3_Large(4).eval()
    model.input_size = 96  # pyright: ignore[reportAttributeAccessIssue]
    quick = fast(model, "cpu", tune="none", example=torch.randn(1, 3, 96, 136))
    for one, other in zip(segment(model, photographs()), segment(quick, photographs()), strict=True):
        assert (one.classes == other.classes).float().mean() > 0.999
