"""The progress of runs elsewhere, shown as that of runs here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress, TaskID

from confitune.engine import LiveProgress, progress_board
from confitune.experiments.cluster.worker import DECODING, PLACED, Message
from confitune.experiments.job import Job


@dataclass
class _Shown:
    """What is known of a run."""

    label: str
    attempt: str = ""
    attempts: int = 0
    progress: LiveProgress | None = None
    decoding: TaskID | None = None


class Display:
    """A bar for each run that goes on, and one for all of them; elsewhere than on a terminal a plain line a task."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._runs: dict[str, _Shown] = {}
        self._ended: set[str] = set()
        self._board: Progress | None = None

    def expect(self, jobs: Sequence[Job]) -> None:
        """More runs are to be shown."""
        self._runs |= {str(job.folder): _Shown(job.label) for job in jobs}
        if self._board is None and jobs and self._console.is_terminal:
            self._board = progress_board(self._console)
            self._all = self._board.add_task("all runs", total=0, status="")
            self._board.start()
        self._count()

    def show(self, messages: Iterable[Message]) -> None:
        """Show what has happened."""
        for message in messages:
            run = self._runs.get(message.run)
            if run is None or message.run in self._ended:
                continue
            if message.event == PLACED:
                self._place(run, message)
            elif message.attempt == run.attempt and run.progress is not None:
                if message.event == DECODING:
                    self._show_decoding(run, *message.values)
                    continue
                self._hide_decoding(run)
                getattr(run.progress, message.event)(*message.values)
        self._count()

    def attempts(self, job: Job) -> int:
        """How many workers have taken the run on so far."""
        return self._runs[str(job.folder)].attempts

    def ended(self, job: Job) -> None:
        """A run has a result, or will have none."""
        self._ended.add(str(job.folder))
        self._take_away(self._runs[str(job.folder)])
        self._count()

    def close(self) -> None:
        """Take everything away."""
        for run in self._runs.values():
            self._take_away(run)
        if self._board:
            self._board.stop()
            self._board = None

    def _place(self, run: _Shown, message: Message) -> None:
        self._take_away(run)
        run.attempt, run.attempts = message.attempt, run.attempts + 1
        run.progress = LiveProgress(self._console, run.label, self._board)
        if run.attempts > 1:
            run.progress.note(f"{run.label}: its worker died; it goes on from its checkpoint on {message.values[0]}")

    def _take_away(self, run: _Shown) -> None:
        self._hide_decoding(run)
        if run.progress:
            run.progress.close()
            run.progress = None

    def _show_decoding(self, run: _Shown, what: str, done: int, total: int) -> None:
        if not self._board:
            return
        if run.decoding is None:
            run.decoding = self._board.add_task(run.label, status="")
        self._board.update(run.decoding, completed=done, total=total, status=f"{what} {done}/{total}")

    def _hide_decoding(self, run: _Shown) -> None:
        if self._board and run.decoding is not None:
            self._board.remove_task(run.decoding)
        run.decoding = None

    def _count(self) -> None:
        if self._board:
            going_on = sum(run.progress is not None for run in self._runs.values())
            status = f"{len(self._ended)} of {len(self._runs)} done, {going_on} going on"
            self._board.update(self._all, completed=len(self._ended), total=len(self._runs), status=status)
