"""The four datasets of the paper, read from the folders that their archives unpack to.

- CIFAR100 (Krizhevsky 2009), `cifar-100-python`, with the official split. Kept at 32 x 32 (184 MB for all 60,000
  images, so in memory and not in a store) and enlarged on the fly: Resize(256) and CenterCrop(224) as for the other
  sets. The published code treats it so too: both pipelines are the same.
- CUB200-2011 (Wah et al. 2011), `CUB_200_2011`, with the official split. Nothing downloads it; the archive
  `CUB_200_2011.tgz`, put into the data folder, is unpacked on first use.
- Caltech101 (Fei-Fei et al. 2004), torchvision's `caltech101`. The category BACKGROUND_Google is not an object and is
  dropped. The 80/20 split is made over all 101 classes; the one that is left over when they are cut into tasks of ten
  is dropped afterwards.
- Flowers102 (Nilsback and Zisserman 2008), torchvision's `flowers-102`. The paper splits all 8,189 images 80/20; the
  official split in `setid.mat`, with only ten training images a class, is not used. 102 classes in tasks of ten leave
  two unused.

Where CIFAR100 and CUB200 are not there in this form, image files are taken: `cifar100/train/CLASS/` and
`cifar100/test/CLASS/`, likewise `cub200/`, which then has no bounding boxes.
"""

import pickle
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torchvision.datasets import Flowers102

from confitune.errors import DataError
from confitune.tasks.datasets.dataset import ImageSet, Remote, locate, unpack
from confitune.tasks.datasets.folder import read_folder
from confitune.tasks.decode import CROP, RESIZE, Box, open_rgb
from confitune.tasks.splits import stratified_split
from confitune.tasks.store import ImageFile

# ---- CIFAR100 ------------------------------------------------------------------------------------------------------

CIFAR_FOLDER = "cifar-100-python"
CIFAR_ARCHIVE = Remote(f"https://www.cs.toronto.edu/~kriz/{CIFAR_FOLDER}.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85")
CIFAR_SOURCE = f"downloaded (169 MB), or unpack {CIFAR_ARCHIVE.url} so that the data folder holds {CIFAR_FOLDER}/"


def read_cifar100(data_dir: Path, download: bool) -> ImageSet:
    """Training images, then test images, each in the order of its file."""
    if not (data_dir / CIFAR_FOLDER).exists() and (data_dir / "cifar100/train").is_dir():
        return read_cifar_images(data_dir / "cifar100")
    fetch = (lambda root: CIFAR_ARCHIVE.fetch_folder(root / CIFAR_FOLDER)) if download else None
    folder = locate("cifar100", data_dir, CIFAR_FOLDER, ["train", "test", "meta"], CIFAR_SOURCE, fetch)
    train, test, meta = (_unpickled(folder / part) for part in ("train", "test", "meta"))
    try:
        pixels = np.concatenate([train["data"], test["data"]]).reshape(-1, 3, 32, 32)
        labels = np.array([*train["fine_labels"], *test["fine_labels"]], dtype=np.int64)
        classes = tuple(str(name) for name in meta["fine_label_names"])
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{folder} does not hold CIFAR100's batches ({error!r}); get it again") from error
    rows, test_rows = np.split(np.arange(len(labels)), [len(train["fine_labels"])])
    images = torch.from_numpy(pixels)
    return ImageSet(classes, labels, rows, test_rows, pixels=images, resize=RESIZE, crop=CROP)


@lru_cache(maxsize=1)  # experiments ask for it once for each method
def read_cifar_images(folder: Path) -> ImageSet:
    """CIFAR100 from image files."""
    images = read_folder(folder)
    pixels = [np.asarray(open_rgb(folder / file.name)).transpose(2, 0, 1) for file in images.files]
    if {image.shape for image in pixels} != {(3, 32, 32)}:
        raise DataError(f"{folder} holds images that are not of 32 x 32 pixels; get it again")
    return replace(images, pixels=torch.from_numpy(np.stack(pixels)), files=(), resize=RESIZE, crop=CROP)


