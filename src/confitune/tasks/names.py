"""Names of sequences: one dataset, or tasks of several joined by '+', as in `photos:1-2+digits:1+photos:3-5`.

    name    = part { "+" part }
    part    = dataset [ ":" tasks ]
    dataset = a key of `DATASETS` | folder:PATH | FILE.py:FUNCTION | package.module:FUNCTION
    tasks   = N | N-M                  counted from 1, both ends included; without them: all

What follows the last ':' is tasks if it looks like N or N-M, otherwise a piece of a path. A path that has a '+' itself
can only stand alone.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType

from confitune.tasks.datasets.bundled import DIGITS, PHOTOS, read_digits, read_photos
from confitune.tasks.datasets.caltech101 import CALTECH101, read_caltech101
from confitune.tasks.datasets.cifar100 import CIFAR100, read_cifar100
from confitune.tasks.datasets.cub200 import CUB200, read_cub200
from confitune.tasks.datasets.dataset import DatasetInfo, ImageSet
from confitune.tasks.datasets.flowers102 import FLOWERS102, read_flowers102
from confitune.tasks.datasets.folder import FOLDER, read_folder
from confitune.tasks.errors import DataError
from confitune.tasks.own_file import OwnFile

READERS: dict[DatasetInfo, Callable[[Path, bool], ImageSet]] = {  # called with the data folder, and whether to download
    CIFAR100: read_cifar100,
    CUB200: read_cub200,
    CALTECH101: read_caltech101,
    FLOWERS102: read_flowers102,
    PHOTOS: lambda data_dir, download: read_photos(),
    DIGITS: lambda data_dir, download: read_digits(),
    FOLDER: lambda path, download: read_folder(path),
}
DATASETS: Mapping[str, DatasetInfo] = MappingProxyType({info.name: info for info in READERS})
FOLDER_PREFIX = "folder:"
_ALL = (1, sys.maxsize)
_TASKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True)
class Part:
    """Tasks of one dataset."""

    dataset: str  # a key of `DATASETS`, "folder:PATH", "FILE.py:FUNCTION" or "package.module:FUNCTION"
    tasks: tuple[int, int] | None = None  # the first and the last one, counted from 1; None: all

    @property
    def folder(self) -> str | None:
        """The path, where it is a folder."""
        path = self.dataset.removeprefix(FOLDER_PREFIX)
        return None if path == self.dataset else os.path.expanduser(path)

    @property
    def own(self) -> OwnFile | None:
        """The user's function, where that makes the dataset."""
        found = OwnFile.parse(self.dataset) if self.folder is None else None
        return found if found and found.module not in DATASETS else None

    @property
    def info(self) -> DatasetInfo:
        """What is known of the dataset; "folder:PATH" gives the entry "folder". An error if there is none."""
        if self.own:
            return self.own.info()
        if self.dataset in ("folder", FOLDER_PREFIX):
            raise DataError("a folder set needs its path: write folder:PATH")
        if self.folder:
            return FOLDER
        if self.dataset in DATASETS:
            return DATASETS[self.dataset]
        near = difflib.get_close_matches(self.dataset.lower().partition(":")[0], DATASETS, n=1)
        known = ", ".join(f"{name}:PATH" if name == "folder" else name for name in DATASETS)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {known} and FILE.py:FUNCTION"
        how = " Tasks are written as photos:2 or photos:1-3" if near and ":" in self.dataset else ""
        raise DataError(f"there is no dataset {self.dataset!r}; {hint}{how}")

    @property
    def key(self) -> str:
        """The same for all names of one dataset: a path can be written in several ways."""
        if self.folder:
            return f"{FOLDER_PREFIX}{os.path.realpath(self.folder)}"
        return f"{self.own.path}:{self.own.function}" if self.own and self.own.path else self.dataset

    def __str__(self) -> str:
        if self.tasks is None:
            return self.dataset
        first, last = self.tasks
        return f"{self.dataset}:{first}" + (f"-{last}" if last > first else "")


def dataset_parts(name: str) -> tuple[Part, ...]:
    """What a sequence's name asks for, in order; a dataset's own name is one part with all of its tasks.

    >>> [(part.dataset, part.tasks) for part in dataset_parts("photos:1-2+digits:4+cub200")]
    [('photos', (1, 2)), ('digits', (4, 4)), ('cub200', None)]
    """
    try:
        with suppress(OSError):
            os.stat(name)
    except ValueError as error:  # a character that no name of a file has
        raise DataError(f"the dataset {name!r} cannot be looked for: {error}") from error
    alone = _part(name)
    path = alone.folder or (alone.own and alone.own.path)
    if path and os.path.exists(path):
        return (alone,)
    parts = tuple(_part(text) for text in name.split("+"))
    for part in parts:
        if not part.own:  # which is looked for when it is needed
            _ = part.info
    for one, other in combinations(parts, 2):
        (first, last), (start, end) = one.tasks or _ALL, other.tasks or _ALL
        if one.key == other.key and first <= end and start <= last:
            raise DataError(f"{name!r} takes tasks of {one.dataset} twice ({one} and {other})")
    return parts


def dataset_info(name: str) -> DatasetInfo:
    """What is known of whatever `load_tasks` takes; "folder:PATH" gives the entry "folder".

    Parts of datasets are learned as the first of them is: its epochs, its batch size and, for one of the paper's, the
    paper's options of methods. They have the pipelines that all of them have.

    >>> dataset_info("flowers102").epochs
    10
    >>> dataset_info("flower102")
    Traceback (most recent call last):
    confitune.tasks.errors.DataError: there is no dataset 'flower102'; did you mean 'flowers102'?
    >>> dataset_info("flowers102:1-5+photos").pipelines
    ('clean',)
    """
    parts = dataset_parts(name)
    sets = [part.info for part in parts]
    if len(parts) == 1 and parts[0].tasks is None:
        return sets[0]
    sizes = {info.classes_per_task for info in sets}
    pipelines = tuple(p for p in sets[0].pipelines if all(p in info.pipelines for info in sets))
    per_task = sizes.pop() if len(sizes) == 1 else None
    return replace(sets[0], name=name, tasks=None, classes_per_task=per_task, pipelines=pipelines)


def _part(text: str) -> Part:
    dataset, _, tasks = text.rpartition(":")
    numbers = _TASKS.fullmatch(tasks)
    if not numbers or dataset in ("", "folder"):  # folder:3 is a folder called 3
        return Part(text)
    first, last = int(numbers[1]), int(numbers[2] or numbers[1])
    if not 1 <= first <= last:
        raise DataError(f"{text!r}: tasks are counted from 1, the smaller number first, e.g. 2 or 1-3; got {tasks}")
    return Part(dataset, (first, last))
