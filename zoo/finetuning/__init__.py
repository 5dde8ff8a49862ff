"""Teaching a network other classes: `finetune`."""

from zoo.finetuning.loop import NotFinite, Stopped
from zoo.finetuning.metrics import Metrics
from zoo.finetuning.rates import find_rate
from zoo.finetuning.run import Run, finetune
from zoo.finetuning.settings import Settings

__all__ = ["Metrics", "NotFinite", "Run", "Settings", "Stopped", "find_rate", "finetune"]
