"""The example in each command's help runs: as it stands, but for large networks, for which small ones stand, and for hours of training."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import weights
from zoo.commands.app import EXAMPLES, main

EMBEDDED = Path(weights.__file__).parent / "embedded" / "resnet20_cifar10.safetensors"
SMALL = {"ResNet50": "ResNet20", "ResNet50:mine": "ResNet20:mine", "VGG19": "ResNet20:cifar10", "ResNet50,VGG19": "ResNet20"}
"""Networks of examples, and those that stand for them: the first is in the package."""
SHORTER = {
    "bench": ["--rounds", "1", "--batches", "1", "--tune", "none", "--peers", "eager-fp32"],
    "dream": ["--octaves", "1", "--steps", "1"],
    "browse": ["--no-open"],
    "embed": ["--model", "ResNet20", "--workers", "0"],
    "finetune": ["--model", "ResNet20", "--epochs", "1", "--workers", "0"],
    "recommend": ["--model", "ResNet20", "--quick", "--max-ms", "100000"],
    "segment": ["--model", "LRASPP_MobileNet_V3_Large", "--weights", "mine.pth"],
    "train-style": ["--steps", "1", "--batch-size", "1", "--size", "64", "--style-side", "64", "--channels", "8"],
}
"""What is added to examples that would take minutes, or a download."""
STORIES = {
    "weights": "list info browse pull lock sbom bundle sign unbundle mirror add remove cache verify gc doctor",
    "files": "inspect convert diff",
    "photographs": "predict explain demo dream stylize segment",
    "boxes": "detect evaluate",
    "many": "embed search knn recommend finetune train-style bench",
}
"""Commands that follow one another in one folder, because one makes what the next opens."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What examples open, but for weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    draw = np.random.default_rng(0)
    for name in ("cat", "dog", "street", "photo", "starry"):
        Image.fromarray(draw.integers(0, 255, (48, 64, 3), np.uint8)).save(tmp_path / f"{name}.jpg")
    for label in ("cats", "dogs"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(draw.integers(0, 255, (32, 32, 3), np.uint8)).save(tmp_path / "photos" / label / f"{number}.png")
    return tmp_path


def run(name: str, *more: str) -> None:
    program, *words = shlex.split(EXAMPLES[name])
    assert program == "zoo"
    words = ["srv/zoo" if word == "/srv/zoo" else SMALL.get(word, word) for word in words]
    called = [*words, *SHORTER.get(name, ()), *more]
    assert main(called) == 0, f"zoo {shlex.join(called)}"


def test_every_command_is_in_a_story() -> None:
    told = [name for names in STORIES.values() for name in names.split()]
    assert sorted(told) == sorted(EXAMPLES)


@pytest.mark.long
def test_examples_of_weights(place: Path) -> None:
    import torch

    from zoo import ResNet20

    torch.save(ResNet20().state_dict(), place / "model.pth")
    subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "KEY.pem"], check=True)
    for name in STORIES["weights"].split():
        run(name)
    assert json.loads((place / "sbom.json").read_text())["components"]
    assert (place / "zoo.tar.sig").is_file()
    assert (place / "srv" / "zoo" / "index.json").is_file()


@pytest.mark.long
def test_examples_of_files(place: Path) -> None:
    assert main(["convert", str(EMBEDDED), "model.h5", "--model", "ResNet20", "-q"]) == 0
    run("inspect")
    run("convert")
    for name in ("old", "new"):
        shutil.copy(EMBEDDED, place / f"{name}.safetensors")
    run("diff")


@pytest.mark.long
def test_examples_of_photographs(place: Path) -> None:
    import torch

    from zoo import LRASPP_MobileNet_V3_Large

    torch.save(LRASPP_MobileNet_V3_Large().state_dict(), place / "mine.pth")
    for name in STORIES["photographs"].split():
        run(name)
    assert {"why.png", "demo.png", "dream.png", "classes.png"} <= {path.name for path in place.iterdir()}


@pytest.mark.long
def test_examples_of_boxes(place: Path) -> None:
    import torch

    from zoo import YOLOv3Tiny

    with torch.device("meta"):
        count = sum(tensor.numel() for tensor in YOLOv3Tiny().state_dict().values() if tensor.is_floating_point())
    header = np.array([0, 2, 5, 0, 0], "<i4").tobytes()
    (place / "yolov3-tiny.weights").write_bytes(header + bytes(4 * count))
    (place / "annotations").mkdir()
    image = {"id": 1, "file_name": "street.jpg", "width": 64, "height": 48}
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [8, 8, 16, 16], "area": 256, "iscrowd": 0}
    told = {"images": [image], "annotations": [box], "categories": [{"id": 1, "name": "person"}]}
    (place / "annotations" / "instances_val2017.json").write_text(json.dumps(told))
    run("detect", "--threshold", "0.9")
    run("evaluate", "--images", ".")


@pytest.mark.long
def test_examples_of_many_images(place: Path) -> None:
    for name in STORIES["many"].split():
        run(name)
    assert (place / "starry" / "model.safetensors").is_file()
