"""`zoo stylize` and `zoo train-style`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from zoo.catalogue import SqueezeNet1_0
from zoo.commands.app import main
from zoo.stylizing import Johnson, style_network, styles
from zoo.stylizing.learning import seeded
from zoo.stylizing.training import Stopped


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two photographs and a style network, which commands are called in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        Image.fromarray(draw.integers(0, 256, (80, 90, 3), dtype=np.uint8)).save(tmp_path / "photos" / f"{name}.png")
    torch.save(seeded(Johnson, 0, channels=2).state_dict(), tmp_path / "ink.pth")
    return tmp_path


def test_a_photograph_becomes_a_painting_beside_it(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stylize", "photos/cat.png", "-s", "ink.pth", "--strength", "0.5", "--keep-colour"]) == 0
    assert capsys.readouterr().out == "painted 'cat-ink.png'\n"
    with Image.open("cat-ink.png") as painting:
        assert painting.size == (90, 80)
    assert main(["stylize", "photos/cat.png", "-s", "ink.pth"]) == 1
    assert "'cat-ink.png' is there already; --replace" in capsys.readouterr().err
    assert main(["stylize", "photos/cat.png", "-s", "ink.pth", "--replace", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"image": "photos/cat.png", "painting": "cat-ink.png", "style": "ink.pth", "width": 90, "height": 80}
    ]


def test_a_folder_becomes_a_folder_and_what_cannot_be_read_spoils_no_other(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "photos" / "ill.png").write_bytes(b"\x89PNG\r\n\x1a\n cut off")
    assert main(["stylize", "photos", "-s", "ink.pth", "-o", "painted"]) == 1
    assert sorted(path.name for path in (work / "painted").iterdir()) == ["cat-ink.png", "dog-ink.png"]
    assert "ill.png" in capsys.readouterr().err


def test_an_interrupted_folder_goes_on(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stylize", "photos", "-s", "ink.pth", "-o", "painted", "-q"]) == 0
    (work / "painted" / "dog-ink.png").unlink()
    (work / "painted" / "cat-ink.png").write_bytes(b"left alone")
    assert main(["stylize", "photos", "-s", "ink.pth", "-o", "painted"]) == 0
    said = capsys.readouterr()
    assert "resumed: 1 of 2 are done already" in said.err
    assert said.out.splitlines()[-2:] == [
        "painted 'painted/dog-ink.png'",
        "left alone 1 painting of an earlier call; --replace paints them again",
    ]
    assert (work / "painted" / "cat-ink.png").read_bytes() == b"left alone"
    assert main(["stylize", "photos", "-s", "ink.pth", "-o", "painted", "--replace"]) == 0
    assert (work / "painted" / "cat-ink.png").read_bytes() != b"left alone"


def test_a_jpeg_has_no_transparency_and_is_not_written(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGBA", (40, 40), (10, 20, 30, 0)).save("clear.png")
    assert main(["stylize", "clear.png", "-s", "ink.pth", "-o", "out.jpg", "--strength", "0"]) == 1
    assert "'out.jpg' would lose the picture's transparency" in capsys.readouterr().err
    assert main(["stylize", "clear.png", "-s", "hf://no/such", "-o", "out.jpg"]) == 1
    assert "transparency" in capsys.readouterr().err  # before a network is fetched
    assert sorted(path.name for path in work.iterdir()) == ["clear.png", "ink.pth", "photos"]
    assert main(["stylize", "clear.png", "-s", "ink.pth", "-o", "out.png", "--strength", "0"]) == 0
    with Image.open("out.png") as painting:
        assert painting.mode == "RGBA"


def test_an_animation_is_a_film(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "orange")]
    frames[0].save("clip.gif", save_all=True, append_images=frames[1:])
    assert main(["stylize", "clip.gif", "-s", "ink.pth", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["painting"], told["frames"]) == ("clip-ink.gif", 2)


def test_styles_are_listed_with_their_licences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stylize", "--list"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["candy"].startswith("a download  licence not stated: its authors state no licence")


def test_a_style_is_pulled_by_its_name_and_its_licence_is_said(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    candy = replace(styles()["candy_8"], sources=((work / "ink.pth").as_uri(),), sha256=None, sha256_prefix=None, size_bytes=None)
    for place in ("zoo.commands.cache.styles", "zoo.stylizing.style_files.styles"):
        monkeypatch.setattr(place, lambda: {"candy_8": candy})
    assert main(["pull", "candy_8"]) == 0
    assert "licence not stated: its authors state no licence; ask them before you publish what it paints" in capsys.readouterr().out
    network = style_network("candy_8")  # from the cache, and without a second word about its licence
    assert network.checkpoint is candy
    assert "licence" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "code", "message"),
    [
        (["none.jpg", "-s", "ink.pth"], 3, "none.jpg: there is no such file"),
        (["photos/cat.png", "-s", "mosaik"], 3, "there is no style 'mosaik', and no such file; did you mean mosaic"),
        (["photos/cat.png", "-s", "ink.pth", "--strength", "3"], 2, "is not in the range"),
        (["photos/cat.png", "-s", "ink.pth", "-o", "out.txt"], 2, "a painting of a photograph is one of .png"),
        (["photos/cat.png", "-s", "ink.pth", "-o", "out.mp4"], 2, "a painting of a photograph is one of .png"),
        (["photos/cat.png", "-s", "ink.pth", "-o", "none/out.png"], 1, "there is no folder"),
        (["photos/cat.png", "photos/cat.png", "-s", "ink.pth", "-o", "x"], 2, "have one name"),
        (["photos/cat.png", "-s", "photos/cat.png"], 1, "photos/cat.png"),
    ],
)
def test_what_cannot_be_used_is_named(work: Path, capsys: pytest.CaptureFixture[str], told: list[str], code: int, message: str) -> None:
    assert main(["stylize", *told]) == code
    said = capsys.readouterr()
    assert message in " ".join((said.err + said.out).replace("│", " ").split())


def test_a_style_is_trained_and_used(work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("zoo.stylizing.training.trained", lambda *_: SqueezeNet1_0().eval())
    told = ["train-style", "photos", "photos/cat.png", "-o", "starry", "--steps", "1", "--batch-size", "1", "--size", "64"]
    told += ["--channels", "2", "--style-side", "64", "--device", "cpu"]
    assert main([*told, "--licence", "CC0-1.0"]) == 0
    said = capsys.readouterr()
    assert "after 1 step; 1 is a photograph that nobody painted" in said.out
    assert "use it: zoo stylize PHOTO --style starry" in said.out
    assert "step 1 of 1: style" in said.err
    assert main(["stylize", "photos/dog.png", "-s", "starry"]) == 0
    assert (work / "dog-starry.png").is_file()
    assert main(told) == 1
    assert "--restart throws it away" in capsys.readouterr().err


def test_a_misspelt_setting_is_named_before_anything_is_read(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train-style", "photos", "none.png", "-o", "starry", "--steps", "0"]) == 2
    assert "steps is a whole number of at least 1, got 0" in " ".join(capsys.readouterr().err.split())
    assert main(["train-style", "photos", "none.png", "-o", "starry"]) == 3
    assert "none.png: there is no such file" in capsys.readouterr().err


def test_an_interrupted_training_says_how_it_goes_on(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise Stopped("stopped after step 3 of 9; the same call goes on, the state is in 'starry'")

    monkeypatch.setattr("zoo.stylizing.train_style", interrupted)
    assert main(["train-style", "photos", "photos/cat.png", "-o", "starry"]) == 130
    assert capsys.readouterr().err == "stopped after step 3 of 9; the same call goes on, the state is in 'starry'\n"
