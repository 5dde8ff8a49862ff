"""Image to tensor, exactly as a checkpoint's record says.

On opaque 8-bit pictures the numbers equal those of torchvision's ``weights.transforms()`` on ``Image.open(path).convert("RGB")``
bit for bit. What that pipeline leaves open or gets wrong is decided here, once, in `open_image`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from zoo.images.reading import TOO_LARGE, BadImage, opened_file

if TYPE_CHECKING:
    from PIL.Image import Image

    from weights.record import Preprocessing

PICTURE = (1, 3, 4)
"""Channels of an array that is a picture: grey, RGB or RGBA."""
ORIENTATION = 0x0112
UPRIGHT = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90"}
"""EXIF orientation -> the PIL transposition that undoes it."""
TELL_ORIENTATION = ("exif", "xmp", "XML:com.adobe.xmp", "Raw profile type exif")
"""What Pillow reads the orientation from, of a picture that is in memory."""


def preprocess(images: Any, preprocessing: Preprocessing) -> Tensor:
    """Turn images into the batch that a checkpoint was measured with.

    Args:
        images: a path, a PIL image, a numpy array or torch tensor of uint8 or uint16, (H, W), (H, W, C) or (C, H, W), or a list or
            tuple of these; an array of four axes is a batch. C is 1, 3 or 4 (RGBA), in RGB order whatever the record's order is;
            only a record of another number of channels wants exactly that number. `open_image` says how each becomes 8-bit RGB.
        preprocessing: the record: shorter side, or with `squash` both, resized by PIL (antialiased), square centre crop (black where
            the picture is smaller), channel order, then (x / 255 - mean) / std with `mean` and `std` in the tensor's channel order.

    Returns:
        float32 (B, C, H, W) on the CPU, contiguous; B is 1 for a single image.

    Raises:
        BadImage: an image can't be read, is ambiguous or too large, the list is empty, or its images end in different sizes.
    """
    named = named_images(images)
    if not named:
        raise BadImage("there are no images to preprocess: the list is empty")
    return preprocess_named(named, preprocessing)


def is_many(images: Any) -> bool:
    """Tell a list, a tuple or an array of four axes from a single image."""
    return isinstance(images, (list, tuple)) or (isinstance(images, (np.ndarray, Tensor)) and images.ndim == 4)


def named_images(images: Any) -> list[tuple[str, Any]]:
    """Give every image the name that messages use: a file's path, otherwise its place."""
    if not is_many(images):
        return [(_name(images, "the image"), images)]
    return [(_name(image, f"images[{i}]"), image) for i, image in enumerate(images)]


def preprocess_named(images: Sequence[tuple[str, Any]], preprocessing: Preprocessing) -> Tensor:
    """Do what `preprocess` does, for one or more images that have their names."""
    return preprocess_and_measure(images, preprocessing)[0]


def preprocess_and_measure(images: Sequence[tuple[str, Any]], preprocessing: Preprocessing) -> tuple[Tensor, list[tuple[int, int]]]:
    """Do what `preprocess_named` does, and tell width and height of each upright picture; each file is opened once."""
    pixels, sizes = zip(*(_pixels_and_size(image, preprocessing, name) for name, image in images), strict=True)
    (height, width, _), first = pixels[0].shape, images[0][0]
    for (name, _), array in zip(images, pixels, strict=True):
        if array.shape != pixels[0].shape:
            raise BadImage(
                f"images of one batch must end in the same size, but {first} is {width}x{height} and {name} is "
                f"{array.shape[1]}x{array.shape[0]} pixels: this record does not crop, so crop them alike or give them one at a time"
            )
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    if preprocessing.channel_order == "bgr":
        x = x.flip(1)
    x = x.to(torch.float32, memory_format=torch.contiguous_format)
    mean, std = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    return x.div_(255).sub_(mean).div_(std), list(sizes)


