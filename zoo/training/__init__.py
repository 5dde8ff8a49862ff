"""Teaching networks that answer more than a class: detectors and segmenters, in runs that go on where they were interrupted."""

from zoo.training.detectors import train_detector
from zoo.training.loop import Diverged, LearningSettings, Learnt
from zoo.training.segmenters import measure_segmenter, train_segmenter
from zoo.training.yolo_text import read_yolo

__all__ = ["Diverged", "LearningSettings", "Learnt", "measure_segmenter", "read_yolo", "train_detector", "train_segmenter"]
