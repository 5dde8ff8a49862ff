"""Teaching networks that answer more than a class: detectors and segmenters, in runs that go on where they were interrupted."""

from zoo.training.detectors import train_detector
from zoo.training.loop import Diverged, LearningSettings, Learnt
from zoo.training.pixel_truths import Painted, read_painted
from zoo.training.run import Taught, teach
from zoo.training.segmenters import measure_segmenter, train_segmenter
from zoo.training.yolo_text import read_yolo

__all__ = [
    "Diverged",
    "LearningSettings",
    "Learnt",
    "Painted",
    "Taught",
    "measure_segmenter",
    "read_painted",
    "read_yolo",
    "teach",
    "train_detector",
    "train_segmenter",
]
