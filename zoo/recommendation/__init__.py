"""Which checkpoint to start from: candidates compared on a user's own images, with their speed on this machine, size and licence."""

from zoo.recommendation.budget import Budget
from zoo.recommendation.result import Ranked, Recommendation
from zoo.recommendation.run import recommend

__all__ = ["Budget", "Ranked", "Recommendation", "recommend"]
