"""Every file of a folder is an image, left out with a reason, or counted; nothing that lies there ends a run or lets it wait."""

from __future__ import annotations

import io
import os
import pickle
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from zoo.conversion.proof_images import Pictures
from zoo.images import BadImage, files, open_source
from zoo.images.preprocess import open_image
from zoo.images.source import LeftOut

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    """End a test that waits for a pipe."""

    def late(*_: object) -> None:
        raise AssertionError("waited for a pipe")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def picture(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)).save(path)
    return path


def forbid(monkeypatch: pytest.MonkeyPatch, folder: Path, error: type[OSError] = PermissionError) -> None:
    """Make listing a folder fail. It works for root, too."""
    whole = os.scandir

    def scandir(path: Any) -> Any:
        if path == str(folder):
            raise error(13 if error is PermissionError else 2, "no", str(path))
        return whole(path)

    monkeypatch.setattr(files.os, "scandir", scandir)


def test_other_files_are_counted_by_their_ending(tmp_path: Path) -> None:
    picture(tmp_path / "cat/1.png")
    for name in ("notes.txt", "cat/a.TXT", "cat/b.json", "Makefile", "cat/movie.mp4", ".hidden.txt"):
        (tmp_path / name).write_bytes(b"-")
    source = open_source(tmp_path)
    assert source.others == {".txt": 2, ".json": 1, "": 1, ".mp4": 1}
    assert list(source.left_out) == []
    assert pickle.loads(pickle.dumps(source)).others == source.others


def test_a_folder_without_images_says_what_is_there_instead(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "c.psd"):
        (tmp_path / name).write_bytes(b"-")
    with pytest.raises(ValueError, match=r"no \.tar, but 3 other files: 2 \.txt, 1 \.psd"):
        open_source(tmp_path)


