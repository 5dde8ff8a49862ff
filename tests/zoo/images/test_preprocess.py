import io
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from weights import Preprocessing
from zoo.images.preprocess import BadImage, open_image, preprocess

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RECORD = Preprocessing(256, 224, "bilinear", MEAN, STD)
AS_IT_IS = Preprocessing(None, None, "bilinear", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
GREY_AS_IT_IS = Preprocessing(None, None, "bilinear", (0.0,), (1.0,))


def noise(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def pixels(image: object, record: Preprocessing = AS_IT_IS) -> np.ndarray:
    """The 8-bit pixels (H, W, C) that the network sees."""
    return (preprocess(image, record)[0] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()


def saved(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)
    return path


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def photographs() -> list[Image.Image]:
    import skimage.data

    photos = [Image.fromarray(getattr(skimage.data, name)()) for name in ("chelsea", "coffee", "rocket")]
    rgb = [*photos, photos[0].resize((223, 225)), photos[0].resize((1000, 37)), photos[1].resize((37, 1000)), photos[2].resize((77, 76))]
    exact = [photos[1].resize((side, side)) for side in (224, 232, 256)]
    tiny = [Image.fromarray(noise(h, w, 3)) for h, w in ((1, 1), (1, 2), (3, 2), (2, 61), (333, 5))]
    return rgb + exact + tiny


def torchvision_transforms() -> dict[str, object]:
    from torchvision import models

    weights = (w for name in models.list_models(module=models) for w in models.get_model_weights(name))
    return {str(w.transforms()): w.transforms() for w in weights}


def test_a_record_that_squashes_resizes_both_sides_and_cuts_the_middle() -> None:
    picture = Image.fromarray(noise(60, 90, 3))
    squashed = Preprocessing(40, 32, "bicubic", (0.0,) * 3, (1.0,) * 3, squash=True)
    expected = np.asarray(picture.resize((40, 40), Image.Resampling.BICUBIC))[4:36, 4:36]
    assert (pixels(picture, squashed) == expected).all()
    assert (pixels(picture.transpose(Image.Transpose.ROTATE_90), squashed).shape) == (32, 32, 3)


@pytest.mark.reference
def test_every_torchvision_classification_transform_is_reproduced_bit_for_bit(photographs: list[Image.Image]) -> None:
    transforms = torchvision_transforms()
    assert len(transforms) > 25
    for number, transform in enumerate(transforms.values()):
        (resize,), (crop,) = transform.resize_size, transform.crop_size
        record = Preprocessing(resize, crop, transform.interpolation.value, tuple(transform.mean), tuple(transform.std))
        for photo in photographs[number % 3 :: 3]:  # of each kind one, and every one ten times
            assert torch.equal(preprocess(photo, record)[0], transform(photo)), (transform, photo.size)


@pytest.mark.reference
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize(("resize", "crop"), [(None, 33), (None, 64), (40, None), (32, 32), (41, 32), (40, 39)])
def test_other_records_equal_torchvisions_functions(photographs: list[Image.Image], interpolation: str, resize: int, crop: int) -> None:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as tv

    for photo in photographs:
        expected = photo if resize is None else tv.resize(photo, [resize], InterpolationMode(interpolation))
        expected = expected if crop is None else tv.center_crop(expected, [crop])
        expected = tv.normalize(tv.convert_image_dtype(tv.pil_to_tensor(expected)), list(MEAN), list(STD))
        assert torch.equal(preprocess(photo, Preprocessing(resize, crop, interpolation, MEAN, STD))[0], expected)


@pytest.mark.reference
def test_grey_records_equal_torchvisions_greyscale(photographs: list[Image.Image]) -> None:
    from torchvision.transforms import functional as tv

    for photo in photographs:
        expected = tv.center_crop(tv.resize(photo.convert("L"), [32]), [28])
        expected = tv.normalize(tv.convert_image_dtype(tv.pil_to_tensor(expected)), [0.1307], [0.3081])
        assert torch.equal(preprocess(photo, Preprocessing(32, 28, "bilinear", (0.1307,), (0.3081,)))[0], expected)


def test_a_batch_equals_its_images_and_is_float32_and_contiguous(photographs: list[Image.Image]) -> None:
    batch = preprocess(photographs, RECORD)
    assert batch.shape == (len(photographs), 3, 224, 224)
    assert batch.dtype == torch.float32
    assert batch.is_contiguous()
    assert torch.equal(batch, torch.cat([preprocess(photo, RECORD) for photo in photographs]))


def test_paths_pil_images_and_arrays_of_one_picture_give_the_same_tensor(tmp_path: Path) -> None:
    array = noise(50, 41, 3)
    tensor = torch.from_numpy(array)
    path = saved(Image.fromarray(array), tmp_path / "a.png")
    expected = preprocess(Image.fromarray(array), RECORD)
    for image in (path, str(path), array, tensor, array.transpose(2, 0, 1), tensor.permute(2, 0, 1), array[::1], [array], (path,)):
        assert torch.equal(preprocess(image, RECORD), expected)
    for batch in (np.stack([array, array]), torch.stack([tensor, tensor]).permute(0, 3, 1, 2), [path, array]):
        assert torch.equal(preprocess(batch, RECORD), expected.repeat(2, 1, 1, 1))


def test_grey_arrays_are_pictures_with_and_without_a_channel_axis() -> None:
    grey = noise(40, 30)
    for image in (grey, grey[..., None], grey[None], torch.from_numpy(grey)):
        assert np.array_equal(pixels(image), np.dstack([grey] * 3))
        assert np.array_equal(pixels(image, GREY_AS_IT_IS)[..., 0], grey)


def test_bgr_records_flip_the_channels_and_take_mean_and_std_in_that_order() -> None:
    array = noise(8, 8, 3)
    bgr = Preprocessing(None, None, "bilinear", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bgr")
    rgb = Preprocessing(None, None, "bilinear", (0.3, 0.2, 0.1), (0.6, 0.5, 0.4), "rgb")
    assert torch.equal(preprocess(array, bgr), preprocess(array, rgb).flip(1))


def test_records_of_other_channel_counts_take_arrays_plane_by_plane() -> None:
    five = noise(50, 40, 5)
    record = Preprocessing(32, 30, "bicubic", (0.0,) * 5, (1.0,) * 5)
    one = Preprocessing(32, 30, "bicubic", (0.0,), (1.0,))
    expected = torch.cat([preprocess(np.ascontiguousarray(five[..., c]), one) for c in range(5)], dim=1)
    assert torch.equal(preprocess(five, record), expected)
    assert torch.equal(preprocess(five.transpose(2, 0, 1), record), expected)
    with pytest.raises(BadImage, match=r"takes images of 5 channels, which only a uint8 array \(5, H, W\) or \(H, W, 5\) holds; got Image"):
        preprocess(Image.new("RGB", (50, 40)), record)
    with pytest.raises(BadImage, match=r"with 5 channels, got \(50, 40, 3\)"):
        preprocess(five[..., :3], record)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone_for_files_and_pil_images(tmp_path: Path, orientation: int) -> None:
    from PIL import ImageOps

    image, exif = Image.fromarray(noise(20, 30, 3)), Image.Exif()
    exif[0x0112] = orientation
    for name in ("a.png", "a.tif", "a.webp"):
        path = saved(image, tmp_path / name, exif=exif, **({"lossless": True} if name == "a.webp" else {}))
        with Image.open(path) as opened:
            expected = np.asarray(ImageOps.exif_transpose(opened))
            assert expected.shape == ((30, 20, 3) if orientation > 4 else (20, 30, 3))
            assert np.array_equal(pixels(opened), expected)
        assert np.array_equal(pixels(path), expected)
        assert np.array_equal(pixels(open_image(path)), expected)  # as commands read what lies in folders: upright once, not twice


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0MM", b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12"])
def test_damaged_exif_leaves_the_picture_as_it_is(tmp_path: Path, exif: bytes) -> None:
    path = saved(Image.new("RGB", (8, 4), "red"), tmp_path / "a.jpg", exif=exif)
    assert pixels(path).shape == (4, 8, 3)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV"])
def test_opaque_modes_convert_as_pillow_does(mode: str) -> None:
    image = Image.fromarray(noise(20, 30, 3)).convert(mode)
    assert np.array_equal(pixels(image), np.asarray(image.convert("RGB")))
    assert np.array_equal(pixels(image, GREY_AS_IT_IS)[..., 0], np.asarray(image.convert("L")))


def test_cmyk_jpegs_show_their_colours_with_and_without_adobes_marker(tmp_path: Path) -> None:
    path = saved(Image.new("CMYK", (32, 32), (0, 255, 255, 0)), tmp_path / "adobe.jpg", quality=95)
    data = path.read_bytes()
    start = data.index(b"\xff\xee")
    length = struct.unpack(">H", data[start + 2 : start + 4])[0]
    plain = written(tmp_path / "plain.jpg", data[:start] + data[start + 2 + length :])
    for image in (path, plain):  # Pillow reads every CMYK JPEG in Adobe's inverted polarity
        assert np.abs(pixels(image).astype(int) - (255, 0, 0)).max() <= 3


@pytest.mark.parametrize("mode", ["LA", "PA", "RGBA", "RGBa"])
def test_opaque_alpha_changes_nothing(mode: str) -> None:
    image = Image.fromarray(noise(20, 30, 3))
    image = (image.convert("L") if mode == "LA" else image).convert("RGBA").convert(mode)
    assert np.array_equal(pixels(image), np.asarray(image.convert("RGBA").convert("RGB")))


def test_transparent_pixels_are_laid_on_white() -> None:
    rgba = np.zeros((1, 5, 4), np.uint8)  # black, of alpha 0, 51, 102, 204, 255
    rgba[0, :, 3] = (0, 51, 102, 204, 255)
    for image in (rgba.repeat(5, axis=0), Image.fromarray(rgba), Image.fromarray(rgba).convert("LA")):
        assert pixels(image)[0, :, 0].tolist() == [255, 204, 153, 51, 0]
        assert pixels(image, GREY_AS_IT_IS)[0, :, 0].tolist() == [255, 204, 153, 51, 0]


@pytest.mark.parametrize("transparency", [0, b"\x00\xff"])
def test_a_palettes_transparent_colour_is_laid_on_white(tmp_path: Path, transparency: int | bytes) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    path = saved(image, tmp_path / "a.png", transparency=transparency)
    assert pixels(path).tolist() == [[[255, 255, 255], [0, 0, 255]]]


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_colour_key_is_laid_on_white(tmp_path: Path, mode: str) -> None:
    image = Image.new(mode, (2, 1), 0)
    image.putpixel((1, 0), (7, 7, 7) if mode == "RGB" else 7)
    path = saved(image, tmp_path / "a.png", transparency=(0, 0, 0) if mode == "RGB" else 0)
    assert pixels(path).tolist() == [[[255, 255, 255], [7, 7, 7]]]


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_sixteen_bit_greyscale_is_scaled_not_clipped(tmp_path: Path, name: str) -> None:
    ramp = np.arange(0, 65536, 97, dtype=np.uint16)[None]
    path = saved(Image.fromarray(ramp), tmp_path / name)
    expected = np.round(ramp / 257).astype(np.uint8)
    assert np.array_equal(pixels(path), np.dstack([expected] * 3))
    assert np.array_equal(pixels(path, GREY_AS_IT_IS)[..., 0], expected)


def test_sixteen_bit_arrays_are_scaled_whatever_their_byte_order() -> None:
    array = noise(6, 5, 3, dtype=np.uint16)
    expected = np.round(array / 257).astype(np.uint8)
    for image in (array, array.astype(">u2"), torch.from_numpy(array), array.transpose(2, 0, 1)):
        assert np.array_equal(pixels(image), expected)
    big_endian = Image.frombytes("I;16B", (5, 6), array[..., 0].astype(">u2").tobytes())
    assert np.array_equal(pixels(big_endian)[..., 0], expected[..., 0])


def test_the_first_frame_of_a_file_and_the_current_one_of_a_pil_image_count(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for name in ("a.gif", "a.tif"):
        path = saved(frames[0], tmp_path / name, save_all=True, append_images=frames[1:])
        assert pixels(path)[0, 0].tolist() == [255, 0, 0]
        with Image.open(path) as image:
            image.seek(1)
            assert pixels(image)[0, 0].tolist() == [0, 0, 255]


def test_icc_profiles_are_ignored(tmp_path: Path) -> None:
    from PIL import ImageCms

    image = Image.fromarray(noise(4, 4, 3))
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    assert np.array_equal(pixels(saved(image, tmp_path / "a.png", icc_profile=profile)), np.asarray(image))


def test_the_input_is_left_untouched() -> None:
    array, image = noise(40, 30, 3), Image.fromarray(noise(40, 30, 4))
    before, pil_before, limit = array.copy(), image.copy(), Image.MAX_IMAGE_PIXELS
    preprocess([array, image, torch.from_numpy(array)], RECORD)
    assert np.array_equal(array, before)
    assert image == pil_before
    assert limit == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_truncated_files_are_refused_at_every_length(tmp_path: Path, form: str) -> None:
    stream = io.BytesIO()
    Image.fromarray(noise(40, 30, 3)).save(stream, form)
    data = stream.getvalue()
    for part in (0.001, 0.02, 0.1, 0.5, 0.9):
        path = written(tmp_path / "cut", data[: max(1, int(len(data) * part))])
        with pytest.raises(BadImage, match=r"cut: (the file is no image|Pillow can't decode it|it can't be opened)"):
            preprocess(path, RECORD)


def test_damaged_files_are_refused_or_read_but_never_raise_anything_else(tmp_path: Path) -> None:
    random, refused = np.random.default_rng(1), []
    for form in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        stream = io.BytesIO()
        Image.fromarray(noise(24, 24, 3)).save(stream, form)
        for _ in range(60):
            data = np.frombuffer(stream.getvalue(), np.uint8).copy()
            data[random.integers(0, min(len(data), 200), 8)] = random.integers(0, 256, 8)
            path = written(tmp_path / "damaged", data.tobytes())
            try:
                assert preprocess(path, RECORD).shape == (1, 3, 224, 224)
            except BadImage as error:
                refused.append(str(error))
    assert len(refused) > 50
    assert all(message.startswith(f"{path}: ") for message in refused)


def test_files_that_are_no_image_are_refused_with_their_name_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadImage, match=r"empty\.jpg: the file is empty; get it again"):
        preprocess(written(tmp_path / "empty.jpg", b""), RECORD)
    with pytest.raises(BadImage, match=r"page\.html: the file is no image that Pillow can read; convert it"):
        preprocess(written(tmp_path / "page.html", b"<!doctype html>"), RECORD)
    with pytest.raises(BadImage, match=r"cat\.jpg: there is no such file; the path is relative to .*test_files"):
        preprocess("cat.jpg", RECORD)
    with pytest.raises(BadImage, match=r"missing\.jpg: there is no such file; check the path"):
        preprocess(tmp_path / "missing.jpg", RECORD)
    with pytest.raises(BadImage, match=r"https://a/cat\.jpg: there is no such file; download it first"):
        preprocess("https://a/cat.jpg", RECORD)
    with pytest.raises(BadImage, match=r"it is a folder; give its files"):
        preprocess(tmp_path, RECORD)
    with pytest.raises(BadImage, match=r"it can't be opened .*null"):
        preprocess("a\0b.jpg", RECORD)


def png_header(width: int, height: int) -> bytes:
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [9_500, 100_000])
@pytest.mark.parametrize("action", ["error", "ignore"])
def test_decompression_bombs_are_refused_before_they_are_decoded(tmp_path: Path, side: int, action: str) -> None:
    import warnings

    path = written(tmp_path / "bomb.png", png_header(side, side))
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        with pytest.raises(BadImage, match=r"bomb\.png: .*pixels.*raise PIL\.Image\.MAX_IMAGE_PIXELS if you trust it"):
            preprocess(path, RECORD)


def test_a_needle_whose_resizing_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(BadImage, match=r"images\[1\]: it is so narrow that .* makes 2560000x256 pixels, more than"):
        preprocess([noise(8, 8, 3), noise(1, 10_000)], RECORD)


def test_the_limit_on_pixels_is_pillows_own_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    with pytest.raises(BadImage, match="it has 20x30 pixels, more than the 200"):
        preprocess(Image.new("RGB", (20, 30)), AS_IT_IS)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert preprocess(Image.new("RGB", (20, 30)), AS_IT_IS).shape == (1, 3, 30, 20)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((8, 8, 3), np.float32), "got float32; scale it to 0..255 and convert it to uint8; what is preprocessed already"),
        (torch.zeros(3, 8, 8, dtype=torch.bfloat16), "got bfloat16; scale it"),
        (np.zeros((8, 8), bool), "got bool; a mask is no picture"),
        (torch.zeros(3, 8, 8, dtype=torch.int64), "got int64; convert it to uint8 if"),
        (np.zeros((8, 8, 2), np.uint8), r"expected shape \(H, W, C\) or \(C, H, W\) with 1 or 3 or 4 channels, got \(8, 8, 2\)"),
        (np.zeros(8, np.uint8), r"got \(8,\)"),
        (np.zeros((2, 2, 8, 8, 3), np.uint8), r"got \(2, 2, 8, 8, 3\)"),
        (np.zeros((3, 8, 4), np.uint8), r"both the first and the last axis of shape \(3, 8, 4\)"),
        (np.zeros((0, 8, 3), np.uint8), "it has no pixels"),
        (Image.new("F", (8, 8)), "its pixels have 32 bits .mode F."),
        (Image.new("I", (8, 8)), "its pixels have 32 bits .mode I."),
        (Image.new("RGB", (0, 8)), "it has no pixels"),
        (Image.new("La", (8, 8)), "conversion from La"),
        (None, "expected a path, a PIL image, or a uint8 array or tensor, got NoneType"),
        ([[1, 2], [3, 4]], r"images\[0\]: .*got list"),
        ([], "the list is empty"),
    ],
)
def test_what_is_no_picture_is_refused_with_the_reason(image: object, message: str) -> None:
    with pytest.raises(BadImage, match=message):
        preprocess(image, RECORD)


def test_images_of_other_sizes_can_not_share_a_batch_without_a_crop() -> None:
    record = Preprocessing(16, None, "bilinear", MEAN, STD)
    with pytest.raises(BadImage, match=r"images\[0\] is 16x20 and images\[2\] is 16x16 pixels: this record does not crop"):
        preprocess([noise(20, 16, 3), noise(20, 16, 3), noise(50, 50, 3)], record)


def test_a_pil_image_is_named_by_its_file(tmp_path: Path) -> None:
    path = written(tmp_path / "a.png", saved(Image.fromarray(noise(40, 30, 3)), tmp_path / "b.png").read_bytes()[:500])
    with Image.open(path) as image, pytest.raises(BadImage, match=r"a\.png: Pillow can't decode it"):
        preprocess([image], RECORD)


def test_open_image_returns_the_picture_whole(tmp_path: Path) -> None:
    image = Image.fromarray(noise(40, 30, 3))
    assert np.array_equal(open_image(saved(image, tmp_path / "a.png")), image)
    assert np.array_equal(open_image(image, "L"), image.convert("L"))
