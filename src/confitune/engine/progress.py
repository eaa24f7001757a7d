"""What a person sees while a run goes on: task, stage, epoch, loss, accuracy so far, time left."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from confitune.engine.events import EpochEnd, Listener


def progress_board(console: Console) -> Progress:
    """Where progress bars of runs are shown; one at a time can be on a terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


@contextmanager
def decoding_bar(console: Console, lines: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Within, a bar of images decoded: called as bar(what, done, total).

    Without a terminal there is no bar; `lines` then says when something begins.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        shown: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in shown:
                shown[what] = bar.add_task(what, total=total)
                if lines and not console.is_terminal:
                    console.print(f"{what} ({total:,})", markup=False, highlight=False)
            bar.update(shown[what], completed=done)

        yield show


class LiveProgress(Listener):
    """A progress bar on a terminal, on the `board` of runs side by side if there is one.

    Without a terminal, a plain line for each task, and with `stages` for each stage.
    """

    def __init__(self, console: Console, label: str, board: Progress | None = None, stages: bool = False) -> None:
        self._console = console
        self._label = label
        self._board = board
        self._stages = stages
        self._bar: Progress | None = None
        self._average: float | None = None

    def run_started(self, name: str, tasks: Sequence[str], epochs: int, first_task: int) -> None:
        self._tasks, self._epochs = len(tasks), epochs
        if self._console.is_terminal:
            self._bar = self._board or progress_board(self._console)
            self._line = self._bar.add_task(self._label, total=len(tasks) * epochs, status="")
            self._bar.start()

    def task_started(self, task: int, name: str, first_epoch: int) -> None:
        self._task, self._epoch = task, first_epoch
        self._busy = "begins"
        self._loss: float | None = None  # not every task is trained
        self._show()

    def stage_started(self, stage: str) -> None:
        self._stage, self._busy = stage, ""
        self._line_of(f"training {stage}, up to {self._epochs} epochs in all")

    def busy_with(self, what: str) -> None:
        self._busy = what
        self._line_of(what)
        self._show()

    def _line_of(self, what: str) -> None:
        if self._stages and not self._bar:
            self._console.print(f"{self._label}: {what}", markup=False, highlight=False)

    def step_done(self, step: int, steps: int) -> None:
        if step == steps or step % 5 == 0:
            self._show(step / steps)

    def epoch_ended(self, end: EpochEnd) -> None:
        self._epoch, self._loss = end.epoch + 1, end.loss
        self._show()

    def task_ended(self, task: int, accuracies: Sequence[float]) -> None:
        self._average = sum(accuracies) / len(accuracies)
        if not self._bar:
            loss = "" if self._loss is None else f"loss {self._loss:.3f}, "
            done = f"task {task + 1} of {self._tasks}, {loss}average accuracy so far {self._average:.1f}%"
            self._console.print(f"{self._label}: {done}", markup=False)
        if task + 1 == self._tasks:
            self.close()

    def note(self, message: str) -> None:
        self._console.print(f"note: {message}", style="yellow", highlight=False, markup=False)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar and self._board:
            self._bar.remove_task(self._line)
        elif self._bar:
            self._bar.stop()
        self._bar = None

    def _show(self, share_of_epoch: float = 0.0) -> None:
        if not self._bar:
            return
        epoch = min(self._epoch + 1, self._epochs)
        doing = self._busy or f"{self._stage:<10} epoch {epoch}/{self._epochs}"
        status = f"task {self._task + 1}/{self._tasks}  {doing}"
        if self._loss is not None:
            status += f"  loss {self._loss:.3f}"
        if self._average is not None:
            status += f"  accuracy so far {self._average:.1f}%"
        done = self._task * self._epochs + self._epoch + share_of_epoch
        self._bar.update(self._line, completed=done, status=status)
