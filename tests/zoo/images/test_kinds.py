"""What an image is: one list for listing and for decoding, and no decoder beside it."""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from zoo.images import BadImage, decode, kinds, open_source
from zoo.images.preprocess import open_image

ROOT = Path(__file__).parents[3]
SAVED = [kind for kind in kinds.KINDS if kind.format != "HEIF"]
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    kinds.missing.cache_clear()
    kinds.formats.cache_clear()
    yield
    kinds.missing.cache_clear()
    kinds.formats.cache_clear()


def encoded(kind: str, **options: Any) -> bytes:
    y, x = np.mgrid[0:24, 0:32]
    buffer = io.BytesIO()
    Image.fromarray(np.stack([8 * x, 10 * y, 0 * x + 90], axis=-1).astype(np.uint8)).save(buffer, kind, **options)
    return buffer.getvalue()


def without(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Take a library or a part of Pillow away."""
    from PIL import features

    whole = features.check
    monkeypatch.setattr(features, "check", lambda name: name != what and whole(name))
    monkeypatch.setattr(kinds, "find_spec", lambda name: None if name == what else find_spec(name))


@pytest.mark.parametrize("kind", SAVED, ids=[kind.format for kind in SAVED])
def test_every_kind_is_listed_by_each_of_its_endings_in_any_case_and_decoded(kind: kinds.Kind, tmp_path: Path) -> None:
    if kinds.missing(kind):
        pytest.skip(kinds.missing(kind))
    data = encoded(kind.format)
    for number, ending in enumerate(kind.endings):
        (tmp_path / f"{number}{ending}").write_bytes(data)
        (tmp_path / f"{number}-{ending.upper()}").write_bytes(data)
    source = open_source(tmp_path)
    assert len(source) == 2 * len(kind.endings)
    for index, item in enumerate(source):
        seen = np.asarray(decode(source.read(index), item.key))
        assert seen.shape == (24, 32, 3)
        assert np.array_equal(seen, np.asarray(open_image(tmp_path / item.key)))


def test_the_ending_does_not_matter_once_a_file_is_listed(tmp_path: Path) -> None:
    (tmp_path / "really.jpg").write_bytes(encoded("PNG"))
    assert open_image(tmp_path / "really.jpg").size == (32, 24)


def test_an_avif_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded("AVIF", exif=exif)).size == (24, 32)


@pytest.mark.parametrize("name", ["photo.heic", "IMG_1.HEIC", "a.heif", "a.hif"])
def test_heic_without_its_library_is_left_out_with_the_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    without(monkeypatch, "pillow_heif")
    advice = r"HEIC is read with pillow-heif, which is not installed: pip install 'kernelzoo\[heic\]'"
    (tmp_path / name).write_bytes(b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf" + bytes(60))
    with pytest.raises(ValueError, match=rf"holds no images that can be used; left out 1 name: {name} \({advice}\)"):
        open_source(tmp_path)
    with pytest.raises(BadImage, match=advice):
        open_image(tmp_path / name)
    (tmp_path / "b.png").write_bytes(encoded("PNG"))
    source = open_source(tmp_path)
    assert [item.key for item in source] == ["b.png"]
    assert [(one.key, one.why.partition(",")[0]) for one in source.left_out] == [(name, "HEIC is read with pillow-heif")]


def test_heic_with_its_library_is_an_image_like_any_other(tmp_path: Path) -> None:
    import pillow_heif as heif

    pixels = np.tile(np.array([200, 40, 40], np.uint8), (32, 48, 1))
    heif.from_pillow(Image.fromarray(pixels)).save(tmp_path / "a.heic", quality=95)
    source = open_source(tmp_path)
    assert [item.key for item in source] == ["a.heic"]
    for seen in (decode(source.read(0)), open_image(tmp_path / "a.heic")):
        assert seen.size == (48, 32)
        assert np.abs(np.asarray(seen, np.int16) - pixels).max() < 12
    (tmp_path / "a.heic").write_bytes((tmp_path / "a.heic").read_bytes()[:200])
    with pytest.raises(BadImage, match=r"a\.heic: .*cut off or damaged"):
        open_image(tmp_path / "a.heic")


@pytest.mark.parametrize(("kind", "feature"), [("AVIF", "avif"), ("WEBP", "webp"), ("JPEG2000", "jpg_2000")])
def test_what_this_pillow_was_built_without_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, feature: str) -> None:
    data = encoded(kind)
    without(monkeypatch, feature)
    ending = next(one for one in kinds.KINDS if one.format == kind).endings[0]
    (tmp_path / f"a{ending}").write_bytes(data)
    with pytest.raises(ValueError, match=r"is read by Pillow 11.3 or later with .* built in: pip install --upgrade pillow"):
        open_source(tmp_path)
    with pytest.raises(BadImage, match="pip install --upgrade pillow"):
        decode(data, "a")


def test_an_eps_that_is_called_a_jpeg_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("Ghostscript was started")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", "gs")
    (tmp_path / "a.jpg").write_bytes(EPS)
    Image.open(tmp_path / "a.jpg").close()  # Pillow by itself takes it
    for opening in (lambda: open_image(tmp_path / "a.jpg"), lambda: decode(EPS, "a.jpg")):
        with pytest.raises(BadImage, match=r"a\.jpg: the file is EPS or PostScript, which is not decoded; convert it to PNG or JPEG"):
            opening()


@pytest.mark.parametrize("kind", ["TGA", "ICO", "PCX", "SGI", "DIB", "ICNS", "DDS", "SPIDER", "MSP", "XBM"])
def test_no_decoder_beside_the_list_is_reached(kind: str) -> None:
    buffer = io.BytesIO()
    mode = {"SPIDER": "F", "MSP": "1", "XBM": "1"}.get(kind, "RGB")
    Image.new(mode, (32, 32)).save(buffer, kind)
    with pytest.raises(BadImage, match=r"a\.png: .*(no image|can't be opened)"):
        decode(buffer.getvalue(), "a.png")


@pytest.mark.parametrize(
    ("data", "what"),
    [(b"%PDF-1.7", "PDF"), (b"8BPS\0\1", "Photoshop"), (b"<svg xmlns=''/>", "SVG"), (b"<?xml version='1.0'?>", "XML or SVG")],
)
def test_what_is_often_called_an_image_is_named(data: bytes, what: str) -> None:
    with pytest.raises(BadImage, match=f"a.png: the file is {what}, which is not decoded"):
        decode(data, "a.png")


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def product(*words: str) -> list[Path]:
    """List the files of the product in which one of these words stands: parsing them all takes seconds."""
    found = (path for room in ("zoo", "weights", "convert") for path in (ROOT / room).rglob("*.py"))
    return [path for path in found if any(word in path.read_text(encoding="utf-8") for word in words)]


def test_one_place_opens_images_and_it_says_which_kinds() -> None:
    found = [(path, call) for path in product("Image.open") for name, call in calls(path) if name in ("Image.open", "PIL.Image.open")]
    assert [path.relative_to(ROOT).as_posix() for path, _ in found] == ["zoo/images/reading.py"]
    assert all(any(keyword.arg == "formats" for keyword in call.keywords) for _, call in found)


ENDINGS = (".jpg", ".jpeg", ".webp")


def test_one_list_says_which_endings_images_have() -> None:
    holding = [
        path.relative_to(ROOT).as_posix()
        for path in product(*ENDINGS)
        if any(
            isinstance(node, ast.Tuple | ast.List | ast.Set)
            and any(isinstance(one, ast.Constant) and one.value in ENDINGS for one in node.elts)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    ]
    assert holding == ["zoo/images/kinds.py"]


def test_other_files_are_worded_by_their_number() -> None:
    assert kinds.endings({"": 1, ".txt": 10, ".json": 1200}) == "1,211 other files: 1,200 .json, 10 .txt, 1 without an ending"


def test_names_of_one_kind_tell_it_and_others_do_not() -> None:
    assert kinds.kind_of_names(["a/1.jpg", "b/2.JPEG"]) == "JPEG"
    assert kinds.kind_of_names(["1.jpg", "2.png"]) == "image"
    assert kinds.kind_of_names(["part-0.parquet#12"]) == "image"
    assert kinds.kind_of_names([]) == "image"
