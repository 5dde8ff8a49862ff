"""What processes are given to compile is what is launched, and its key says all that it depends on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from preloaded import compiler

import zoo
from tests.zoo.kernels.launching import SHAPE, Gated
from tests.zoo.kernels.works import SETTING, tasks_of
from zoo.kernels.passes.merge import apply, merges
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.tuning.binding import blanks
from zoo.kernels.tuning.steps import Candidate, describe
from zoo.kernels.tuning.tasks import Blank, Task

KEYS = """
import torch, zoo
from tests.zoo.kernels.works import chains_of, tasks_of
for work in (*tasks_of(zoo.SqueezeNet1_1, 64), *chains_of(zoo.ResNet20), *chains_of(zoo.MobileNetV2)):
    print(work.key)
"""


CHAINS = """
import torch
from dataclasses import replace
from triton.runtime.jit import JITFunction
from zoo.kernels.compilation.compiler_process import stop_at_launch
seen, launched = [], JITFunction.run
def run(self, *args, **options):
    seen.append(self.__name__)
    return launched(self, *args, **options)
JITFunction.run = run
stop_at_launch(90)
from zoo.kernels.training import kernels
kernels.on_kernels = lambda device: True
from zoo.kernels.training.compiling import _works
from zoo.kernels.training.record import record
conv, relu = torch.nn.Conv2d, torch.nn.ReLU
network = torch.nn.Sequential(conv(3, 8, 3), relu(), conv(8, 16, 3), relu(), conv(16, 8, 3), conv(8, 8, 3, groups=8, bias=False)).train()
images = torch.randn(2, 3, 16, 16)
works = list(_works(record(network, (images,), {}, images.device)))
for work in works:
    work.compile()
print(sum(work.name.startswith("conv") for work in works))
launches = []
for share, shares in [(0, 1), *((share, 3) for share in range(3))]:
    before = len(seen)
    replace(next(work for work in works if "depthwise" in work.name), share=(share, shares)).compile()
    launches.append(seen[before:])
