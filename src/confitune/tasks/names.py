"""Names of sequences: one dataset, or tasks of several joined by '+', as in `photos:1-2+digits:1+photos:3-5`.

    name    = part { "+" part }
    part    = dataset [ ":" tasks ]
    dataset = a key of `DATASETS` | folder:PATH | FILE.py:FUNCTION
    tasks   = N | N-M                  counted from 1, both ends included; without them: all

What follows the last ':' is tasks if it looks like N or N-M, otherwise a piece of a path. A path that has a '+' itself
can only stand alone. A function of the user's own is called with the mean and standard deviation of the network's
input (three values each) and the data folder (a `Path`), and returns a `TaskSequence`:

    BATCH_SIZE, EPOCHS = 16, 5  # defaults for training; may be left out

    def load(mean, std, data_dir):
        return TaskSequence.from_datasets([...], name="mine", mean=mean, std=std)
"""

import difflib
import os
import re
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from types import MappingProxyType, ModuleType

from confitune.errors import ConfituneError, DataError, DataMissingError
from confitune.files import run_file
from confitune.tasks.datasets.bundled import read_digits, read_photos
from confitune.tasks.datasets.dataset import DatasetInfo
from confitune.tasks.datasets.folder import read_folder
from confitune.tasks.datasets.paper_sets import read_caltech101, read_cifar100, read_cub200, read_flowers102
from confitune.tasks.sequence import TaskSequence

