"""Every test has a cache of its own, a seed of its own, any place in the order, and no network but this machine's."""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loopback
import numpy as np
import preloaded
import pytest
import torch
from browser import chromium
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from order import shuffle

os.environ.setdefault("KERAS_BACKEND", "torch")  # before anybody imports it: its own choice is TensorFlow, and slow to load
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton, which reads it once
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # both go by the clock of an idle machine
settings.load_profile("busy")
providers._get_local_constants = lambda: providers._local_constants  # it would parse all files of the project, in every worker
gc.disable()  # until everything is imported: see pytest_collection_finish
loopback.only()


def undrawn(fill: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let an initialisation leave alone what has no numbers: on the meta device it costs as much as the rest of a network."""

    @functools.wraps(fill)
    def filled(tensor: torch.Tensor, *how: Any, **more: Any) -> torch.Tensor:
        return tensor if tensor.is_meta else fill(tensor, *how, **more)

    return filled


FILLS = "uniform_ normal_ trunc_normal_ constant_ ones_ zeros_ kaiming_uniform_ kaiming_normal_ xavier_uniform_"
for name in FILLS.split():
    setattr(torch.nn.init, name, undrawn(getattr(torch.nn.init, name)))

HOMES = itertools.count()
LONGER = (Path(__file__).with_name("longer.txt")).read_text(encoding="utf-8").split("\n")[:-1]
"""Tests of one network that take a second or more and repeat what a smaller one shows; -m long has them."""
REAL = Path(os.environ.get("ZOO_REAL", Path(__file__).parents[2] / "shared"))
"""Real checkpoints, photographs and CIFAR-10 as JPEG, where someone keeps them beside the checkout."""


ORDER = int(os.environ.setdefault("TEST_ORDER", str(random.SystemRandom().randrange(1, 10**6))))
"""The number that says the order of the tests, 0 the one they are written in; left where the workers, who must all have one, find it."""


def pytest_report_header() -> str:
    return f"shuffled: TEST_ORDER={ORDER}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
    if exitstatus:
        terminalreporter.write_line(f"in this order again: TEST_ORDER={ORDER}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect, not skip, what this machine has no device or no files for, and what is long."""
    there = {item.nodeid: item for item in items}
    for name in LONGER:
        if name in there:
            there[name].add_marker("long")
        elif config.args == config.getini("testpaths"):  # of all tests, none is called so
            raise pytest.UsageError(f"tests/longer.txt: there is no test {name}")
    absent = set()
    if not torch.cuda.is_available():
        absent.add("gpu")
    if importlib.util.find_spec("keras_hub") is None:
        absent.add("kerashub")
    for name in ("cudnn", "nncf"):
        if importlib.util.find_spec(name) is None:
            absent.add(name)
    if importlib.util.find_spec("playwright") is None or chromium() is None:
        absent.add("browser")
    absent |= {name for name in ("long", "mounts") if name not in config.getoption("markexpr")}
    if not (REAL / "real" / "INDEX.md").is_file():
        absent.add("real")
    gone = [item for item in items if any(item.get_closest_marker(name) for name in absent)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        kept = set(items).difference(gone)
        items[:] = [item for item in items if item in kept]
    shuffle(items, ORDER)


FROZEN = {"modules": 0}
MORE = 150
"""Modules that tests have imported since: a library, whose objects each collection would look through."""


def freeze() -> None:
    gc.collect()
    gc.freeze()
    FROZEN["modules"] = len(sys.modules)


def pytest_collection_finish() -> None:
    """Keep what was imported out of the garbage collector's sight: a million objects that it would look through for every test."""
    gc.enable()
    freeze()
    gc.set_threshold(10_000, 10, 10)  # JAX and Hypothesis listen to each collection, and cost more than it
    if main := sys.modules.get("typer.main"):
        main.get_command = functools.cache(main.get_command)  # the zoo's whole command, made anew for each line of it


def pytest_configure() -> None:
    """Let Ctrl-C reach the processes that tests start: a shell without job control starts what is in its background deaf to it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


STRANGERS = ("test_sandbox.py", "test_confinement.py", "test_room.py", "test_hostile.py", "test_hostile_samples.py", "test_diagnose.py")
STRANGERS += ("test_who_parses.py", "test_hostile_files.py", "test_cut_files.py")
"""Files of tests about what a reader is protected from; they start it as a user's does, the others fork it."""
USUAL: dict[str, Any] = {}


def fork_readers(path: Path) -> None:
    """Start no process for a file in tests that are not about strangers' files."""
    if sandbox := sys.modules.get("convert.sandbox"):
        alone = USUAL.setdefault("_started", sandbox._started)
        sandbox._started = alone if path.name in STRANGERS else preloaded.reader


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draw the same numbers whatever ran before; a test that needs others asks for them."""
    fork_readers(item.path.relative_to(Path(__file__).parent))
    if len(sys.modules) > FROZEN["modules"] + MORE:
        freeze()
    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)  # the other notes each time, with the whole stack, what to do once there is a GPU


@pytest.fixture(scope="session")
def real() -> Path:
    return REAL


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / f"home{next(HOMES)}"  # mktemp looks through all that there are
    folder.mkdir()
    ours, theirs = ("ZOO_OFFLINE", "ZOO_FROZEN", "ZOO_MIRROR", "ZOO_REGISTRY"), ("HF_HUB_OFFLINE", "HF_TOKEN")
    for name in (*ours, *theirs, "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("ZOO_CACHE", str(folder / "cache"))
    monkeypatch.setenv("ZOO_USER_REGISTRY", str(folder / "registry"))
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    monkeypatch.setenv("TORCH_HOME", str(folder / "torch"))
    return folder / "cache"
