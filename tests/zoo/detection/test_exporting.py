"""Detectors of one step export for any batch, and images on which nothing is are answered too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision_pairs import pair

from zoo.detection.catalogue import FasterRCNN_MobileNet_V3_Large_320_FPN
from zoo.detection.exporting import AllBoxes

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
        images = torch.randn(batch, 3, 320, 320)
        with torch.no_grad():
            own, exact = whole(images), AllBoxes(copy.deepcopy(model).double())(images.double())
        found = [torch.from_numpy(array) for array in session.run(None, {"images": images.numpy()})]
        for one, other, truth in zip(found, own, exact, strict=True):  # no further from the exact answer than PyTorch itself is, thrice
            assert (one - truth).abs().max() <= 3 * (other - truth).abs().max()
        assert [len(one["boxes"]) for one in whole.settle(*found, threshold=0.9999, overlap=0.5)] == [0] * batch
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


def test_a_detector_of_two_steps_is_refused() -> None:
    with pytest.raises(TypeError, match="what it crops depends on what it finds"):
        AllBoxes(FasterRCNN_MobileNet_V3_Large_320_FPN(3))
