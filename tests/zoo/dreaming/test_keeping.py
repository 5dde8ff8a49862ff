"""Unfinished dreams are kept, and a resumed one has the bytes of one that never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zoo.dreaming.dreams import picture
from weights.progress import Show
from zoo.dreaming import dream, dream_frames, dream_video
from zoo.dreaming import keeping as keeping_module
from zoo.dreaming.keeping import Kept
from zoo.networks.model import Model

HOW: dict[str, Any] = {"at": "layer2", "steps": 3, "octaves": 3, "jitter": 4}


def stops(after: int, seen: list[tuple[str, int, int]]) -> Show:
    """Show nothing, note what was said, and interrupt the job after so many steps."""

    @contextmanager
    def show(name: str, total: int, done: int) -> Iterator[Callable[[int], None]]:
        seen.append((name, total, done))
        left = after

        def advance(steps: int) -> None:
            nonlocal left
            left -= steps
            if left < 0:
                raise KeyboardInterrupt

        yield advance

    return show


@pytest.mark.parametrize("after", [0, 2, 3, 7])
@pytest.mark.parametrize("tile", [0, 16])
def test_a_resumed_dream_has_the_bytes_of_one_that_never_stopped(after: int, tile: int, network: Model, tmp_path: Path) -> None:
    wanted = dream(network, picture(40, 36), tile=tile, progress=False, **HOW).tobytes()
    file, seen = tmp_path / "sky.part", []
    with pytest.raises(KeyboardInterrupt):
        dream(network, picture(40, 36), tile=tile, keep=file, progress=stops(after, seen), **HOW)
    assert file.is_file()
    again = dream(network, picture(40, 36), tile=tile, keep=file, progress=stops(10**6, seen), **HOW)
    assert again.tobytes() == wanted
    assert not file.exists()
    assert [name for name, _, _ in seen] == ["dreaming", "dreaming"]
    assert seen[0][1] == seen[1][1]
    if tile == 0:
        assert seen[1][2] == after


@pytest.mark.parametrize("other", ["picture", "network", "setting", "damaged"])
def test_what_is_kept_of_another_dream_is_not_taken_up(
    other: str, network: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, seen = tmp_path / "sky.part", []
    with pytest.raises(KeyboardInterrupt):
        dream(network, picture(40, 36), keep=file, progress=stops(4, seen), **HOW)
    image, model, how = picture(40, 36), network, dict(HOW)
    if other == "picture":
        image = picture(40, 36, seed=1)
    elif other == "network":
        import copy

        model = copy.deepcopy(network)
        model.layer1[0].conv1.weight.data[0, 0, 0, 0] += 1e-3
    elif other == "setting":
        how["rate"] = 1.0
    else:
        file.write_bytes(file.read_bytes()[:100])
    wanted = dream(model, image, progress=False, **how).tobytes()
    assert dream(model, image, keep=file, progress=stops(10**6, seen), **how).tobytes() == wanted
    assert seen[1][2] == 0
    assert ("is no dream, or is damaged" if other == "damaged" else "keeps a dream of another picture, network or setting") in caplog.text


def test_a_killed_dream_has_what_was_kept_at_times(network: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping_module, "EVERY_S", 0.0)
    kept: list[tuple[int, int]] = []
    monkeypatch.setattr(Kept, "keep", lambda self, octave, step, picture: kept.append((octave, step)))
    dream(network, picture(40, 36), keep=tmp_path / "sky.part", progress=False, **HOW)
    assert kept == [(octave, step) for octave in range(3) for step in (1, 2, 3)]


def test_an_interrupt_while_the_picture_changes_keeps_no_half_step(network: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, calls = tmp_path / "sky.part", 0
    clamp = torch.Tensor.clamp_

    def interrupted(self: torch.Tensor, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return clamp(self, *args)

    monkeypatch.setattr(torch.Tensor, "clamp_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dream(network, picture(40, 36), keep=file, progress=False, **HOW)
    assert not file.exists()


def test_a_resumed_film_has_the_frames_of_one_that_never_stopped(network: Model, tmp_path: Path) -> None:
    wanted = [frame.tobytes() for frame in dream_frames(network, picture(40, 36), frames=4, progress=False, **HOW)]
    assert wanted[0] == dream(network, picture(40, 36), progress=False, **HOW).tobytes()
    assert len(set(wanted)) == 4
    out, seen = tmp_path / "film", []
    with pytest.raises(KeyboardInterrupt):
        dream_video(network, picture(40, 36), out, frames=4, progress=stops(1, seen), **HOW)
    assert sorted(place.name for place in out.iterdir()) == ["00000.png", "00001.png", "dream.txt"]
    assert dream_video(network, picture(40, 36), out, frames=4, progress=stops(10, seen), **HOW) == out
    assert seen == [("dreaming frames", 4, 0), ("dreaming frames", 4, 2)]
    from PIL import Image

    assert [Image.open(place).tobytes() for place in sorted(out.iterdir())] == wanted
