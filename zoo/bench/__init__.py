"""Measurements that print the peer beside ours: one process, in turns, medians, parity before any number.

`load` times constructing and loading a network; `run` times inference, and `chart` and `page` show its record.
"""

from zoo.bench.loading import Timing as Timing
from zoo.bench.loading import alternate as alternate
from zoo.bench.loading import load as load
from zoo.bench.machine import versions as versions
from zoo.bench.subject import torchvision_builder as torchvision_builder
