"""Names of sequences: one dataset, or tasks of several joined by '+', as in `photos:1-2+digits:1+photos:3-5`.

    name  = part { "+" part }
    part  = dataset [ ":" tasks ]      dataset: a key of `DATASETS`, or folder:PATH
    tasks = N | N-M                    counted from 1, both ends included; without them: all

A path can hold '+' and ':' itself. Where `folder:PATH` stands alone, with tasks after it or without, and such a folder
is there, it is that folder. Everywhere else '+' separates parts, and what follows the last ':' of a folder's part is
its tasks if it looks like N or N-M, otherwise a piece of its path.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from confitune.tasks.catalog import FOLDER_PREFIX, DatasetInfo, one_dataset
from confitune.tasks.errors import DataError

_TASKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_EXAMPLE = "photos:1-2+digits:1"


@dataclass(frozen=True)
class Part:
    """Tasks of one dataset.

    Args:
        dataset: a key of `DATASETS`, or "folder:PATH".
        tasks: the first and the last one, counted from 1; None: all.
    """

    dataset: str
    tasks: tuple[int, int] | None = None

    @property
    def info(self) -> DatasetInfo:
        """What is known of the dataset; an error if there is none of that name."""
        return one_dataset(self.dataset)

    @property
    def key(self) -> str:
        """The same for all names of one dataset: a folder can be written in several ways."""
        return f"{FOLDER_PREFIX}{os.path.realpath(_path(self.dataset))}" if _is_folder(self.dataset) else self.dataset

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
    _refuse_what_no_file_is_called(name)
    if alone := _folder_alone(name):
        return (alone,)
    parts: list[Part] = []
    for text in name.split("+"):
        try:
            parts.append(_part(text, name))
        except DataError as error:
            if any(_is_folder(part.dataset) for part in parts):
                raise _after_a_folder(error, name) from error
            raise
    _refuse_twice(parts, name)
    return tuple(parts)


def is_whole_dataset(parts: Sequence[Part]) -> bool:
    """Whether the parts are one dataset with all of its tasks, as its own name asks for."""
    return len(parts) == 1 and parts[0].tasks is None


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
    sets = list({part.info.name: part.info for part in parts}.values())
    if is_whole_dataset(parts):
        return sets[0]
    sizes = {info.classes_per_task for info in sets}
    return replace(
        sets[0],
        name=name,
        description=f"tasks of {', '.join(info.name for info in sets)}",
        tasks=None,
        classes_per_task=sizes.pop() if len(sizes) == 1 else None,
        pipelines=tuple(p for p in sets[0].pipelines if all(p in info.pipelines for info in sets)),
        licence="; ".join(f"{info.name}: {info.licence}" for info in sets),
        source="; ".join(f"{info.name}: {info.source}" for info in sets),
    )


def _refuse_what_no_file_is_called(name: str) -> None:
    try:
        os.fsencode(name)
    except UnicodeEncodeError as error:
        raise DataError(f"the dataset {name!r} has a character that no name of a file has: {error}") from error
    if "\0" in name:
        raise DataError(f"the dataset {name!r} has a character of code 0, which no name has")


def _folder_alone(name: str) -> Part | None:
    """The folder that the whole name, its '+' and ':' included, is the path of; None if there is none."""
    if not _is_folder(name):
        return None
    if _is_there(name):
        return Part(name)
    dataset, tasks = _cut_tasks(name)
    return Part(dataset, _numbers(tasks, name)) if tasks and _is_there(dataset) else None


def _part(text: str, name: str) -> Part:
    if not text:
        raise DataError(f"{name!r} has an empty part: write datasets with '+' between them, e.g. {_EXAMPLE}")
    if _is_folder(text):
        dataset, tasks = _cut_tasks(text)
        if tasks and _is_there(text):  # written alone, it would be this folder: it must not mean something else here
            raise DataError(
                f"{text!r} can be tasks of {_path(dataset)} or the folder {_path(text)}: write {dataset}/:{tasks} for "
                f"the former, {text}:1-2 with the tasks to take for the latter"
            )
    else:
        dataset, colon, tasks = text.partition(":")
        one_dataset(dataset)
        if colon and not _TASKS.fullmatch(tasks):
            raise DataError(
                f"{text!r}: {tasks!r} are no tasks of {dataset}: write one as {dataset}:2 or several as {dataset}:1-3, "
                f"more of them as parts of their own, e.g. {dataset}:1-3+{dataset}:5"
            )
    one_dataset(dataset)
    return Part(dataset, _numbers(tasks, text) if tasks else None)


def _cut_tasks(folder: str) -> tuple[str, str]:
    """`folder:PATH` and the tasks that follow it, '' if there are none."""
    path, colon, tasks = folder.removeprefix(FOLDER_PREFIX).rpartition(":")
    return (f"{FOLDER_PREFIX}{path}", tasks) if colon and _TASKS.fullmatch(tasks) else (folder, "")


def _numbers(tasks: str, text: str) -> tuple[int, int]:
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


def _after_a_folder(error: DataError, name: str) -> DataError:
    """What is no part may have been meant as the rest of a path."""
    absent = f"there is no folder {_path(name)}, and as parts joined by '+': " if _is_folder(name) else ""
    return DataError(f"{absent}{error} (a folder whose path has a '+' can only stand alone)")


def _is_folder(text: str) -> bool:
    return text.startswith(FOLDER_PREFIX)


def _path(folder: str) -> str:
    return os.path.expanduser(folder.removeprefix(FOLDER_PREFIX))


def _is_there(folder: str) -> bool:
    return os.path.isdir(_path(folder))