def open_image(source: Any, mode: str = "RGB", name: str | None = None) -> Image:
    """Read one image as the upright 8-bit picture that a network sees.

    EXIF orientation is applied. Transparent pixels are laid on white; torchvision's pipeline shows the colour hidden behind them.
    16-bit greyscale and uint16 arrays are divided by 257, so that 65535 is white; Pillow's own conversion would clip at 255.
    Of a file with several frames the first counts, of a PIL image the current one. ICC profiles are ignored, as in torchvision's
    pipeline. CMYK, palettes and the rest become RGB as Pillow converts them.

    Args:
        source: a path, a PIL image, or an array as `preprocess` takes it.
        mode: "RGB" or "L".
        name: what messages call it.

    Returns:
        A PIL image of that mode.

    Raises:
        BadImage: the file is missing, a folder, a pipe, empty, cut off or of no kind in `zoo.images.kinds`; it has more than
            ``PIL.Image.MAX_IMAGE_PIXELS`` pixels; its pixels have 32 bits; or an array's type, shape or layout is not a picture's.
    """
    from PIL import Image

    name = name or _name(source, "the image")
    if isinstance(source, (str, os.PathLike)):
        with opened_file(Path(source), name) as image:
            return _picture(image, mode, name)
    if isinstance(source, (np.ndarray, Tensor)):
        source = _image(_channels_last(_array(source, name), PICTURE, name))
    if not isinstance(source, Image.Image):
        raise BadImage(f"{name}: expected a path, a PIL image, or a uint8 array or tensor, got {type(source).__name__}")
    return _picture(source, mode, name)


def _name(image: Any, otherwise: str) -> str:
    if isinstance(image, (str, os.PathLike)):
        return os.fsdecode(image)
    return getattr(image, "filename", None) or otherwise  # PIL remembers where an image comes from


def _picture(image: Image, mode: str, name: str) -> Image:
    from PIL.Image import Transpose

    _check_size(*image.size, name)
    try:
        image.load()
        picture = _eight_bit(image, mode, name)
        turn = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
        if not turn:
            return picture
        upright = picture.transpose(Transpose[turn])
        upright.info = {key: value for key, value in upright.info.items() if key not in TELL_ORIENTATION}  # or it would be turned again
        return upright
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # a decoder raises whatever it stumbles over: OSError, SyntaxError, struct.error, IndexError
        raise BadImage(
            f"{name}: Pillow can't decode it ({str(error) or type(error).__name__}); it is cut off or damaged: get it again"
        ) from error


def _eight_bit(image: Image, mode: str, name: str) -> Image:
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):  # the latter is how Pillow holds a 16-bit PGM
        image = _image(_array(np.asarray(image).astype(np.uint16), name)[..., None])
    elif image.mode in ("I", "F"):
        raise BadImage(f"{name}: its pixels have 32 bits (mode {image.mode}) and no known black and white; scale them to a uint8 array")
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def _check_size(width: int, height: int, name: str, doing: str = "has") -> None:
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS  # the user's switch; None takes the limit away
    if not width * height:
        raise BadImage(f"{name}: it has no pixels ({width}x{height}); check where it comes from")
    if limit is not None and width * height > limit:
        raise BadImage(f"{name}: it {doing} {width}x{height} pixels, more than the {limit:,} that Pillow finds safe. {TOO_LARGE}")


def pixels_of(source: Any, preprocessing: Preprocessing, name: str) -> np.ndarray:
    """Read, resize and crop one image: uint8 (H, W, C)."""
    return _pixels_and_size(source, preprocessing, name)[0]


def _pixels_and_size(source: Any, preprocessing: Preprocessing, name: str) -> tuple[np.ndarray, tuple[int, int]]:
    channels = len(preprocessing.mean)
    if channels in (1, 3):
        planes = [open_image(source, "RGB" if channels == 3 else "L", name)]
    elif isinstance(source, (np.ndarray, Tensor)):
        array = _channels_last(_array(source, name), (channels,), name)
        planes = [_image(array[..., channel, None]) for channel in range(channels)]
    else:
        raise BadImage(
            f"{name}: the network takes images of {channels} channels, which only a uint8 array ({channels}, H, W) or (H, W, {channels}) "
            f"holds; got {type(source).__name__}"
        )
    cropped = np.dstack([np.asarray(_crop(_resize(plane, preprocessing, name), preprocessing.crop)) for plane in planes])
    return cropped, planes[0].size


def _resize(image: Image, preprocessing: Preprocessing, name: str) -> Image:
    from PIL.Image import Resampling

    size = _resized(image.size, preprocessing)
    if size == image.size:
        return image
    _check_size(*size, name, "is so narrow that resizing its shorter side makes")
    return image.resize(size, Resampling[preprocessing.interpolation.upper()])


def _resized(size: tuple[int, int], preprocessing: Preprocessing) -> tuple[int, int]:
    if preprocessing.resize is None:
        return size
    short, long = preprocessing.resize, int(preprocessing.resize * max(size) / min(size))
    return (short, short) if preprocessing.squash else (short, long) if size[0] <= size[1] else (long, short)


def _crop(image: Image, side: int | None) -> Image:
    if side is None or image.size == (side, side):
        return image
    left, top = _corner(image.size, side)
    return image.crop((left, top, left + side, top + side))


