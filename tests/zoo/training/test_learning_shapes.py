"""One epoch over a few hundred photographs with drawn shapes teaches a detector to find them: minutes on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import shapes
import torch

from zoo import EfficientNetLite0, trained
from zoo.detection import evaluate
from zoo.detection.dense import FCOS
from zoo.training import train_detector


class Shapes(FCOS, body=EfficientNetLite0, shorter=(128,), longer=192): ...


@pytest.mark.long
@pytest.mark.reference
def test_one_epoch_learns_to_find_shapes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Measured: mAP50 1.00, mAP 0.81, after 225 s of one core, with a body of ImageNet and photographs behind the shapes."""
    beside = Path(request.config.rootpath).parent / "shared" / "real" / "images"
    photographs = sorted(beside.glob("darknet_*.jpg"))
    shapes.make(tmp_path / "train", 600, 0, photographs)
    shapes.make(tmp_path / "test", 60, 1, photographs)
    torch.manual_seed(0)
    model = Shapes(4, norm="frozen", body=trained(EfficientNetLite0))
    train_detector(model, tmp_path / "train" / "annotations.json", tmp_path / "run", epochs=1, lr=0.01, warmup_steps=20)
    assert evaluate(model, tmp_path / "test" / "annotations.json", batch_size=4).precision.ap50 > 0.9
