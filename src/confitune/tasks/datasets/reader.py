"""The one place that knows which reader belongs to which dataset name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from confitune.tasks.datasets.caltech101 import read_caltech101
from confitune.tasks.datasets.cifar100 import read_cifar100
from confitune.tasks.datasets.cub200 import read_cub200
from confitune.tasks.datasets.digits import read_digits
from confitune.tasks.datasets.flowers102 import read_flowers102
from confitune.tasks.datasets.folder import read_folder
from confitune.tasks.datasets.image_set import ImageSet
from confitune.tasks.datasets.photos import read_photos

READERS: Mapping[str, Callable[[Path, bool], ImageSet]] = {
    "cifar100": read_cifar100,
    "cub200": read_cub200,
    "caltech101": read_caltech101,
    "flowers102": read_flowers102,
    "photos": lambda data_dir, download: read_photos(),
    "digits": lambda data_dir, download: read_digits(),
    "folder": lambda path, download: read_folder(path),
}


def read_dataset(name: str, data_dir: Path, download: bool) -> ImageSet:
    """Everything about the dataset `name` (a key of `DATASETS`) but the decoding of its image files."""
    return READERS[name](data_dir, download)