def _corner(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Return torchvision's offsets: half to even where it cuts, and the odd pixel to the right and bottom where it pads."""
    left, top = (round((length - side) / 2) if length >= side else -((side - length) // 2) for length in size)
    return left, top


def seen_box(size: tuple[int, int], preprocessing: Preprocessing) -> tuple[float, float, float, float]:
    """Tell which part of a picture a network sees after `preprocess`.

    Args:
        size: width and height of the upright picture in pixels.
        preprocessing: the record.

    Returns:
        Left, top, right and bottom in the picture's pixels, from its upper left corner; outside of the picture where the crop pads.
    """
    width, height = _resized(size, preprocessing)
    left, top, right, bottom = 0, 0, width, height
    if preprocessing.crop is not None:
        left, top = _corner((width, height), preprocessing.crop)
        right, bottom = left + preprocessing.crop, top + preprocessing.crop
    across, down = size[0] / width, size[1] / height
    return left * across, top * down, right * across, bottom * down


def picture_size(source: Any, name: str | None = None) -> tuple[int, int]:
    """Return width and height of the upright picture that `open_image` gives, of a file by its header alone.

    Raises:
        BadImage: as `open_image`, as far as the header tells.
    """
    from PIL import Image

    name = name or _name(source, "the image")
    if isinstance(source, (str, os.PathLike)):
        with opened_file(Path(source), name) as image:
            return _upright(image)
    if isinstance(source, Image.Image):
        return _upright(source)
    shape = tuple(source.shape)
    if len(shape) == 2:
        return shape[1], shape[0]
    first = shape[0] < shape[2] and shape[2] not in PICTURE
    return (shape[2], shape[1]) if first else (shape[1], shape[0])


def _upright(image: Image) -> tuple[int, int]:
    turned = image.getexif().get(ORIENTATION, 1) >= 5
    return (image.height, image.width) if turned else image.size


def _array(source: np.ndarray | Tensor, name: str) -> np.ndarray:
    """Return the pixels as uint8."""
    dtype = source.dtype.name if isinstance(source, np.ndarray) else str(source.dtype).removeprefix("torch.")
    if dtype not in ("uint8", "uint16"):
        if "float" in dtype:
            todo = "scale it to 0..255 and convert it to uint8; what is preprocessed already goes to the network as a tensor (B, C, H, W)"
        elif dtype == "bool":
            todo = "a mask is no picture; mask * np.uint8(255) makes one"
        else:
            todo = "convert it to uint8 if its values are 0..255"
        raise BadImage(f"{name}: expected an array of uint8 (0..255) or uint16 (0..65535), got {dtype}; {todo}")
    array = source if isinstance(source, np.ndarray) else source.detach().cpu().numpy()
    return array if dtype == "uint8" else ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _channels_last(array: np.ndarray, channels: tuple[int, ...], name: str) -> np.ndarray:
    shape, wanted = array.shape, " or ".join(map(str, channels))
    if array.ndim == 2 and 1 in channels:
        return array[..., None]
    if array.ndim != 3 or not {shape[0], shape[2]} & set(channels):
        raise BadImage(f"{name}: expected shape (H, W, C) or (C, H, W) with {wanted} channels, got {shape}")
    if shape[0] in channels and shape[2] in channels:
        todo = "say which by giving a PIL image: PIL.Image.fromarray(x), where x is (H, W, C)"
        raise BadImage(f"{name}: both the first and the last axis of shape {shape} could be the channels; {todo}")
    return array if shape[2] in channels else array.transpose(1, 2, 0)


def _image(array: np.ndarray) -> Image:
    """Wrap uint8 (H, W, C) of 1, 3 or 4 channels."""
    from PIL import Image

    return Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[2] == 1 else array))


def at_size(preprocessing: Preprocessing, side: int) -> Preprocessing:
    """Let a record's preprocessing end in images of another size, the shorter edge scaled along; `side` is in pixels."""
    crop = preprocessing.crop or preprocessing.resize or side
    resize = preprocessing.resize or crop
    return replace(preprocessing, crop=side, resize=max(side, round(resize * side / crop)))


def with_channels(preprocessing: Preprocessing, channels: int) -> Preprocessing:
    """Give a record's mean and std another number of channels: their average for one, their cyclic repetition for more."""

    def spread(values: tuple[float, ...]) -> tuple[float, ...]:
        return (sum(values) / len(values),) if channels == 1 else tuple(values[i % len(values)] for i in range(channels))

    return replace(preprocessing, mean=spread(preprocessing.mean), std=spread(preprocessing.std))
