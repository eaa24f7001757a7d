"""What is measured while the runs of the ablation go on: representational shift and transductive moments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from confitune.analysis import ShiftRecorder, transductive_accuracy
from confitune.engine import Listener, TrainSettings
from confitune.nn import ContinualNet
from confitune.tasks import TaskSequence

SHIFT, TRANSDUCTIVE = "shift.json", "transductive.json"


def watch_moments(
    net: ContinualNet, sequence: TaskSequence, settings: TrainSettings, folder: Path
) -> Sequence[Listener]:
    """Listeners that leave `shift.json` and `transductive.json` in the run's folder."""
    shift = ShiftRecorder(net, sequence, settings, folder)
    return (shift, _Writer(shift, net, sequence, settings, folder))


class _Writer(Listener):
    def __init__(
        self, shift: ShiftRecorder, net: ContinualNet, sequence: TaskSequence, settings: TrainSettings, folder: Path
    ) -> None:
        self._shift, self._net, self._sequence, self._settings, self._folder = shift, net, sequence, settings, folder

    def run_started(self, name: str, tasks: Sequence[str], epochs: int, first_task: int) -> None:
        if first_task == len(self._sequence):  # broken off between the last task and its result
            self._write()

    def task_ended(self, task: int, accuracies: Sequence[float]) -> None:
        if task == len(self._sequence) - 1:
            self._write()

    def _write(self) -> None:
        self._shift.result().save(self._folder / SHIFT)
        found = transductive_accuracy(self._net, self._sequence.tasks, self._settings)
        found.save(self._folder / TRANSDUCTIVE)
