"""Where things are on a photograph: `detect` finds them, detectors of any family answer it, and measures say how well they do."""

from zoo.detection.darknet import Darknet, darknet
from zoo.detection.detections import Detections
from zoo.detection.detector import DETECTORS, Detector
from zoo.detection.folders import Written, detect_folder
from zoo.detection.run import detect

__all__ = ["DETECTORS", "Darknet", "Detections", "Detector", "Written", "darknet", "detect", "detect_folder"]
