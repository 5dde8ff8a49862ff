"""Detectors of one step export for any batch, and images on which nothing is are answered too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision_pairs import pair

from zoo.detection.catalogue import FasterRCNN_MobileNet_V3_Large_320_FPN, SSDlite320_MobileNet_V3_Large
from zoo.detection.exporting import AllBoxes, AllRegions

NAMES = ("images", "boxes", "scores")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_an_exported_detector_answers_any_batch_and_images_without_things(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model: Any = pair("ssdlite320_mobilenet_v3_large", 4)[1]
    whole = AllBoxes(model)
    images = torch.randn(1, 3, 320, 320)
    axes = {name: {0: "batch"} for name in NAMES}
    torch.onnx.export(
        whole, (images,), tmp_path / "ssd.onnx", dynamo=False, input_names=NAMES[:1], output_names=NAMES[1:], dynamic_axes=axes
    )
    session = onnxruntime.InferenceSession(tmp_path / "ssd.onnx")
    for batch in (1, 3):
        images = model.transform(list(photographs(batch)))[0].images
        with torch.no_grad():
            own, exact = whole(images), AllBoxes(copy.deepcopy(model).double())(images.double())
        found = [torch.from_numpy(array) for array in session.run(None, {"images": images.numpy()})]
        for one, other, truth in zip(found, own, exact, strict=True):  # no further from the exact answer than PyTorch itself is, thrice
            assert (one - truth).abs().max() <= 3 * (other - truth).abs().max()
        assert [len(one["boxes"]) for one in whole.settle(*found, threshold=0.999999, overlap=0.5)] == [0] * batch
        assert all(len(one["boxes"]) for one in whole.settle(*found, threshold=0.2, overlap=0.5))


@pytest.mark.parametrize("name", ["ssdlite320_mobilenet_v3_large", pytest.param("retinanet_resnet50_fpn", marks=pytest.mark.long)])
def test_all_boxes_settled_are_the_detectors_own(name: str) -> None:
    model: Any = pair(name, 4)[1]
    whole = AllBoxes(model)
    photograph = torch.nn.functional.interpolate(torch.rand(1, 3, 8, 8), size=(160, 160), mode="bicubic")[0].clamp(0, 1)
    with torch.no_grad():
        batch, _ = model.transform([photograph])
        found = whole.settle(*whole(batch.images), threshold=0.4, overlap=0.5)[0]
        expected = model.run(batch, None, 0.4, 0.5)[0]
    assert len(found["boxes"]) == len(expected["boxes"]) > 3
    torch.testing.assert_close(found["scores"], expected["scores"])
    torch.testing.assert_close(found["boxes"], expected["boxes"])


def test_no_more_candidates_are_settled_than_the_detector_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ssdlite320_mobilenet_v3_large", "retinanet_resnet50_fpn"):
        model: Any = pair(name, 4)[1]
        monkeypatch.setattr(model, "candidates", 20)
        whole, images = AllBoxes(model), photographs(2)[..., :160]
        with torch.no_grad():
            batch, _ = model.transform(list(images))
            found = whole.settle(*whole(batch.images), threshold=0.01, overlap=0.5)
            expected = model.run(batch, None, 0.01, 0.5)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one["scores"], other["scores"])
            torch.testing.assert_close(one["boxes"], other["boxes"])


def test_boxes_of_images_of_a_size_that_was_not_seen_are_refused() -> None:
    whole = AllBoxes(pair("retinanet_resnet50_fpn", 4)[1])
    with pytest.raises(ValueError, match=r"images of a size that this has not computed \(none\); call it once"):
        whole.settle(torch.zeros(1, 30, 4), torch.zeros(1, 30, 4), 0.5, 0.5)


def test_each_kind_of_detector_names_the_other_way() -> None:
    with pytest.raises(TypeError, match="AllRegions is for R-CNNs"):
        AllBoxes(FasterRCNN_MobileNet_V3_Large_320_FPN(3))
    with pytest.raises(TypeError, match="AllBoxes is for detectors of one step"):
        AllRegions(SSDlite320_MobileNet_V3_Large(3))


def photographs(count: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.nn.functional.interpolate(torch.rand(count, 3, 8, 8, generator=random), size=(160, 192), mode="bicubic").clamp(0, 1)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_an_exported_rcnn_answers_any_batch_images_without_things_and_without_proposals(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model: Any = pair("fasterrcnn_mobilenet_v3_large_320_fpn", 4, (160, 240))[1]  # photographs of 160 by 192 fill a batch
    whole = AllRegions(model)
    batch, _ = model.transform(list(photographs(3)))
    with torch.no_grad():
        found = whole.settle(*whole(batch.images), count=3, threshold=0.3, overlap=0.5)
        expected = model.run(batch, None, 0.3, 0.5)
    for one, other in zip(expected, found, strict=True):
        assert len(one["boxes"]) == len(other["boxes"]) > 5
        torch.testing.assert_close(other["scores"], one["scores"], rtol=0, atol=1e-5)
        torch.testing.assert_close(other["boxes"], one["boxes"], rtol=0, atol=1e-3)
    names = ["boxes", "scores", "image"]
    axes = {"images": {0: "batch"}, **{name: {0: "regions"} for name in names}}
    file = tmp_path / "rcnn.onnx"
    torch.onnx.export(
        whole, (batch.images[:2],), file, dynamo=False, opset_version=16, input_names=["images"], output_names=names, dynamic_axes=axes
    )
    session = onnxruntime.InferenceSession(file)
    for count in (1, 3):
        outputs = [torch.from_numpy(array) for array in session.run(None, {"images": batch.images[:count].numpy()})]
        again = whole.settle(*outputs, count=count, threshold=0.3, overlap=0.5)
        for one, other in zip(expected, again, strict=False):
            assert len(one["boxes"]) == len(other["boxes"])
            torch.testing.assert_close(other["scores"], one["scores"], rtol=0, atol=1e-4)
            torch.testing.assert_close(other["boxes"], one["boxes"], rtol=0, atol=1e-2)
        assert [len(one["boxes"]) for one in whole.settle(*outputs, count=count, threshold=0.99999, overlap=0.5)] == [0] * count
    with torch.no_grad():
        for layer in model.rpn.head.modules():
            if isinstance(layer, torch.nn.Conv2d) and layer.out_channels == model.rpn.anchor_generator.per_pixel:
                layer.bias.fill_(-1e4)  # pyright: ignore[reportOptionalMemberAccess]  # nothing is proposed
    torch.onnx.export(
        whole, (batch.images[:2],), file, dynamo=False, opset_version=16, input_names=["images"], output_names=names, dynamic_axes=axes
    )
    outputs = [torch.from_numpy(array) for array in onnxruntime.InferenceSession(file).run(None, {"images": batch.images.numpy()})]
    assert [len(output) for output in outputs] == [0, 0, 0]
    assert [len(one["boxes"]) for one in whole.settle(*outputs, count=3, threshold=0.3, overlap=0.5)] == [0, 0, 0]
