"""What every dataset's reader hands over, whatever the files look like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from confitune.tasks.store import ImageFile


@dataclass(frozen=True, eq=False)
class ImageSet:
    """All images of a dataset before they are cut into tasks.

    Args:
        classes: names, in the order of the labels.
        labels: int64 [M], of every image.
        train: int64, positions of the training images, ascending.
        test: int64, positions of the test images, ascending.
        pixels: the images, uint8 [M,3,H,W], where they are small enough to hold in memory; otherwise None.
        folder: where `files` lie.
        files: the images' files, in the order of `labels`, to be decoded into a store.
        resize: to be done on the fly, see `Preprocess`.
        crop: likewise.
    """

    classes: tuple[str, ...]
    labels: NDArray[np.int64]
    train: NDArray[np.int64]
    test: NDArray[np.int64]
    pixels: Tensor | None = None
    folder: Path = Path()
    files: tuple[ImageFile, ...] = ()
    resize: int | None = None
    crop: int | None = None
