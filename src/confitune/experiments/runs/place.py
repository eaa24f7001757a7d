"""Where runs are done: on this machine, or elsewhere.

A place is a `Place`; one that is to be chosen with --on is opened by `open_place`, and nothing else knows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext

from rich.console import Console

from confitune.engine import LiveProgress, RunResult, decoding_bar, progress_board
from confitune.errors import ConfituneError
from confitune.experiments.runs.job import Job, Loaded, TrainingError, groups_of, side_by_side
from confitune.experiments.runs.recipe import Recipe


class Place:
    """Does runs. Planning, results and summaries are the same wherever they are done."""

    def __init__(self, console: Console | None = None, parallel_seeds: int = 1) -> None:
        self.console = console or Console(quiet=True)  # where progress is shown
        self.parallel_seeds = parallel_seeds

    def settled(self, recipe: Recipe) -> Recipe:
        """The recipe with everything fixed that depends on the machine that will do its runs."""
        return recipe

    def begin(self, jobs: Sequence[Job]) -> None:
        """Say which results will be asked for; a place that can do many runs at once begins with all of them."""

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, RunResult | ConfituneError]]:
        """What became of jobs of one recipe, as it comes: a result, or why there is none.

        A run that fails stops those that share its process, and no others.
        """
        raise NotImplementedError


class LocalPlace(Place):
    """This machine: one run after the other, or `parallel_seeds` seeds of a method at once; each gives the same."""

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, RunResult | ConfituneError]]:
        """Do the jobs, which must be of one recipe."""
        if not jobs:
            return
        with decoding_bar(self.console) as bar:
            loaded = Loaded.of(jobs[0], bar)
        for group in groups_of(jobs, self.parallel_seeds):
            try:
                yield from zip(group, self._done(group, loaded), strict=True)
            except TrainingError as error:
                yield from ((job, error) for job in group)

    def _done(self, group: Sequence[Job], loaded: Loaded) -> list[RunResult]:
        several = len(group) > 1 and self.console.is_terminal
        with progress_board(self.console) if several else nullcontext() as board:
            return side_by_side(
                group, loaded, lambda job: closing(LiveProgress(self.console, job.label, board)), _refuse
            )


def _refuse(job: Job) -> None:
    raise ConfituneError(f"another process is working in {job.folder}; wait for it, or choose another --out folder")


@contextmanager
def open_place(
    on: str = "local",
    console: Console | None = None,
    *,
    parallel_seeds: int = 1,
    gpus_per_run: float | None = None,
    cpus_per_run: int | None = None,
) -> Iterator[Place]:
    """The place of this name, for as long as the context lasts; runs that are not done then are stopped.

    Args:
        on: 'local': this machine. 'ray': the Ray cluster that RAY_ADDRESS names, else one that is started here.
            'HOST:PORT' or 'ray://HOST:PORT': the Ray cluster there.
        parallel_seeds: so many seeds of a method share a process, here or on the cluster.
        gpus_per_run: a process's share of GPUs on a cluster, e.g. 0.25; default: 1 where there are GPUs.
        cpus_per_run: its CPUs.
    """
    if on == "local":
        if gpus_per_run is not None or cpus_per_run is not None:
            raise ConfituneError("--gpus-per-run and --cpus-per-run are a run's share of a cluster: add --on ray")
        yield LocalPlace(console, parallel_seeds)
        return
    from confitune.experiments.runs.cluster import ray_place

    with ray_place(on, console or Console(quiet=True), parallel_seeds, gpus_per_run, cpus_per_run) as place:
        yield place
