"""`zoo convert --report` gathers what is known of a conversion, with filters and predictions."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from roundtrips import built

import weights
from convert.diagnose import Diagnosis
from convert.formats import safetensors
from weights.errors import WeightsMismatch
from zoo import ResNet20, SqueezeNet1_1
from zoo.conversion.convert import convert
from zoo.conversion.report import write_report
from zoo.conversion.result import Conversion, NotProven


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


def test_a_real_failure_carries_all_that_a_report_needs(tmp_path: Path, pictures: Path) -> None:
    network = built("ResNet20")
    np.savez(tmp_path / "a.npz", **{n: t.numpy() for n, t in network.state_dict().items() if "num_" not in n})
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        np.savez(tmp_path / "r.npz", inputs=images.numpy(), outputs=network(images).numpy())
    with pytest.raises(NotProven) as caught:
        convert(tmp_path / "a.npz", tmp_path / "b.npz", ResNet20, kernel_convention="convolution", reference=tmp_path / "r.npz")
    assert caught.value.conversion is not None
    write_report(caught.value.conversion, tmp_path / "report.html", pictures)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "kernels flipped" in page
    assert 'class="verdict failed"' in page
    assert len(re.findall(r'class="photograph"', page)) == 3
    assert "flip(2,3)" in page


def test_a_files_own_words_are_escaped(tmp_path: Path, pictures: Path) -> None:
    """They come as tensor names, as metadata, and as the names of the file and of the photographs."""
    evil = "<script>alert(1)</script>"
    network = built("ResNet20", num_classes=4)
    folder = tmp_path / "<b onload='x'"
    folder.mkdir()
    source = folder / "<i onclick=x>.safetensors"
    state = {name.replace("fc.", f"{evil}'\"&."): tensor for name, tensor in network.state_dict().items()}
    safetensors.save(state, source, {f"key{evil}": f"value{evil}"})
    (pictures / "0.png").rename(pictures / "<img src=x onerror=alert(1)>.png")
    with pytest.raises(WeightsMismatch):
        convert(source, tmp_path / "b.safetensors", SqueezeNet1_1)
    made = convert(source, tmp_path / "b.safetensors", ResNet20)
    assert any(evil in note for note in made.notes)
    write_report(made, tmp_path / "report.html", pictures)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)" in page
    for word in ("<script>alert", "<i onclick", "<img src=x", "<b onload"):
        assert word not in page
    seen = Tags()
    seen.feed(page)
    assert not [value for value in seen.attributes if value.startswith("on")]
    assert "script" not in seen.names


class Tags(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_damaged_photographs_are_left_out(made: Conversion, pictures: Path, tmp_path: Path) -> None:
    (pictures / "0.png").write_bytes(b"no picture")
    write_report(made, tmp_path / "report.html", pictures)
    assert len(re.findall(r'class="photograph"', (tmp_path / "report.html").read_text(encoding="utf-8"))) == 2


def test_a_folder_without_photographs_is_an_error(made: Conversion, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="holds no pictures"):
        write_report(made, tmp_path / "report.html", tmp_path / "none")
