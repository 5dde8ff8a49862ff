"""Which steps run on the zoo's kernels, that they learn what PyTorch's do, and that nothing which goes wrong with kernels ends a run."""

from __future__ import annotations

import io
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from small import Forked, Moody, Tiny

from tests.zoo.finetuning.test_studies import radiographs
from zoo.finetuning import NotFinite, Run, Stopped, finetune, stepping
from zoo.finetuning.loop import Trainer
from zoo.finetuning.progress import bar
from zoo.finetuning.settings import Settings
from zoo.kernels.training import FastStep, FastTraining, fast_step
from zoo.networks.model import Model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def run(folder: Path, out: Path, model: type[Model] = Tiny, **settings: Any) -> Run:
    told = {"from_scratch": True, "lr": 0.1, "batch_size": 12, "epochs": 2, "workers": 0, "device": "cpu"}
    return finetune(model, folder, out, **{**told, **settings})


def same(one: Path, other: Path) -> bool:
    """Tell whether two runs ended with the same weights, statistics, means and state of the optimiser, to the last bit."""
    ours, theirs = (load_file(folder / "last.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    return all(torch.equal(value, theirs[key]) for key, value in ours.items())


def on_kernels(folder: Path) -> bool:
    """Tell whether the report of a run shows what its layers ran on."""
    return "what each layer ran on" in (folder / "report.html").read_text()


HEADS = {"head_epochs": 1, "accumulate": 2, "ema": 0.9, "options": {"dropout": 0.2}}
MIXED = {"mixup": 0.3, "cutmix": 1.0, "label_smoothing": 0.1, "balance": True, "clip": 0.5}
RATES = {"optimizer": "adamw", "lr": 0.01, "layer_decay": 0.7, "freeze_norm": True, "augment": "resized"}


@pytest.mark.parametrize(
    ("model", "told"),
    [(Tiny, HEADS), (Tiny, MIXED), (Tiny, RATES), (Forked, HEADS | MIXED)],
    ids=["head first, in parts", "mixed", "layers' rates", "an auxiliary head"],
)
def test_a_run_on_the_zoos_kernels_learns_the_same_to_the_last_bit(
    photos: Path, tmp_path: Path, model: type[Model], told: dict[str, Any]
) -> None:
    plain = run(photos, tmp_path / "plain", model, **told)
    quick = run(photos, tmp_path / "fast", model, fast=True, **told)
    assert same(quick.folder, plain.folder)
    assert [row.get("loss") for row in quick.history] == [row.get("loss") for row in plain.history]
    assert on_kernels(quick.folder)


def test_studies_are_learnt_the_same_on_the_zoos_kernels(tmp_path: Path) -> None:
    for part, seed in (("train", 0), ("valid", 1)):
        radiographs(tmp_path / "mura" / part, 8, seed)
    for name in ("plain", "fast"):
        run(tmp_path / "mura", tmp_path / name, layout="studies", balance=True, fast=name == "fast")
    assert same(tmp_path / "fast", tmp_path / "plain")
    assert (tmp_path / "fast" / "metrics.json").read_text() == (tmp_path / "plain" / "metrics.json").read_text()


def test_a_run_may_go_on_without_the_kernels_that_it_began_with_and_the_other_way_around(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"optimizer": "adamw", "lr": 0.01, "ema": 0.9, "steps": 8}
    run(photos, tmp_path / "whole", **told)
    step = Trainer._one

    def interrupted(self: Trainer, batches: Any) -> Any:
        if self.step == 4:
            signal.raise_signal(signal.SIGINT)
        return step(self, batches)

    for first in (True, False):
        monkeypatch.setattr(Trainer, "_one", interrupted)
        with pytest.raises(Stopped):
            run(photos, tmp_path / f"{first}", fast=first, **told)
        monkeypatch.undo()
        assert finetune(Tiny, out=tmp_path / f"{first}", resume=True, fast=not first).steps == 8
        assert same(tmp_path / f"{first}", tmp_path / "whole")


@pytest.mark.parametrize(
    ("told", "device", "steps", "why"),
    [
        ({}, CUDA, stepping.LEAST_STEPS, ""),
        ({}, CUDA, stepping.LEAST_STEPS - 1, "pays from 2,000 steps on, and there are 1,999; --fast"),
        ({"fast": True}, CUDA, 1, ""),
        ({"fast": False}, CUDA, 10**6, "told so"),
        ({}, CPU, 10**6, "a CPU has no CUDA graphs"),
        ({"fast": True}, CPU, 10**6, ""),
        ({"fsdp": True}, CUDA, 10**6, "FSDP gathers parameters"),
        ({"compile": True}, CUDA, 10**6, "torch.compile"),
    ],
)
def test_kernels_are_prepared_on_a_gpu_where_there_are_steps_enough(
    told: dict[str, Any], device: torch.device, steps: int, why: str
) -> None:
    reason = stepping.declined(Settings(**told), device, steps)
    assert (why in reason) if why else not reason


@pytest.mark.parametrize("other", ["compile", "fsdp"])
def test_kernels_that_are_asked_for_exclude_what_makes_steps_in_another_way(other: str) -> None:
    with pytest.raises(ValueError, match=f"fast and {other} exclude each other; leave one out"):
        Settings(fast=True, **{other: True})


def test_a_report_says_how_the_steps_were_done(photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = run(photos, tmp_path / "fast", fast=True, head_epochs=1)
    assert done.replayed == 0
    assert caplog.messages == ["no step is faster for --fast on a CPU: chains run PyTorch's own functions there"]
    page = (tmp_path / "fast" / "report.html").read_text()
    assert "steps: 3 on the zoo&#x27;s kernels; a CPU has no CUDA graphs; 3 on the zoo&#x27;s kernels; a CPU has no CUDA graphs" in page
    assert on_kernels(tmp_path / "fast")
    assert "batch_norm + relu" in page
    run(photos, tmp_path / "plain")
    page = (tmp_path / "plain" / "report.html").read_text()
    assert "steps: 6 as PyTorch does them: a CPU has no CUDA graphs" in page
    assert not on_kernels(tmp_path / "plain")


def test_a_run_whose_kernels_can_not_be_prepared_goes_on_without_and_says_why(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(photos, tmp_path / "plain")

    def fail(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried")

    with monkeypatch.context() as patched:
        patched.setattr(stepping, "fast", fail)
        run(photos, tmp_path / "fast", fast=True)
    assert same(tmp_path / "fast", tmp_path / "plain")
    assert "the run goes on as PyTorch computes it: OutOfMemoryError: CUDA out of memory." in caplog.messages[-1]
    assert len(caplog.messages) == 1
    assert "CUDA out of memory." in (tmp_path / "fast" / "report.html").read_text()


def test_a_network_that_can_not_be_recorded_is_trained_as_it_is(photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(photos, tmp_path / "plain", Moody)
    run(photos, tmp_path / "fast", Moody, fast=True)
    assert same(tmp_path / "fast", tmp_path / "plain")
    assert [message for message in caplog.messages if "the zoo's kernels are left out" in message] == caplog.messages
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("when", [0, 2])
def test_a_kernel_that_fails_in_a_step_leaves_nothing_behind_and_the_run_goes_on(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: int
) -> None:
    run(photos, tmp_path / "plain", options={"dropout": 0.2})
    forward, calls = FastTraining.forward, []

    def broken(self: FastTraining, *args: Any) -> Any:
        made = forward(self, *args)  # by then statistics are those of this step
        calls.append(1)
        if len(calls) > when:
            raise RuntimeError("out of resource: shared memory")
        return made

    monkeypatch.setattr(FastTraining, "forward", broken)
    run(photos, tmp_path / "fast", fast=True, options={"dropout": 0.2})
    assert same(tmp_path / "fast", tmp_path / "plain")
    assert len(calls) == when + 1
    assert "RuntimeError: out of resource: shared memory" in caplog.text


def test_an_interrupt_while_kernels_are_prepared_stops_at_once(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(photos, tmp_path / "plain")

    def interrupted(*args: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr(stepping, "fast", interrupted)
    with pytest.raises(Stopped, match="stopped after step 0 of 6; go on with: zoo finetune --resume"):
        run(photos, tmp_path / "x", fast=True)
    monkeypatch.undo()
    assert finetune(Tiny, out=tmp_path / "x", resume=True).steps == 6
    assert same(tmp_path / "x", tmp_path / "plain")


def test_a_terminal_shows_that_kernels_are_prepared(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, prepared, before = io.StringIO(), stepping.fast, []
    terminal = Console(file=shown, force_terminal=True, width=120)

    def slow(*args: Any, **options: Any) -> Any:
        while "preparing kernels" not in shown.getvalue() and len(before) < 3000:  # five minutes, which nothing takes that comes at all
            time.sleep(0.1)
            before.append(1)
        return prepared(*args, **options)

    monkeypatch.setattr(stepping, "fast", slow)
    run(photos, tmp_path / "x", fast=True, epochs=1, progress=partial(bar, console=terminal))
    assert len(before) < 3000


@pytest.mark.parametrize(("steps", "said"), [(2000, False), (1999, True)])
def test_a_short_run_on_a_gpu_says_that_it_leaves_kernels_out(steps: int, said: bool, caplog: pytest.LogCaptureFixture) -> None:
    network = Tiny()
    here = stepping.World(0, 1, CUDA)
    stepping.Stepper(network, torch.optim.SGD(network.parameters()), Settings(), here, None, steps, True)
    assert ("preparing kernels pays from 2,000 steps on" in caplog.text) is said
    caplog.clear()
    stepping.Stepper(network, torch.optim.SGD(network.parameters()), Settings(fast=False), here, None, steps, True)
    assert caplog.text == ""


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_a_run_lets_its_graphs_go_however_it_ends(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    live: list[FastStep] = []
    real = FastStep.close
    monkeypatch.setattr(stepping, "fast_step", lambda *parts, **told: live.append(fast_step(*parts, **told)) or live[-1])
    monkeypatch.setattr(FastStep, "close", lambda step: (live.remove(step), real(step)))
    if ends == "well":
        run(photos, tmp_path / "run", head_epochs=1)
    else:
        with pytest.raises(NotFinite):
            run(photos, tmp_path / "run", lr=1e30)
    assert not live  # NCCL waits for graphs when processes part
