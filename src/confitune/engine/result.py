"""What a run measured, and all it takes to measure it again; and the file with a line for each run."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from typing_extensions import NotRequired, Self, TypedDict

from confitune import metrics
from confitune.errors import ConfituneError
from confitune.files import DamagedFileError, checksum_of, exclusive, sync_folder

_PACKAGES = ("torch", "torchvision", "timm", "numpy", "scikit-learn", "scikit-image", "Pillow")
_CHECKSUM = "checksum"  # of everything else in the line

Percent = Annotated[float, Field(ge=-1e-3, le=100 + 1e-3)]  # as `metrics` has it: a mean may be rounded up
Points = Annotated[float, Field(ge=-100 - 1e-3, le=100 + 1e-3)]  # a difference of percentages
Count = Annotated[int, Field(ge=0, lt=2**63)]


class TaskSummary(TypedDict):
    """One task of a run."""

    name: str
    classes: list[str]
    train_images: Count
    test_images: Count
    norm_numbers: Count
    head_numbers: Count
    choice: NotRequired[dict[str, Any]]  # what the method chose for it, and why; see `Method.choices`


class _Shown(TypedDict, total=False):
    """What reports say of a run's configuration; whatever else determines its result is compared and no more."""

    model: str
    pipeline: str
    scenario: str
    held_out: Annotated[float, Field(gt=0, lt=1)] | None
    means: str | None
    statistics: str | None
    precision: str
    options: dict[str, dict[str, Any]]


_SHOWN = TypeAdapter(_Shown)


class RunResult(BaseModel):
    """One run: one method on one sequence of tasks with one seed. Accuracies are in percent."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dataset: str
    method: str
    seed: Count
    acc: Percent
    fgt: Points | None  # not defined for joint training
    learning_acc: Percent | None
    bwt: Points | None
    accuracy_matrix: list[list[Percent | None]] = Field(min_length=1)  # [i][j]: task i after training task j
    # Of each task right after its training, where means are recovered: with running means, before that is done.
    as_learned: list[Percent] | None = None
    tasks: list[TaskSummary] = Field(min_length=1)  # joint training has one, of all classes
    config: dict[str, Any]
    versions: dict[str, str]
    device: str
    execution: str = "fp32, eager"  # precision and how steps were run
    weights: str
    weights_sha256: str  # of the pre-trained backbone
    final_sha256: str  # of everything the network holds at the end
    data: Count = 0  # checksum of the images and labels; 0: not known
    seconds: float = Field(ge=0)
    images_per_second: float = Field(ge=0)  # while training
    command: str
    measured: dict[str, Any] = Field(default_factory=dict)  # what else was measured of the network, by name

    @model_validator(mode="after")
    def _require_what_the_matrix_gives(self) -> Self:
        tasks = len(self.accuracy_matrix)
        if any(len(row) != tasks for row in self.accuracy_matrix):
            raise ValueError("the accuracy matrix must have a row and a column for each task")
        if self.as_learned is not None and len(self.as_learned) != tasks:
            raise ValueError(f"{len(self.as_learned)} tasks were tested as learned, of {tasks}")
        if len(self.tasks) not in (1, tasks):
            raise ValueError(f"{len(self.tasks)} tasks are described, {tasks} were measured")
        for name, value in summary_of(self.matrix).items():
            said, found = (np.array(numbers, dtype=np.float64) for numbers in (getattr(self, name), value))
            if not np.allclose(said, found, rtol=1e-9, atol=1e-6, equal_nan=True):  # what is not defined is NaN
                raise ValueError(f"{name} is {getattr(self, name)}, its accuracy matrix gives {value}")
        return self

    @property
    def matrix(self) -> np.ndarray:
        """The accuracy matrix, NaN where a task was not there yet."""
        return np.array(self.accuracy_matrix, dtype=np.float64)

    @property
    def published_matrix(self) -> np.ndarray:
        """As the paper's code measures: a task that was just learned is tested with running means."""
        matrix = self.matrix
        if self.as_learned is not None:
            np.fill_diagonal(matrix, self.as_learned)
        return matrix

    def line(self) -> bytes:
        """As a line of JSON with a checksum."""
        values = self.model_dump(mode="json")
        return json.dumps({**values, _CHECKSUM: checksum_of(values)}, ensure_ascii=False).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes, where: str) -> RunResult:
        """What `line` wrote, or an error that says where it is and what is wrong with it."""
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise ValueError(f"it holds {type(values).__name__}, not an object")
            if values.pop(_CHECKSUM, None) != checksum_of(values):
                raise DamagedFileError(f"{where} is damaged: its checksum does not match; restore it, or run it again")
            result = cls.model_validate(values)
            _SHOWN.validate_python(result.config)
            return result
        except (ValueError, RecursionError) as error:
            raise ConfituneError(f"{where} is not a result of this program: {error}") from error


def read_results(path: Path) -> list[RunResult]:
    """Every result in a file of them, in order; none where there is no file.

    What follows the end of the last line is being written, or was when its process died, and is not counted.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfituneError(f"{path} cannot be read: {error.strerror or error}") from error
    return [RunResult.of_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def add_result(path: Path, result: RunResult) -> None:
    """Add a line to a file of results, which other processes may do at the same time."""
    with exclusive(path, lambda: None) as held, path.open("r+b") as file:
        # A process that died while it wrote has left part of a line; without locks it may be still alive.
        file.seek(file.read().rfind(b"\n") + 1 if held else 0, os.SEEK_SET if held else os.SEEK_END)
        file.truncate()
        file.write(result.line())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def summary_of(matrix: np.ndarray) -> dict[str, Any]:
    """The metrics of an accuracy matrix as `RunResult` fields, None where not defined."""
    return {
        "acc": metrics.average_accuracy(matrix),
        "fgt": _or_none(metrics.average_forgetting(matrix)),
        "learning_acc": _or_none(metrics.learning_accuracy(matrix)),
        "bwt": _or_none(metrics.backward_transfer(matrix)),
        "accuracy_matrix": [[_or_none(float(a)) for a in row] for row in matrix],
    }


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {"python": platform.python_version(), "confitune": sys.modules["confitune"].__version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    return found


def device_name(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"


def command_line() -> str:
    """How this process was started, without the folders of this machine."""
    program = Path(sys.argv[0]).name
    arguments = [Path(argument).name if argument.startswith("/") else argument for argument in sys.argv[1:]]
    return shlex.join(["confitune" if program == "__main__.py" else program, *arguments])


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
