"""Names of sequences: one dataset, or tasks of several joined by '+', as in `photos:1-2+digits:1+photos:3-5`.

    name    = part { "+" part }
    part    = dataset [ ":" tasks ]
    dataset = a key of `DATASETS` | folder:PATH | FILE.py:FUNCTION | package.module:FUNCTION
    tasks   = N | N-M                  counted from 1, both ends included; without them: all

A path can hold '+' and ':' itself. Where `folder:PATH` or `FILE.py:FUNCTION` stands alone, with tasks after it or
without, and such a folder or file is there, it is meant. Everywhere else '+' separates parts, and what follows the last
':' of a folder's part is its tasks if it looks like N or N-M, otherwise a piece of its path.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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
_TASKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


@dataclass(frozen=True)
class Part:
    """Tasks of one dataset.

    Args:
        dataset: a key of `DATASETS`, "folder:PATH", "FILE.py:FUNCTION" or "package.module:FUNCTION".
        tasks: the first and the last one, counted from 1; None: all.
    """

    dataset: str
    tasks: tuple[int, int] | None = None

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
        near = difflib.get_close_matches(self.dataset.lower(), DATASETS, n=1)
        known = [f"{name}:PATH" if name == "folder" else name for name in (near or DATASETS)]
        hint = f"did you mean {known[0]!r}?" if near else f"there are {', '.join(known)} and FILE.py:FUNCTION"
        raise DataError(f"there is no dataset {self.dataset!r}; {hint}")

    @property
    def is_there(self) -> bool:
        """Whether its path is that of a folder, or of a file of one's own."""
        if self.folder is not None:
            return os.path.isdir(self.folder)
        return bool(self.own and self.own.path and os.path.isfile(self.own.path))

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
    >>> dataset_parts("photos:1-3+digits+photos:3")
    Traceback (most recent call last):
    confitune.tasks.errors.DataError: 'photos:1-3+digits+photos:3' takes task 3 of photos twice (photos:1-3 and \
photos:3); a task can be learned once in a sequence
    """
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        raise DataError(f"the dataset {name!r} has a character that no name of a file has: {error}") from error
    if "\0" in name:
        raise DataError(f"the dataset {name!r} has a character of code 0, which no name has")
    for dataset, tasks in ((name, ""), _cut_tasks(name)):
        if Part(dataset).is_there:
            return (Part(dataset, _numbers(tasks, name)),)
    parts: list[Part] = []
    for text in name.split("+"):
        try:
            parts.append(_part(text, name))
        except DataError as error:
            if not any(part.folder for part in parts):
                raise
            # What is no part may have been meant as the rest of a path.
            whole = Part(name).folder
            absent = "" if whole is None else f"there is no folder {whole}, and as parts joined by '+': "
            raise DataError(f"{absent}{error} (a folder whose path has a '+' can only stand alone)") from error
    _refuse_twice(parts, name)
    return tuple(parts)


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
    return replace(
        sets[0],
        name=name,
        tasks=None,
        classes_per_task=sizes.pop() if len(sizes) == 1 else None,
        pipelines=tuple(p for p in sets[0].pipelines if all(p in info.pipelines for info in sets)),
    )


def _part(text: str, name: str) -> Part:
    if not text:
        raise DataError(f"{name!r} has an empty part: write datasets with '+' between them, e.g. photos:1-2+digits:1")
    dataset, tasks = _cut_tasks(text)
    part, whole = Part(dataset), Part(text)
    if tasks and whole.is_there:  # written alone, it would be this folder: it must not mean another here
        raise DataError(
            f"{text!r} can be tasks of {part.folder} or the folder {whole.folder}: write {dataset}/:{tasks} for the "
            f"former, {text}:1-2 with the tasks to take for the latter"
        )
    if part.folder is None and not part.own:
        dataset, colon, tasks = text.partition(":")
        if dataset in DATASETS and colon and not _TASKS.fullmatch(tasks):
            raise DataError(
                f"{text!r}: {tasks!r} are no tasks of {dataset}: write one as {dataset}:2 or several as {dataset}:1-3, "
                f"more of them as parts of their own, e.g. {dataset}:1-3+{dataset}:5"
            )
        part = Part(dataset)
    if not part.own:  # which is looked for when it is needed
        _ = part.info
    return replace(part, tasks=_numbers(tasks, text))


def _cut_tasks(text: str) -> tuple[str, str]:
    """A dataset and the tasks that follow it, '' if there are none."""
    dataset, colon, tasks = text.rpartition(":")
    if colon and _TASKS.fullmatch(tasks) and dataset != "folder":  # folder:3 is a folder called 3
        return dataset, tasks
    return text, ""


def _numbers(tasks: str, text: str) -> tuple[int, int] | None:
    if not tasks:
        return None
    first, _, last = tasks.partition("-")
    numbers = int(first), int(last or first)
    if not 1 <= numbers[0] <= numbers[1]:
        raise DataError(f"{text!r}: tasks are counted from 1, the smaller number first, e.g. 2 or 1-3; got {tasks}")
    return numbers


def _refuse_twice(parts: Sequence[Part], name: str) -> None:
    taken: dict[str, list[tuple[int, int, Part]]] = {}
    for part in parts:
        first, last = part.tasks or (1, sys.maxsize)
        taken.setdefault(part.key, []).append((first, last, part))
    for ranges in taken.values():
        for (_, last, one), (first, _, other) in pairwise(sorted(ranges, key=lambda taking: taking[0])):
            if first <= last:
                raise DataError(
                    f"{name!r} takes task {first} of {one.dataset} twice ({one} and {other}); a task can be learned "
                    "once in a sequence"
                )
