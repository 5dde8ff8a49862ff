"""Teaching a network other classes: `finetune`."""

from zoo.finetuning.loop import NotFinite as NotFinite
from zoo.finetuning.loop import Stopped as Stopped
from zoo.finetuning.metrics import Metrics as Metrics
from zoo.finetuning.rates import find_rate as find_rate
from zoo.finetuning.run import Run as Run
from zoo.finetuning.run import finetune as finetune
from zoo.finetuning.settings import Settings as Settings
