"""Films: MP4, GIF and folders, whole or not at all."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.zoo.dreaming.dreams import levels, picture
from zoo.dreaming import dream, dream_frames, dream_video, video
from zoo.networks.model import Model

QUICK: dict[str, Any] = {"at": "layer1", "steps": 1, "octaves": 1, "progress": False}


def test_a_film_is_an_mp4_that_opencv_reads(network: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cv2 = pytest.importorskip("cv2")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert video.encoder() == "OpenCV"
    out = dream_video(network, picture(65, 49), tmp_path / "film.mp4", frames=3, **QUICK)
    assert [place.name for place in tmp_path.iterdir()] == ["film.mp4"]
    film = cv2.VideoCapture(str(out))
    frames = []
    while (read := film.read())[0]:
        frames.append(read[1][:, :, ::-1])
    assert [frame.shape for frame in frames] == [(50, 66, 3)] * 3
    first = levels(dream(network, picture(65, 49), **QUICK))
    assert np.abs(frames[0][:49, :65].astype(int) - first).mean() < 12


def test_ffmpeg_gets_every_frame_and_its_error_is_told(network: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name notes what it is given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "ffmpeg"
    text = (
        "import sys\ndata = sys.stdin.buffer.read()\nopen(sys.argv[-1], 'wb').write(data)\nopen({note!r}, 'w').write(' '.join(sys.argv))\n"
    )
    program.write_text(f"#!{sys.executable}\n{text.format(note=str(tmp_path / 'note'))}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    out = dream_video(network, picture(64, 48), tmp_path / "film.mp4", frames=3, fps=12, **QUICK)
    wanted = b"".join(frame.tobytes() for frame in dream_frames(network, picture(64, 48), frames=3, **QUICK))
    assert out.read_bytes() == wanted
    assert "-pix_fmt rgb24 -s 64x48 -r 12" in (tmp_path / "note").read_text()
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no encoder called libx264')\n")
    with pytest.raises(OSError, match=r"ffmpeg could not write '.*': no encoder called libx264"):
        dream_video(network, picture(64, 48), tmp_path / "other.mp4", frames=2, **QUICK)
    assert not (tmp_path / "other.mp4").exists()
    assert len(list((tmp_path / "other.mp4.frames").glob("*.png"))) == 2


def test_a_film_is_a_gif_of_all_frames(network: Model, tmp_path: Path) -> None:
    out = dream_video(network, picture(40, 36), tmp_path / "film.gif", frames=3, fps=10, **QUICK)
    with Image.open(out) as film:
        assert (film.n_frames, film.size, film.info["duration"]) == (3, (40, 36), 100)  # pyright: ignore[reportAttributeAccessIssue]


def test_films_that_can_not_be_written_are_refused_before_anything_is_dreamed(
    network: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str, said: str, **how: Any) -> None:
        with pytest.raises(ValueError, match=said):
            dream_video(network, picture(), tmp_path / name, **QUICK | {"frames": 2} | how)

    refused("film.avi", "'film.avi' is no film's name: name it 'film.mp4', 'film.gif', or 'film' for a folder of frames")
    refused("film.gif", "fps is a number of frames a second, more than 0 and at most 240, got 0", fps=0)
    refused("film.gif", "zoom is the share of each side that a frame loses, at least 0 and less than 1, got 1", zoom=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").touch()
    refused("mine", "'.*mine' holds other files: name another place", restart=True)
    (tmp_path / "file").touch()
    refused("file", "'.*file' is there already and is a file: name another place")
    with monkeypatch.context() as patch:
        patch.setattr(video, "encoder", lambda: None)
        refused("film.mp4", "'film.mp4' needs ffmpeg or OpenCV, and neither is here")
    assert sorted(place.name for place in tmp_path.iterdir()) == ["file", "mine"]


def test_frames_of_other_settings_are_thrown_away_only_if_asked(network: Model, tmp_path: Path) -> None:
    frames = tmp_path / "film.gif.frames"
    frames.mkdir()
    (frames / "dream.txt").write_text("another")
    (frames / "00000.png").touch()
    with pytest.raises(ValueError, match="holds frames of a dream with other settings; restart=True throws them away"):
        dream_video(network, picture(40, 36), tmp_path / "film.gif", frames=2, **QUICK)
    dream_video(network, picture(40, 36), tmp_path / "film.gif", frames=2, restart=True, **QUICK)
    assert [place.name for place in tmp_path.iterdir()] == ["film.gif"]


def test_a_rate_fades_from_frame_to_frame_as_in_deepdream_jl(network: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.dreaming import dreamer

    rates: list[float] = []
    steps = dreamer.steps
    monkeypatch.setattr(dreamer, "steps", lambda pull, x, rate, low, high: rates.append(rate) or steps(pull, x, rate, low, high))
    list(dream_frames(network, picture(40, 36), frames=3, like="deepdream.jl", **QUICK))
    assert rates == pytest.approx([0.03, 0.03 / 1.005, 0.03 / 1.005**2])