whole, *parts = launches
print(len(whole), [part == whole[share::3] for share, part in enumerate(parts)])
"""


def python(*arguments: str, **environment: str) -> str:
    """Run Python where kernels are compiled, not interpreted, and return what it prints."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    there = kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment
    program = sys.executable if "PYTHONHASHSEED" in environment else compiler()  # a fork has the seed of its parent
    ran = subprocess.run([program, *arguments], env=there, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_keys_are_the_same_in_every_process() -> None:
    known = [python("-c", KEYS, **seed).splitlines() for seed in ({"PYTHONHASHSEED": "1"}, {})]  # the other one is drawn
    assert known[0] == known[1]
    assert len(set(known[0])) > 30
    assert not any(" at 0x" in key for key in known[0])


GLOBALS = """
import importlib, pathlib
from triton.runtime.jit import JITFunction
from zoo.kernels import ops
files = sorted(pathlib.Path(ops.__path__[0]).glob("[!_]*.py")) + sorted(pathlib.Path(ops.__path__[0]).glob("_[!_]*.py"))
modules = [importlib.import_module(f"zoo.kernels.ops.{file.stem}") for file in files]
kernels = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}
for kernel in kernels.values():
    kernel.cache_key
print(len(kernels), sorted({name for kernel in kernels.values() for name, _ in kernel.used_global_vals}))
"""


LENGTH = """
import os, pathlib, re, torch
from zoo.kernels.compilation.compiler_process import stop_at_launch
stop_at_launch(90)
from zoo.kernels.ops import depthwise
x = torch.empty(32, 672, 14, 14, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
config = {"vector": 2, "cols": 4, "rows": 14, "steps": 1, "ahead": 1, "warps": 4}
weight, bias = torch.empty(5, 5, 672, dtype=torch.bfloat16), torch.empty(672)
depthwise.launch(x, weight, bias, padding=(2, 2, 2, 2), act="silu", sums=True, config=config)
[file] = pathlib.Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.ttir")
print(len(re.findall(r"^ +(?:%[^=]*= )?(?:arith|math|tt|scf)\\.", file.read_text(), re.M)))
"""


def test_a_depthwise_kernel_is_short_to_triton_whose_time_grows_with_its_length_cubed(tmp_path: Path) -> None:
    operations = int(python("-c", LENGTH, TRITON_CACHE_DIR=str(tmp_path)))
    assert 500 < operations < 1200  # 1,058; with an address of its own for each column, and sums apart from products, 1,499


def test_no_kernel_reads_a_global_which_its_hash_would_hold_or_not() -> None:
    count, found = python("-c", GLOBALS).split(" ", 1)
    assert int(count) > 50
    assert found.strip() == "[]"


def test_what_processes_compile_is_what_is_launched(tmp_path: Path) -> None:
    found = json.loads(python(str(Path(__file__).parents[1] / "launching.py"), TRITON_CACHE_DIR=str(tmp_path)))
    assert found["ahead"] > 8
    assert {"stem", "depthwise", "squeeze_excite", "depthwise_squeeze", "conv"} <= set(found["ops"])
    assert found["refused"] == []
    assert found["timed"] == []
    assert found["planned"] == []


@pytest.mark.parametrize("merged", [False, True])
def test_a_gate_is_compiled_in_the_type_that_kernels_give_it(merged: bool) -> None:
    graph, places = understand(Gated().eval(), (torch.zeros(SHAPE),), {})
    if merged:
        apply(graph, [merge for merge in merges(graph, places) if merge.node.op == "depthwise_squeeze"], places)
    node = next(node for node in graph.steps() if "gate" in node.roles)
    assert node.inputs[1].op == ("second" if merged else "squeeze_excite")
    light = Task(node, places, SETTING, Candidate("conv")).portable()
    assert [blank.dtype for blank in blanks(light.node, light.places, light.setting)] == [torch.bfloat16, torch.float32]


def test_a_key_says_where_a_map_begins() -> None:
    graph, places = understand(zoo.DenseNet_BC_100_12().eval(), (torch.zeros(1, 3, 32, 32),), {})
    keys: dict[str, set[str]] = {}
    begins: dict[str, set[int]] = {}
    for node in graph.steps():
        if node in places:  # parts of twelve channels
            text = describe(node, places, SETTING)
            keys.setdefault(text, set()).add(Task(node, places, SETTING, Candidate("conv")).key)
            begins.setdefault(text, set()).add(2 * places[node].offset % 16)
    assert max(len(several) for several in begins.values()) == 2
    assert all(len(keys[text]) >= len(begins[text]) for text in keys)


def test_what_trains_convolutions_with_a_bias_can_be_compiled(tmp_path: Path) -> None:
    convolutions, launches = python("-c", CHAINS, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert int(convolutions) > 0
    count, shares = launches.split(" ", 1)
    assert int(count) > 2
    assert shares == "[True, True, True]"


def test_a_key_says_what_follows_and_which_parameters() -> None:
    first = tasks_of(zoo.SqueezeNet1_1, 64)[0]
    others = [replace(first, followed=False), replace(first, candidate=replace(first.candidate, config={"BM": 1}))]
    assert len({first.key, *(other.key for other in others), tasks_of(zoo.SqueezeNet1_1, 96)[0].key}) == 4
    assert replace(first).key == first.key


def test_a_portable_task_carries_no_weights_and_no_other_step() -> None:
    task = max(tasks_of(zoo.SqueezeNet1_1, 64), key=lambda task: task.node.attrs["weight"].numel() if "weight" in task.node.attrs else 0)
    light = task.portable()
    assert isinstance(light.node.attrs["weight"], Blank)
    assert light.node.attrs["weight"].shape == tuple(task.node.attrs["weight"].shape)
    assert all(not source.inputs and not source.attrs for source in light.node.inputs)
    assert isinstance(task.node.attrs["weight"], torch.Tensor)
