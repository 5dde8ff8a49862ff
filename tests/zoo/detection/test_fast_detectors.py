"""Fast detectors and segmenters find what the plain ones do, on photographs of different sizes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torchvision_pairs import THEIRS, pair

from zoo import LRASPP_MobileNet_V3_Large, detect, fast, segment, why
from zoo.kernels.api.parts import Rows
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
    assert "covers only maps (body, pyramid, heads)" in str(why(quick))
    expected, found = detect(model, photographs(), threshold=0.3), detect(quick, photographs(), threshold=0.3)
    for one, other in zip(expected, found, strict=True):
        assert len(one) > 5
        assert len(one) == len(other)
        torch.testing.assert_close(other.scores, one.scores, rtol=0, atol=1e-4)
        same = (one.labels[:, None] == other.labels) & ((one.scores[:, None] - other.scores).abs() < 1e-4)
        near = (one.boxes[:, None] - other.boxes).abs().amax(2) < 0.05
        assert (same & near).any(0).all()  # things of nearly the same score may change places
        assert (same & near).any(1).all()


def test_an_example_of_photographs_plans_every_part_and_images_without_things_are_answered() -> None:
    model = pair("fasterrcnn_mobilenet_v3_large_320_fpn", 4)[1]
    given = [photograph / 255 for photograph in photographs()]
    quick = fast(model, "cpu", tune="none", example=(given,))
    planned = [plan.given for plan in why(quick).plans]
    assert len(planned) == 2  # maps, and crops filled up to a power of two
    assert planned[1].endswith("x256x7x7")
    rows = int(planned[1].partition("x")[0])
    assert rows & (rows - 1) == 0
    found = quick(given, threshold=0.999999)
    assert [len(one["boxes"]) for one in found] == [0, 0]
    assert [plan.given for plan in why(quick).plans] == planned
    with pytest.raises(ValueError, match="does not take this example"):
        fast(model, "cpu", tune="none", example=torch.zeros(1, 2))


def test_a_part_for_crops_answers_any_number_of_them() -> None:
    layer = torch.nn.Linear(3, 2)
    met: list[int] = []
    layer.register_forward_hook(lambda _, given, output: met.append(len(given[0])))
    rows = Rows(layer)
    for count in (0, 1, 16, 17, 100):
        x = torch.randn(count, 3)
        torch.testing.assert_close(rows(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert met == [16, 16, 16, 32, 128]


@pytest.mark.gpu
@pytest.mark.parametrize("name", THEIRS)
def test_a_gpu_finds_what_a_cpu_does(name: str) -> None:
    model = pair(name, 2 if name.startswith("keypoint") else 4)[1]
    given = [photograph / 255 for photograph in photographs()]
    with torch.no_grad():
        expected = model(given)
    found = fast(model, "cuda", torch.float32, tune="none")([photograph.cuda() for photograph in given])
    for one, other in zip(expected, found, strict=True):
        assert abs(len(one["boxes"]) - len(other["boxes"])) <= 1  # a score may lie at the threshold
        near = (one["boxes"][:, None] - other["boxes"].cpu()).abs().amax(2) < 0.05
        same = near & ((one["scores"][:, None] - other["scores"].cpu()).abs() < 1e-3) & (one["labels"][:, None] == other["labels"].cpu())
        assert same.any(1).float().mean() > 0.97  # of boxes that overlap as much as the limit, either side may drop one


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large", "retinanet_resnet50_fpn"])
def test_a_batch_does_not_wait_for_the_gpu_once_an_image(name: str) -> None:
    model = pair(name, 4)[1].cuda()
    waits: list[int] = []
    counts = (2, 8)
    for count in counts:
        given = [photographs()[0].cuda() / 255] * count
        with torch.no_grad():
            model(given)
            with warnings.catch_warnings(record=True) as caught:  # the mode itself warns that it is a prototype
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    model(given)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("called a synchronizing" in str(one.message) for one in caught))
    assert waits[0] > 0
    assert waits[1] - waits[0] < counts[1] - counts[0]  # other sums of a larger batch may take suppression a round more


def test_maps_are_the_plain_networks() -> None:
    torch.manual_seed(0)
    model: Published = LRASPP_MobileNet_V3_Large(4).eval()
    model.input_size = 96  # pyright: ignore[reportAttributeAccessIssue]
    quick = fast(model, "cpu", tune="none", example=torch.randn(1, 3, 96, 136))
    for one, other in zip(segment(model, photographs()), segment(quick, photographs()), strict=True):
        assert (one.labels == other.labels).float().mean() > 0.999
