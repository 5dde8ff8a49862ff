"""Data as COCO and VOC keep them are read, their damages told, and a detector that finds all of it measured as such."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from weights import MalformedFile
from zoo import Detections
from zoo.commands.app import main
from zoo.detection import Detector, evaluate, read_truths
from zoo.detection.measures import Truth

SIZES = ((64, 48), (50, 80), (30, 30))


class Spots(Detector):
    """Finds the bright rectangle of every photograph; its score is what is left of 255 by the rectangle's red."""

    paper = "none"
    classifiers = ()
    called = ("moth", "motorbike")

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.num_classes = num_classes

    def answer(self, photographs: Sequence[Tensor], threshold: float, overlap: float) -> list[Detections]:
        found = []
        for photograph in photographs:
            size = int(photograph.shape[2]), int(photograph.shape[1])
            rows, columns = (photograph[1] > 100).nonzero(as_tuple=True)
            box = torch.tensor([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]], dtype=torch.float32)
            kind = torch.tensor([int(photograph[2].max() > 100)])
            found.append(Detections(box, torch.tensor([0.5]), kind, self.names_of(kind.tolist()), size))
        return found


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "JPEGImages"
    folder.mkdir(parents=True)
    for number, (width, height) in enumerate(SIZES):
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[5:25, 4:20] = (0, 255, 255 * (number == 1))
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


@pytest.fixture
def voc(photos: Path) -> Path:
    folder = photos.parent / "Annotations"
    folder.mkdir()
    for number in range(3):
        name = "motorbike" if number == 1 else "moth"
        box = "<xmin>5</xmin><ymin>6</ymin><xmax>20</xmax><ymax>25</ymax>"
        things = f"<object><name>{name}</name><difficult>0</difficult><bndbox>{box}</bndbox></object>"
        (folder / f"{number}.xml").write_text(f"<annotation><filename>{number}.png</filename>{things}</annotation>")
    lists = photos.parent / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    (lists / "test.txt").write_text("0\n2\n")
    return photos.parent


@pytest.fixture
def coco(photos: Path) -> Path:
    (photos.parent / "annotations").mkdir()
    told: dict[str, Any] = {"categories": [{"id": 7, "name": "moth"}, {"id": 3, "name": "motorcycle"}, {"id": 9, "name": "bat"}]}
    told["images"] = [{"id": 40 + n, "file_name": f"{n}.png"} for n in (2, 0, 1)]
    box = {"bbox": [4, 5, 16, 20], "area": 320, "iscrowd": 0}
    told["annotations"] = [{"image_id": 40 + n, "category_id": 3 if n == 1 else 7, **box} for n in range(3)]
    told["annotations"].append({"image_id": 41, "category_id": 9, "bbox": [0, 0, 4, 4], "area": 16, "iscrowd": 0})
    file = photos.parent / "annotations" / "instances.json"
    file.write_text(json.dumps(told))
    (photos.parent / "images").symlink_to(photos)
    return file


def test_cocos_data_are_read_and_measured(coco: Path) -> None:
    known = read_truths(coco)
    assert (known.kind, known.classes) == ("coco", ("motorcycle", "moth", "bat"))
    assert [path.name for path in known.photographs] == ["0.png", "1.png", "2.png"]
    assert known.truths[1].classes.tolist() == [0, 2]
    assert known.truths[0].boxes.tolist() == [[4, 5, 20, 25]]
    found = evaluate(Spots(), coco, batch_size=2)
    assert found.classes == pytest.approx({"moth": 1, "motorcycle": 1, "bat": 0}), "motorbike is the network's word for it"
    assert (found.unknown, found.photographs, found.voc) == (("bat",), 3, None)
    assert found.precision.ap == pytest.approx(2 / 3)


