"""What a run measured, and all it takes to measure it again."""

from __future__ import annotations

import json
import math
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
from confitune.files import DamagedFileError, checksum_of, write_whole

_PACKAGES = ("torch", "torchvision", "timm", "numpy", "scikit-learn", "scikit-image", "Pillow")
_CHECKSUM = "checksum"  # of everything else in the file

Percent = Annotated[float, Field(ge=-1e-3, le=100 + 1e-3)]  # as `metrics` has it: a mean may be rounded up
Points = Annotated[float, Field(ge=-100 - 1e-3, le=100 + 1e-3)]  # a difference of percentages
Count = Annotated[int, Field(ge=0, lt=2**63)]


class TaskEntry(TypedDict):
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
    tasks: list[TaskEntry] = Field(min_length=1)  # joint training has one, of all classes
    config: dict[str, Any]
    versions: dict[str, str]
    device: str
    execution: str = "fp32, eager"  # precision and how steps were run
    weights: str
    weights_sha256: str  # of the pre-trained backbone
    final_sha256: str  # of everything the network holds at the end
    seconds: float = Field(ge=0)
    images_per_second: float = Field(ge=0)  # while training
    command: str

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
            if name != "accuracy_matrix" and not _near(getattr(self, name), value):
                raise ValueError(f"{name} is {getattr(self, name)}, its accuracy matrix gives {value}")
        return self

    @property
    def matrix(self) -> np.ndarray:
        """The accuracy matrix, NaN where a task was not there yet."""
        return np.array([[math.nan if a is None else a for a in row] for row in self.accuracy_matrix])

    @property
    def published_matrix(self) -> np.ndarray:
        """As the paper's code measures: a task that was just learned is tested with running means."""
        matrix = self.matrix
        if self.as_learned is not None:
            np.fill_diagonal(matrix, self.as_learned)
        return matrix

    def save(self, path: Path) -> None:
        """Write as JSON with a checksum, whole or not at all."""
        values = self.model_dump(mode="json")
        text = json.dumps({**values, _CHECKSUM: checksum_of(values)}, indent=1, ensure_ascii=False)
        write_whole(path, lambda out: out.write(text.encode()))

    @classmethod
    def load(cls, path: Path) -> RunResult:
        """Read a result, or say what is wrong with the file.

        What a file says must fit its checksum. Results that were written before there was one are taken without.
        """
        try:
            values = json.loads(path.read_bytes())
            if not isinstance(values, dict):
                raise ValueError(f"it holds {type(values).__name__}, not an object")
            checksum = values.pop(_CHECKSUM, None)
            if checksum not in (None, checksum_of(values)):
                raise DamagedFileError(f"{path} is damaged: its checksum does not fit; restore it, or run it again")
            result = cls.model_validate(values)
            _SHOWN.validate_python(result.config)
            return result
        except (OSError, ValueError, RecursionError) as error:
            raise ConfituneError(f"{path} is not a result of this program: {error}") from error


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


def _near(said: float | None, measured: float | None) -> bool:
    if said is None or measured is None:
        return said is measured
    return math.isclose(said, measured, abs_tol=1e-6)
