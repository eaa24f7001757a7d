"""From stored pixels to network input: resize, crop, normalise, on whatever device the pixels are.

Images are stored as bytes (see `store.py`); this is the last step, done batch by batch. Sets of small images
(CIFAR100, digits) are stored at their own size and enlarged here, which keeps the store fifty times smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from confitune.tasks.errors import DataError
from confitune.tasks.pipelines import CROP

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocess:
    """How stored pixels become network input.

    Args:
        mean: per channel, of values scaled to [0, 1]; use the backbone's own.
        std: per channel, likewise.
        resize: resize the short side to this many pixels (bilinear, antialiased); None keeps the stored size.
        crop: then cut this many pixels square from the centre; None keeps everything.

    >>> grey = torch.full((1, 3, 8, 8), 51, dtype=torch.uint8)  # 51 / 255 = 0.2
    >>> ready = Preprocess(mean=(0.1,) * 3, std=(0.5,) * 3, resize=64)(grey)  # (0.2 - 0.1) / 0.5
    >>> list(ready.shape), round(ready.mean().item(), 4)
    ([1, 3, 64, 64], 0.2)
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: int | None = None
    crop: int | None = None

    @classmethod
    def of_cut(cls, mean: Sequence[float], std: Sequence[float], size: int) -> Preprocess:
        """For images that were cut to `CROP` pixels square: resized where the network takes another size."""
        return cls(tuple(mean), tuple(std), None if size == CROP else size)

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.std) != 3:
            raise DataError(f"mean and std need three values each (red, green, blue): got {self.mean} and {self.std}")
        if min(self.std) <= 0:
            raise DataError(f"std must be positive in every channel: got {self.std}")
        for option, value in (("resize", self.resize), ("crop", self.crop)):
            if value is not None and value < 1:
                raise DataError(f"{option} must be at least one pixel or None: got {value}")

    def __call__(self, pixels: Tensor) -> Tensor:
        """Bytes [N,3,H,W] to normalised float32, channels last; float input is returned as it is.

        Float pixels come from a user's own transform, which has resized and normalised them already.
        """
        if pixels.is_floating_point():
            return pixels
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] != 3:
            raise DataError(
                f"expected uint8 pixels of shape [N, 3, H, W], got {pixels.dtype} {list(pixels.shape)}; "
                "convert the images or normalise them to float yourself"
            )
        values = pixels.to(torch.float32, memory_format=torch.channels_last)
        if self.resize is not None:
            values = _resize_short_side(values, self.resize)
        if self.crop is not None:
            values = _centre_crop(values, self.crop)
        scale, shift = _scale_and_shift(self.mean, self.std, values.device)
        return torch.addcmul(shift, values, scale)


@lru_cache(maxsize=64)  # copied to the device once: a copy for every batch would be slow and cannot be captured
def _scale_and_shift(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(x / 255 - mean) / std as x * scale + shift, shaped to broadcast over images."""
    means, stds = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (mean, std))
    return (1 / (255 * stds)).to(device, torch.float32), (-means / stds).to(device, torch.float32)


def _resize_short_side(values: Tensor, side: int) -> Tensor:
    height, width = values.shape[-2:]
    short, long = min(height, width), max(height, width)
    if short == side:
        return values
    far = int(side * long / short)  # truncated, as torchvision's Resize does
    new_height, new_width = (side, far) if height <= width else (far, side)
    # As Pillow: first along rows, then along columns, rounded to grey levels each time, halves up. An image enlarged
    # here is then the same as one that was enlarged before it was stored.
    for size in ((height, new_width), (new_height, new_width)):
        # Antialiasing changes nothing when enlarging.
        values = functional.interpolate(values, size=size, mode="bilinear", antialias=side < short)
        values = values.add_(0.5).floor_()
    return values


def _centre_crop(values: Tensor, side: int) -> Tensor:
    height, width = values.shape[-2:]
    if min(height, width) < side:
        raise DataError(f"cannot crop {side} x {side} from images of {height} x {width}; set resize to {side} or more")
    top, left = round((height - side) / 2), round((width - side) / 2)
    return values[..., top : top + side, left : left + side]
