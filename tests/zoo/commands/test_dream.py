"""`zoo dream`: pictures, folders of pictures and films; interrupted and given again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.zoo.dreaming.dreams import picture
from zoo import ResNet20, trained
from zoo.commands import watching
from zoo.commands.app import main
from zoo.dreaming import dream

QUICK = ["-m", "ResNet20", "--at", "layer2", "--steps", "2", "--octaves", "2"]
HOW: dict[str, Any] = {"at": "layer2", "steps": 2, "octaves": 2, "progress": False}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    picture(40, 36).save(tmp_path / "sky.png")
    return tmp_path


def stopping(after: int) -> Callable[..., Any]:
    """Interrupt a job after so many steps, as Ctrl-C would."""

    @contextmanager
    def watched(name: str, total: int, done: int, **how: Any) -> Iterator[Callable[[int], None]]:
        left = after

        def advance(steps: int) -> None:
            nonlocal left
            left -= steps
            if left < 0:
                raise KeyboardInterrupt

        yield advance

    return watched


def stopping_second(after: int) -> Callable[..., Any]:
    """Let the first job end, and interrupt the second after so many steps."""
    ways = iter((watching.watched, stopping(after)))
    return lambda *args, **how: next(ways)(*args, **how)


def test_a_picture_is_dreamed_by_the_network_and_settings_that_are_named(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dream", "sky.png", "-o", "dream.png", "--seed", "3", *QUICK, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"image": "sky.png", "dream": "dream.png", "network": "ResNet20"}]
    wanted = dream(trained(ResNet20), work / "sky.png", seed=3, **HOW)
    with Image.open(work / "dream.png") as found:
        assert found.tobytes() == wanted.tobytes()
    assert sorted(place.name for place in work.iterdir()) == ["dream.png", "sky.png"]


def test_the_network_is_that_of_predict_where_none_is_named(work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from weights import find
    from zoo.pretrained import offline

    monkeypatch.setattr(offline, "usual", lambda: (find("ResNet20", "cifar10"), "which ships with kernelzoo"))
    assert main(["dream", "sky.png", "-o", "dream.png", "--steps", "1", "--octaves", "1", "--guide", "sky.png"]) == 0
    shown = capsys.readouterr().out
    assert shown == "dreamed 'dream.png'\nby ResNet20:cifar10, which ships with kernelzoo; another: --model NETWORK\n"


def test_an_interrupted_picture_resumes_and_what_was_there_stays_until_it_is_done(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "dream.png").write_bytes(b"mine")
    assert main(["dream", "sky.png", "-o", "dream.png", *QUICK]) == 1
    assert "'dream.png' is there already; --replace puts the new one in its place" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(watching, "watched", stopping(2))
        assert main(["dream", "sky.png", "-o", "dream.png", "--replace", *QUICK]) == 130
    said = capsys.readouterr().err
    assert "interrupted; what was dreamed is kept: the same command resumes with it" in said
    assert "next time" not in said
    assert (work / "dream.png").read_bytes() == b"mine"
    assert (work / "dream.png.unfinished").is_file()
    assert main(["dream", "sky.png", "-o", "dream.png", "--replace", *QUICK]) == 0
    assert "resumed: 2 of 4 are done already" in capsys.readouterr().err
    with Image.open(work / "dream.png") as found:
        assert found.tobytes() == dream(trained(ResNet20), work / "sky.png", **HOW).tobytes()
    assert not (work / "dream.png.unfinished").exists()


def test_a_folder_of_dreams_resumes_with_the_pictures_that_are_left(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture(40, 36, seed=2).save(work / "sea.png")
    line = ["dream", "sky.png", "sea.png", "-o", "dreams", *QUICK]
    with monkeypatch.context() as patch:
        patch.setattr(watching, "watched", stopping_second(1))
        assert main(line) == 130
    assert sorted(place.name for place in (work / "dreams").iterdir()) == [".dreaming", "sea.png.unfinished", "sky.png"]
    os.utime(work / "dreams" / "sky.png", (1, 1))
    capsys.readouterr()
    assert main(line) == 0
    shown = capsys.readouterr()
    assert "resumed: 1 of 4 are" in shown.err
    assert "1 picture finished by the run before" in shown.out
    assert (work / "dreams" / "sky.png").stat().st_mtime == 1
    assert sorted(place.name for place in (work / "dreams").iterdir()) == ["sea.png", "sky.png"]
    assert main(line) == 1
    assert "is there already; --replace puts" in capsys.readouterr().err


def test_a_film_resumes_behind_its_last_frame(work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["dream", "sky.png", "--video", "film.gif", "--frames", "3", *QUICK]
    with monkeypatch.context() as patch:
        patch.setattr(watching, "watched", stopping(0))
        assert main(line) == 130
    assert main(line) == 0
    assert "resumed: 1 of 3 are done already" in capsys.readouterr().err
    with Image.open(work / "film.gif") as film:
        assert film.n_frames == 3  # pyright: ignore[reportAttributeAccessIssue]
    assert sorted(place.name for place in work.iterdir()) == ["film.gif", "sky.png"]


def test_a_picture_with_a_film_resumes_with_the_film(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["dream", "sky.png", "-o", "dream.png", "--video", "film.gif", "--frames", "3", *QUICK]
    with monkeypatch.context() as patch:
        patch.setattr(watching, "watched", stopping_second(0))
        assert main(line) == 130
    os.utime(work / "dream.png", (1, 1))
    assert main(line) == 0
    assert (work / "dream.png").stat().st_mtime == 1
    assert sorted(place.name for place in work.iterdir()) == ["dream.png", "film.gif", "sky.png"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["sky.png"], 2, "name the dream, --out dream.png, or a film, --video dream.mp4"),
        (["sky.png", "-o", "dream.txt"], 2, "'dream.txt' is no picture's name"),
        (["glass.png", "-o", "dream.jpg"], 2, "'dream.jpg' would lose the picture's transparency"),
        (["sky.png", "glass.png", "-o", "dream.png"], 2, "the dreams of 2 pictures go into a folder"),
        (["sky.png", "sky.png", "-o", "dreams"], 2, "two pictures would be"),
        (["sky.png", "glass.png", "--video", "a.mp4"], 2, "a film is of one picture"),
        (["sky.png", "--video", "a.avi", "-m", "ResNet20"], 1, "'a.avi' is no film's name"),
        (["sky.png", "-o", "a.png", "-w", "cifar10"], 2, "name that too, --model NETWORK"),
        (["sky.png", "-o", "a.png", "-m", "ResNet20", "--at", "layer7"], 2, "Nearest: layer3"),
        (["sky.png", "-o", "a.png", "-m", "ResNet20", "--octaves", "9"], 1, "which is too small for 9 octaves"),
        (["sky.png", "-o", "a.png", "-m", "ResNet20", "--like", "mine"], 2, "like is 'original' or 'deepdream.jl', got 'mine'"),
        (["sky.png", "-o", "a.png", "-m", "ResNet20", "--scale", "0.5"], 2, "more than 1, got 0.5"),
        (["sky.png", "-o", "a.png", "-m", "ResNet20", "--rate", "-1"], 2, "more than 0, got -1.0"),
        (["sky.png", "--video", "a.gif", "-m", "ResNet20", "--zoom", "2"], 2, "less than 1, got 2.0"),
        ([".", "-o", "a.png"], 2, "'.' is a folder; give its pictures, *.jpg"),
        (["nothing.png", "-o", "a.png"], 3, "nothing.png: there is no such file"),
    ],
)
def test_a_mistake_has_one_line_and_leaves_nothing(
    words: list[str], code: int, said: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    see_through = picture(40, 36)
    see_through.putalpha(100)
    see_through.save(work / "glass.png")
    before = sorted(work.iterdir())
    assert main(["dream", *words]) == code
    shown = capsys.readouterr().err
    assert said in " ".join(shown.replace("│", " ").split())
    assert sorted(work.iterdir()) == before


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_ended_resumes_with_the_bytes_of_one_that_was_not(how: signal.Signals, work: Path) -> None:
    """A killed one with what it kept at times, here after each step."""
    picture(160, 120).save(work / "sky.png")
    often = (
        "import sys\nfrom zoo.commands.app import main\nfrom zoo.dreaming import keeping\nkeeping.EVERY_S = 0\nsys.exit(main(sys.argv[1:]))"
    )
    line = [sys.executable, "-c", often, "dream", "sky.png", "-m", "ResNet20", "--steps", "12"]
    running = subprocess.Popen([*line, "-o", "dream.png"], cwd=work, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    while not (work / "dream.png.unfinished").is_file():
        assert running.poll() is None
    running.send_signal(how)
    assert running.wait() in (130, -signal.SIGKILL)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    again = subprocess.run([*line, "-o", "dream.png"], cwd=work, env=env, stderr=subprocess.PIPE, text=True, check=True)
    assert "resumed: " in again.stderr
    subprocess.run([*line, "-o", "whole.png"], cwd=work, env=env, check=True)
    assert (work / "dream.png").read_bytes() == (work / "whole.png").read_bytes()


def test_a_folder_of_frames_is_made_with_the_folders_above_it(work: Path) -> None:
    assert main(["dream", "sky.png", "--video", "films/sky", "--frames", "2", *QUICK]) == 0
    assert sorted(place.name for place in (work / "films" / "sky").iterdir()) == ["00000.png", "00001.png"]
