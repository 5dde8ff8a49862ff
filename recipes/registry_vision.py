"""Make the registry's rows of torchvision's detectors and segmenters from torchvision's own tables of weights.

    python -m recipes.registry_vision            writes weights/registry/rcnn.toml, dense.toml, ssd.toml and dilated.toml
    python -m recipes.registry_vision --check    writes nothing, and exits with 1 where a file is not what it would write

Then `zoo lock --shipped weights` and `make docs-pages`. Facts that torchvision states: URL, first digits of the SHA-256 (in the URL),
metrics, parameters, multiply-adds, recipe. It states no licence per file. The size rule and the options are those of its constructors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torchvision

from recipes.registry_rows import Wanted, text
from weights.record import record
from zoo.detection import DETECTORS
from zoo.detection import catalogue as _detectors
from zoo.detection.learning import LearningDetector
from zoo.networks.published import Published
from zoo.segmentation import SEGMENTERS
from zoo.segmentation import catalogue as _segmenters

SHIPPED = Path(__file__).parents[1] / "weights" / "registry"
DATA = {"COCO-val2017": "COCO val2017", "COCO-val2017-VOC-labels": "COCO val2017, the 20 classes of PASCAL VOC"}
NO_EPS = ("COCO_V1",)
"""Tags of first versions whose norms torchvision gives an eps of 0, as they were trained; see `overwrite_eps` there."""
assert _detectors
assert _segmenters


def rows(cls: Any) -> Iterator[Wanted]:
    """Make the rows of one network."""
    enum: Any = torchvision.models.get_model_weights(cls.__name__.lower())
    for entry in enum:
        meta = entry.meta
        digits = re.search(r"-([0-9a-f]{8,})\.pth$", entry.url)
        assert digits is not None
        (data, metrics), *others = meta["_metrics"].items()
        assert not others
        table: dict[str, Any] = {"default": True} if entry is enum.DEFAULT else {}
        table |= {"sources": [entry.url], "format": "pytorch", "names": "torchvision", "sha256_prefix": digits[1]}
        table |= {"num_classes": len(meta["categories"]), "labels": labels(cls, len(meta["categories"]))}
        table |= {"metrics": metrics, "metrics_data": DATA[data], "license": "unstated", "recipe": meta["recipe"]}
        table |= {"params": meta["num_params"], "gmacs": meta["_ops"], "preprocessing": preprocessing(cls)}
        if options := options_of(cls, entry.name):
            table["options"] = options
        version = torchvision.__version__.partition("+")[0]
        table["provenance"] = f"torchvision {version}: weights enum and constructor; it states no licence per file"
        yield Wanted(cls.__name__, entry.name.lower(), table, (entry.url,))


def labels(cls: type[Published], count: int) -> str:
    """Name the list of labels."""
    return "voc21" if cls.task == "segmentation" else {91: "coco91", 2: "coco_person"}[count]


def preprocessing(cls: Any) -> dict[str, Any]:
    """Return the size rule: one size, or the shorter side and a bound of the longer one."""
    own = {"interpolation": "bilinear", "mean": list(cls.mean), "std": list(cls.std)}
    if cls.task == "segmentation":
        return {"resize": cls.input_size} | own
    if cls.fixed is not None:
        return {"resize": cls.fixed[0]} | own | {"squash": True}
    return {"resize": cls.shorter[-1]} | own | {"longest": cls.longer}


def options_of(cls: Any, tag: str) -> dict[str, Any]:
    """Return the constructor keywords of torchvision's checkpoints: frozen norms, and the auxiliary head."""
    if cls.task == "segmentation":
        return {} if cls.__name__.startswith("LRASPP") else {"aux": True}
    if getattr(cls, "version", 0) != 1 and not cls.__name__.startswith("FCOS"):
        return {}
    without = not cls.__name__.startswith(("FCOS", "FasterRCNN_MobileNet")) and tag in NO_EPS
    return {"norm": "frozen"} | ({"norm_eps": 0.0} if without else {})


def files() -> dict[Path, str]:
    """Return the text of each file."""
    found: dict[Path, list[Wanted]] = {}
    for cls in (*DETECTORS.values(), *SEGMENTERS.values()):
        if issubclass(cls, LearningDetector) or cls.task == "segmentation":
            path = SHIPPED / f"{cls.family().__module__.rpartition('.')[2]}.toml"
            found.setdefault(path, []).extend(rows(cls))
    texts: dict[Path, str] = {}
    for path, wanted in found.items():
        for row in wanted:
            record(row.model, row.tag, row.table, path.name)
        head = "# torchvision's checkpoints, made by recipes/registry_vision.py; the keys are explained at weights.registry.Checkpoint.\n\n"
        texts[path] = head + "\n".join(map(text, wanted))
    return texts


def main() -> int:
    """Write the files, or compare them."""
    differ = [path for path, content in files().items() if not path.is_file() or path.read_text(encoding="utf-8") != content]
    if "--check" in sys.argv:
        print(*(f"{path.name} is not what torchvision's tables say" for path in differ), sep="\n")
        return int(bool(differ))
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
        print(path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
