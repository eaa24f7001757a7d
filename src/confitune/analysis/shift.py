"""Representational shift of every convolution that a batch norm follows (ConFiT, sec. 4.2.2, ablation study).

With mu_te^j and v_te^j the true mean and variance of a convolution's output on the TEST set of the first task after
training task j, and mu_r^j and v_r^j those that its batch norm uses when that task is tested then, all [C], the paper
measures

    D0 = ||mu_r^1 - mu_te^1||     how far a running mean is off anyway
    D1 = ||mu_te^1 - mu_te^T||    how far the representation moved
    D2 = ||mu_r^T - mu_te^T||     how far the running mean is off at the end; D2 - D0 is what forgetting added

Euclidean norms over channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, model_validator
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from confitune.analysis.moments import moments_at_test
from confitune.engine import Listener, TrainSettings
from confitune.errors import ConfituneError
from confitune.files import write_whole
from confitune.methods import METHODS
from confitune.nn import ContinualNet
from confitune.tasks import TaskSequence

AFTER_FIRST_TASK = "shift-after-first-task.safetensors"


class ShiftResult(BaseModel, frozen=True):
    """D0, D1 and D2 of each layer, in the order in which the network computes them."""

    dataset: str
    method: str
    seed: int
    task: str  # whose representation was watched: the first
    last_task: str  # after which
    layers: list[str]
    d0: list[float]
    d1: list[float]
    d2: list[float]

    @property
    def added(self) -> list[float]:
        """D2 - D0 of each layer: the running mean's error that came after the first task."""
        return [after - before for after, before in zip(self.d2, self.d0, strict=True)]

    @model_validator(mode="after")
    def _one_a_layer(self) -> ShiftResult:
        lengths = {len(self.d0), len(self.d1), len(self.d2)}
        if lengths != {len(self.layers)}:
            raise ValueError(f"{len(self.layers)} layers, but lists of {sorted(lengths)}")
        return self


class ShiftRecorder(Listener):
    """Measures a run after its first task, and when asked; give it to the `SequenceRun` as a listener.

    In the run's folder, what was measured after the first task waits for a run that is broken off and resumed.
    """

    def __init__(self, net: ContinualNet, sequence: TaskSequence, settings: TrainSettings, folder: Path) -> None:
        self._net, self._sequence, self._settings = net, sequence, settings
        self._path = folder / AFTER_FIRST_TASK
        self._method = ""

    def run_started(self, name: str, tasks: Sequence[str], epochs: int, first_task: int) -> None:
        self._method = name
        own = [task.name for task in self._sequence]
        method = METHODS.get(name)
        if list(tasks) != own or (method is not None and method.separate):
            raise ConfituneError(
                f"{name!r} has no network that learns {own[0]!r} and then the other tasks: no shift to be measured"
            )
        if first_task == 0:
            self._path.unlink(missing_ok=True)  # of a run that was here before
        else:
            self._before()  # what is missing is said now, not at the end

    def task_ended(self, task: int, accuracies: Sequence[float]) -> None:
        if task == 0:
            kept = {name: torch.stack(means) for name, means in self._measure().items()}
            write_whole(self._path, lambda out: out.write(save(kept)))

    def result(self) -> ShiftResult:
        """What moved up to now; to be asked for when the last task has ended."""
        before, after = self._before(), self._measure()
        known, own = ({name: means[0].numel() for name, means in moments.items()} for moments in (before, after))
        if known != own:
            raise ConfituneError(
                f"{self._path} is of another network: its layers and their channels are {known}, this one's {own}; "
                "start this run anew for this analysis"
            )
        pairs = [(*before[name], *after[name]) for name in after]  # true and used means, then and now
        return ShiftResult(
            dataset=self._sequence.name,
            method=self._method,
            seed=self._settings.seed,
            task=self._sequence[0].name,
            last_task=self._sequence[-1].name,
            layers=list(after),
            d0=[_distance(used, true) for true, used, _, _ in pairs],
            d1=[_distance(first, last) for first, _, last, _ in pairs],
            d2=[_distance(used, true) for _, _, true, used in pairs],
        )

    def _measure(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        return moments_at_test(self._net, self._sequence[0], self._settings)

    def _before(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """What was measured after the first task, or an error that says what to do."""
        try:
            return {name: (true, used) for name, (true, used) in load(self._path.read_bytes()).items()}
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise ConfituneError(
                f"{self._path} cannot be read ({error}): start this run anew for this analysis"
            ) from error


def _distance(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a - b))
