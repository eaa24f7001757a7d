"""CUB200-2011 (Wah et al. 2011) from its archive's own folder `CUB_200_2011`, with the official split.

Nothing downloads it; the archive `CUB_200_2011.tgz`, put into the data folder, is unpacked on first use. Where neither
is there, image files are taken: `cub200/train/CLASS/` and `cub200/test/CLASS/`, which have no bounding boxes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from confitune.errors import DataError
from confitune.tasks.datasets.dataset import DatasetInfo, ImageSet, locate, unpack
from confitune.tasks.datasets.folder import read_folder
from confitune.tasks.decode import Box
from confitune.tasks.store import ImageFile

FOLDER = "CUB_200_2011"
ARCHIVE, MD5 = f"{FOLDER}.tgz", "97eceeb196236b17998738112f37df78"
TABLES = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "bounding_boxes.txt", "classes.txt")
SOURCE = (
    "get CUB_200_2011.tgz (1.2 GB) from https://data.caltech.edu/records/65de6-vp158 "
    "and put it into the data folder; it is unpacked to CUB_200_2011/ on first use"
)
CUB200 = DatasetInfo.of_paper("cub200", tasks=10, classes_per_task=20, batch_size=32, epochs=50)


def read_cub200(data_dir: Path, download: bool) -> ImageSet:
    """All images in the order of their numbers. `download` changes nothing: there is nowhere to download it from."""
    if not any((data_dir / name).exists() for name in (FOLDER, ARCHIVE)) and (data_dir / "cub200/train").is_dir():
        images_alone = read_folder(data_dir / "cub200")
        return replace(images_alone, classes=tuple(map(_species, images_alone.classes)))
    packed = any((place / ARCHIVE).exists() for place in (data_dir, data_dir.parent))
    folder = locate("cub200", data_dir, FOLDER, ["images", *TABLES], SOURCE, _unpack if packed else None)
    images, labels, split, boxes, classes = (_table(folder / table) for table in TABLES)
    numbers = sorted(images)
    species = sorted(classes)
    try:
        found = np.array([species.index(int(labels[number])) for number in numbers], dtype=np.int64)
        train = np.array([split[number] == "1" for number in numbers])
        files = tuple(ImageFile(f"images/{images[number]}", _box(boxes[number])) for number in numbers)
    except (ValueError, KeyError) as error:
        raise DataError(f"cannot understand the tables in {folder}: {error}; unpack the archive again") from error
    names = tuple(_species(classes[number]) for number in species)
    return ImageSet(names, found, np.flatnonzero(train), np.flatnonzero(~train), folder=folder, files=files)


def _species(name: str) -> str:
    """As people write it.

    >>> _species("001.Black_footed_Albatross")
    'Black footed Albatross'
    """
    return name.split(".", 1)[-1].replace("_", " ")


def _unpack(root: Path) -> None:
    if (root / ARCHIVE).exists():
        unpack(root / ARCHIVE, root / FOLDER, MD5)


def _table(path: Path) -> dict[int, str]:
    """Lines "number value" as a mapping."""
    rows = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        number, _, value = line.strip().partition(" ")
        if number:
            rows[int(number)] = value
    return rows


def _box(text: str) -> Box:
    """The table's "x y width height" as (left, top, right, bottom).

    >>> _box("60.0 27.0 325.0 304.0")
    (60, 27, 385, 331)
    """
    left, top, width, height = (float(value) for value in text.split())
    return round(left), round(top), round(left + width), round(top + height)
