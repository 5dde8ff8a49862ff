"""Deep dreams: a picture changed, step by step, into more of what a layer of a network finds in it."""

from zoo.dreaming.gradients import NothingToDream
from zoo.dreaming.run import dream, dream_frames, dream_video

__all__ = ["NothingToDream", "dream", "dream_frames", "dream_video"]
