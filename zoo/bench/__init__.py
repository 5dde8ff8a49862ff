"""Measurements that print the peer beside ours: one process, in turns, medians, parity before any number.

`loading` times constructing and loading a network, `inference` calls, `training` steps, `embedding` folders of images (with the rates of
`embedding_rates`). What is measured is a `subject` in a `cell`, in the ways of `peers`, by the `clock`, beside the `floor`; `record` keeps
it with the `machine` that it belongs to, and `chart`, `page` and `training_page` show it.
"""

from zoo.bench.loading import Timing as Timing
from zoo.bench.loading import alternate as alternate
from zoo.bench.loading import load as load
from zoo.bench.machine import versions as versions
from zoo.bench.subject import torchvision_builder as torchvision_builder
