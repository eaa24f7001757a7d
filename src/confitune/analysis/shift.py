"""Representational shift of every convolution that a batch norm follows (ConFiT, sec. 4.2.2, ablation study).

With mu_te^j and v_te^j the true mean and variance of a convolution's output on the TEST set of the first task after
training task j, and mu_r^j and v_r^j those that its batch norm uses when that task is tested then, all [C], the paper
measures

    D0 = ||mu_r^1 - mu_te^1||     how far a running mean is off anyway
    D1 = ||mu_te^1 - mu_te^T||    how far the representation moved
    D2 = ||mu_r^T - mu_te^T||     how far the running mean is off at the end; D2 - D0 is what forgetting added

Euclidean norms over channels.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
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


class ShiftRecorder(Listener):
    """Measures the shift of a run's first task; give it to the `SequenceRun` as a listener.

    What it measures after the first task is kept in the run's folder, so an interrupted run can be resumed.
    """

    def __init__(self, net: ContinualNet, sequence: TaskSequence, settings: TrainSettings, folder: Path) -> None:
        self._net, self._sequence, self._settings = net, sequence, settings
        self._path = folder / AFTER_FIRST_TASK

    def run_started(self, name: str, tasks: Sequence[str], epochs: int, first_task: int) -> None:
        own = [task.name for task in self._sequence]
        method = METHODS.get(name)
        if list(tasks) != own or (method is not None and method.separate):
            raise ConfituneError(
                f"{name!r} does not learn {own[0]!r} and then the other tasks in one network: no shift to measure"
            )
        if first_task == 0:
            self._path.unlink(missing_ok=True)  # of an earlier run
        else:
            self._before()  # fail now, not at the end

    def task_ended(self, task: int, accuracies: Sequence[float]) -> None:
        if task == 0:
            kept = self._measure()
            write_whole(self._path, lambda out: out.write(save(kept)))

    def result(self) -> dict[str, Any]:
        """The layers in network order, and D0, D1 and D2 of each; call it after the last task."""
        before, after = self._before(), self._measure()
        pairs = [(*before[name], *after[name]) for name in after]  # true and used means, then and now
        return {
            "layers": list(after),
            "d0": [_distance(used, true) for true, used, _, _ in pairs],
            "d1": [_distance(first, last) for first, _, last, _ in pairs],
            "d2": [_distance(used, true) for _, _, true, used in pairs],
        }

    def _measure(self) -> dict[str, Tensor]:
        return moments_at_test(self._net, self._sequence[0], self._settings)

    def _before(self) -> dict[str, Tensor]:
        try:
            return load(self._path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise ConfituneError(
                f"{self._path} cannot be read ({error}): start this run anew for this analysis"
            ) from error


def _distance(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a - b))