def test_vocs_data_are_read_and_measured(voc: Path) -> None:
    known = read_truths(voc)
    assert (known.kind, known.classes, len(known.photographs)) == ("voc", ("moth", "motorbike"), 3)
    seen: list[int] = []
    found = evaluate(Spots(), voc, progress=lambda name, total, done: nullcontext(seen.append))
    assert (found.voc, found.classes, seen) == (1, {"moth": 1, "motorbike": 1}, [3])
    assert len(read_truths(voc, split="test").photographs) == 2
    assert evaluate(Spots(), voc, split="test", points=11).voc == 1
    with pytest.raises(FileNotFoundError):
        read_truths(voc, split="train")


def test_data_that_cannot_be_used_say_why(voc: Path, coco: Path, tmp_path: Path) -> None:
    model = Spots()
    model.called = ("bee", "wasp")
    with pytest.raises(ValueError, match="the data have moth, motorbike, and the network knows none of these: it knows bee, wasp"):
        evaluate(model, voc)
    for text, said in (
        ("{", "instances.json"),
        ("{}", "images"),
        ('{"images": [{"id": 1}], "annotations": [], "categories": []}', "file_name"),
    ):
        coco.write_text(text)
        with pytest.raises(MalformedFile, match=said):
            read_truths(coco)
    bomb = '<!DOCTYPE a [<!ENTITY x "xxxx">]><annotation><filename>&x;</filename></annotation>'
    for text, said in (
        (bomb, "document type"),
        ("<annotation>", "no XML"),
        ("<annotation/>", "filename is missing"),
        ("<annotation><filename>0.png</filename><object><name>a</name></object></annotation>", "bndbox/xmin is missing"),
    ):
        (voc / "Annotations" / "0.xml").write_text(text)
        with pytest.raises(MalformedFile, match=said):
            read_truths(voc)
    with pytest.raises(ValueError, match="no folder as VOC has them"):
        read_truths(tmp_path)
    with pytest.raises(ValueError, match="split is of a VOC folder"):
        read_truths(coco, split="test")


def test_a_photograph_that_is_gone_is_told(voc: Path, coco: Path) -> None:
    (voc / "JPEGImages" / "2.png").unlink()
    for data in (voc, coco):
        with pytest.raises(FileNotFoundError, match=r"2\.png"):
            read_truths(data)


def test_truths_have_the_areas_of_their_boxes_unless_told() -> None:
    assert Truth.of([[0, 0, 4, 5]], [1]).areas.tolist() == [20]


CFG = "[net]\nwidth=16\nheight=16\nchannels=3\n[convolutional]\nfilters=7\nsize=1\nactivation=linear\n"
CFG += "[yolo]\nmask=0\nanchors=8,8\nclasses=2\nnum=1\n"


def test_the_command_shows_the_numbers(voc: Path, coco: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.cfg").write_text(CFG)
    numbers = np.concatenate([[0, 0, 0, 0, -9, 9, -9], np.zeros(21)]).astype("<f4")
    numbers[7 + 12 + 1] = 14  # a thing wherever green is bright
    (tmp_path / "net.weights").write_bytes(np.array([0, 2, 5, 0, 0], "<i4").tobytes() + numbers.tobytes())
    (tmp_path / "net.names").write_text("moth\nbee\n")
    network = ["--cfg", str(tmp_path / "net.cfg"), "-w", str(tmp_path / "net.weights"), "--names", str(tmp_path / "net.names")]
    assert main(["evaluate", str(voc), *network, "--classes"]) == 0
    told = capsys.readouterr().out
    assert "VOC's mAP50" in told
    assert "not known to it, and counted: motorbike" in told
    assert main(["evaluate", str(coco), *network, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["photographs"] == 3
    assert 0 < found["ar100"] <= 1
    assert set(found["classes"]) == {"moth", "motorcycle", "bat"}
    assert main(["evaluate", str(tmp_path / "none.json"), *network]) == 3
    assert main(["evaluate", str(voc), *network, "--points", "5"]) == 2
