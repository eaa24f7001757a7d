"""CIFAR100 (Krizhevsky 2009) from its archive's own folder `cifar-100-python`, with the official split; or, where that
is not there, from image files: `cifar100/train/CLASS/` and `cifar100/test/CLASS/`.

Kept at 32 x 32 (184 MB for all 60,000 images, so in memory and not in a store) and enlarged on the fly: Resize(256)
and CenterCrop(224) as for the other sets. The published code treats it so too: both pipelines are the same.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from confitune.errors import DataError
from confitune.tasks.datasets.dataset import DatasetInfo, ImageSet, Remote, locate
from confitune.tasks.datasets.folder import read_folder
from confitune.tasks.decode import CROP, RESIZE, open_rgb

FOLDER = "cifar-100-python"
ARCHIVE = Remote("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85")
SOURCE = (
    "downloaded (169 MB), or unpack https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz "
    "so that the data folder holds cifar-100-python/"
)
CIFAR100 = DatasetInfo.of_paper("cifar100", tasks=20, classes_per_task=5, batch_size=128, epochs=10)


def read_cifar100(data_dir: Path, download: bool) -> ImageSet:
    """Training images, then test images, each in the order of its file."""
    if not (data_dir / FOLDER).exists() and (data_dir / "cifar100/train").is_dir():
        return _read_images(data_dir / "cifar100")
    fetch = (lambda root: ARCHIVE.fetch_folder(root / FOLDER)) if download else None
    folder = locate("cifar100", data_dir, FOLDER, ["train", "test", "meta"], SOURCE, fetch)
    train, test, meta = (_load(folder / part) for part in ("train", "test", "meta"))
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
def _read_images(folder: Path) -> ImageSet:
    images = read_folder(folder)
    pixels = [np.asarray(open_rgb(folder / file.name)).transpose(2, 0, 1) for file in images.files]
    if {image.shape for image in pixels} != {(3, 32, 32)}:
        raise DataError(f"{folder} holds images that are not of 32 x 32 pixels; get it again")
    return replace(images, pixels=torch.from_numpy(np.stack(pixels)), files=(), resize=RESIZE, crop=CROP)


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            # CIFAR's files were written by Python 2, whose strings are bytes.
            content = _ArraysOnly(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle raises almost anything
        raise DataError(f"cannot read {path}: {error}; get the dataset again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds {type(content).__name__}, not a batch of CIFAR100; get the dataset again")
    return content


class _ArraysOnly(pickle.Unpickler):
    """Reads numbers, strings, lists, mappings and arrays, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        # All that CIFAR's files need. A pickle can otherwise name, and so run, any function.
        if f"{module}.{name}" in ("numpy.ndarray", "numpy.dtype", "_codecs.encode"):
            return super().find_class(module, name)
        if f"{module}.{name}" in ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"):
            return np.zeros(0).__reduce__()[0]  # what an array's own pickle calls; its module moved in numpy 2
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a batch of images has no use for")
