"""A trace loads no compiler, and leaves PyTorch's functions as they were."""

from __future__ import annotations

import subprocess
import sys

from zoo.kernels.passes import unloaded

CODE = """
import sys
import torch
from torch import nn
from zoo.kernels.passes import unloaded
from zoo.kernels.passes.trace import trace

layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(4)]
network = nn.Sequential(*layers, nn.Linear(4, 5), nn.GELU(), nn.Softmax(1)).eval()
nodes = trace(network, (torch.zeros(2, 3, 8, 8),), {}).nodes
print(len(nodes) > 8, "torch._dynamo" in sys.modules)
changed = unloaded._hidden()
print(len(changed) > 50)
torch.relu(torch.zeros(2, device="meta"))
print("torch._dynamo" in sys.modules, len(unloaded._hidden()) < len(changed))
"""


def test_a_trace_loads_no_compiler_and_what_comes_later_does() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False", "True", "True", "True"], done.stderr


def test_nothing_is_changed_where_the_compiler_is_there() -> None:
    import torch._dynamo

    before = len(unloaded._hidden())
    with unloaded.compiler_unloaded():
        assert len(unloaded._hidden()) == before
    torch.relu(torch.zeros(2, device="meta"))


THREADS = """
import sys, threading
import torch
from torch import nn
from zoo.kernels.passes.trace import trace

network = nn.Sequential(*[layer for _ in range(20) for layer in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())]).eval()
ready, errors = threading.Barrier(6), []

def work():
    ready.wait()
    try:
        trace(network, (torch.zeros(2, 3, 8, 8),), {})
    except BaseException as error:
        errors.append(repr(error))

threads = [threading.Thread(target=work) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(errors, "torch._dynamo" in sys.modules)
"""


def test_first_traces_of_many_threads_are_no_trouble_to_each_other() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert done.stdout.strip() == "[] False", done.stdout + done.stderr