def test_links_to_themselves_to_nothing_and_round_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    picture(tmp_path / "cat/1.png")
    (tmp_path / "cat/self.jpg").symlink_to(tmp_path / "cat/self.jpg")
    (tmp_path / "cat/a.jpg").symlink_to(tmp_path / "cat/b.jpg")
    (tmp_path / "cat/b.jpg").symlink_to(tmp_path / "cat/a.jpg")
    (tmp_path / "cat/gone.jpg").symlink_to(tmp_path / "nothing.jpg")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "cat/round").symlink_to(tmp_path)
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing.txt")
    source = open_source(tmp_path)
    assert [item.key for item in source] == ["cat/1.png"]
    assert list(source.left_out) == [
        LeftOut("cat/a.jpg", "it is a link to itself"),
        LeftOut("cat/b.jpg", "it is a link to itself"),
        LeftOut("cat/gone.jpg", "it is a link to nothing"),
        LeftOut("cat/round", "it is a link to a folder that it lies in"),
        LeftOut("cat/self.jpg", "it is a link to itself"),
        LeftOut("loop", "it is a link to itself"),
    ]
    assert source.others == {".txt": 1}
    assert source.empty == []
    assert "left out 6 names: cat/a.jpg (it is a link to itself), " in caplog.text
    assert [item.key for item in open_source(tmp_path)] == ["cat/1.png"]
    assert [path.name for path in Pictures.of(tmp_path).files] == ["1.png"]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (PermissionError, "the folder may not be read: permission denied"),
        (FileNotFoundError, "it vanished while the folder above was listed"),
    ],
)
@pytest.mark.parametrize("name", ["cow", "v1.2", "cat/deep"])
def test_a_folder_that_can_not_be_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError], why: str, name: str
) -> None:
    picture(tmp_path / "cat/1.png")
    picture(tmp_path / "dog/1.png")
    picture(tmp_path / name / "2.png")
    forbid(monkeypatch, tmp_path / name, error)
    source = open_source(tmp_path)
    assert [item.key for item in source] == ["cat/1.png", "dog/1.png"]
    assert list(source.left_out) == [LeftOut(name, why)]
    assert source.empty == []
    assert [path.name for path in Pictures.of(tmp_path).files] == ["1.png", "1.png"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_is_left_out_for_a_user(tmp_path: Path) -> None:
    picture(tmp_path / "cat/1.png")
    picture(tmp_path / "cow/2.png")
    (tmp_path / "cow").chmod(0)
    try:
        assert list(open_source(tmp_path).left_out) == [LeftOut("cow", "the folder may not be read: permission denied")]
    finally:
        (tmp_path / "cow").chmod(0o700)


def test_a_file_that_vanishes_while_the_folder_is_listed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        picture(tmp_path / f"{number}.png", number)
    hidden = files.hidden

    def hurried(name: str) -> bool:
        (tmp_path / "1.png").unlink(missing_ok=True)  # the entry is there, the file no longer
        return hidden(name)

    monkeypatch.setattr(files, "hidden", hurried)
    source = open_source(tmp_path)
    assert [item.key for item in source] == ["0.png", "2.png"]
    assert list(source.left_out) == [LeftOut("1.png", "it vanished while the folder above was listed")]


@needs_pipes
def test_pipes_and_devices_in_a_folder_are_never_opened(tmp_path: Path) -> None:
    picture(tmp_path / "cat/1.png")
    os.mkfifo(tmp_path / "cat/pipe.jpg")
    os.mkfifo(tmp_path / "cat/pipe.txt")
    (tmp_path / "cat/zero.jpg").symlink_to("/dev/zero")
    source = open_source(tmp_path)
    assert [item.key for item in source] == ["cat/1.png"]
    why = "it is a pipe, a socket or a device, which is never opened"
    assert list(source.left_out) == [LeftOut("cat/pipe.jpg", why), LeftOut("cat/zero.jpg", why)]
    assert source.others == {".txt": 1}
    assert len(Pictures.of(tmp_path).files) == 1


@needs_pipes
@pytest.mark.parametrize("link", [False, True])
def test_a_pipe_that_is_named_is_not_waited_for(tmp_path: Path, link: bool) -> None:
    pipe = tmp_path / "pipe.jpg"
    os.mkfifo(pipe)
    if link:
        (tmp_path / "link.jpg").symlink_to(pipe)
        pipe = tmp_path / "link.jpg"
    with pytest.raises(BadImage, match=r"\.jpg: it is a pipe, a socket or a device, which is never opened; name an image's file"):
        open_image(pipe)
    picture(tmp_path / "a.png")
    (tmp_path / "list.txt").write_text(f"{pipe}\na.png\n")
    source = open_source(tmp_path / "list.txt")
    with pytest.raises(OSError, match="It is no regular file"):
        source.read(0)
    assert source.read(1)
    for name in ("list2.txt", "shard.tar", "part.parquet"):
        os.mkfifo(tmp_path / name)
        with pytest.raises((OSError, ValueError), match="no regular file"):
            open_source(tmp_path / name)


def test_a_tar_counts_other_files_and_names_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.images.tar.unreadable", lambda name: "no library" if name.endswith(".heic") else "")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("cat/1.png", "cat/1.cls", "cat/2.heic", "cat/3.txt", "cat/4.xmp"):
            made = tarfile.TarInfo(name)
            made.size = 3
            archive.addfile(made, io.BytesIO(b"abc"))
    for where in (tmp_path / "a.tar", tmp_path):
        source = open_source(where)
        assert [item.key for item in source] == ["a.tar/cat/1.png"]
        assert list(source.left_out) == [LeftOut("a.tar/cat/2.heic", "no library")]
        assert source.others == {".txt": 1, ".xmp": 1}


def test_what_lies_beside_shards_is_accounted_for_too(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(picture(tmp_path / "deep/1.png"), "cat/1.png")
    (tmp_path / "deep/1.png").unlink()
    (tmp_path / "self.jpg").symlink_to(tmp_path / "self.jpg")
    (tmp_path / "README.md").write_text("-")
    source = open_source(tmp_path)
    assert [item.key for item in source] == ["a.tar/cat/1.png"]
    assert [one.key for one in source.left_out] == ["self.jpg"]
    assert source.others == {".md": 1}


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_whose_files_may_not_be_looked_at_is_not_an_empty_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(tmp_path / "cat/1.png")
    (tmp_path / "dog").mkdir()
    (tmp_path / "cow").mkdir()
    whole = files.walk

    def walk(folder: str, left_out: list[tuple[str, str]] | None = None) -> Iterator[files.Found]:
        yield from whole(folder, left_out)
        assert left_out is not None
        left_out.append(("dog/1.png", "the file may not be read: permission denied"))

    monkeypatch.setattr(files, "walk", walk)
    assert open_source(tmp_path).empty == ["cow"]
