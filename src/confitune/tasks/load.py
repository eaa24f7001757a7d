"""`load_tasks`: a dataset's name in, a sequence of tasks out."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from confitune.tasks.catalog import DATASETS, FOLDER_PREFIX, DatasetInfo, dataset_info
from confitune.tasks.datasets import ImageSet, read_dataset
from confitune.tasks.errors import DataError
from confitune.tasks.pipelines import CROP, Pipeline
from confitune.tasks.preprocess import Preprocess
from confitune.tasks.progress import Progress
from confitune.tasks.sequence import TaskSequence
from confitune.tasks.splits import class_order, cut_into_tasks
from confitune.tasks.store import open_store
from confitune.tasks.task import Images, Task


def load_tasks(
    name: str,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    data_dir: Path | None = None,
    cache_dir: Path | None = None,
    pipeline: str = "clean",
    order_seed: int = 0,
    tasks: int | None = None,
    classes_per_task: int | None = None,
    download: bool = True,
    progress: Progress | None = None,
) -> TaskSequence:
    """A dataset as a sequence of tasks, always split and ordered in the same way.

    Args:
        name: one of `DATASETS` (cifar100, cub200, caltech101, flowers102, photos, digits) or "folder:PATH".
        mean: of the backbone's own preprocessing, per channel, for values in [0, 1].
        std: likewise.
        data_dir: the folder that holds `flowers-102/` and the like (torchvision's `root`), or that folder itself;
            default `$CONFITUNE_DATA` or `~/.cache/confitune/data`.
        cache_dir: where decoded images are kept (1.2 GB for flowers102); default `$CONFITUNE_CACHE` or
            `~/.cache/confitune/store`.
        pipeline: "clean", or "published" for the treatment behind the paper's numbers (see `pipelines.py`).
        order_seed: of the order of classes, and so of which classes make a task; the paper's is 0.
        tasks: only the first so many tasks.
        classes_per_task: default as in `DATASETS`; for a folder a fifth of its classes, or 2 if it has fewer than 10.
            Classes left over when cutting are not used; `TaskSequence.unused_classes` names them.
        download: fetch a dataset that is not there, where that is possible (all of the paper's but cub200).
        progress: called as progress(what, done, total) while images are decoded.

    Raises:
        DataError: whatever is wrong with the data or the arguments, with the file, folder or option to look at.
    """
    info = dataset_info(name)
    preprocessing = Preprocess(tuple(map(float, mean)), tuple(map(float, std)))
    treatment = _pipeline(info, pipeline, preprocessing)
    where = Path(name.removeprefix(FOLDER_PREFIX)) if info.name == "folder" else data_dir or _home("DATA", "data")
    images = read_dataset(info.name, where.expanduser(), download)
    usual = info.classes_per_task or default_classes_per_task(len(images.classes))
    per_task = usual if classes_per_task is None else classes_per_task
    groups, unused = cut_into_tasks(class_order(len(images.classes), order_seed), per_task)
    if tasks is not None and not 1 <= tasks <= len(groups):
        raise DataError(
            f"{name} has {len(groups)} tasks of {per_task} classes, so tasks={tasks} is impossible; "
            f"give a number from 1 to {len(groups)}"
        )
    store = _store_name(info, where)
    cache = (cache_dir or _home("CACHE", "store")).expanduser()
    pixels = (
        images.pixels
        if images.pixels is not None
        else open_store(store, images.folder, images.files, treatment, cache, progress)
    )
    ready = Preprocess(preprocessing.mean, preprocessing.std, images.resize, images.crop)
    width = len(str(len(groups)))
    made = [_task(f"task{i + 1:0{width}}", images, group, pixels, ready) for i, group in enumerate(groups[:tasks])]
    return TaskSequence(name, pipeline, tuple(made), tuple(images.classes[i] for i in unused))


def load_folder_task(
    folder: Path,
    name: str,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    size: int = CROP,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Task:
    """A folder of labelled images as one task, with all its classes in sorted order.

    Args:
        folder: one folder of images for each class, or train/ and test/ with such folders; see `datasets/folder.py`.
        name: of the task.
        mean: of the backbone's own preprocessing.
        std: likewise.
        size: of the network's input, in pixels; images are cut to 224 square ones first.
        cache_dir: as in `load_tasks`.
        progress: called as progress(what, done, total) while images are decoded.
    """
    info = dataset_info(f"{FOLDER_PREFIX}{folder}")
    images = read_dataset(info.name, folder.expanduser(), download=False)
    cache = (cache_dir or _home("CACHE", "store")).expanduser()
    pixels = open_store(_store_name(info, folder), images.folder, images.files, Pipeline(), cache, progress)
    ready = Preprocess.of_cut(mean, std, size)
    return _task(name, images, range(len(images.classes)), pixels, ready)


def default_classes_per_task(n_classes: int) -> int:
    """For a user's folder: five tasks if there are ten classes or more, otherwise tasks of two.

    >>> default_classes_per_task(23), default_classes_per_task(9)
    (4, 2)
    """
    return n_classes // 5 if n_classes >= 10 else 2


def _pipeline(info: DatasetInfo, name: str, preprocess: Preprocess) -> Pipeline:
    if name not in ("clean", "published"):
        raise DataError(f"there is no pipeline {name!r}; there are 'clean' and 'published'")
    if name not in info.pipelines:
        having = ", ".join(other.name for other in DATASETS.values() if name in other.pipelines)
        raise DataError(f"{info.name} has no {name!r} pipeline, only {having} have; use 'clean'")
    if name == "clean":
        return Pipeline()
    # The published code's double transform is in the code of these two sets only.
    wrap = (preprocess.mean, preprocess.std) if info.name in ("caltech101", "flowers102") else None
    return Pipeline(name, wrap=wrap, use_box=info.name == "cub200")


def _task(name: str, images: ImageSet, group: Sequence[int], pixels: Tensor, preprocess: Preprocess) -> Task:
    place = np.full(len(images.classes), -1, dtype=np.int64)
    place[list(group)] = np.arange(len(group))

    def chosen(rows: np.ndarray) -> Images:
        labels = place[images.labels[rows]]
        return Images(pixels, torch.from_numpy(rows[labels >= 0]), torch.from_numpy(labels[labels >= 0]))

    classes = tuple(images.classes[i] for i in group)
    return Task(name, classes, chosen(images.train), chosen(images.test), preprocess)


def _home(variable: str, folder: str) -> Path:
    return Path(os.environ.get(f"CONFITUNE_{variable}") or Path.home() / ".cache" / "confitune" / folder)


def _store_name(info: DatasetInfo, where: Path) -> str:
    """Readable in a listing; what keeps stores apart is the key that follows it."""
    if info.name != "folder":
        return info.name
    return "folder-" + re.sub(r"[^A-Za-z0-9]+", "_", where.resolve().name)[:40]
