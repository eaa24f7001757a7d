"""Caltech101 (Fei-Fei et al. 2004) from torchvision's folder `caltech101`.

The category BACKGROUND_Google is not an object and is dropped. The 80/20 split is made over all 101 classes; the
one that is left over when they are cut into tasks of ten is dropped afterwards.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from confitune.errors import DataError
from confitune.tasks.datasets.dataset import DatasetInfo, ImageSet, Remote, locate, unpack
from confitune.tasks.datasets.folder import folders_in, images_below
from confitune.tasks.splits import stratified_split
from confitune.tasks.store import ImageFile

FOLDER, CATEGORIES = "caltech101", "101_ObjectCategories"
ARCHIVE = Remote(
    "https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip", "3138e1922a9193bfa496528edbbc45d0"
)
SOURCE = (
    "downloaded (137 MB), or unpack 101_ObjectCategories.tar.gz from "
    "https://data.caltech.edu/records/mzrjq-6wc02 so that the data folder holds caltech101/101_ObjectCategories/"
)
CALTECH101 = DatasetInfo.of_paper("caltech101", tasks=10, classes_per_task=10, batch_size=32, epochs=20)


def read_caltech101(data_dir: Path, download: bool) -> ImageSet:
    """All images, category by category in sorted order, each category's files sorted."""

    def fetch(root: Path) -> None:
        (root / FOLDER).mkdir(exist_ok=True)
        with TemporaryDirectory(prefix=f".{FOLDER}-", dir=root) as scratch:  # an archive of archives
            ARCHIVE.fetch_folder(Path(scratch) / "caltech-101")
            unpack(Path(scratch) / f"caltech-101/{CATEGORIES}.tar.gz", root / FOLDER / CATEGORIES)

    folder = locate("caltech101", data_dir, FOLDER, [CATEGORIES], SOURCE, fetch if download else None)
    if (folder / "caltech-101").exists():  # torchvision removes it when everything has been unpacked
        raise DataError(f"{folder} was not unpacked to the end; remove it and get it again")
    top = folder / CATEGORIES
    classes = [name for name in folders_in(top) if name != "BACKGROUND_Google"]
    found = [images_below(top / category) for category in classes]
    if not classes or not all(found):
        raise DataError(f"{top} holds no category folders, or one without images; unpack the archive again")
    files = tuple(ImageFile(path.relative_to(folder).as_posix()) for paths in found for path in paths)
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), [len(paths) for paths in found])
    train, test = stratified_split(labels, classes)
    return ImageSet(tuple(classes), labels, train, test, folder=folder, files=files)
