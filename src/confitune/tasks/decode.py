"""From an image file to the bytes that are stored: RGB of eight bits, upright, 224 x 224.

There are two pipelines. `clean` is the usual Resize(256), CenterCrop(224). `published` is what the published code of
the paper feeds the network: there the normalised float image of Caltech101 and Flowers102 is turned back into bytes,
which wraps most values around, and goes through the clean pipeline a second time; CUB200 is cropped to its bounding
boxes. The paper's numbers come from it, so it is kept.
"""

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError
from torchvision.transforms import functional

from confitune.errors import DataError, UnreadableImageError

Progress = Callable[[str, int, int], None]
"""Called as progress(what, done, total), e.g. progress("decoding flowers102", 256, 8189)."""
Box = tuple[int, int, int, int]
RESIZE, CROP = 256, 224
MOST_STRETCHED = 100  # long side to short side: the short side becomes 256 pixels, the long one in proportion
MOST_PIXELS = 80_000_000  # 8,900 pixels square; decoding takes up to 12 bytes each (a progressive JPEG for print)
MOST_SCANS = 50  # of a JPEG, which usually has 10: each goes over all pixels again and may take two dozen bytes
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]", re.DOTALL)  # of a JPEG's part with a length, or of its end
_STRIP = 64  # rows that are converted at once
_TURNS: Mapping[object, Image.Transpose] = {  # by EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # not all that Pillow knows: EPS is a program
Image.init()  # Pillow looks for formats that are named only among those it has loaded
IMAGE_ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


@dataclass(frozen=True)
class Pipeline:
    """From an RGB image to stored bytes [3, 224, 224]."""

    name: str = "clean"  # or "published"
    wrap: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # mean and std of the double transform
    use_box: bool = False  # crop to the image's bounding box first

    def __call__(self, image: Image.Image, box: Box | None = None) -> NDArray[np.uint8]:
        """The stored bytes of one image; `box` is (left, top, right, bottom) and clipped to the image."""
        if self.use_box and box is not None:
            left, top, right, bottom = box
            image = image.crop((max(left, 0), max(top, 0), min(right, image.width), min(bottom, image.height)))
        image = _resize_and_crop(image)
        if self.wrap is not None:
            image = _resize_and_crop(image.point(byte_wrap_table(*self.wrap)))
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def _resize_and_crop(image: Image.Image) -> Image.Image:
    """Short side to 256 pixels (bilinear; Pillow always antialiases), then the centre 224 x 224."""
    _require_broad(image)
    return functional.center_crop(functional.resize(image, RESIZE), CROP)  # type: ignore[no-any-return]


def _require_broad(image: Image.Image) -> None:
    if max(image.size) > MOST_STRETCHED * min(image.size):
        raise DataError(
            f"it is too thin: {image.width} x {image.height} pixels, more than {MOST_STRETCHED} to 1; crop it"
        )


@cache
def byte_wrap_table(mean: tuple[float, ...], std: tuple[float, ...]) -> list[int]:
    """What ToTensor, Normalize and ToPILImage together make of each byte: 256 entries for each channel in turn.

    A byte has 256 values, so one table per channel replaces the arithmetic on every pixel. The arithmetic is done in
    float32 and in torchvision's order, since one rounding more or less moves a value across a truncation. It goes
    through int32 because casting a negative float to uint8 is undefined and differs between devices.

    >>> table = byte_wrap_table((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    >>> table[0], table[255]  # red: -2.117904 * 255 = -540.07 -> -540 + 768; 2.248908 * 255 = 573.47 -> 573 - 512
    (228, 61)
    """
    levels = torch.arange(256, dtype=torch.uint8).to(torch.float32).div(255)
    table: list[int] = []
    for channel_mean, channel_std in zip(mean, std, strict=True):
        normalised = (levels - torch.tensor(channel_mean)) / torch.tensor(channel_std)
        table += normalised.mul(255).to(torch.int32).remainder(256).tolist()
    return table


def is_image_name(name: str) -> bool:
    """Whether a file's name looks like an image's; capitals do not matter, hidden files do not count.

    >>> is_image_name("IMG_1.JPG"), is_image_name("Thumbs.db"), is_image_name("._IMG_1.jpg")
    (True, False, False)
    """
    return not name.startswith(".") and Path(name).suffix.lower() in IMAGE_ENDINGS


def open_rgb(source: Path | IO[bytes], *, name: str | None = None, most_pixels: int = MOST_PIXELS) -> Image.Image:
    """Decode an image; an unreadable one raises `UnreadableImageError` with its name.

    Args:
        source: a file's path, or its bytes as an open file.
        name: how to call it in errors; default: its path.
        most_pixels: a larger one is refused before it is decoded: a file of a few kilobytes can hold gigabytes.
    """
    name = name or (str(source) if isinstance(source, Path) else "given")
    try:
        with Image.open(source, formats=FORMATS) as image:
            if image.width * image.height > most_pixels:
                raise DataError(
                    f"it has {image.width} x {image.height} pixels, more than {most_pixels / 1e6:,.0f} million"
                )
            _require_broad(image)
            if image.format in ("JPEG", "MPO"):
                _require_few_scans(image)
            image.load()
            way, rgb = _way_up(image), _in_colour(image)
        del image  # else there would be three of them while it is turned
        return rgb if way is None else rgb.transpose(way)
    except UnidentifiedImageError as error:  # its message names a Python object
        raise UnreadableImageError(f"cannot read the image {name}: it is no image, or of an unknown kind") from error
    except Exception as error:  # Pillow's decoders raise almost anything on broken input
        why = getattr(error, "strerror", None) or error or type(error).__name__
        raise UnreadableImageError(f"cannot read the image {name}: {why}") from error


def pixels_of(data: bytes) -> int:
    """How many pixels an image file says that it has, without decoding them; 0 for what is no image."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.width * image.height
    except Exception:  # decoding it will say what is wrong
        return 0


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright RGB: EXIF orientation applied, 16 bits scaled to 8, transparency laid on white.

    >>> to_rgb(Image.new("LA", (1, 1), (0, 0))).getpixel((0, 0))  # fully transparent
    (255, 255, 255)
    """
    image.load()
    way, rgb = _way_up(image), _in_colour(image)
    return rgb if way is None else rgb.transpose(way)


def _require_few_scans(image: ImageFile.ImageFile) -> None:
    """Refuse a JPEG of endless scans; a thumbnail inside it, and what telephones append to it, are not looked at."""
    file = image.fp
    assert file is not None  # nothing was decoded yet
    place = file.tell()
    file.seek(0)
    data = file.read()
    file.seek(place)
    scans, start = 0, 2
    while (marker := _MARKER.search(data, start)) and marker[0] != b"\xff\xd9":
        scans += marker[0] == b"\xff\xda"
        start = marker.end() + max(int.from_bytes(data[marker.end() : marker.end() + 2], "big"), 2)
    if scans > MOST_SCANS:
        raise DataError(f"it is coded in {scans} scans, more than {MOST_SCANS}; save it again")


def _way_up(image: Image.Image) -> Image.Transpose | None:
    return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation))


def _in_colour(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise DataError("its values are floats, and nothing says which of them is white; save it with 8 or 16 bits")
    deep = image.mode.startswith("I")
    if not (deep or image.has_transparency_data):
        return image.convert("RGB")
    rgb = Image.new("RGB", image.size)
    for top in range(0, image.height, _STRIP):  # a whole image of every step on the way would take a lot of memory
        strip = image.crop((0, top, image.width, min(top + _STRIP, image.height)))
        rgb.paste(_eight_bits(strip) if deep else _on_white(strip), (0, top))
    return rgb


def _eight_bits(image: Image.Image) -> Image.Image:
    # Pillow's own conversion clips at 255, which turns a 16-bit photograph white.
    levels = np.clip(np.asarray(image), 0, 65535).astype(np.uint32)
    return Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
