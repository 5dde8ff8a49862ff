"""A class for every pixel: `segment` finds them, segmenters of any family answer it, and a confusion of pixels says how well they do."""

from zoo.segmentation.measures import PixelConfusion, PixelMeasures
from zoo.segmentation.run import Segmentation, segment
from zoo.segmentation.segmenter import SEGMENTERS, Segmenter
from zoo.segmentation.unet import UNet

__all__ = ["SEGMENTERS", "PixelConfusion", "PixelMeasures", "Segmentation", "Segmenter", "UNet", "segment"]
