"""Flowers102 (Nilsback and Zisserman 2008) from torchvision's folder `flowers-102`.

The paper splits all 8,189 images 80/20; the official split in `setid.mat`, with only ten training images a class,
is not used. 102 classes in tasks of ten leave two unused.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from scipy.io import loadmat
from torchvision.datasets import Flowers102

from confitune.tasks.datasets.fetch import Remote, fetch_file, fetch_folder
from confitune.tasks.datasets.image_set import ImageSet
from confitune.tasks.datasets.locate import locate
from confitune.tasks.errors import DataError
from confitune.tasks.splits import stratified_split
from confitune.tasks.store import ImageFile

FOLDER = "flowers-102"
_SOURCE = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102"
IMAGES = Remote(f"{_SOURCE}/102flowers.tgz", "52808999861908f626f3c1f4e79d11fa")
LABELS = Remote(f"{_SOURCE}/imagelabels.mat", "e0620be6f572b9609742df49c70aed4d")


def read_flowers102(data_dir: Path, download: bool) -> ImageSet:
    """All images in the order of their numbers, which is the sorted order of their files."""

    def fetch(root: Path) -> None:
        (root / FOLDER).mkdir(exist_ok=True)
        if not (root / FOLDER / "jpg").exists():
            fetch_folder(IMAGES, root / FOLDER / "jpg")
        fetch_file(LABELS, root / FOLDER)

    folder = locate("flowers102", data_dir, FOLDER, ["jpg", "imagelabels.mat"], fetch if download else None)
    try:
        numbers = loadmat(folder / "imagelabels.mat", squeeze_me=True)["labels"].ravel().astype(np.int64)
    except (OSError, KeyError, ValueError, TypeError, NotImplementedError) as error:
        raise DataError(
            f"cannot read the labels {folder / 'imagelabels.mat'}: {error}; fetch the file again"
        ) from error
    names = [f"image_{number:05d}.jpg" for number in range(1, len(numbers) + 1)]
    missing = sorted(set(names) - set(os.listdir(folder / "jpg")))
    if missing:
        raise DataError(
            f"{folder / 'jpg'} lacks {len(missing)} of {len(names)} images, the first is {missing[0]}; "
            "unpack 102flowers.tgz again"
        )
    species, labels = np.unique(numbers, return_inverse=True)
    known = Flowers102.classes
    classes = tuple(known[number - 1] if 1 <= number <= len(known) else str(number) for number in species)
    train, test = stratified_split(labels, classes)
    return ImageSet(
        classes, labels.astype(np.int64), train, test, folder=folder, files=tuple(ImageFile(f"jpg/{n}") for n in names)
    )
