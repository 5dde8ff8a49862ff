"""`zoo convert --report` gathers what is known of a conversion, with filters and predictions."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import weights
from convert.diagnose import Diagnosis
from zoo import ResNet20
from zoo.converting import Conversion, convert
from zoo.reporting import write_report


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 255, (40, 50, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


@pytest.fixture
def made(tmp_path: Path) -> Conversion:
    source = weights.get(weights.find("ResNet20")).path
    return convert(source, tmp_path / "out.safetensors", ResNet20)


def test_a_conversion_is_reported_with_its_filters_and_predictions(made: Conversion, pictures: Path, tmp_path: Path) -> None:
    write_report(made, tmp_path / "report.html", pictures)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert made.sha256 in page
    assert "layer1.0.conv1.weight" in page
    assert "Filters of the first layer" in page
    assert len(re.findall(r'class="photograph"', page)) == 3
    assert re.search(r"(airplane|automobile|bird|cat|deer|dog|frog|horse|ship|truck) \d", page)
    write_report(made, tmp_path / "again.html", pictures)
    assert (tmp_path / "again.html").read_bytes() == (tmp_path / "report.html").read_bytes()


def test_a_failure_is_reported_with_its_cause(made: Conversion, tmp_path: Path) -> None:
    made.diagnosis = Diagnosis("conv1", "conv1", "kernels flipped", "Its kernels are turned.", 0.5, 1e-7, "Say --kernel-convention.")
    write_report(made, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for words in ("What went wrong", "kernels flipped", "Say --kernel-convention.", 'class="verdict failed"'):
        assert words in page
    assert 'class="photograph"' not in page
