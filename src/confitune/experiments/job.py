"""One run of an experiment: what it computes, and in which folder."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confitune.engine import Listener, TrainSettings
from confitune.errors import ConfituneError
from confitune.experiments.recipe import Recipe
from confitune.nn import ContinualNet
from confitune.tasks import TaskSequence

RESULT, LOCK = "result.json", ".lock"
_LONGEST = 200  # bytes of a name; file systems take 255, and pictures say more than the dataset

# From a network, its tasks, its settings and its folder to listeners that measure something on the way.
Watch = Callable[[ContinualNet, TaskSequence, TrainSettings, Path], Sequence[Listener]]


@dataclass(frozen=True)
class Job:
    """One method of a recipe with one seed; it can be sent to another machine.

    Attributes:
        out: the folder of the experiment.
        weights_sha256: of the network that it starts from.
        command: how the run was asked for, for its result.
        watch: makes listeners that measure something while the run goes on; a function of a module, so that other
            machines find it.
    """

    recipe: Recipe
    out: Path
    method: str
    seed: int
    weights_sha256: str
    command: str
    checkpoint_seconds: float = 30.0
    watch: Watch | None = None

    @property
    def folder(self) -> Path:
        """Where its checkpoints, logs and result go."""
        return run_folder(self.out, self.recipe.dataset, self.method, self.seed)

    @property
    def label(self) -> str:
        """What a person reads beside its progress."""
        seed = f" seed {self.seed}" if self.recipe.seeds > 1 else ""
        return f"{self.recipe.dataset} {self.method}{seed}"

    @property
    def config(self) -> dict[str, Any]:
        """What determines its result."""
        return self.recipe.identity(self.method, self.seed, self.weights_sha256)


class TrainingError(ConfituneError):
    """A run whose numbers became infinite.

    Attributes:
        config: the run's identity.
    """

    def __init__(self, message: str, config: dict[str, Any]) -> None:
        super().__init__(message)
        self.config = config

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors are sent from machine to machine, by default without what else they were made with."""
        return type(self), (str(self), self.config)


def run_folder(out: Path, dataset: str, method: str, seed: int) -> Path:
    """`out/<dataset>/<method>/seed-<k>`; a dataset's path, and parts of datasets, become a plain name."""
    return out / file_name(dataset) / method / f"seed-{seed}"


def file_name(dataset: str) -> str:
    """What a dataset's folder or file is called; one that no file can have is cut, with a checksum at its end.

    >>> file_name("photos:1-2+folder:/data/my images")
    'photos-1-2+folder-data-my-images'
    """
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", dataset).strip("-.")
    return plain if len(plain) <= _LONGEST else f"{plain[: _LONGEST - 9]}-{zlib.crc32(os.fsencode(dataset)):08x}"


def groups_of(jobs: Sequence[Job], size: int) -> list[list[Job]]:
    """Runs of one method of one recipe, at most so many together: what one process does side by side."""
    groups: list[list[Job]] = []
    for job in jobs:
        first = groups[-1][0] if groups else None
        alike = first is not None and (first.method, first.out, first.recipe) == (job.method, job.out, job.recipe)
        if alike and len(groups[-1]) < size:
            groups[-1].append(job)
        else:
            groups.append([job])
    return groups
