"""`digits`: the 1,797 scanned digits of 8 x 8 pixels that come with scikit-learn."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits

from confitune.tasks.datasets.image_set import ImageSet
from confitune.tasks.splits import stratified_split

SIDE = 64


def read_digits() -> ImageSet:
    """Stored at 8 x 8, enlarged to 64 x 64 on the fly; levels 0..16 spread over 0..255; 80/20 split."""
    data = load_digits()
    grey = np.rint(data.images * (255 / 16)).astype(np.uint8)
    labels = data.target.astype(np.int64)
    classes = tuple(str(digit) for digit in range(10))
    train, test = stratified_split(labels, classes)
    pixels = torch.from_numpy(grey)[:, None].repeat(1, 3, 1, 1)
    return ImageSet(classes, labels, train, test, pixels=pixels, resize=SIDE)
