"""A dataset of the user's own, made by a function: `FILE.py:FUNCTION` or `package.module:FUNCTION`.

    from confitune.tasks import TaskSequence

    BATCH_SIZE, EPOCHS = 16, 5  # defaults for training; may be left out

    def load(mean, std, data_dir):
        return TaskSequence.from_datasets([...], name="mine", mean=mean, std=std)

The function is called with the mean and standard deviation of the network's input (three values each) and the data
folder (a `Path`), and returns a `TaskSequence`. The text says where it is, so that another process finds it too.
"""

from __future__ import annotations

import importlib
import os
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from confitune.errors import ConfituneError
from confitune.files import run_file
from confitune.tasks.datasets.dataset import DatasetInfo
from confitune.tasks.errors import DataError, DataMissingError
from confitune.tasks.sequence import TaskSequence

_NAME = r"[^\W\d]\w*"
_TEXT = re.compile(rf"(?P<module>.+\.py|{_NAME}(?:\.{_NAME})*):(?P<function>{_NAME})", re.DOTALL)


@dataclass(frozen=True)
class OwnFile:
    """Where the function is: the file or module, and the function's name."""

    module: str
    function: str

    @classmethod
    def parse(cls, dataset: str) -> OwnFile | None:
        """None for a text of another form.

        >>> OwnFile.parse("data/mine.py:load"), OwnFile.parse("photos:1-2")
        (OwnFile(module='data/mine.py', function='load'), None)
        """
        found = _TEXT.fullmatch(dataset)
        return cls(**found.groupdict()) if found else None

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"

    @property
    def path(self) -> str | None:
        """Of the file, without links; None for a module."""
        return os.path.realpath(os.path.expanduser(self.module)) if self.module.endswith(".py") else None

    def info(self) -> DatasetInfo:
        """What is known before it is loaded; the file is run for its BATCH_SIZE and EPOCHS, the function is not."""
        module = self._module()
        batch_size, epochs = getattr(module, "BATCH_SIZE", 32), getattr(module, "EPOCHS", 10)
        return DatasetInfo(str(self), None, None, batch_size, epochs)

    def load(self, mean: tuple[float, ...], std: tuple[float, ...], data_dir: Path) -> TaskSequence:
        """What the function returns."""
        module = self._module()
        function = getattr(module, self.function, None)
        if not callable(function):
            raise DataError(f"{self.module} has no function {self.function!r}")
        try:
            tasks = function(mean=mean, std=std, data_dir=data_dir)
        except Exception as error:
            raise _failed(f"{self}, called with mean, std and data_dir,", error, module.__file__) from error
        if not isinstance(tasks, TaskSequence):
            raise DataError(
                f"{self} returned {type(tasks).__name__}, but must return a TaskSequence: "
                "make one with TaskSequence.from_datasets"
            )
        return tasks

    def _module(self) -> ModuleType:
        if self.path is not None and not os.path.isfile(self.path):
            raise DataMissingError(f"there is no file {self.module}; write FILE.py:FUNCTION with its path")
        try:
            return importlib.import_module(self.module) if self.path is None else run_file(self.path)
        except Exception as error:
            raise _failed(self.module, error, self.path) from error


def _failed(what: str, error: Exception, path: str | None) -> DataError:
    """What the user's code raised, and in which line of it: the command line shows no traceback."""
    if isinstance(error, ConfituneError):
        return DataError(f"{what} failed: {error}")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return DataError(f"{what} raised {type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else ""))
