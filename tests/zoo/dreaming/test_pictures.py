"""Pictures: transparency, orientation and colours stay, and a file is never lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from tests.zoo.dreaming.dreams import levels, picture
from zoo.dreaming import dream
from zoo.dreaming.pictures import read
from zoo.images import BadImage
from zoo.images.writing import save, writable_as
from zoo.networks.model import Model

QUICK: dict[str, Any] = {"at": "layer1", "steps": 1, "octaves": 1, "progress": False}


def see_through() -> Image.Image:
    image = picture(40, 36)
    alpha = np.zeros((36, 40), np.uint8)
    alpha[:, 10:20], alpha[:, 20:] = 128, 255
    image.putalpha(Image.fromarray(alpha))
    return image


@pytest.mark.parametrize("kind", ["file", "image", "array", "turned array"])
def test_transparency_is_kept_and_colours_in_front_of_it_are_their_own(kind: str, network: Model, tmp_path: Path) -> None:
    image = see_through()
    image.save(tmp_path / "a.png")
    given: Any = {"file": tmp_path / "a.png", "image": image, "array": np.asarray(image)}.get(kind, np.asarray(image).transpose(2, 0, 1))
    dreamt = dream(network, given, **QUICK)
    assert dreamt.mode == "RGBA"
    assert dreamt.getchannel("A").tobytes() == image.getchannel("A").tobytes()
    found = read(given, "a").levels.permute(1, 2, 0).numpy()
    assert (found[:, :10] == 255).all()
    assert (found[:, 10:] == np.asarray(image)[:, 10:, :3]).all()


def test_a_picture_that_lies_on_its_side_is_dreamed_and_written_upright(network: Model, tmp_path: Path) -> None:
    upright = picture(40, 36)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "a.png", exif=exif)
    dreamt = dream(network, tmp_path / "a.png", **QUICK)
    assert dreamt.size == (40, 36)
    assert dreamt.tobytes() == dream(network, upright, **QUICK).tobytes()
    assert 0x0112 not in dreamt.getexif()
    see_through().transpose(Image.Transpose.ROTATE_90).save(tmp_path / "b.png", exif=exif)
    assert dream(network, tmp_path / "b.png", **QUICK).getchannel("A").tobytes() == see_through().getchannel("A").tobytes()


def test_the_colour_profile_goes_along(network: Model, tmp_path: Path) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    picture(40, 36).save(tmp_path / "a.png", icc_profile=profile)
    save(dream(network, tmp_path / "a.png", **QUICK), tmp_path / "b.jpg")
    with Image.open(tmp_path / "b.jpg") as written:
        assert written.info["icc_profile"] == profile


def test_pictures_of_sixteen_bits_and_grey_ones_are_dreamed(network: Model, tmp_path: Path) -> None:
    grey = np.asarray(picture(40, 36).convert("L"))
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    wanted = dream(network, np.stack([grey] * 3, 2), **QUICK).tobytes()
    assert dream(network, tmp_path / "deep.png", **QUICK).tobytes() == wanted
    assert dream(network, grey, **QUICK).tobytes() == wanted


def test_a_picture_that_can_not_be_used_is_named(network: Model, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"nothing")
    with pytest.raises(BadImage, match=r"a\.png"):
        dream(network, tmp_path / "a.png", **QUICK)
    with pytest.raises(FileNotFoundError, match=r"b.png: there is no such file"):
        dream(network, picture(), guide=tmp_path / "b.png", **QUICK)
    with pytest.raises(BadImage, match="the image: expected a path"):
        dream(network, 3, **QUICK)
    with pytest.raises(BadImage, match=r"images\[1\]: expected a path"):
        dream(network, [picture(), None], **QUICK)


def test_a_file_that_is_there_is_not_lost_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"mine")

    def full(self: Image.Image, place: Path, *how: Any, **more: Any) -> None:
        Path(place).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", full)
        with pytest.raises(OSError, match="No space left"):
            save(picture(), path)
    assert [place.read_bytes() for place in tmp_path.iterdir()] == [b"mine"]
    save(picture(), path)
    assert (levels(Image.open(path)) == levels(picture())).all()


def test_files_that_hold_no_picture_or_no_transparency_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'a.txt' is no picture's name: it ends in .png, .*; name it 'a.png'"):
        writable_as(Path("a.txt"), False)
    with pytest.raises(ValueError, match=r"'a.jpg' would lose the picture's transparency, which .jpg files don't hold; name it 'a.png'"):
        writable_as(Path("a.jpg"), True)
    assert (writable_as(Path("a.JPG"), False), writable_as(Path("a.webp"), True)) == ("JPEG", "WEBP")
