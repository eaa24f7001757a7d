"""Logs of a run: CSV files to plot from, and TensorBoard events where TensorBoard is installed."""

import csv
import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from confitune.engine.events import EpochEnd, Listener
from confitune.files import write_whole

_EPOCH_COLUMNS = ("task", "task_name", "stage", "epoch", "loss", "accuracy", "lr", "seconds", "images")
_ACCURACY_COLUMNS = ("after_task", "task", "task_name", "accuracy")


def run_logs(folder: Path) -> list[Listener]:
    """CSV files, and TensorBoard events where it is installed (`pip install 'confitune[tensorboard]'`)."""
    logs: list[Listener] = [CsvLog(folder)]
    if find_spec("tensorboard") is not None:
        logs.append(TensorBoardLog(folder))
    return logs


class CsvLog(Listener):
    """`epochs.csv`: a line per epoch; `accuracy.csv`: a line per task and evaluation."""

    def __init__(self, folder: Path) -> None:
        self._epochs = folder / "epochs.csv"
        self._accuracy = folder / "accuracy.csv"

    def run_started(self, name: str, tasks: Sequence[str], epochs: int, first_task: int) -> None:
        """A fresh run starts fresh files; one that goes on drops what it will do again."""
        self._names = list(tasks)
        _keep(self._accuracy, _ACCURACY_COLUMNS, lambda row: int(row["after_task"]) < first_task)

    def task_started(self, task: int, name: str, first_epoch: int) -> None:
        """Epochs that are done again are logged once."""
        _keep(self._epochs, _EPOCH_COLUMNS, lambda row: (int(row["task"]), int(row["epoch"])) < (task, first_epoch))

    def epoch_ended(self, end: EpochEnd) -> None:
        _append(self._epochs, [getattr(end, column) for column in _EPOCH_COLUMNS])

    def task_ended(self, task: int, accuracies: Sequence[float]) -> None:
        for earlier, accuracy in enumerate(accuracies):
            name = self._names[earlier] if len(self._names) > earlier else str(earlier)  # joint training has one task
            _append(self._accuracy, [task, earlier, name, accuracy])


class TensorBoardLog(Listener):
    """Loss, training accuracy and learning rate per epoch, and the accuracy of every task after each task."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def run_started(self, name: str, tasks: Sequence[str], epochs: int, first_task: int) -> None:
        self._tasks, self._epochs = len(tasks), epochs

    def task_started(self, task: int, name: str, first_epoch: int) -> None:
        """A run that goes on hides what it will do again."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and needed by training runs only

            done = task * self._epochs + first_epoch
            self._writer = SummaryWriter(str(self._folder), purge_step=done + 1 if done else None)

    def epoch_ended(self, end: EpochEnd) -> None:
        step = end.task * end.epochs + end.epoch + 1
        for tag, value in (("loss", end.loss), ("accuracy", end.accuracy), ("lr", end.lr)):
            self._writer.add_scalar(f"train/{tag}", value, step)

    def task_ended(self, task: int, accuracies: Sequence[float]) -> None:
        for earlier, accuracy in enumerate(accuracies):
            self._writer.add_scalar(f"test/task {earlier + 1}", accuracy, task + 1)
        self._writer.add_scalar("test/average", sum(accuracies) / len(accuracies), task + 1)
        self._writer.flush()
        if task + 1 == self._tasks:
            self._writer.close()


def _append(path: Path, values: Sequence[object]) -> None:
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(values)


def _keep(path: Path, columns: Sequence[str], keep: Callable[[dict[str, str]], bool]) -> None:
    """Write the log anew with the lines that are to be kept; a process that was killed may have left half a line."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    lines = path.read_text("utf-8", "replace").replace("\0", "").splitlines() if path.exists() else []
    with suppress(csv.Error):
        for row in csv.DictReader(lines):
            with suppress(ValueError):
                if set(row) == set(columns) and None not in row.values() and keep(row):
                    writer.writerow(row)
    write_whole(path, lambda file: file.write(text.getvalue().encode()))
