"""Flowers102 (Nilsback and Zisserman 2008) from torchvision's folder `flowers-102`.

The paper splits all 8,189 images 80/20; the official split in `setid.mat`, with only ten training images a class,
is not used. 102 classes in tasks of ten leave two unused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torchvision.datasets import Flowers102

from confitune.errors import DataError
from confitune.tasks.datasets.dataset import DatasetInfo, ImageSet, Remote, locate
from confitune.tasks.splits import stratified_split
from confitune.tasks.store import ImageFile

FOLDER = "flowers-102"
_SITE = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102"
IMAGES = Remote(f"{_SITE}/102flowers.tgz", "52808999861908f626f3c1f4e79d11fa")
LABELS = Remote(f"{_SITE}/imagelabels.mat", "e0620be6f572b9609742df49c70aed4d")
SOURCE = (
    f"downloaded (345 MB), or get 102flowers.tgz and imagelabels.mat from {_SITE}/ so that the data folder holds "
    "flowers-102/jpg/ and flowers-102/imagelabels.mat"
)
FLOWERS102 = DatasetInfo.of_paper("flowers102", tasks=10, classes_per_task=10, batch_size=32, epochs=10)


def read_flowers102(data_dir: Path, download: bool) -> ImageSet:
    """All images in the order of their numbers, which is the sorted order of their files."""
    from scipy.io import loadmat

    def fetch(root: Path) -> None:
        (root / FOLDER).mkdir(exist_ok=True)
        if not (root / FOLDER / "jpg").exists():
            IMAGES.fetch_folder(root / FOLDER / "jpg")
        LABELS.fetch(root / FOLDER)

    folder = locate("flowers102", data_dir, FOLDER, ["jpg", "imagelabels.mat"], SOURCE, fetch if download else None)
    try:
        numbers = loadmat(folder / "imagelabels.mat", squeeze_me=True)["labels"].ravel().astype(np.int64)
    except (OSError, KeyError, ValueError, TypeError, NotImplementedError) as error:
        raise DataError(
            f"cannot read the labels {folder / 'imagelabels.mat'}: {error}; fetch the file again"
        ) from error
    names = [f"image_{number:05d}.jpg" for number in range(1, len(numbers) + 1)]
    species, labels = np.unique(numbers, return_inverse=True)
    known = Flowers102.classes
    classes = tuple(known[number - 1] if 1 <= number <= len(known) else str(number) for number in species)
    train, test = stratified_split(labels, classes)
    return ImageSet(
        classes, labels.astype(np.int64), train, test, folder=folder, files=tuple(ImageFile(f"jpg/{n}") for n in names)
    )
