"""What a log gets of a long job: a line an epoch, a line a minute, and that it was resumed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from small import draw

from zoo.commands import watching
from zoo.commands.app import main
from zoo.finetuning.metrics import Metrics
from zoo.finetuning.progress import Epoch


class Clock:
    """A clock that goes only when it is told."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def console(terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=120), file


def metrics(right: int, wrong: int) -> Metrics:
    import numpy as np

    return Metrics(np.array([[right, wrong], [0, 0]]), 0.5, None)


def test_a_log_gets_one_line_an_epoch_with_the_time_that_is_left() -> None:
    clock, (shown, file) = Clock(), console()
    with watching.watched_steps(40, 0, console=shown, clock=clock) as told:
        for step in range(1, 41):
            clock.now += 2.5
            told.step(step, 0.5, 30.0)
            if step % 20 == 0:
                told.epoch(Epoch(step, step / 20, 2, 0.25, metrics(9, 1)))
    assert file.getvalue().splitlines() == [
        "epoch 1 of 2: loss 0.2500, 90.0 % of 10 right, about 50 s left",
        "epoch 2 of 2: loss 0.2500, 90.0 % of 10 right",
    ]


def test_a_log_gets_a_line_a_minute_of_an_epoch_that_takes_longer() -> None:
    clock, (shown, file) = Clock(), console()
    with watching.watched_steps(20, 0, console=shown, clock=clock) as told:
        for step in range(1, 21):
            clock.now += 12
            told.step(step, 0.5, 30.0)
            if step % 10 == 0:
                told.epoch(Epoch(step, step / 10, 2, 0.25, None))
    assert file.getvalue().splitlines() == [
        "step 5 of 20: loss 0.5000, 30 images/s, about 3 min left",
        "step 10 of 20: loss 0.5000, 30 images/s, about 2 min left",
        "epoch 1 of 2: loss 0.2500, about 2 min left",
        "step 15 of 20: loss 0.5000, 30 images/s, about 60 s left",
        "step 20 of 20: loss 0.5000, 30 images/s",
        "epoch 2 of 2: loss 0.2500",
    ]


def test_a_log_hears_that_a_run_was_resumed_and_what_takes_long() -> None:
    clock, (shown, file) = Clock(), console()
    with watching.watched_steps(40, 30, console=shown, clock=clock) as told:
        told.busy("preparing kernels")
        told.busy("")
        clock.now += 50
        told.epoch(Epoch(35, 3.5, 4, 1.0, None))
    assert file.getvalue().splitlines() == [
        "resumed: 30 of 40 steps are done already",
        "preparing kernels",
        "epoch 3.5 of 4: loss 1.0000, about 50 s left",
    ]


def test_a_log_gets_one_line_a_minute_of_images() -> None:
    clock, (shown, file) = Clock(), console()
    with watching.watched("embedding by ResNet50", 100_000, 20_000, console=shown, clock=clock) as advance:
        for _ in range(30):
            clock.now += 5
            advance(100)
    assert file.getvalue().splitlines() == [
        "resumed: 20,000 of 100,000 are done already",
        "embedding by ResNet50: 21,200 of 100,000, 20/s, about 66 min left",
        "embedding by ResNet50: 22,400 of 100,000, 20/s, about 65 min left",
    ]


def test_a_log_gets_one_line_a_minute_of_a_dream_and_a_terminal_a_bar() -> None:
    clock, (shown, file) = Clock(), console()
    with watching.watched("dreaming", 40, 10, console=shown, clock=clock) as advance:
        for _ in range(4):
            clock.now += 30
            advance(1)
    assert file.getvalue().splitlines() == [
        "resumed: 10 of 40 are done already",
        "dreaming: 12 of 40, about 14 min left",
        "dreaming: 14 of 40, about 13 min left",
    ]
    shown, file = console(terminal=True)
    with watching.watched("dreaming frames", 40, 10, console=shown) as advance:
        advance(30)
    assert "resumed: 10 of 40 are done already" in file.getvalue()
    assert "40/40" in file.getvalue()


def test_a_terminal_has_a_bar_instead_and_hears_of_the_resumption_too() -> None:
    shown, file = console(terminal=True)
    with watching.watched("embedding", 8, 2, console=shown) as advance:
        advance(3)
    assert "resumed: 2 of 8 are done already" in file.getvalue()
    assert "5/8" in file.getvalue()
    shown, file = console(terminal=True)
    with watching.watched_steps(8, 2, console=shown) as told:
        told.step(3, 0.5, 12.0)
    assert "resumed: 2 of 8 steps are done already" in file.getvalue()
    assert "step 3/8" in file.getvalue()


def test_the_command_writes_a_line_an_epoch_and_says_that_it_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = draw(tmp_path / "ships", {"boat": 10, "raft": 10}), tmp_path / "run"
    told = ["finetune", str(data), "-m", "ResNet20", "--out", str(run), "--epochs", "2", "--batch-size", "8", "--no-fast"]
    assert main(told) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch ")]
    assert [line.partition(":")[0] for line in lines] == ["epoch 1 of 2", "epoch 2 of 2"]
    assert all("right" in line for line in lines)
    from zoo.finetuning import checkpoint

    tensors, facts = checkpoint.read(run / checkpoint.LAST)
    checkpoint.write(run, tensors, {**facts, "step": 2, "done": False}, False)
    assert main(["finetune", "--resume", str(run)]) == 0
    printed = capsys.readouterr()
    assert "resumed: 2 of 4 steps are done already" in printed.err
    assert "after 4 steps, 2 of them before it was resumed" in printed.out
    assert main(["finetune", "--resume", str(run), "-q"]) == 0
    assert "epoch" not in capsys.readouterr().err


def test_embedding_says_that_it_resumed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zoo.embedding import run as job

    told = ["embed", str(photos), "-m", "ResNet20", "-o", str(tmp_path / "o.npy"), "--no-fast", "--workers", "0", "--batch-size", "16"]
    real = job.flow

    def ends(feeder: object, source: object, plan: object, todo: object, arriving: object, save: object, advance: object) -> object:
        def two(part: range, rows: object) -> None:
            if part.start >= 64:
                raise KeyboardInterrupt
            save(part, rows)

        return real(feeder, source, plan, todo, arriving, two, advance)

    monkeypatch.setattr("zoo.embedding.plan.PART_ROWS", 32)
    monkeypatch.setattr(job, "flow", ends)
    assert main(told) == 130
    assert "the same command resumes" in capsys.readouterr().err
    monkeypatch.setattr(job, "flow", real)
    assert main(told) == 0
    printed = capsys.readouterr()
    assert "resumed: 64 of 120 are done already" in printed.err
    assert printed.out.splitlines()[0].endswith("), 64 of them by an earlier run")
