"""`zoo predict`: folders, a device and a batch size."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from zoo import ResNet20
from zoo.commands import pictures as given
from zoo.commands import predict as command
from zoo.commands.app import main
from zoo.kernels.comparing.sample_images import natural_images


@pytest.fixture
def few(photos: Path, tmp_path: Path) -> Path:
    shutil.copytree(photos / "circle", tmp_path / "few")
    for path in sorted((tmp_path / "few").iterdir())[5:]:
        path.unlink()
    return tmp_path / "few"


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["predict", "-m", "ResNet20", "--top", "1", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_folder_is_all_of_its_pictures_with_the_answers_of_each(few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(str(path) for path in few.iterdir())
    singly = predicted(capsys, *files)
    assert predicted(capsys, str(few)) == singly
    assert [row["image"] for row in singly] == files
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        for file in files:
            shard.add(file, Path(file).name)
    (tmp_path / "list.txt").write_text("\n".join(files))
    answers = [row["predictions"] for row in singly]
    for source in ("shard.tar", "list.txt"):
        assert [row["predictions"] for row in predicted(capsys, str(tmp_path / source))] == answers
    assert [row["predictions"] for row in predicted(capsys, str(few), files[0])] == [*answers, answers[0]]


def test_what_is_missing_is_named_with_its_list(few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list.txt").write_text(f"{next(few.iterdir())}\ngone.png\n")
    assert main(["predict", "-m", "ResNet20", str(tmp_path / "list.txt")]) == 1
    said = capsys.readouterr()
    assert f"error: gone.png in {tmp_path / 'list.txt'}: it can't be read" in said.err
    assert said.out.endswith("1 of 2 images classified\n")


def test_an_answer_that_is_a_guess_is_marked_and_pictures_are_counted(
    few: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zoo.prediction.predict.UNCERTAIN", 1.1)
    assert [row["uncertain"] for row in predicted(capsys, str(few))] == [True] * 5
    assert main(["predict", "-m", "ResNet20", str(few)]) == 0
    text = capsys.readouterr().out
    assert text.count("uncertain: it may show none of the classes") == 5
    assert text.endswith("5 of 5 images classified\n")
    monkeypatch.setattr("zoo.prediction.predict.UNCERTAIN", 0.0)
    assert [row["uncertain"] for row in predicted(capsys, str(few))] == [False] * 5


def test_a_sheet_that_holds_a_part_of_the_pictures_says_so(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "DRAWN", 3)
    assert main(["predict", "-m", "ResNet20", str(few), "--picture", str(tmp_path / "sheet.png")]) == 0
    assert "sheet.png', the first 3 of 5" in capsys.readouterr().out


def test_a_file_and_classes_without_names_are_called_what_they_are(few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.pth"
    torch.save(ResNet20().state_dict(), file)
    photo = str(next(few.iterdir()))
    assert main(["predict", "-m", "ResNet20", "-w", str(file), photo]) == 0
    assert f"by ResNet20 with the weights of {file}, which knows 10 classes" in capsys.readouterr().out
    assert main(["add", str(file), "ResNet20:mine"]) == 0
    told = capsys.readouterr().err
    assert "warning: the classes of ResNet20:mine have no names" in told
    assert "add it with --labels cifar10" in told
    assert main(["add", str(file), "ResNet20:mine"]) == 1
    assert "ResNet20:mine exists: choose another tag; or --replace replaces it" in capsys.readouterr().err
    assert main(["predict", "-m", "ResNet20:mine", photo]) == 0
    assert "its classes have no names; zoo add FILE NAME:TAG --labels LIST" in capsys.readouterr().out
    assert main(["add", str(file), "ResNet20:mine", "--replace", "--labels", "cifar10"]) == 0
    assert "no names" not in capsys.readouterr().err


def test_pictures_go_through_the_network_so_many_at_once(
    few: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, batches = given.predict, []

    def counted(network: Any, images: Any, *how: Any) -> Any:
        batches.append(len(images))
        return real(network, images, *how)

    monkeypatch.setattr(given, "predict", counted)
    predicted(capsys, str(few), "--batch-size", "2")
    assert batches == [2, 2, 1]


def test_a_bad_picture_in_a_folder_spoils_no_other_and_is_counted(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (few / "bad.jpg").write_bytes(b"")
    assert main(["predict", str(few), "-m", "ResNet20", "--batch-size", "4"]) == 1
    shown = capsys.readouterr()
    assert "5 of 6 images classified" in shown.out
    assert f"{few / 'bad.jpg'}: the file is empty" in shown.err


def test_what_a_folder_leaves_out_is_counted_too(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (few / "self.jpg").symlink_to(few / "self.jpg")
    assert main(["predict", str(few), "-m", "ResNet20"]) == 0
    shown = capsys.readouterr()
    assert "5 of 6 images classified" in shown.out
    assert "self.jpg (it is a link to itself)" in shown.err


def test_a_sheet_of_many_pictures_has_the_first_of_them(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "DRAWN", 1)
    assert main(["predict", str(few), "-m", "ResNet20", "--picture", str(tmp_path / "one.png")]) == 0
    monkeypatch.setattr(command, "DRAWN", 60)
    assert main(["predict", str(few), "-m", "ResNet20", "--picture", str(tmp_path / "all.png")]) == 0
    assert f"drawn in '{tmp_path / 'all.png'}'" in capsys.readouterr().out
    with Image.open(tmp_path / "one.png") as one, Image.open(tmp_path / "all.png") as five:
        assert one.width * one.height < five.width * five.height


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--device", "cuda:99"], 2, "there is no 'cuda:99' on this machine; take --device cpu"),
        (["--device", "gpu"], 2, "a device is cpu, cuda or cuda:1, not 'gpu'"),
        (["--batch-size", "0"], 2, "Invalid value for '--batch-size'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(
    arguments: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("zoo.pretrained.trained.trained", never)
    assert main(["predict", "none.jpg", "-m", "ResNet20", *arguments]) == code
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_an_empty_folder_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["predict", str(tmp_path / "empty"), "-m", "ResNet20"]) == 1
    assert "empty' holds no images" in capsys.readouterr().err


@pytest.mark.nncf
def test_int8_is_certified_and_answers_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = torch.cat([natural_images((16, 3, 32, 32), torch.device("cpu"), seed) for seed in range(5)])
    for number, image in enumerate(images.sigmoid()):
        Image.fromarray((255 * image).byte().permute(1, 2, 0).numpy()).save(tmp_path / f"{number:02}.png")
    asked = ["predict", str(tmp_path / "00.png"), "--model", "ResNet20", "--json", "--device", "cpu"]
    int8 = ["--dtype", "int8", "--calibration", str(tmp_path)]
    assert main(asked) == 0
    (plain,) = json.loads(capsys.readouterr().out)
    assert main([*asked, *int8, "--tolerance", "0.5"]) == 0
    told = capsys.readouterr()
    (found,) = json.loads(told.out)
    assert "int8 proven" in told.err
    assert found["network"] == plain["network"]
    assert found["predictions"][0]["probability"] == pytest.approx(plain["predictions"][0]["probability"], abs=0.15)
    for wrong, said in (
        (["--dtype", "int8"], "it needs --calibration DATA"),
        (["--dtype", "int9"], "float32 or int8, not 'int9'"),
        (["--calibration", str(tmp_path)], "it goes with --dtype int8"),
        (["--dtype", "int8", "--calibration", " "], "it needs --calibration DATA"),
        ([*int8, "--tolerance", "0"], "a top1 of 0 asks for nothing"),
    ):
        assert main([*asked, *wrong]) in (1, 2)
        assert said in " ".join(capsys.readouterr().err.split())
