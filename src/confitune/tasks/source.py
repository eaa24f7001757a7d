"""One dataset, read and cut into tasks; its images are decoded when tasks are taken from it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from confitune.tasks.catalog import DATASETS, FOLDER_PREFIX, DatasetInfo, one_dataset
from confitune.tasks.datasets import ImageSet, read_dataset
from confitune.tasks.errors import DataError
from confitune.tasks.pipelines import Pipeline
from confitune.tasks.preprocess import Preprocess
from confitune.tasks.progress import Progress
from confitune.tasks.splits import class_order, cut_into_tasks
from confitune.tasks.store import open_store
from confitune.tasks.task import Images, Task


@dataclass(frozen=True, eq=False)
class Source:
    """A dataset and the classes of each of its tasks.

    Attributes:
        dataset: its name, or "folder:PATH".
        label: a short one that can stand in names of tasks and files.
        images: everything but the pixels of image files.
        pipeline: how those are decoded.
        groups: the classes of each task.
        unused: classes left over.
    """

    dataset: str
    label: str
    images: ImageSet
    pipeline: Pipeline
    groups: Sequence[Sequence[int]]
    unused: tuple[str, ...]

    @classmethod
    def read(
        cls,
        dataset: str,
        pipeline: Pipeline,
        *,
        data_dir: Path | None = None,
        order_seed: int = 0,
        classes_per_task: int | None = None,
        download: bool = True,
    ) -> Source:
        """Options as those of `load_tasks`; one class order cut into tasks, the same every time."""
        info = one_dataset(dataset)
        where = (
            Path(dataset.removeprefix(FOLDER_PREFIX)) if info.name == "folder" else data_dir or _home("DATA", "data")
        )
        images = read_dataset(info.name, Path(os.path.expanduser(where)), download)
        usual = info.classes_per_task or default_classes_per_task(len(images.classes))
        per_task = usual if classes_per_task is None else classes_per_task
        try:
            groups, unused = cut_into_tasks(class_order(len(images.classes), order_seed), per_task)
        except DataError as error:
            raise DataError(f"{dataset}: {error}") from error
        return cls(dataset, label_of(info, where), images, pipeline, groups, tuple(images.classes[i] for i in unused))

    @property
    def counted(self) -> str:
        """How many tasks it has, for messages."""
        return f"{self.dataset} has {len(self.groups)} tasks of {len(self.groups[0])} classes"

    def task_name(self, index: int) -> str:
        """Of the task at this place, counted from 0."""
        return f"task{index + 1:0{len(str(len(self.groups)))}}"

    def pixels(self, cache_dir: Path | None, progress: Progress | None) -> Tensor:
        """Of all its images; files are decoded once, into a store."""
        if self.images.pixels is not None:
            return self.images.pixels
        return stored_pixels(self.label, self.images, self.pipeline, cache_dir, progress)

    def task(self, index: int, name: str, pixels: Tensor, normalise: Preprocess) -> Task:
        """The task at this place, called `name`."""
        ready = replace(normalise, resize=self.images.resize, crop=self.images.crop)
        return make_task(name, self.images, self.groups[index], pixels, ready)


def pipeline_of(info: DatasetInfo, name: str, preprocess: Preprocess) -> Pipeline:
    """How a dataset's image files are decoded; an error where it has no pipeline of that name."""
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


def default_classes_per_task(n_classes: int) -> int:
    """For a user's folder: five tasks if there are ten classes or more, otherwise tasks of two.

    >>> default_classes_per_task(23), default_classes_per_task(9)
    (4, 2)
    """
    return n_classes // 5 if n_classes >= 10 else 2


def make_task(name: str, images: ImageSet, group: Sequence[int], pixels: Tensor, preprocess: Preprocess) -> Task:
    """A task of some of the classes."""
    place = np.full(len(images.classes), -1, dtype=np.int64)
    place[list(group)] = np.arange(len(group))

    def chosen(rows: np.ndarray) -> Images:
        labels = place[images.labels[rows]]
        return Images(pixels, torch.from_numpy(rows[labels >= 0]), torch.from_numpy(labels[labels >= 0]))

    classes = tuple(images.classes[i] for i in group)
    return Task(name, classes, chosen(images.train), chosen(images.test), preprocess)


def stored_pixels(
    label: str, images: ImageSet, pipeline: Pipeline, cache_dir: Path | None, progress: Progress | None
) -> Tensor:
    """Of all image files, from the store that they are decoded into once."""
    cache = (cache_dir or _home("CACHE", "store")).expanduser()
    return open_store(label, images.folder, images.files, pipeline, cache, progress)


def label_of(info: DatasetInfo, where: Path) -> str:
    """Readable in a listing; folders of the same name have the same one."""
    if info.name != "folder":
        return info.name
    return "folder-" + re.sub(r"[^A-Za-z0-9]+", "_", where.resolve().name)[:40]


def _home(variable: str, folder: str) -> Path:
    return Path(os.environ.get(f"CONFITUNE_{variable}") or Path.home() / ".cache" / "confitune" / folder)
