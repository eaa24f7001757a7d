"""What a run measured, and all it takes to measure it again."""

from __future__ import annotations

import math
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from confitune import metrics
from confitune.errors import ConfituneError
from confitune.files import write_whole

_PACKAGES = ("torch", "torchvision", "timm", "numpy", "scikit-learn", "scikit-image", "Pillow")


class RunResult(BaseModel):
    """One run: one method on one sequence of tasks with one seed. Accuracies are in percent."""

    model_config = ConfigDict(frozen=True)

    dataset: str
    method: str
    seed: int
    acc: float
    fgt: float | None  # not defined for joint training
    learning_acc: float | None
    bwt: float | None
    accuracy_matrix: list[list[float | None]]  # [i][j]: task i after training task j
    tasks: list[dict[str, Any]]  # name, classes, train and test images, numbers stored
    config: dict[str, Any]
    versions: dict[str, str]
    device: str
    execution: str = "fp32, eager"  # precision and how steps were run
    weights: str
    weights_sha256: str  # of the pre-trained backbone
    final_sha256: str  # of everything the network holds at the end
    seconds: float
    images_per_second: float  # while training
    command: str

    @property
    def matrix(self) -> np.ndarray:
        """The accuracy matrix, NaN where a task was not there yet."""
        return np.array([[math.nan if a is None else a for a in row] for row in self.accuracy_matrix])

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        write_whole(path, lambda out: out.write(self.model_dump_json(indent=1).encode()))

    @classmethod
    def load(cls, path: Path) -> RunResult:
        """Read a result, or say what is wrong with the file."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
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
