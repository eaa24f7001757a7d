"""The two ways in which a photograph becomes the bytes that are stored.

`clean` is the usual Resize(256), CenterCrop(224). `published` is what the published code of the paper feeds the
network: there the normalised float image of Caltech101 and Flowers102 is turned back into bytes, which wraps most
values around, and goes through the clean pipeline a second time; CUB200 is cropped to its bounding boxes. The
paper's numbers come from it, so it is kept; the order of the methods is the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import functional

from confitune.tasks.errors import DataError

Box = tuple[int, int, int, int]
RESIZE, CROP = 256, 224
MOST_STRETCHED = 100  # long side to short side: the short side becomes 256 pixels, the long one in proportion


@dataclass(frozen=True)
class Pipeline:
    """From an RGB image to stored bytes [3, 224, 224].

    Args:
        name: "clean" or "published".
        wrap: (mean, std) of the double transform, None to leave it out.
        use_box: crop to the image's bounding box first.
    """

    name: str = "clean"
    wrap: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    use_box: bool = False

    def __call__(self, image: Image.Image, box: Box | None = None) -> NDArray[np.uint8]:
        """The stored bytes of one image; `box` is (left, top, right, bottom) and clipped to the image."""
        if self.use_box and box is not None:
            left, top, right, bottom = box
            image = image.crop((max(left, 0), max(top, 0), min(right, image.width), min(bottom, image.height)))
        image = resize_and_crop(image)
        if self._table is not None:
            image = resize_and_crop(image.point(self._table))
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))

    @cached_property
    def _table(self) -> list[int] | None:
        return None if self.wrap is None else byte_wrap_table(*self.wrap)

    def describe(self) -> dict[str, Any]:
        """Everything that changes the bytes, for the store's key."""
        return {"resize": RESIZE, "crop": CROP, "wrap": self.wrap, "use_box": self.use_box}


def resize_and_crop(image: Image.Image) -> Image.Image:
    """Short side to 256 pixels (bilinear; Pillow always antialiases), then the centre 224 x 224."""
    if max(image.size) > MOST_STRETCHED * min(image.size):
        raise DataError(
            f"it is too thin: {image.width} x {image.height} pixels, more than {MOST_STRETCHED} to 1; crop it"
        )
    return functional.center_crop(functional.resize(image, RESIZE), CROP)  # type: ignore[no-any-return]


def byte_wrap_table(mean: Sequence[float], std: Sequence[float]) -> list[int]:
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