_of_paper = partial(DatasetInfo, pipelines=("clean", "published"), from_paper=True)
_sets = (
    _of_paper("cifar100", read_cifar100, tasks=20, classes_per_task=5, batch_size=128, epochs=10),
    _of_paper("cub200", read_cub200, tasks=10, classes_per_task=20, batch_size=32, epochs=50),
    _of_paper("caltech101", read_caltech101, tasks=10, classes_per_task=10, batch_size=32, epochs=20),
    _of_paper("flowers102", read_flowers102, tasks=10, classes_per_task=10, batch_size=32, epochs=10),
    DatasetInfo("photos", lambda *_: read_photos(), tasks=5, classes_per_task=4, batch_size=16, epochs=5),
    DatasetInfo("digits", lambda *_: read_digits(), tasks=5, classes_per_task=2, batch_size=16, epochs=5),
    DatasetInfo("folder", lambda path, _: read_folder(path), batch_size=32, epochs=10),
)
DATASETS: Mapping[str, DatasetInfo] = MappingProxyType({info.name: info for info in _sets})
FOLDER_PREFIX = "folder:"
_ALL = (1, sys.maxsize)
_TASKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_OWN = re.compile(r"(.+\.py):[^\W\d]\w*", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """Tasks of one dataset."""

    text: str  # as it was written
    dataset: str  # a key of `DATASETS`, "folder:PATH" or "FILE.py:FUNCTION"
    tasks: tuple[int, int] | None = None  # the first and the last one, counted from 1; None: all

    @property
    def folder(self) -> str | None:
        """The path, where it is a folder."""
        path = self.dataset.removeprefix(FOLDER_PREFIX)
        return None if path == self.dataset else os.path.expanduser(path)

    @property
    def own(self) -> str | None:
        """The file, as it was written, where a function of the user's own makes the dataset."""
        found = _OWN.fullmatch(self.dataset) if self.folder is None else None
        return found[1] if found else None

    @property
    def own_file(self) -> str | None:
        """The same without links."""
        return os.path.realpath(os.path.expanduser(self.own)) if self.own else None

    @property
    def info(self) -> DatasetInfo:
        """What is known of the dataset; "folder:PATH" gives the entry "folder". An error if there is none."""
        if self.own:
            module = self._own_module()  # the function is not called yet
            return DatasetInfo(self.dataset, None, getattr(module, "BATCH_SIZE", 32), getattr(module, "EPOCHS", 10))
        if self.dataset in ("folder", FOLDER_PREFIX):
            raise DataError("a folder set needs its path: write folder:PATH")
        if self.folder:
            return DATASETS["folder"]
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
        return f"{self.own_file}:{self.dataset.rpartition(':')[2]}" if self.own_file else self.dataset

    @property
    def label(self) -> str:
        """Short and readable, for names of tasks and files."""
        if self.folder:
            return f"folder-{_plain(Path(self.folder).resolve().name)}"
        return _plain(Path(self.own).name.removesuffix(".py")) if self.own else self.dataset

    def call_own(self, mean: tuple[float, ...], std: tuple[float, ...], data_dir: Path) -> TaskSequence:
        """What the user's own function returns."""
        module, name = self._own_module(), self.dataset.rpartition(":")[2]
        function = getattr(module, name, None)
        if not callable(function):
            raise DataError(f"{self.own} has no function {name!r}")
        try:
            tasks = function(mean=mean, std=std, data_dir=data_dir)
        except Exception as error:
            raise _failed(f"{self.dataset}, called with mean, std and data_dir,", error, module.__file__) from error
        if not isinstance(tasks, TaskSequence):
            raise DataError(
                f"{self.dataset} returned {type(tasks).__name__}, but must return a TaskSequence: "
                "make one with TaskSequence.from_datasets"
            )
        return tasks

    def _own_module(self) -> ModuleType:
        assert self.own is not None
        assert self.own_file is not None
        if not os.path.isfile(self.own_file):
            raise DataMissingError(f"there is no file {self.own}; write FILE.py:FUNCTION with its path")
        try:
            return run_file(self.own_file)
        except Exception as error:
            raise _failed(self.own, error, self.own_file) from error


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
    path = alone.folder or alone.own_file
    if path and os.path.exists(path):
        return (alone,)
    parts = tuple(_part(text) for text in name.split("+"))
    for part in parts:
        if not part.own:  # which is looked for when it is needed
            _ = part.info
    for one, other in combinations(parts, 2):
        (first, last), (start, end) = one.tasks or _ALL, other.tasks or _ALL
        if one.key == other.key and first <= end and start <= last:
            raise DataError(f"{name!r} takes tasks of {one.dataset} twice ({one.text} and {other.text})")
    return parts


def dataset_info(name: str) -> DatasetInfo:
    """What is known of whatever `load_tasks` takes; "folder:PATH" gives the entry "folder".

    Parts of datasets are learned as the first of them is: its epochs, its batch size and, for one of the paper's, the
    paper's options of methods. They have the pipelines that all of them have.

    >>> dataset_info("flowers102").epochs
    10
    >>> dataset_info("flower102")
    Traceback (most recent call last):
    confitune.errors.DataError: there is no dataset 'flower102'; did you mean 'flowers102'?
    >>> dataset_info("flowers102:1-5+photos").pipelines
    ('clean',)
    """
    parts = dataset_parts(name)
    sets = [part.info for part in parts]
    if len(parts) == 1 and parts[0].tasks is None:
        return sets[0]
    pipelines = tuple(p for p in sets[0].pipelines if all(p in info.pipelines for info in sets))
    return replace(sets[0], name=name, tasks=None, classes_per_task=None, pipelines=pipelines)


def _part(text: str) -> Part:
    dataset, _, tasks = text.rpartition(":")
    numbers = _TASKS.fullmatch(tasks)
    if not numbers or dataset in ("", "folder"):  # folder:3 is a folder called 3
        return Part(text, text)
    first, last = int(numbers[1]), int(numbers[2] or numbers[1])
    if not 1 <= first <= last:
        raise DataError(f"{text!r}: tasks are counted from 1, the smaller number first, e.g. 2 or 1-3; got {tasks}")
    return Part(text, dataset, (first, last))


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", text)[:40]


def _failed(what: str, error: Exception, path: str | None) -> DataError:
    """What the user's code raised, and in which line of it: the command line shows no traceback."""
    if isinstance(error, ConfituneError):
        return DataError(f"{what} failed: {error}")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return DataError(f"{what} raised {type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else ""))
