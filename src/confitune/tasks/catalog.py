"""The datasets that `load_tasks` knows: how they are cut into tasks and trained on, and where they come from."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from confitune.tasks.errors import DataError

FOLDER_PREFIX = "folder:"


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset and the defaults for learning it.

    Args:
        name: as given to `load_tasks`.
        description: one line.
        tasks: how many there are by default; None where that depends on the data.
        classes_per_task: likewise.
        batch_size: default for training; the paper's for the four sets of the paper.
        epochs: default for training each task; the paper's for the four sets of the paper.
        image_size: side of the images that the network sees.
        pipelines: which treatments of the images there are, the default first.
        from_paper: whether tasks, batch size and epochs are those of the ConFiT paper (sec. 5.1).
        licence: what is known of the terms of use.
        source: how to get the data.
    """

    name: str
    description: str
    tasks: int | None
    classes_per_task: int | None
    batch_size: int
    epochs: int
    image_size: int
    licence: str
    source: str
    pipelines: tuple[str, ...] = ("clean",)
    from_paper: bool = False


_SETS = (
    DatasetInfo(
        name="cifar100",
        description="60,000 small images of 100 kinds of things; official split",
        tasks=20,
        classes_per_task=5,
        batch_size=128,
        epochs=10,
        image_size=224,
        licence="none stated; cite Krizhevsky, Learning Multiple Layers of Features from Tiny Images (2009)",
        source="downloaded (169 MB), or unpack https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz "
        "so that the data folder holds cifar-100-python/",
        pipelines=("clean", "published"),
        from_paper=True,
    ),
    DatasetInfo(
        name="cub200",
        description="11,788 photographs of 200 species of birds; official split",
        tasks=10,
        classes_per_task=20,
        batch_size=32,
        epochs=50,
        image_size=224,
        licence="non-commercial research and education only",
        source="get CUB_200_2011.tgz (1.2 GB) from https://data.caltech.edu/records/65de6-vp158 "
        "and put it into the data folder; it is unpacked to CUB_200_2011/ on first use",
        pipelines=("clean", "published"),
        from_paper=True,
    ),
    DatasetInfo(
        name="caltech101",
        description="8,677 photographs of 101 kinds of objects, unbalanced; 80/20 split",
        tasks=10,
        classes_per_task=10,
        batch_size=32,
        epochs=20,
        image_size=224,
        licence="CC BY 4.0",
        source="downloaded (137 MB), or unpack 101_ObjectCategories.tar.gz from "
        "https://data.caltech.edu/records/mzrjq-6wc02 so that the data folder holds caltech101/101_ObjectCategories/",
        pipelines=("clean", "published"),
        from_paper=True,
    ),
    DatasetInfo(
        name="flowers102",
        description="8,189 photographs of 102 species of flowers, unbalanced; 80/20 split over all of them",
        tasks=10,
        classes_per_task=10,
        batch_size=32,
        epochs=10,
        image_size=224,
        licence="none stated; cite Nilsback and Zisserman, Automated Flower Classification (2008)",
        source="downloaded (345 MB), or get 102flowers.tgz and imagelabels.mat from "
        "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/ so that the data folder holds flowers-102/jpg/ "
        "and flowers-102/imagelabels.mat",
        pipelines=("clean", "published"),
        from_paper=True,
    ),
    DatasetInfo(
        name="photos",
        description="patches of 20 unlike photographs that come with scikit-image and scikit-learn; needs no download",
        tasks=5,
        classes_per_task=4,
        batch_size=16,
        epochs=5,
        image_size=64,
        licence="the photographs' own, all free to use; see scikit-image's and scikit-learn's documentation",
        source="installed with scikit-image and scikit-learn",
    ),
    DatasetInfo(
        name="digits",
        description="1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn; needs no download",
        tasks=5,
        classes_per_task=2,
        batch_size=16,
        epochs=5,
        image_size=64,
        licence="CC BY 4.0 (UCI, Optical Recognition of Handwritten Digits)",
        source="installed with scikit-learn",
    ),
    DatasetInfo(
        name="folder",
        description="your own images: folder:PATH with train/CLASS/ and test/CLASS/, or CLASS/ and an 80/20 split",
        tasks=None,
        classes_per_task=None,
        batch_size=32,
        epochs=10,
        image_size=224,
        licence="yours",
        source="PATH holds train/ and test/ with one folder of images for each class, or such class folders directly",
    ),
)

DATASETS: Mapping[str, DatasetInfo] = MappingProxyType({info.name: info for info in _SETS})


def one_dataset(name: str) -> DatasetInfo:
    """The dataset called `name`; "folder:PATH" gives the entry "folder". Names of parts are `joined.py`'s."""
    if name.startswith(FOLDER_PREFIX) and name != FOLDER_PREFIX:
        return DATASETS["folder"]
    if name in ("folder", FOLDER_PREFIX):
        raise DataError("a folder set needs its path: write folder:PATH")
    if name in DATASETS:
        return DATASETS[name]
    near = difflib.get_close_matches(name.lower(), DATASETS, n=1)
    known = ", ".join("folder:PATH" if known == "folder" else known for known in DATASETS)
    hint = f"did you mean {'folder:PATH' if near == ['folder'] else near[0]!r}?" if near else f"there are {known}"
    raise DataError(f"there is no dataset {name!r}; {hint}")
