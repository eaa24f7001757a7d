"""Any image file as an RGB image of eight bits, upright."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from confitune.tasks.errors import DataError, UnreadableImageError

MOST_PIXELS = 178_956_970  # as Pillow, which only warns from half of it on: a photograph of 13,377 pixels square
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # not all that Pillow knows: EPS is a program
Image.init()  # Pillow looks for formats that are named only among those it has loaded
IMAGE_ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


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
            image.load()
            return to_rgb(image)
    except UnidentifiedImageError as error:  # its message names a Python object
        raise UnreadableImageError(f"cannot read the image {name}: it is no image, or of an unknown kind") from error
    except Exception as error:  # Pillow's decoders raise almost anything on broken input
        raise UnreadableImageError(f"cannot read the image {name}: {error or type(error).__name__}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright RGB: EXIF orientation applied, 16 bits scaled to 8, transparency laid on white.

    >>> to_rgb(Image.new("LA", (1, 1), (0, 0))).getpixel((0, 0))  # fully transparent
    (255, 255, 255)
    """
    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise DataError("its values are floats, and nothing says which of them is white; save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        # Pillow's own conversion clips at 255, which turns a 16-bit photograph white.
        levels = np.clip(np.asarray(image), 0, 65535).astype(np.uint32)
        image = Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8))
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return image.convert("RGB")
