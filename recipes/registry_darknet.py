"""Make the registry's rows of Darknet's detectors from what their authors and others publish of the files.

    python -m recipes.registry_darknet            writes weights/registry/darknet_networks.toml
    python -m recipes.registry_darknet --check    writes nothing, and exits with 1 where the file is not what it would write

Then `zoo lock --shipped weights` and `make docs-pages`. The size rule, the classes and the parameters are those of our classes, which the
files fit number by number. Whose BatchNorm a file needs is in its header, and is read there. YOLOv2Tiny, YOLOv3SPP and YOLOv7Tiny have no
row: nobody is known to publish a hash of their files, and a row without one would promise nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from recipes.registry_rows import Wanted, text
from weights.record import record
from zoo import YoloFastest, YoloFastestXL, YOLOv2, YOLOv3, YOLOv3Tiny, YOLOv4, YOLOv4Tiny

FILE = Path(__file__).parents[1] / "weights" / "registry" / "darknet_networks.toml"
REDMON = "https://pjreddie.com/media/files/"
ALEXEY = "https://github.com/AlexeyAB/darknet/releases/download/"
FASTEST = "https://raw.githubusercontent.com/dog-qiuqiu/Yolo-Fastest/master/ModelZoo/yolo-fastest-1.1_coco/"
VAL, DEV = "COCO val2017, by Darknet's own measure", "COCO test-dev"
LICENSED = "LicenseRef-yolo-license"
"""The YOLO License of the repository that holds the file: "do whatever you want with it"."""
OPENCV = "its SHA-1 is in OpenCV's list of models for tests, testdata/dnn/download_models.py of opencv_extra"
HORIZON = "its MD5 is in several projects that download it, the makefile of openyolo among them"


class File(NamedTuple):
    """What is published of a file.

    Attributes:
        network: the class that it fits.
        sources: its addresses.
        hashed: "sha256" or "digest", and what that is.
        metrics, data: what the authors measured, and on which images.
        license: as a record has it.
        provenance: who says so.
        size_bytes: of the file.
    """

    network: Any
    sources: tuple[str, ...]
    hashed: tuple[str, str]
    metrics: dict[str, float]
    data: str
    license: str
    provenance: str
    size_bytes: int


KNOWN = (
    File(
        YOLOv2, (f"{REDMON}yolov2.weights",), ("digest", "md5:70d89ba2e180739a1c700a9ff238e354"),
        {"map50": 48.1}, DEV, "unstated", f"the author's page and paper; {HORIZON}", 203_934_260,
    ),
    File(
        YOLOv3, (f"{REDMON}yolov3.weights",), ("digest", "sha1:520878f12e97cf820529daea502acca380f1cb8e"),
        {"map50": 57.9}, DEV, "unstated", f"the author's page and paper; {OPENCV}", 248_007_048,
    ),
    File(
        YOLOv3Tiny, (f"{REDMON}yolov3-tiny.weights",), ("digest", "md5:3bcd6b390912c18924b46b26a9e7ff53"),
        {"map50": 33.1}, DEV, "unstated", f"the author's page; {HORIZON}", 35_434_956,
    ),
    File(
        YOLOv4, (f"{ALEXEY}yolov4/yolov4.weights", f"{ALEXEY}darknet_yolo_v3_optimal/yolov4.weights"),
        ("digest", "sha1:0143deb6c46fcc7f74dd35bf3c14edc3784e99ee"),
        {"map": 43.5, "map50": 65.7}, DEV, LICENSED, f"the repository's README; {OPENCV}", 257_717_640,
    ),
    File(
        YOLOv4Tiny, (f"{ALEXEY}darknet_yolo_v4_pre/yolov4-tiny.weights",), ("digest", "sha1:d110379b7b86899226b591ad4affc7115f707157"),
        {"map50": 40.2}, DEV, LICENSED, f"the repository's README; {OPENCV}", 24_251_276,
    ),
    File(
        YoloFastest, (f"{FASTEST}yolo-fastest-1.1.weights",),
        ("sha256", "1c445c42bbd6df63edea2cc69f99667b5650d663ca11e34b116240740cd42890"),
        {"map50": 24.4}, VAL, LICENSED, "the repository, its mAP_log.txt beside the file; hashed and run for this row", 1_384_268,
    ),
    File(
        YoloFastestXL, (f"{FASTEST}yolo-fastest-1.1-xl.weights",),
        ("sha256", "fac5fb41786c1f38f04972a658443b189f48720d7d117f9a044100e98a35b0c5"),
        {"map50": 34.33}, VAL, LICENSED, "the repository, its xl-mAP_log.txt beside the file; hashed and run for this row", 3_693_964,
    ),
)  # fmt: skip


def row(file: File) -> Wanted:
    """Make the row of a file."""
    cls = file.network
    _, steps = cls.told_by({"format": "darknet"})
    table: dict[str, Any] = {"default": True, "sources": list(file.sources), "format": "darknet", "names": "darknet"}
    table |= dict([file.hashed]) | {"size_bytes": file.size_bytes} | {"num_classes": cls.usual_classes(), "labels": cls.labels}
    table |= {"metrics": file.metrics, "metrics_data": file.data, "license": file.license, "params": cls.params}
    steps = {name: list(value) if isinstance(value, tuple) else value for name, value in steps.items() if value is not None}
    table |= {"preprocessing": steps, "provenance": file.provenance}
    return Wanted(cls.__name__, "coco", table, file.sources)


def written() -> str:
    """Return the text of the file."""
    rows = [row(file) for file in KNOWN]
    for one in rows:
        record(one.model, one.tag, one.table, FILE.name)
    head = "# Darknet's checkpoints, made by recipes/registry_darknet.py; the keys are explained at weights.registry.Checkpoint.\n\n"
    return head + "\n".join(map(text, rows))


def main() -> int:
    """Write the file, or compare it."""
    if "--check" in sys.argv:
        same = FILE.is_file() and FILE.read_text(encoding="utf-8") == written()
        print(*[] if same else [f"{FILE.name} is not what is known of Darknet's files"], sep="\n")
        return int(not same)
    FILE.write_text(written(), encoding="utf-8")
    print(FILE.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
