"""Runs on this machine, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing

from rich.console import Console

from confitune.engine import LiveProgress, RunResult, decoding_bar, progress_board
from confitune.errors import ConfituneError
from confitune.experiments.group import Loaded, side_by_side
from confitune.experiments.job import Job, TrainingError, groups_of
from confitune.experiments.recipe import Recipe
from confitune.ranks import Ranks


class LocalPlace:
    """This machine: one run after the other, or several seeds of a method at once.

    Args:
        parallel_seeds: how many seeds of a method run at once on the device; each gives what it gives alone.
        ranks: the processes that do each run together; default: this one alone.
    """

    def __init__(self, console: Console | None = None, parallel_seeds: int = 1, ranks: Ranks | None = None) -> None:
        self.console = console or Console(quiet=True)
        self.at_once = parallel_seeds
        self._ranks = ranks or Ranks()

    @property
    def writes(self) -> bool:
        """Whether this is the process that does."""
        return self._ranks.first

    def settled(self, recipe: Recipe) -> Recipe:
        """As it is: the device is this process's to choose."""
        return recipe

    def begin(self, jobs: Sequence[Job]) -> None:
        """Nothing yet: runs begin when their results are asked for."""
        if self._ranks.several and any(job.watch is not None for job in jobs):
            raise ConfituneError(f"measuring on the way needs one process, not {self._ranks.size} (no torchrun)")

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, RunResult | ConfituneError]]:
        """Do the jobs, which must be of one recipe."""
        if not jobs:
            return
        with decoding_bar(self.console) as bar:
            loaded = Loaded.of(jobs[0], bar, self._ranks)
        for group in groups_of(jobs, self.at_once):
            try:
                yield from zip(group, self._side_by_side(group, loaded), strict=True)
            except TrainingError as error:
                yield from ((job, error) for job in group)

    def _side_by_side(self, group: Sequence[Job], loaded: Loaded) -> list[RunResult]:
        with ExitStack() as stack:
            several = len(group) > 1 and self.console.is_terminal
            board = stack.enter_context(progress_board(self.console)) if several else None
            return side_by_side(
                group, loaded, lambda job: closing(LiveProgress(self.console, job.label, board)), _refuse
            )


def _refuse(job: Job) -> None:
    raise ConfituneError(f"another process is working in {job.folder}; wait for it, or choose another --out folder")
