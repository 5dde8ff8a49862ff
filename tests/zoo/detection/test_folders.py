"""A run over a folder that is killed, again and again, writes the bytes of one that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zoo import Detections, detect
from zoo.detection import darknet, detect_folder, folders
from zoo.detection.coco import CATEGORIES, category, image_id, results, run_lengths
from zoo.detection.folders import WORKPLACE

CFG = "[net]\nwidth=32\nheight=32\nchannels=3\n[convolutional]\nfilters=7\nsize=3\npad=1\nactivation=linear\n"
CFG += "[yolo]\nmask=0\nanchors=9,9\nclasses=2\nnum=1\n"
RUN = """
import sys, torch
from contextlib import contextmanager
from zoo.detection import darknet, detect_folder
@contextmanager
def loud(name, total, done):
    yield lambda n: print(n, flush=True)
torch.set_num_threads(1)
torch.manual_seed(0)
model = darknet(sys.argv[1])().eval()
detect_folder(model, sys.argv[2], sys.argv[3], threshold=0.1, batch_size=4, progress=loud)
"""


def draw(place: Path, count: int) -> Path:
    folder = place / "photos"
    folder.mkdir()
    (place / "net.cfg").write_text(CFG)
    drawn = np.random.default_rng(0)
    for number in range(count):
        height, width = drawn.integers(8, 40, 2)
        Image.fromarray(drawn.integers(0, 256, (height, width, 3), np.uint8)).save(folder / f"{number:05d}.png")
    (folder / "00050.png").write_bytes(b"no picture")
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return draw(tmp_path, 200)


@pytest.mark.long
@pytest.mark.parametrize(("count", "kills"), [(200, (1, 2, 3)), (10_000, (20, 75, 130))])
def test_killed_three_times_it_writes_the_same_bytes(count: int, kills: tuple[int, ...], tmp_path: Path) -> None:
    """Photographs in parts of 64; the run is killed after so many parts, those of earlier runs counted."""
    photos = draw(tmp_path, count)
    cfg = str(tmp_path / "net.cfg")
    environment = os.environ | {"PYTHONPATH": str(Path(folders.__file__).parents[2])}
    words = [sys.executable, "-c", RUN, cfg, str(photos)]
    subprocess.run([*words, str(tmp_path / "whole")], check=True, env=environment, stdout=subprocess.DEVNULL)
    out = tmp_path / "killed"
    for parts in kills:
        with subprocess.Popen([*words, str(out)], env=environment, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            for _ in range(parts):
                assert run.stdout.readline()
            time.sleep(0.01)
            run.send_signal(signal.SIGKILL)
        assert not (out / "detections.json").exists()
        assert len(list((out / WORKPLACE).glob("0*.json"))) >= parts
    subprocess.run([*words, str(out)], check=True, env=environment, stdout=subprocess.DEVNULL)
    for name in ("detections.json", "images.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(one.name for one in out.iterdir()) == ["detections.json", "images.json"]
    images = json.loads((out / "images.json").read_text())
    assert [row["file_name"] for row in images if "left_out" in row] == ["00050.png"]
    assert len(images) == count
    assert len(json.loads((out / "detections.json").read_text())) > count / 2


def test_parts_of_another_job_are_refused(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = darknet(tmp_path / "net.cfg")().eval()
    monkeypatch.setattr(folders, "write_whole", _stopping(folders.write_whole, "000001.json"))
    with pytest.raises(KeyboardInterrupt):
        detect_folder(model, photos, tmp_path / "found", threshold=0.3)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="differs in threshold; restart=True"):
        detect_folder(model, photos, tmp_path / "found", threshold=0.4)
    (tmp_path / "found" / WORKPLACE / "000000.json").write_text("{")
    with pytest.raises(ValueError, match="Delete it and call again"):
        detect_folder(model, photos, tmp_path / "found", threshold=0.3)
    done = detect_folder(model, photos, tmp_path / "found", threshold=0.4, restart=True)
    assert (done.photographs, done.resumed, len(done.left_out)) == (199, 0, 1)
    with pytest.raises(FileExistsError, match="restart=True"):
        detect_folder(model, photos, tmp_path / "found", threshold=0.4)


def _stopping(write: object, name: str) -> object:
    def written(path: Path, *rest: object, **how: object) -> None:
        if path.name == name:
            raise KeyboardInterrupt
        write(path, *rest, **how)  # pyright: ignore[reportCallIssue]

    return written


def test_cocos_form() -> None:
    assert (len(CATEGORIES), category(0, "coco"), category(16, "coco"), category(79, "coco")) == (80, 1, 18, 90)
    assert (category(17, None), category(17, "coco91")) == (18, 17)
    assert (image_id("val/000000000139.jpg"), image_id("a/dog.jpg")) == (139, "a/dog.jpg")
    assert run_lengths(np.array([[0, 1], [1, 1]], bool)) == {"size": [2, 2], "counts": [1, 3]}
    assert run_lengths(np.ones((2, 2), bool)) == {"size": [2, 2], "counts": [0, 4]}
    assert results(Detections.none((3, 3)), "a.jpg", None) == []


def test_an_answer_does_not_depend_on_the_others_of_its_batch(photos: Path, tmp_path: Path) -> None:
    model = darknet(tmp_path / "net.cfg")().eval()
    names = [photos / f"{number:05d}.png" for number in range(6)]
    together = detect(model, names, threshold=0.3, batch_size=6)
    for name, one in zip(names, together, strict=True):
        alone = detect(model, name, threshold=0.3)
        assert alone.labels.tolist() == one.labels.tolist()
        assert np.allclose(alone.boxes, one.boxes, atol=1e-3)
