from pathlib import Path

import numpy as np
import pytest
import torch

from zoo import ResNet18
from zoo.bench import embedding as bench
from zoo.images import decode, open_source
from zoo.trained import find_record


def test_generated_photographs_are_all_different_and_of_imagenets_usual_size(tmp_path: Path) -> None:
    bench.photographs(tmp_path, 6)
    source = open_source(tmp_path)
    assert source.classes == ["even", "odd"]
    assert len({source.read(i) for i in range(6)}) == 6
    assert {decode(source.read(i)).size for i in range(6)} == {bench.SIZE}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # timm's reader leaves its files to the garbage collector
def test_timms_way_ends_with_a_vector_of_every_image(tmp_path: Path) -> None:
    bench.photographs(tmp_path / "p", 5)
    model = ResNet18().eval()
    model.checkpoint = find_record(ResNet18)
    run = bench._timm_way(model, tmp_path / "p", tmp_path / "o.npy", 2, 0, torch.device("cpu"))
    assert run() > 0
    vectors = np.load(tmp_path / "o.npy")
    assert vectors.shape == (5, 512)
    assert np.isfinite(vectors).all()