def _unpickled(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            # CIFAR's files were written by Python 2, whose strings are bytes.
            return _ArraysOnly(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle raises almost anything
        raise DataError(f"cannot read {path}: {error}; get the dataset again") from error


class _ArraysOnly(pickle.Unpickler):
    """Reads numbers, strings, lists, mappings and arrays, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        # All that CIFAR's files need. A pickle can otherwise name, and so run, any function.
        if f"{module}.{name}" in ("numpy.ndarray", "numpy.dtype", "_codecs.encode"):
            return super().find_class(module, name)
        if f"{module}.{name}" in ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"):
            return np.zeros(0).__reduce__()[0]  # what an array's own pickle calls; its module moved in numpy 2
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a batch of images has no use for")


# ---- CUB200 --------------------------------------------------------------------------------------------------------

CUB_FOLDER = "CUB_200_2011"
CUB_ARCHIVE = f"{CUB_FOLDER}.tgz"
CUB_MD5 = "97eceeb196236b17998738112f37df78"
CUB_TABLES = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "bounding_boxes.txt", "classes.txt")
CUB_SOURCE = (
    f"get {CUB_ARCHIVE} (1.2 GB) from https://data.caltech.edu/records/65de6-vp158 "
    f"and put it into the data folder; it is unpacked to {CUB_FOLDER}/ on first use"
)


def read_cub200(data_dir: Path, download: bool) -> ImageSet:
    """All images in the order of their numbers. `download` changes nothing: there is nowhere to download it from."""
    there = any((data_dir / name).exists() for name in (CUB_FOLDER, CUB_ARCHIVE))
    if not there and (data_dir / "cub200/train").is_dir():
        found = read_folder(data_dir / "cub200")
        return replace(found, classes=tuple(map(_species, found.classes)))
    packed = any((place / CUB_ARCHIVE).exists() for place in (data_dir, data_dir.parent))
    folder = locate("cub200", data_dir, CUB_FOLDER, ["images", *CUB_TABLES], CUB_SOURCE, _unpack if packed else None)
    images, labels, split, boxes, classes = (_table(folder / table) for table in CUB_TABLES)
    numbers, species = sorted(images), sorted(classes)
    try:
        label_of = np.array([species.index(int(labels[number])) for number in numbers], dtype=np.int64)
        train = np.array([split[number] == "1" for number in numbers])
        files = tuple(ImageFile(f"images/{images[number]}", _box(boxes[number])) for number in numbers)
    except (ValueError, KeyError) as error:
        raise DataError(f"cannot understand the tables in {folder}: {error}; unpack the archive again") from error
    names = tuple(_species(classes[number]) for number in species)
    return ImageSet(names, label_of, np.flatnonzero(train), np.flatnonzero(~train), folder=folder, files=files)


def _unpack(root: Path) -> None:
    if (root / CUB_ARCHIVE).exists():
        unpack(root / CUB_ARCHIVE, root / CUB_FOLDER, CUB_MD5)


def _species(name: str) -> str:
    """As people write it.

    >>> _species("001.Black_footed_Albatross")
    'Black footed Albatross'
    """
    return name.split(".", 1)[-1].replace("_", " ")


def _table(path: Path) -> dict[int, str]:
    """Lines "number value" as a mapping."""
    lines = (line.strip().partition(" ") for line in path.read_text(encoding="utf-8").splitlines())
    return {int(number): value for number, _, value in lines if number}


def _box(text: str) -> Box:
    """The table's "x y width height" as (left, top, right, bottom).

    >>> _box("60.0 27.0 325.0 304.0")
    (60, 27, 385, 331)
    """
    left, top, width, height = (float(value) for value in text.split())
    return round(left), round(top), round(left + width), round(top + height)


# ---- Caltech101 ----------------------------------------------------------------------------------------------------

CALTECH_FOLDER = "caltech101"
CATEGORIES = "101_ObjectCategories"
CALTECH_ARCHIVE = Remote(
    "https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip", "3138e1922a9193bfa496528edbbc45d0"
)
CALTECH_SOURCE = (
    "downloaded (137 MB), or unpack 101_ObjectCategories.tar.gz from "
    "https://data.caltech.edu/records/mzrjq-6wc02 so that the data folder holds caltech101/101_ObjectCategories/"
)


def read_caltech101(data_dir: Path, download: bool) -> ImageSet:
    """All images, category by category in sorted order, each category's files sorted."""

    def fetch(root: Path) -> None:
        (root / CALTECH_FOLDER).mkdir(exist_ok=True)
        with TemporaryDirectory(prefix=f".{CALTECH_FOLDER}-", dir=root) as scratch:  # an archive of archives
            CALTECH_ARCHIVE.fetch_folder(Path(scratch) / "caltech-101")
            unpack(Path(scratch) / f"caltech-101/{CATEGORIES}.tar.gz", root / CALTECH_FOLDER / CATEGORIES)

    fetching = fetch if download else None
    folder = locate("caltech101", data_dir, CALTECH_FOLDER, [CATEGORIES], CALTECH_SOURCE, fetching)
    if (folder / "caltech-101").exists():  # torchvision removes it when everything has been unpacked
        raise DataError(f"{folder} was not unpacked to the end; remove it and get it again")
    return read_folder(folder / CATEGORIES, without=frozenset({"BACKGROUND_Google"}))


# ---- Flowers102 ----------------------------------------------------------------------------------------------------

FLOWERS_FOLDER = "flowers-102"
FLOWERS_SITE = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102"
FLOWERS_IMAGES = Remote(f"{FLOWERS_SITE}/102flowers.tgz", "52808999861908f626f3c1f4e79d11fa")
FLOWERS_LABELS = Remote(f"{FLOWERS_SITE}/imagelabels.mat", "e0620be6f572b9609742df49c70aed4d")
FLOWERS_SOURCE = (
    f"downloaded (345 MB), or get 102flowers.tgz and imagelabels.mat from {FLOWERS_SITE}/ so that the data folder "
    "holds flowers-102/jpg/ and flowers-102/imagelabels.mat"
)


def read_flowers102(data_dir: Path, download: bool) -> ImageSet:
    """All images in the order of their numbers, which is the sorted order of their files."""
    from scipy.io import loadmat

    def fetch(root: Path) -> None:
        (root / FLOWERS_FOLDER).mkdir(exist_ok=True)
        if not (root / FLOWERS_FOLDER / "jpg").exists():
            FLOWERS_IMAGES.fetch_folder(root / FLOWERS_FOLDER / "jpg")
        FLOWERS_LABELS.fetch(root / FLOWERS_FOLDER)

    contents = ["jpg", "imagelabels.mat"]
    fetching = fetch if download else None
    folder = locate("flowers102", data_dir, FLOWERS_FOLDER, contents, FLOWERS_SOURCE, fetching)
    try:
        numbers = loadmat(folder / "imagelabels.mat", squeeze_me=True)["labels"].ravel().astype(np.int64)
    except (OSError, KeyError, ValueError, TypeError, NotImplementedError) as error:
        raise DataError(f"cannot read the labels {folder / 'imagelabels.mat'}: {error}; get the file again") from error
    species, labels = np.unique(numbers, return_inverse=True)
    known = Flowers102.classes
    classes = tuple(known[number - 1] if 1 <= number <= len(known) else str(number) for number in species)
    train, test = stratified_split(labels, classes)
    files = tuple(ImageFile(f"jpg/image_{number:05d}.jpg") for number in range(1, len(numbers) + 1))
    return ImageSet(classes, labels.astype(np.int64), train, test, folder=folder, files=files)
