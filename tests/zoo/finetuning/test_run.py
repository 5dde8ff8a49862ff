"""From pictures in folders to a source that `trained` knows, also when it is killed on the way."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from preloaded import python
from rich.console import Console
from safetensors.torch import load_file
from small import Tiny, draw
from torch import nn

from convert.formats import safetensors
from weights import HashMismatch, NonFinite, UnknownWeights, WeightsMismatch
from zoo import DenseNet121, ResNet20, predict, trained
from zoo.finetuning import NotFinite, Run, Stopped, find_rate, finetune, progress, rates
from zoo.finetuning.distributed import World
from zoo.finetuning.drawing import Curve, chart
from zoo.finetuning.loop import Trainer
from zoo.finetuning.rates import suggest
from zoo.images.preprocess import preprocess
from zoo.labels import labels

DRIVER = Path(__file__).with_name("small.py")


def run(folder: Path, out: Path, **settings: Any) -> Run:
    told = {"from_scratch": True, "lr": 0.1, "batch_size": 12, "epochs": 4, "workers": 0}
    return finetune(Tiny, folder, out, **{**told, **settings})


def started(told: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*python(), str(DRIVER), json.dumps(told)], capture_output=True, text=True, env=alone)


def test_a_run_learns_and_its_folder_is_a_source(photos: Path, tmp_path: Path) -> None:
    done = run(photos, tmp_path / "x", ema=0.5, balance=True)
    assert done.metrics is not None
    assert done.metrics.accuracy > 0.9
    assert done.classes == ["cat", "dog", "eel"]
    model = trained(Tiny, tmp_path / "x")
    assert model.checkpoint is not None
    assert model.checkpoint.metrics == {"top1": pytest.approx(100 * done.metrics.accuracy)}
    assert model.checkpoint.provenance == "trained from fresh weights"
    right = [predict(model, file)[0].label == file.parent.name for file in sorted(photos.glob("*/*.png"))]
    assert sum(right) > 43
    assert len({(tmp_path / "x" / name).stat().st_mode for name in ("model.safetensors", "last.safetensors", "weights.toml")}) == 1
    moved = tmp_path / "elsewhere"
    shutil.move(tmp_path / "x", moved)
    assert predict(trained(Tiny, moved), photos / "dog" / "001.png")[0].label == "dog"
    assert torch.equal(trained(Tiny, moved).fc.weight, model.fc.weight)


def test_the_result_is_what_was_measured(photos: Path, tmp_path: Path) -> None:
    done = run(photos, tmp_path / "x", epochs=2)
    assert done.metrics is not None
    table = json.loads((tmp_path / "x" / "metrics.json").read_text())
    assert table["images"] == 9
    assert table["confusion"] == done.metrics.confusion.tolist()
    assert done.model is not None
    steps = done.model.checkpoint.preprocessing
    again = done.model(preprocess(sorted(photos.glob("*/*.png")), steps))
    assert again.shape == (48, 3)


def test_a_run_lists_what_its_images_leave_out_and_counts_other_files(photos: Path, tmp_path: Path) -> None:
    (photos / "cat/self.jpg").symlink_to(photos / "cat/self.jpg")
    (photos / "cat/gone.jpg").symlink_to(tmp_path / "nothing.jpg")
    (photos / "loop").symlink_to(photos / "loop")
    (photos / "dog/notes.txt").write_text("no image")
    (photos / "dog/000.png").write_bytes(b"")
    done = run(photos, tmp_path / "x", steps=1)
    told = {
        "cat/gone.jpg": "cat/gone.jpg: it is a link to nothing",
        "cat/self.jpg": "cat/self.jpg: it is a link to itself",
        "loop": "loop: it is a link to itself",
        "dog/000.png": "dog/000.png: the file is empty; get it again",
    }
    assert done.unreadable == told
    assert (tmp_path / "x/unreadable.txt").read_text() == "".join(f"{key}\t{why}\n" for key, why in told.items())
    page = (tmp_path / "x/report.html").read_text()
    assert "left alone: 1 other file: 1 .txt" in page
    assert "4 images could not be read, and left out" in page
    assert "loop: it is a link to itself" in page


def test_what_shows_a_runs_steps_is_the_callers(photos: Path, tmp_path: Path) -> None:
    told: list[Any] = []

    @contextmanager
    def shown(steps: int, done: int) -> Iterator[Any]:
        told.append((steps, done))
        yield progress.Told(
            lambda step, loss, images_s: told.append((step, loss > 0, images_s > 0)),
            lambda what: None,
            lambda end: told.append((end.step, end.epoch, end.epochs, end.loss > 0, end.metrics and end.metrics.count)),
        )
        told.append("end")

    assert run(photos, tmp_path / "x", epochs=1, progress=shown).resumed == 0
    assert told == [(3, 0), *((step, True, True) for step in (1, 2, 3)), (3, 1.0, 1.0, True, 9), "end"]
    told.clear()
    finetune(Tiny, out=tmp_path / "x", resume=True, progress=shown)
    assert told == [(3, 3), "end"]


def test_an_epoch_is_told_of_whether_or_not_it_is_measured(photos: Path, tmp_path: Path) -> None:
    told: list[Any] = []

    @contextmanager
    def shown(steps: int, done: int) -> Iterator[Any]:
        yield progress.Told(lambda *_: None, lambda what: None, told.append)

    run(photos, tmp_path / "x", steps=7, eval_every=4, progress=shown)
    assert [(end.step, end.metrics is not None) for end in told] == [(3, False), (6, False), (7, True)]
    assert (told[-1].epoch, told[-1].epochs) == (7 / 3, 7 / 3)
    history = [json.loads(line) for line in (tmp_path / "x/log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in history if row["kind"] == "train"]
    assert [end.loss for end in told] == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:6]) / 3, losses[6]])


@pytest.mark.parametrize("terminal", [False, True])
def test_a_bar_is_shown_on_a_terminal_only(terminal: bool) -> None:
    file = io.StringIO()
    with progress.bar(4, console=Console(file=file, force_terminal=terminal, width=100)) as told:
        told.busy("preparing kernels")
        told.step(3, 0.5, 12.0)
    assert ("step 3/4  loss 0.5000  12 images/s" in file.getvalue()) == terminal
    assert terminal or not file.getvalue()


def test_a_killed_run_goes_on_where_it_was(photos: Path, tmp_path: Path) -> None:
    told = {"data": str(photos), "from_scratch": True, "batch_size": 12, "epochs": 4, "lr": 0.05, "ema": 0.9, "mixup": 0.2, "save_steps": 2}
    told |= {"optimizer": "adamw", "options": {"dropout": 0.2}, "head_epochs": 1, "layer_decay": 0.7, "accumulate": 2}
    killed = started({**told, "out": str(tmp_path / "killed"), "die_at": 5})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    assert finetune(Tiny, out=tmp_path / "killed", resume=True).steps == 12
    options = told.pop("options")
    whole = finetune(Tiny, out=tmp_path / "whole", options=options, progress=False, **told)
    assert whole.steps == 12
    for name in ("model", "last", "best"):
        ours, theirs = (load_file(tmp_path / run / f"{name}.safetensors") for run in ("killed", "whole"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    logs = [[json.loads(line) for line in (tmp_path / run / "log.jsonl").read_text().splitlines()] for run in ("killed", "whole")]
    killed_log, whole_log = ([{k: v for k, v in row.items() if k != "time"} for row in log] for log in logs)
    assert killed_log == whole_log


def test_an_interrupted_run_is_saved_and_says_how_it_goes_on(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer._one

    def interrupted(self: Trainer, batches: Any) -> Any:
        if self.step == 4:
            signal.raise_signal(signal.SIGINT)
        return step(self, batches)

    monkeypatch.setattr(Trainer, "_one", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped, match=r"stopped after step 5 of 12; go on with: zoo finetune --resume .*x"):
        run(photos, tmp_path / "x")
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    assert finetune(Tiny, out=tmp_path / "x", resume=True).steps == 12


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_last_good_state(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, step = tmp_path / "x", Trainer._one
    monkeypatch.setattr(Trainer, "_one", lambda self, batches: step(self, batches) * (torch.nan if self.step == 6 else 1))
    with pytest.raises(NotFinite, match=r"the loss is nan at step 7 of 12 .*the last good state is kept: step 6, .*Try lr=0.01, clip=1"):
        run(photos, out, save_steps=2)
    monkeypatch.undo()
    assert finetune(Tiny, out=out, resume=True, lr=0.01).steps == 12


def test_weights_that_are_no_numbers_are_never_saved(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match="the last good state is kept"):
        run(photos, tmp_path / "x", lr=1e38, warmup=0.0, save_steps=1)
    assert all(value.isfinite().all() for value in load_file(tmp_path / "x" / "last.safetensors").values())


def test_a_folder_with_a_run_is_not_overwritten_and_a_run_keeps_its_settings(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    run(photos, out, epochs=1)
    with pytest.raises(FileExistsError, match="holds a run: resume=True"):
        run(photos, out)
    with pytest.raises(ValueError, match="a resumed run keeps its batch"):
        finetune(Tiny, out=out, resume=True, batch_size=6)
    with pytest.raises(ValueError, match="is a run of Tiny, not of ResNet20"):
        finetune(ResNet20, out=out, resume=True)
    with pytest.raises(ValueError, match="Tiny is no network of the catalogue"):
        finetune(out=out, resume=True)
    draw(photos / "more", {"cat": 1})
    with pytest.raises(ValueError, match="holds other images than when"):
        finetune(Tiny, out=out, resume=True)
    with pytest.raises(FileNotFoundError, match="holds no run to go on with"):
        finetune(Tiny, out=tmp_path / "none", resume=True)
    with pytest.raises(ValueError, match="needs a network and images"):
        finetune(Tiny, out=tmp_path / "none")


def test_a_finished_run_that_is_resumed_gives_the_same_result(photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = run(photos, tmp_path / "x", epochs=1).steps
    assert not caplog.messages
    before = (tmp_path / "x" / "model.safetensors").read_bytes()
    (tmp_path / "x" / "weights.toml").unlink()
    finetune(Tiny, out=tmp_path / "x", resume=True)
    assert caplog.messages == [
        f"the run in {tmp_path / 'x'} is at its end, step {done}: nothing is left to learn, it is only measured again"
    ]
    assert (tmp_path / "x" / "model.safetensors").read_bytes() == before
    assert trained(Tiny, tmp_path / "x").num_classes == 3


def test_fresh_classes_get_a_head_that_learns_first(photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = trained(ResNet20)
    with caplog.at_level(logging.WARNING):
        done = finetune(ResNet20, photos, tmp_path / "x", steps=2, head_epochs=1, batch_size=12, lr=0.01)
    assert "fc is new and untrained, 3 classes instead of 10" in caplog.text
    assert done.model is not None
    assert torch.equal(done.model.conv1.weight, base.conv1.weight)  # three steps are an epoch
    assert torch.equal(done.model.bn1.running_mean, base.bn1.running_mean)
    assert done.model.checkpoint is not None
    assert done.model.checkpoint.provenance.startswith("fine-tuned from ResNet20:cifar10, sha256 22978711")
    assert done.model.checkpoint.license == "MIT"
    assert done.model.checkpoint.preprocessing == base.checkpoint.preprocessing


def test_the_checkpoints_own_classes_keep_their_head_and_order(tmp_path: Path) -> None:
    names = [label.name for label in labels("cifar10")]
    done = finetune(ResNet20, draw(tmp_path / "p", dict.fromkeys(reversed(names), 2)), tmp_path / "x", steps=1, batch_size=10, lr=1e-9)
    assert done.classes == names
    assert done.model is not None
    assert torch.allclose(done.model.fc.weight, trained(ResNet20).fc.weight)


def test_an_instance_is_copied_and_one_that_nobody_could_build_again_is_refused(photos: Path, tmp_path: Path) -> None:
    model = Tiny(num_classes=3)
    before = model.fc.weight.clone()
    finetune(model, photos, tmp_path / "x", steps=2, batch_size=12)
    assert torch.equal(model.fc.weight, before)
    stem = model.features[0]
    assert isinstance(stem, nn.Conv2d)
    stem.stride = (2, 2)
    with pytest.raises(ValueError, match=r"this Tiny was changed after it was built.*stride=\(2, 2\)"):
        finetune(model, photos, tmp_path / "y", steps=2, batch_size=12)
    with pytest.raises(ValueError, match="weights, from_scratch and options go with a network's class"):
        finetune(Tiny(), photos, tmp_path / "y", from_scratch=True)
    with pytest.raises(TypeError, match="a network is trained, its class or its name"):
        finetune(3, photos, tmp_path / "y")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnknownWeights, match="no network 'Tiny'"):
        finetune("Tiny", photos, tmp_path / "y")
    with pytest.raises(ValueError, match="from_scratch takes no weights"):
        finetune(Tiny, photos, tmp_path / "y", from_scratch=True, weights="cifar10")
    assert not (tmp_path / "y").exists()


def test_the_head_of_a_network_stays_where_its_labels_are_the_datas(tmp_path: Path) -> None:
    model = trained(ResNet20, classes=["ship", "cat"])
    done = finetune(model, draw(tmp_path / "p", {"cat": 4, "ship": 4}), tmp_path / "x", steps=1, batch_size=6, lr=1e-9)
    assert done.classes == ["ship", "cat"]
    assert done.model is not None
    assert torch.allclose(done.model.fc.weight, model.fc.weight)
    done = finetune(model, draw(tmp_path / "q", {"cat": 4, "cow": 4}), tmp_path / "y", steps=1, batch_size=6, lr=1e-9)
    assert done.classes == ["cat", "cow"]
    assert done.model is not None
    assert not torch.allclose(done.model.fc.weight, model.fc.weight)


def test_steps_that_can_not_be_divided_are_explained(photos: Path, tmp_path: Path) -> None:
    for told, words in (
        ({"batch_size": 100}, "a step of 100 images needs as many, and there are 39 to learn from"),
        ({"batch_size": 10, "accumulate": 4}, "batch_size=10 can't be divided by 1 processes x 4 turns: take 4's multiples"),
        ({"batch_size": 9, "mixup": 0.1}, "mixing needs pairs"),
        ({"size": 0}, "size is at least 1"),
        ({"device": "tpu"}, 'a device is "cpu", "cuda" or "cuda:1"'),
        ({"device": "cuda:99"}, "there is no cuda:99"),
        ({"fsdp": True}, "start them with torchrun"),
    ):
        with pytest.raises(ValueError, match=words):
            run(photos, tmp_path / "x", **told)


def test_a_changed_result_is_not_loaded(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    run(photos, out, steps=1)
    with pytest.raises(WeightsMismatch, match="is a run of Tiny: trained"):
        trained(ResNet20, out)
    content = bytearray((out / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (out / "model.safetensors").write_bytes(content)
    with pytest.raises(HashMismatch, match="expected sha256"):
        trained(Tiny, out)
    (out / "weights.toml").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"weights.toml is no record of one run"):
        trained(Tiny, out)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_result_whose_weights_are_no_numbers_is_not_loaded(photos: Path, tmp_path: Path, value: float) -> None:
    out = tmp_path / "x"
    run(photos, out, steps=1)
    state = safetensors.tensors((out / "model.safetensors").read_bytes())
    name = next(name for name in state if name.endswith("bias"))
    state[name][0] = value
    safetensors.save(state, out / "model.safetensors")
    row = (out / "weights.toml").read_text()
    was, size = re.search(r'sha256 = "(\w{64})"', row), re.search(r"size_bytes = (\d+)", row)
    assert was is not None
    assert size is not None
    data = (out / "model.safetensors").read_bytes()
    row = row.replace(was[1], hashlib.sha256(data).hexdigest()).replace(size[1], str(len(data)))
    (out / "weights.toml").write_text(row)
    with pytest.raises(NonFinite, match=f"{out}/model.safetensors: the tensor '{name}' holds NaN or an infinity") as caught:
        trained(Tiny, out)
    assert caught.value.tensor == name


def test_what_can_not_be_learnt_from_is_explained(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="DenseNet121 needs images of at least 29 pixels, got size=16"):
        finetune(DenseNet121, photos, tmp_path / "x", from_scratch=True, size=16)
    for file in (photos / "eel").iterdir():
        file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no image of eel can be read: eel/\d+.png: the file is empty"):
        run(photos, tmp_path / "x", max_unreadable=1.0)
    for file in photos.glob("*/*.png"):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="39 images one after the other can't be read; the last"):
        run(photos, tmp_path / "x", max_unreadable=1.0, randaugment=1)


def test_a_damaged_table_of_labels_is_explained(photos: Path, tmp_path: Path) -> None:
    run(photos, tmp_path / "x", steps=1)
    (tmp_path / "x" / "labels.tsv").write_text("cat\ndog\neel\n")
    with pytest.raises(ValueError, match=r"labels.tsv is no table of labels .*each line is a WordNet id or nothing, a tab, a name"):
        trained(Tiny, tmp_path / "x")


def test_a_damaged_checkpoint_is_explained(photos: Path, tmp_path: Path) -> None:
    run(photos, tmp_path / "x", steps=2)
    state = tmp_path / "x" / "last.safetensors"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"last.safetensors is no checkpoint of a run"):
        finetune(Tiny, out=tmp_path / "x", resume=True)


def test_patience_ends_a_run_that_gets_no_better(photos: Path, tmp_path: Path) -> None:
    done = run(photos, tmp_path / "x", lr=1e-9, epochs=20, patience=2, freeze_norm=True)
    assert done.steps == 9  # the first evaluation is the best, two more are no better
    rows = [row["step"] for row in done.history if row["kind"] == "eval"]
    assert rows == [3, 6, 9]


def test_unreadable_images_are_in_the_result(photos: Path, tmp_path: Path) -> None:
    (photos / "cat" / "003.png").write_bytes(b"")
    done = run(photos, tmp_path / "x", steps=4)
    assert list(done.unreadable) == ["cat/003.png"]
    assert "cat/003.png" in (tmp_path / "x" / "unreadable.txt").read_text()
    assert "could not be read" in (tmp_path / "x" / "report.html").read_text()


def test_the_page_holds_everything_and_the_pictures_are_pictures(photos: Path, tmp_path: Path) -> None:
    run(photos, tmp_path / "x", lr=1e-6, epochs=2)
    page = (tmp_path / "x" / "report.html").read_text()
    for name in ("curves", "confusion"):
        with Image.open(tmp_path / "x" / f"{name}.png") as picture:
            assert len(picture.getcolors(1 << 20) or []) > 10
        assert f'alt="{name}" src="data:image/png;base64,' in page
    assert "Mistakes it is surest of" in page
    assert "data:image/jpeg;base64," in page
    assert 'src="http' not in page
    assert 'href="http' not in page


def test_grey_images_and_frozen_norms_are_possible(photos: Path, tmp_path: Path) -> None:
    done = run(photos, tmp_path / "x", epochs=2, freeze_norm=True, options={"in_channels": 1}, randaugment=3, rotate=10.0, clip=1.0)
    assert done.model is not None
    assert done.model.in_channels == 1
    assert torch.equal(done.model.features[1].running_mean, torch.zeros(8))
    assert len(done.model.checkpoint.preprocessing.mean) == 1


def test_a_run_of_which_no_step_was_saved_leaves_its_folder_free(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "x"
    with monkeypatch.context() as patched:
        patched.setattr("zoo.finetuning.stepping.loss_of", lambda outputs, target, smoothing: outputs.sum() * torch.nan)
        with pytest.raises(NotFinite):
            run(photos, out, steps=2)
    assert (out / "settings.json").is_file()
    assert run(photos, out, steps=2).steps == 2


def test_a_restart_throws_the_run_away_and_only_the_run(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    run(photos, out, steps=4)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds a run: resume=True goes on with it, restart=True throws it away"):
        run(photos, out, steps=2)
    with pytest.raises(ValueError, match="a step of 500 images"):
        run(photos, out, steps=2, batch_size=500, restart=True)
    assert trained(Tiny, out).num_classes == 3  # what can't begin throws nothing away
    done = run(photos, out, steps=2, restart=True)
    assert done.steps == 2
    assert max(row["step"] for row in done.history) == 2
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda text: text[:40], "is damaged"),
        (lambda text: "[]", "is damaged"),
        (lambda text: text.replace('"fingerprints"', '"other"'), "fingerprints is missing"),
    ],
)
def test_a_damaged_settings_file_is_named_with_what_to_do(photos: Path, tmp_path: Path, damage: Callable[[str], str], why: str) -> None:
    out = tmp_path / "x"
    run(photos, out, steps=1)
    path = out / "settings.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=r"settings.json is damaged.*bring it back, or begin it anew .* restart=True") as told:
        finetune(Tiny, out=out, resume=True)
    assert why in str(told.value)
    assert run(photos, out, steps=1, restart=True).steps == 1


def test_an_unfinished_run_is_no_source_yet_and_says_so(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    run(photos, out, steps=1)
    (out / "weights.toml").unlink()
    with pytest.raises(UnknownWeights, match=r"x is a run that is not finished.*zoo finetune --resume .*x goes on with it"):
        trained(Tiny, out)


def test_what_a_resumed_run_would_ignore_is_refused(photos: Path, tmp_path: Path) -> None:
    run(photos, tmp_path / "x", steps=1)
    with pytest.raises(ValueError, match="a resumed run has its own weights, options"):
        finetune(Tiny, out=tmp_path / "x", resume=True, weights="a", options={"dropout": 0.1})


def test_a_run_of_more_head_epochs_than_epochs_goes_on_as_it_began(photos: Path, tmp_path: Path) -> None:
    run(photos, tmp_path / "x", epochs=1, steps=None, head_epochs=1)
    for file in (tmp_path / "x").rglob("*.json"):  # as an earlier version wrote it
        if (facts := json.loads(file.read_text())).get("settings", {}).get("head_epochs") == 1:
            file.write_text(json.dumps(facts | {"settings": facts["settings"] | {"head_epochs": 5}}))
    assert finetune(Tiny, out=tmp_path / "x", resume=True).metrics is not None
    with pytest.raises(ValueError, match="head_epochs is at most epochs, which is 1, got 5"):
        run(photos, tmp_path / "y", epochs=1, steps=None, head_epochs=5)


def test_jumps_at_the_first_rates_suggest_nothing() -> None:
    rates_ = np.geomspace(1e-6, 3, 100)
    falling = 2.3 - 1.5 / (1 + np.exp(-4 * (np.log10(rates_) + 2)))
    exploding = np.where(rates_ > 0.3, 2 * np.log10(rates_ / 0.3), 0)
    for seed in range(20):
        chance = np.random.default_rng(seed)
        noise = 0.15 * chance.standard_normal(100) * np.linspace(1, 0.2, 100)
        noise[0] += 1.0  # the first loss may be any
        found = suggest(rates_.tolist(), (falling + exploding + noise).tolist())
        assert 1e-3 < found < 0.2, seed
    with pytest.raises(ValueError, match="the loss fell at none of the rates from 1e-06 to 3"):
        suggest(rates_.tolist(), np.linspace(1, 2, 100).tolist())


def test_the_finder_finds_a_rate_between_too_small_and_too_large(photos: Path, tmp_path: Path) -> None:
    found = find_rate(Tiny, photos, from_scratch=True, batch_size=12, tries=60, weight_decay=0.0)
    assert 1e-4 < found.suggested < 3
    assert found.losses[-1] > 1.2 * min(found.losses) or found.rates[-1] > 1
    with Image.open(found.draw(tmp_path / "rates.png")) as picture:
        assert picture.size[0] == 1520


def test_a_search_that_can_find_nothing_is_explained(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "loss_of", lambda outputs, target, smoothing: outputs.sum() * torch.nan)
    with pytest.raises(ValueError, match="the loss was no number, or exploded, from the first steps on"):
        find_rate(Tiny, photos, from_scratch=True, batch_size=12)

    @contextmanager
    def two(device: str | None) -> Iterator[World]:
        yield World(0, 2, torch.device("cpu"))

    monkeypatch.setattr(rates, "world", two)
    with pytest.raises(ValueError, match="the learning-rate finder needs one process"):
        find_rate(Tiny, photos, from_scratch=True)
    with pytest.raises(ValueError, match="there is nothing to draw for 'Loss'"):
        chart("Loss", [Curve("loss", [])], "epoch")


def test_the_callers_random_numbers_stay(photos: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    run(photos, tmp_path / "x", steps=1)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_networks_name_is_its_class_and_its_weights(photos: Path, tmp_path: Path) -> None:
    made = finetune("resnet20:cifar10", photos, tmp_path / "x", steps=1, batch_size=12)
    facts = json.loads((tmp_path / "x" / "settings.json").read_text())
    assert type(made.model).__name__ == facts["model"] == "ResNet20"
    assert facts["base"]["name"] == "ResNet20:cifar10"
    with pytest.raises(ValueError, match="is a run of ResNet20, not of ResNet32"):
        finetune("resnet32", photos, tmp_path / "x", resume=True)
    with pytest.raises(ValueError, match="a resumed run has its own weights"):
        finetune("resnet20:cifar10", photos, tmp_path / "x", resume=True)
    again = finetune("resnet20", photos, tmp_path / "x", resume=True)
    assert again.metrics is not None
    assert again.metrics.loss == made.metrics.loss  # pyright: ignore[reportOptionalMemberAccess]
