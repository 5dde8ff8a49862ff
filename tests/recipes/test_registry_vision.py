"""The rows of torchvision's detectors and segmenters are what its tables say, and each builds the network of its file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import nn
from torchvision.ops.misc import FrozenBatchNorm2d

from recipes import registry_vision
from zoo import trained
from zoo.catalogue import any_class
from zoo.images.preprocess import open_image
from zoo.labels import labels
from zoo.segmentation import segment

FILES = registry_vision.files()
ROWS = [(model, tag, table) for text in FILES.values() for model, tables in tomllib.loads(text).items() for tag, table in tables.items()]
each_row = pytest.mark.parametrize(("model", "tag", "table"), ROWS, ids=[f"{model}:{tag}" for model, tag, _ in ROWS])


@pytest.mark.reference
def test_the_files_are_what_the_recipe_writes_from_the_tables_of_this_torchvision() -> None:
    told = torchvision.__version__.partition("+")[0]
    for path, text in FILES.items():
        committed = path.read_text(encoding="utf-8")
        version = committed.partition("torchvision ")[2].partition(":")[0]
        assert committed == text or committed.replace(version, told) == text


@pytest.mark.reference
def test_every_checkpoint_of_theirs_has_a_row() -> None:
    urls = {
        entry.url
        for module in (torchvision.models.detection, torchvision.models.segmentation)
        for name in torchvision.models.list_models(module)
        for entry in torchvision.models.get_model_weights(name)
    }
    assert {table["sources"][0] for *_, table in ROWS} == urls


@each_row
def test_a_row_builds_the_network_with_its_parameters_and_its_size_rule(model: str, tag: str, table: Mapping[str, Any]) -> None:
    cls: Any = any_class(model)
    with torch.device("meta"):
        network = cls(table["num_classes"], **table.get("options", {}))
    assert sum(p.numel() for p in network.parameters() if p.requires_grad) in trainable(network, table["params"])
    assert len(labels(table["labels"])) == table["num_classes"]
    steps = table["preprocessing"]
    assert (network.mean, network.std) == (tuple(steps["mean"]), tuple(steps["std"]))
    if network.task == "detection":
        rule = network.transform
        assert steps["resize"] == (rule.fixed[0] if rule.fixed else rule.shorter[-1])
        assert steps.get("longest") == (None if rule.fixed else rule.longer)
        eps = {layer.eps for layer in network.backbone.modules() if isinstance(layer, nn.BatchNorm2d)}
        assert (0.0 in eps) == ("norm_eps" in table.get("options", {}))


def trainable(network: nn.Module, stated: int) -> tuple[int, ...]:
    """Return how many parameters may learn: torchvision states all but those of frozen norms, which it calls buffers."""
    assert stated > 0
    return (stated,)


class TheirFile:
    """A file of torchvision's own, written by it: with frozen norms where its checkpoints have them."""

    def __init__(self, name: str, path: Path, frozen: bool) -> None:
        torch.manual_seed(5)
        self.network: Any = torchvision.models.get_model(name, weights=None, weights_backbone=None)
        if frozen:
            for place, layer in list(self.network.backbone.named_modules()):
                if isinstance(layer, nn.BatchNorm2d):
                    norm = FrozenBatchNorm2d(layer.num_features)
                    norm.running_var.uniform_(0.5, 1.5)
                    self.network.backbone.set_submodule(place, norm)
        torch.save(self.network.state_dict(), path)
        self.network.eval()


def photograph() -> Any:
    random = torch.Generator().manual_seed(1)
    soft = torch.nn.functional.interpolate(torch.rand(1, 3, 9, 12, generator=random), size=(180, 240), mode="bicubic")
    return (soft[0].clamp(0, 1) * 255).to(torch.uint8)


def test_a_detectors_file_of_torchvisions_loads_and_finds_the_same(tmp_path: Path) -> None:
    from zoo import FasterRCNN_MobileNet_V3_Large_320_FPN, detect

    theirs = TheirFile("fasterrcnn_mobilenet_v3_large_320_fpn", tmp_path / "theirs.pth", frozen=True).network
    model = trained(FasterRCNN_MobileNet_V3_Large_320_FPN, str(tmp_path / "theirs.pth"), norm="frozen")
    assert model.checkpoint is not None
    assert model.checkpoint.labels == "coco91"
    picture = photograph()
    theirs.roi_heads.score_thresh = 0.011
    theirs.rpn.score_thresh = 0.0
    model.rpn.least = 0.0
    with torch.no_grad():
        expected = theirs([picture / 255])[0]
    found = detect(model, picture, threshold=0.011)
    assert len(found) == len(expected["boxes"]) > 0
    torch.testing.assert_close(found.boxes, expected["boxes"], rtol=0, atol=1e-3)
    torch.testing.assert_close(found.scores, expected["scores"], rtol=0, atol=1e-5)
    assert found.names == tuple(labels("coco91")[int(i)].name for i in expected["labels"])
    few = trained(FasterRCNN_MobileNet_V3_Large_320_FPN, str(tmp_path / "theirs.pth"), norm="frozen", num_classes=3)
    assert few.roi_heads.box_predictor.cls_score.out_features == 3
    assert torch.equal(few.state_dict()["backbone.body.0.0.weight"], model.state_dict()["backbone.body.0.0.weight"])


def test_a_segmenters_file_of_torchvisions_loads_and_finds_the_same(tmp_path: Path) -> None:
    from zoo import LRASPP_MobileNet_V3_Large

    theirs = TheirFile("lraspp_mobilenet_v3_large", tmp_path / "theirs.pth", frozen=False).network
    model = trained(LRASPP_MobileNet_V3_Large, str(tmp_path / "theirs.pth"))
    picture = photograph()
    steps = torchvision.models.segmentation.LRASPP_MobileNet_V3_Large_Weights.DEFAULT.transforms()
    with torch.no_grad():
        ready = steps(open_image(picture.permute(1, 2, 0).numpy()))[None]
        expected = theirs(ready)["out"]
    ours = model.prepare([picture])
    assert ours.shape == ready.shape
    assert (ours - ready).abs().max() < 1.5 / 255 / 0.224  # Pillow rounds after each of two directions
    logits = torch.nn.functional.interpolate(expected, size=picture.shape[1:], mode="bilinear", align_corners=False)[0]
    found = segment(model, picture)
    assert (found.labels == logits.argmax(0)).float().mean() > 0.98
    assert math.isclose(sum(found.areas.values()), 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("backbone.fpn.inner_blocks.2.weight", "backbone.fpn.inner_blocks.2.0.weight"),
        ("rpn.head.conv.bias", "rpn.head.conv.0.0.bias"),
        ("roi_heads.mask_head.mask_fcn3.weight", "roi_heads.mask_head.2.0.weight"),
        ("head.classification_head.conv.4.weight", "head.classification_head.conv.2.0.weight"),
    ],
)
def test_names_of_older_files_are_understood(old: str, new: str) -> None:
    model = any_class("RetinaNet_ResNet50_FPN" if old.startswith("head") else "MaskRCNN_ResNet50_FPN")
    with torch.device("meta"):
        network = model()
    assert new in network.state_dict()
    assert list(network.adopt({old: torch.zeros(1)})) == [new]
