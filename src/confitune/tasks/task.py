"""A task: some classes, their training and test images, and how the images become network input.

Tasks of one dataset share one block of pixels (usually a file mapped into memory) and differ in the rows they use,
so twenty tasks cost no more memory than one. Pixels are stored as bytes and resized, cropped and normalised batch by
batch, on whatever device they are. Sets of small images (CIFAR100, digits) are stored at their own size and enlarged
here, which keeps the store fifty times smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.functional import center_crop

from confitune.errors import DataError
from confitune.tasks.decode import CROP

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocess:
    """How stored pixels become network input.

    >>> grey = torch.full((1, 3, 8, 8), 51, dtype=torch.uint8)  # 51 / 255 = 0.2
    >>> ready = Preprocess(mean=(0.1,) * 3, std=(0.5,) * 3, resize=64)(grey)  # (0.2 - 0.1) / 0.5
    >>> list(ready.shape), round(ready.mean().item(), 4)
    ([1, 3, 64, 64], 0.2)
    """

    mean: tuple[float, ...]  # per channel, of values scaled to [0, 1]; use the backbone's own
    std: tuple[float, ...]
    resize: int | None = None  # the short side to so many pixels (bilinear, antialiased); None keeps the stored size
    crop: int | None = None  # then cut so many pixels square from the centre; None keeps everything

    @classmethod
    def of_cut(cls, mean: Sequence[float], std: Sequence[float], size: int) -> Preprocess:
        """For images that were cut to `CROP` pixels square: resized where the network takes another size."""
        return cls(tuple(mean), tuple(std), None if size == CROP else size)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Bytes [N,3,H,W] to normalised float32, channels last; float input is returned as it is.

        Float pixels come from a user's own transform, which has resized and normalised them already.
        """
        if pixels.is_floating_point():
            return pixels
        values = pixels.to(torch.float32, memory_format=torch.channels_last)
        if self.resize is not None:
            values = _resize_short_side(values, self.resize)
        if self.crop is not None:
            values = center_crop(values, [self.crop])
        scale, shift = _scale_and_shift(self.mean, self.std, values.device)
        return torch.addcmul(shift, values, scale)


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """One split (train or test) of one task.

    >>> images = Images(torch.zeros(5, 3, 2, 2, dtype=torch.uint8), torch.tensor([1, 4]), torch.tensor([0, 1]))
    >>> len(images)
    2
    >>> pixels, labels = images.batch(torch.tensor([1]))
    >>> list(pixels.shape), labels.tolist()
    ([1, 3, 2, 2], [1])
    """

    pixels: Tensor  # uint8 [M,3,H,W] (or float, already normalised), possibly a memory map shared by all tasks
    rows: Tensor  # int64 [N], which rows of `pixels` belong to this split
    labels: Tensor  # int64 [N], their classes, counted from 0 within the task

    def __post_init__(self) -> None:
        kind = self.pixels.dtype == torch.uint8 or self.pixels.is_floating_point()
        if not kind or self.pixels.ndim != 4 or self.pixels.shape[1] != 3:
            got = f"{self.pixels.dtype} {list(self.pixels.shape)}"
            raise DataError(f"pixels must be [M, 3, H, W], uint8 or float and already normalised: got {got}")
        for positions in (self.rows, self.labels):
            if positions.dtype != torch.int64 or positions.shape != (len(self.rows),):
                raise DataError("rows and labels must be two lists of one length, of type int64")
        if len(self.rows) and not 0 <= int(self.rows.min()) <= int(self.rows.max()) < len(self.pixels):
            raise DataError(
                f"rows reach from {int(self.rows.min())} to {int(self.rows.max())}, but there are only "
                f"{len(self.pixels)} images"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, positions: Tensor) -> Images:
        """The images at `positions` (int64, 0..len-1), of the same pixels."""
        return Images(self.pixels, self.rows[positions], self.labels[positions])

    def batch(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels and labels at `positions` (int64, 0..len-1), on the devices where `pixels` and `labels` are."""
        positions = positions.to(self.rows.device)
        return self.pixels[self.rows[positions].to(self.pixels.device)], self.labels[positions]


@dataclass(frozen=True, eq=False)
class Task:
    """Classes to tell apart, and the images to learn and to test that with."""

    name: str  # unique in its sequence
    classes: tuple[str, ...]  # a label is an index into them
    train: Images
    test: Images
    preprocess: Preprocess
    groups: tuple[tuple[int, int], ...] = ()  # first and stop of the classes of tasks that were merged into a joint one

    def inputs(self, pixels: Tensor) -> Tensor:
        """What the network takes of stored pixels, channels last."""
        return self.preprocess(pixels).contiguous(memory_format=torch.channels_last)

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise DataError(f"task {self.name!r} has the classes {list(self.classes)}; it needs two or more")
        if len(set(self.classes)) != len(self.classes):
            twice = sorted({c for c in self.classes if self.classes.count(c) > 1})
            raise DataError(f"task {self.name!r} has two classes of the same name: {twice}")
        for split, images in (("training", self.train), ("test", self.test)):
            if len(images) == 0:
                raise DataError(f"task {self.name!r} has no {split} images")
            low, high = int(images.labels.min()), int(images.labels.max())
            if low < 0 or high >= len(self.classes):
                labels = f"its {split} labels reach from {low} to {high}"
                raise DataError(f"task {self.name!r} has {len(self.classes)} classes, but {labels}")


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
