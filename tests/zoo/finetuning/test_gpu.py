"""A run on a GPU trains by captured steps, learns what PyTorch's steps learn, and goes on in either way."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import Forked, Tiny
from torch import Tensor

from zoo import ResNet20
from zoo.finetuning import Run, Stopped, finetune, stepping
from zoo.finetuning.loop import Trainer
from zoo.networks.model import Model

pytestmark = pytest.mark.gpu

STEPS, EAGER = 30, stepping.EAGER_STEPS


def run(folder: Path, out: Path, model: type[Model] = ResNet20, **settings: Any) -> Run:
    """Train for 30 steps of 12 small images, three steps an epoch."""
    told = {"device": "cuda", "steps": STEPS, "batch_size": 12, "lr": 0.005, "head_epochs": 0, "workers": 0}
    return finetune(model, folder, out, **{**told, **settings})


def losses(done: Run) -> Tensor:
    return torch.tensor([row["loss"] for row in done.history if row["kind"] == "train"])


def overlap(one: Run, other: Run) -> bool:
    """Tell whether the losses of two runs lie over each other, step by step, but for what bfloat16 rounds."""
    ours, theirs = losses(one), losses(other)
    assert len(ours) == len(theirs) == STEPS
    assert theirs[-5:].mean() < 0.7 * theirs[:5].mean()  # both learn, so there is something to compare
    return abs(ours[0] - theirs[0]) < 0.02 * theirs[0] and (ours - theirs).abs().mean() < 0.05 * theirs[0]


def apart(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """Return how far running statistics are from each other, means by the deviations that they are of: the mean over all layers."""
    off = []
    for key in (key for key in others if key.endswith("running_var")):
        mean = key.replace("_var", "_mean")
        off.append((some[key] - others[key]).norm() / others[key].norm())
        off.append((some[mean] - others[mean]).norm() / others[key].sqrt().norm())
    return float(torch.stack(off).mean())


def test_captured_steps_learn_what_eager_ones_learn(photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    eager, quick = run(photos, tmp_path / "eager", fast=False), run(photos, tmp_path / "fast", fast=True)
    assert "zoo's kernels" not in caplog.text
    assert (eager.replayed, quick.replayed) == (0, STEPS - EAGER)
    assert overlap(quick, eager)
    page = (tmp_path / "fast" / "report.html").read_text()
    assert f"steps: {STEPS} on the zoo&#x27;s kernels; {STEPS - EAGER} of them replayed as a CUDA graph" in page
    assert "what each layer ran on" in page
    ours, theirs = (load_file(tmp_path / name / "last.safetensors") for name in ("fast", "eager"))
    assert ours.keys() == theirs.keys()
    counted = [key for key in ours if key.endswith("num_batches_tracked")]
    assert {int(ours[key] - theirs[key]) for key in counted} == {0}
    assert counted


def test_statistics_are_written_by_the_graph_where_evaluations_read_them(photos: Path, tmp_path: Path) -> None:
    off: dict[str, list[float]] = {"fast": [], "eager": []}
    for seed in range(3):
        ways: dict[str, dict[str, Any]] = {"exact": {"fast": False, "dtype": "float32"}, "eager": {"fast": False}, "fast": {"fast": True}}
        for name, settings in ways.items():
            run(photos, tmp_path / f"{name}{seed}", seed=seed, **settings)
        exact, *others = (load_file(tmp_path / f"{name}{seed}" / "last.safetensors") for name in ways)
        for name, found in zip(("eager", "fast"), others, strict=True):
            off[name].append(apart(found, exact))
    # They follow weights that thirty rounded steps have moved: one run is up to twice as far from float32's as another.
    assert sum(off["fast"]) < 1.5 * sum(off["eager"]) < 0.6


def test_mixed_images_in_parts_with_a_mean_of_weights_and_layers_rates_are_captured(photos: Path, tmp_path: Path) -> None:
    told = {"accumulate": 2, "mixup": 0.2, "cutmix": 1.0, "label_smoothing": 0.1, "balance": True, "ema": 0.9, "clip": 1.0}
    told |= {"optimizer": "adamw", "lr": 1e-3, "layer_decay": 0.8}
    quick, eager = (run(photos, tmp_path / f"{fast}", fast=fast, **told) for fast in (True, False))
    assert quick.replayed == STEPS - EAGER
    ours, theirs = losses(quick), losses(eager)
    assert abs(ours[0] - theirs[0]) < 0.02 * theirs[0]
    assert (ours - theirs).abs().mean() < 0.05 * theirs[0]
    assert quick.metrics is not None
    assert eager.metrics is not None
    assert abs(quick.metrics.loss - eager.metrics.loss) < 0.1 * max(1.0, eager.metrics.loss)  # of the means of weights


@pytest.mark.parametrize("freeze_norm", [False, True])
def test_a_head_that_learns_first_is_captured_and_then_all_anew(photos: Path, tmp_path: Path, freeze_norm: bool) -> None:
    told = {"head_epochs": 3, "freeze_norm": freeze_norm}
    told |= {"optimizer": "adamw", "lr": 2e-4} if freeze_norm else {}  # without statistics of its own SGD's rate makes it explode
    quick, eager = (run(photos, tmp_path / f"{fast}", fast=fast, **told) for fast in (True, False))
    assert quick.replayed == 9 - EAGER + 21 - EAGER
    assert overlap(quick, eager)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("fast", [True, False])
def test_a_run_goes_on_in_the_other_way(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, fast: bool) -> None:
    told = {"optimizer": optimizer, "lr": 0.005 if optimizer == "sgd" else 5e-4}
    whole = run(photos, tmp_path / "whole", fast=False, **told)
    step = Trainer._one

    def interrupted(self: Trainer, batches: Any) -> Any:
        if self.step == 14:
            signal.raise_signal(signal.SIGINT)
        return step(self, batches)

    monkeypatch.setattr(Trainer, "_one", interrupted)
    with pytest.raises(Stopped, match="stopped after step 15 of 30"):
        run(photos, tmp_path / "x", fast=fast, **told)
    monkeypatch.undo()
    written = load_file(tmp_path / "x" / "last.safetensors")
    assert written.keys() == load_file(tmp_path / "whole" / "last.safetensors").keys()
    assert {float(value) for key, value in written.items() if key.startswith("optimizer.") and key.endswith(".step")} <= {15.0}
    done = finetune(ResNet20, out=tmp_path / "x", resume=True, fast=not fast)
    assert done.replayed == (0 if fast else 15 - EAGER)
    assert overlap(done, whole)


def test_an_auxiliary_head_and_dropout_are_captured(photos: Path, tmp_path: Path) -> None:
    told = {"from_scratch": True, "lr": 0.1, "options": {"dropout": 0.2}}
    quick, eager = (run(photos, tmp_path / f"{fast}", Forked, fast=fast, **told) for fast in (True, False))
    assert quick.replayed == STEPS - EAGER
    assert overlap(quick, eager)


@pytest.mark.parametrize(("least", "replayed", "said"), [(STEPS, STEPS - EAGER, False), (STEPS + 1, 0, True)])
def test_a_run_of_steps_enough_is_captured_unasked_and_a_shorter_one_says_that_it_is_not(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, least: int, replayed: int, said: bool
) -> None:
    monkeypatch.setattr(stepping, "LEAST_STEPS", least)
    assert run(photos, tmp_path / "x").replayed == replayed
    assert ("preparing kernels pays from 31 steps on, and there are 30; --fast prepares them anyway" in caplog.text) is said


def test_a_loss_that_can_not_be_captured_is_learnt_from_as_it_is(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = {"from_scratch": True, "lr": 0.1, "options": {"dropout": 0.2}}
    plainly = stepping.loss_of

    def looks(outputs: Any, target: Any, smoothing: float) -> Tensor:
        loss = plainly(outputs, target, smoothing)
        return loss if math.isfinite(float(loss.detach())) else loss * 0

    eager = run(photos, tmp_path / "eager", Tiny, fast=False, **told)
    monkeypatch.setattr(stepping, "loss_of", looks)
    quick = run(photos, tmp_path / "fast", Tiny, fast=True, **told)
    assert quick.replayed == 0
    assert "the run goes on as PyTorch computes it: the step can't be captured: " in caplog.text
    assert overlap(quick, eager)
