"""docs/api.md: every public name, what its docstring says first, and the page that explains it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from making.tables import generated, page, table
from zoo.variants import of_all_tasks

PAGES: dict[str, dict[str, str]] = {
    "zoo": {
        "tour": "CATALOGUE Model network networks",
        "predict": "predict Prediction",
        "detect": "detect Detections",
        "explain": "explain Explanation measure",
        "recommend": "recommend Recommendation",
        "features": "body features Features head pyramid reset_head UNet UnknownTap",
        "dream": "dream dream_frames dream_video",
        "embed": "embed",
        "finetune": "find_rate finetune",
        "gpu": "Fast fast plain why",
        "training": "fast_step",
        "segment": "segment Segmentation",
        "stylize": "stylize train_style",
        "weights": "trained",
        "troubleshooting": "NoPretrainedWeights WeightsError WeightsMismatch",
    },
    "weights": {
        "weights": """
            add adhoc Cache Checkpoint checkpoints Collected find gc get Installed load open_weights Preprocessing read_file recognise
            remove Removed Verified verify verify_all""",
        "convert": "ConvertError",
        "troubleshooting": """
            BadLock BadRecord BadSignature CacheNotWritable CallRefused ChangedUpstream CorruptCache HashMismatch InsecureSource
            LimitExceeded MalformedFile MissingLibrary NonFinite NoPretrainedWeights NoSpace NoSuchFile NotLocked Offline OutputsDiffer
            ProtocolError RateLimited ReaderCrashed ReaderUnavailable SizeMismatch SourceUnavailable UnknownWeights UnsafeFormat
            UnsupportedFormat WeightsError WeightsMismatch""",
    },
    "convert": {"convert": "ConvertError core flip formats names read Source"},
    "zoo.detection": {
        "detect": """
            Answer coco_precision Darknet darknet detect detect_folder Detections Detector DETECTORS evaluate Evaluation Precision
            read_truths Truth voc_precision Written"""
    },
    "zoo.dreaming": {"dream": "dream dream_frames dream_video NothingToDream"},
    "zoo.embedding": {"embed": "embed Embeddings knn nearest Neighbour Probed read Report Skipped"},
    "zoo.explanation": {"explain": "CannotExplain class_image ClassImage explain Explanation measure Measured Method METHODS Region"},
    "zoo.finetuning": {"finetune": "find_rate finetune Metrics NotFinite Run Settings Stopped"},
    "zoo.images": {"embed": "BadImage decode Item open_source Source"},
    "zoo.julia": {"from-torch-jl": "collect tensor torch"},
    "zoo.kernels": {"gpu": "Fast fast plain why"},
    "zoo.recommendation": {"recommend": "Budget Ranked recommend Recommendation"},
    "zoo.segmentation": {
        "segment": "PixelConfusion PixelMeasures segment Segmentation Segmenter SEGMENTERS",
        "features": "UNet",
    },
    "zoo.training": {
        "detect": "Diverged Learnt LearningSettings read_yolo Taught teach train_detector",
        "segment": "measure_segmenter Painted read_painted train_segmenter",
    },
    "zoo.stylizing": {
        "stylize": """
            AdaIN Engstrom Johnson MobileStyle style_network StyleNetwork StyleRun StyleSettings styles stylize stylize_video train_style"""
    },
    "zoo.kernels.training": {"training": "fast_step", "gpu": "FastStep FastTraining"},
}
"""The page of every name that a package exports."""
DATA = {
    "CATALOGUE": "Every classifier, by name.",
    "DETECTORS": "Every detector, by name.",
    "SEGMENTERS": "Every segmenter, by name.",
    "METHODS": "Every method of explaining, by name.",
}
"""What is no class, function or module, and so has no docstring."""
HEAD = """\
# Public names

Every name that you may import, and the page that explains it. Anything else in a module may change. `help(trained)` shows the arguments,
results, errors and an example of one name. The networks are in [the table of models](models.md), the commands in [theirs](cli.md).
"""


def exported(package: ModuleType) -> list[str]:
    """List what a package exports, without the networks, which have a page of their own."""
    return [name for name in package.__all__ if name not in of_all_tasks()]


def pages_of(package: str) -> dict[str, str]:
    """Map each name of a package to the page that explains it."""
    return {name: shown for shown, names in PAGES[package].items() for name in names.split()}


def says(name: str, value: Any) -> str:
    """Return the first sentence of a docstring; "" where there is none."""
    first = DATA.get(name) or (inspect.getdoc(value) or "").partition("\n\n")[0]
    sentence, stop, _ = " ".join(first.split()).partition(". ")
    return (sentence + stop.rstrip()).replace("``", "`")


def write() -> dict[str, str]:
    """Return the text of the page by its name in docs/."""
    return {"api.md": page(generated("the packages' own words"), HEAD, *(part for name in PAGES for part in _package(name)))}


def _package(name: str) -> Iterator[str]:
    package = importlib.import_module(name)
    explained = pages_of(name)
    if set(explained) != set(exported(package)):
        raise ValueError(f"{name}: {sorted(set(explained) ^ set(exported(package)))} stand in __all__ or in PAGES, not in both")
    rows = [
        [f"`{each}`", says(each, getattr(package, each)), f"[{explained[each]}]({explained[each]}.md)"]
        for each in sorted(explained, key=str.lower)
    ]
    yield f"## {name}"
    yield table(["name", "is or does", "explained in"], rows)
