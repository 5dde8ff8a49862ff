"""What there is to compile, for the tests of who compiles it."""

from __future__ import annotations

from functools import partial

import torch

from zoo.kernels.passes.pipeline import understand
from zoo.kernels.training import kernels
from zoo.kernels.training.compiling import ChainWork, _works
from zoo.kernels.training.record import record
from zoo.kernels.tuning.binding import blanks
from zoo.kernels.tuning.candidates import candidates
from zoo.kernels.tuning.steps import COMPUTED, FOREIGN, Setting
from zoo.kernels.tuning.tasks import Task

SETTING = Setting(torch.device("cpu"), torch.bfloat16)


def tasks_of(cls: type[torch.nn.Module], size: int) -> list[Task]:
    graph, places = understand(cls().eval(), (torch.zeros(1, 3, size, size),), {})
    made = []
    for node in graph.steps():
        if node.op in COMPUTED:
            ours = (c for c in candidates(node, blanks(node, places, SETTING), SETTING, 1) if c.op not in FOREIGN)
            made += [Task(node, places, SETTING, candidate) for candidate in ours]
    return made


def norm_of(channels: int) -> ChainWork:
    maps, ones = ((32, channels, 56, 56), torch.bfloat16, True), ((channels,), torch.float32, True)
    run = partial(kernels.batch_norm_act, momentum=0.1, eps=1e-5, act="relu")
    return ChainWork("batch_norm", run, (maps, ones, ones, (*ones[:2], False), (*ones[:2], False)), maps, True)


def chains_of(cls: type[torch.nn.Module]) -> list[ChainWork]:
    images = torch.randn(2, 3, 32, 32)
    return list(_works(record(cls().train(), (images,), {}, images.device)))
