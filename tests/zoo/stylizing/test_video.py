"""Films: frames in their order, statistics that are averaged, flow that holds strokes, and files that are whole or not there."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from weights import MissingLibrary
from zoo.stylizing import Johnson, stylize_video
from zoo.stylizing.learning import seeded
from zoo.stylizing.networks import moments
from zoo.stylizing.painting import paint
from zoo.stylizing.video import Averaged, painted_frames


def frames(count: int = 4, size: tuple[int, int] = (32, 24)) -> list[Image.Image]:
    """A still scene whose light flickers a little."""
    scene = np.random.default_rng(0).integers(60, 190, (size[1] // 4, size[0] // 4, 3), dtype=np.uint8)
    large = np.asarray(Image.fromarray(scene).resize(size, Image.Resampling.BICUBIC)).astype(int)
    return [Image.fromarray(np.clip(large + (30 if number % 2 else 0), 0, 255).astype(np.uint8)) for number in range(count)]


def network() -> Johnson:
    made = seeded(Johnson, 0, channels=4)
    torch.manual_seed(0)
    for parameter in made.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    made.deconv3.conv2d.weight.data *= 60  # pyright: ignore
    return made.eval()  # pyright: ignore


def test_statistics_are_averaged_over_frames() -> None:
    averaged, norm = Averaged(0.75), torch.nn.Identity()
    first, second = torch.randn(1, 2, 4, 4), 3 + torch.randn(1, 2, 4, 4)
    assert all(one.equal(other) for one, other in zip(averaged.of(norm, first), moments(first), strict=True))
    found = averaged.of(norm, second)
    for one, old, new in zip(found, moments(first), moments(second), strict=True):
        assert torch.allclose(one, 0.75 * old + 0.25 * new)


def test_the_first_frame_is_painted_as_a_photograph() -> None:
    made, film = network(), frames(2)
    x = torch.from_numpy(np.array(film[0])).permute(2, 0, 1)[None].float()
    alone = paint(made, x).clamp(0, 255).permute(1, 2, 0).numpy()
    painted = list(painted_frames(made, film))
    assert np.abs(painted[0] - alone).max() <= 0.6
    assert len(painted) == 2


def test_what_enters_the_picture_does_not_change_the_rest_of_it() -> None:
    made, scene = network(), frames(1, (192, 96))[0]
    lit = scene.copy()
    lit.paste((255, 255, 255), (0, 0, 24, 96))
    film = [lit if number % 2 else scene for number in range(6)]

    def flicker(kept: float) -> float:
        far = [one[:, 140:].astype(int) for one in painted_frames(made, film, kept=kept)]  # out of the reach of the convolutions
        return float(np.mean([np.abs(a - b).mean() for a, b in pairwise(far)]))

    assert flicker(0) > 1
    assert flicker(0.9) < 0.3 * flicker(0)


def test_flow_holds_the_strokes_of_a_still_scene() -> None:
    pytest.importorskip("cv2")
    made = network()
    scene = np.asarray(frames(1, (64, 48))[0]).astype(int)
    draw = np.random.default_rng(2)
    film = [Image.fromarray(np.clip(scene + draw.normal(0, 3, scene.shape), 0, 255).astype(np.uint8)) for _ in range(5)]

    def flicker(**how: Any) -> float:
        painted = [one.astype(int) for one in painted_frames(made, film, **how)]
        return float(np.mean([np.abs(a - b).mean() for a, b in pairwise(painted)]))

    assert flicker(flow=True) < 0.75 * flicker()


def test_an_animation_is_painted_frame_by_frame(tmp_path: Path) -> None:
    film = frames(3)
    film[0].save(tmp_path / "clip.gif", save_all=True, append_images=film[1:], duration=80)
    seen: list[int] = []

    class Show:
        def __init__(self, name: str, total: int, done: int) -> None:
            seen.append(total)

        def __enter__(self) -> Any:
            return seen.append

        def __exit__(self, *_: object) -> None:
            pass

    made = stylize_video(tmp_path / "clip.gif", tmp_path / "painted.gif", network(), progress=Show)
    assert (made.path, made.frames) == (tmp_path / "painted.gif", 3)
    assert seen == [3, 1, 1, 1]
    with Image.open(made.path) as image:
        assert (image.n_frames, image.size, image.info["duration"]) == (3, (32, 24), 80)


def test_a_film_is_read_and_written_with_opencv(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    writer = cv2.VideoWriter(str(tmp_path / "clip.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 12, (32, 24))
    for frame in frames(4):
        writer.write(np.asarray(frame)[..., ::-1].copy())
    writer.release()
    assert stylize_video(tmp_path / "clip.avi", tmp_path / "out.avi", network(), strength=0).frames == 4
    reader = cv2.VideoCapture(str(tmp_path / "out.avi"))
    there, first = reader.read()
    assert there
    assert np.abs(first[..., ::-1].astype(int) - np.asarray(frames(1)[0])).mean() < 12  # two rounds of JPEG
    assert reader.get(cv2.CAP_PROP_FPS) == 12


def test_a_film_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film = frames(3)
    film[0].save(tmp_path / "clip.gif", save_all=True, append_images=film[1:])
    calls: list[int] = []

    def failing(*args: Any, **how: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return paint(*args, **how)

    monkeypatch.setattr("zoo.stylizing.video.paint", failing)
    with pytest.raises(KeyboardInterrupt):
        stylize_video(tmp_path / "clip.gif", tmp_path / "painted.gif", network())
    assert [path.name for path in tmp_path.iterdir()] == ["clip.gif"]


@pytest.mark.parametrize(
    ("told", "error", "message"),
    [
        ({"strength": 2}, ValueError, "strength is 0 to 1"),
        ({"kept": 1}, ValueError, "kept is 0 to 0.99"),
        ({"film": "none.mp4"}, FileNotFoundError, "'none.mp4' is no file; name a film"),
        ({"film": "text.mp4"}, ValueError, "can't be read as a film"),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], error: type[Exception], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    frames(1)[0].save(tmp_path / "clip.gif")
    (tmp_path / "text.mp4").write_text("no film")
    with pytest.raises(error, match=message):
        stylize_video(**{"film": "clip.gif", "out": "painted.gif", "style": network(), **told})


def test_frames_of_two_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="a film's frames have one size, and 16x16 follows 32x24"):
        list(painted_frames(network(), [*frames(1), Image.new("RGB", (16, 16))]))


def test_opencv_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cv2", None)
    (tmp_path / "clip.mp4").write_bytes(b"film")
    with pytest.raises(MissingLibrary, match=r"a film of the kind \.mp4 needs OpenCV: pip install 'kernelzoo\[video\]'"):
        stylize_video(tmp_path / "clip.mp4", tmp_path / "out.mp4", network())
