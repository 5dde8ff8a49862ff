"""Where things are on a photograph: `detect` finds them, detectors of any family answer it, and measures say how well they do."""

from zoo.detection.darknet_networks import Darknet, darknet
from zoo.detection.detections import Detections
from zoo.detection.detector import DETECTORS, Detector
from zoo.detection.evaluation import Evaluation, evaluate
from zoo.detection.folders import Written, detect_folder
from zoo.detection.measures import Answer, Precision, Truth, coco_precision, voc_precision
from zoo.detection.run import detect
from zoo.detection.truths import read_truths

__all__ = [
    "DETECTORS",
    "Answer",
    "Darknet",
    "Detections",
    "Detector",
    "Evaluation",
    "Precision",
    "Truth",
    "Written",
    "coco_precision",
    "darknet",
    "detect",
    "detect_folder",
    "evaluate",
    "read_truths",
    "voc_precision",
]
