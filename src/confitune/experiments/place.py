"""Where runs are done: on this machine, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.job import Job
from confitune.experiments.local import LocalPlace
from confitune.experiments.recipe import Recipe
from confitune.ranks import Ranks


class Place(Protocol):
    """Does runs. Planning, results and summaries are the same wherever they are done."""

    @property
    def console(self) -> Console:
        """Where progress is shown."""

    @property
    def writes(self) -> bool:
        """Whether this process writes what runs have in common; of several that do a run together, one does."""

    @property
    def at_once(self) -> int | None:
        """How many runs go on at a time, to judge how long many take; None: that cannot be known."""

    def settled(self, recipe: Recipe) -> Recipe:
        """The recipe with everything fixed that depends on the machine that will do its runs."""

    def begin(self, jobs: Sequence[Job]) -> None:
        """Say which results will be asked for; a place that can do many runs at once begins with all of them."""

    def results(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, RunResult | ConfituneError]]:
        """What became of jobs of one recipe, as it comes: a result, or why there is none.

        A run that fails stops those that share its process, and no others.
        """


@contextmanager
def open_place(
    on: str = "local",
    console: Console | None = None,
    *,
    parallel_seeds: int = 1,
    gpus_per_run: float | None = None,
    cpus_per_run: int | None = None,
    ranks: Ranks | None = None,
) -> Iterator[Place]:
    """The place of this name, for as long as the context lasts; runs that are not done then are stopped.

    Args:
        on: 'local': this machine. 'ray': the Ray cluster that RAY_ADDRESS names, else one that is started here.
            'HOST:PORT' or 'ray://HOST:PORT': the Ray cluster there.
        parallel_seeds: so many seeds of a method share a process, here or on the cluster.
        gpus_per_run: a process's share of GPUs on a cluster, e.g. 0.25; default: 1 where there are GPUs.
        cpus_per_run: its CPUs.
        ranks: the processes that do each run together, see `confitune.ranks.joined`; all of them open the place.
    """
    console, ranks = console or Console(quiet=True), ranks or Ranks()
    if ranks.several and (on != "local" or parallel_seeds > 1):
        raise ConfituneError(
            f"{ranks.size} processes do one run at a time together: a cluster, or seeds side by side, need one process "
            "(no torchrun)"
        )
    if on == "local":
        if gpus_per_run is not None or cpus_per_run is not None:
            raise ConfituneError("--gpus-per-run and --cpus-per-run are a run's share of a cluster: add --on ray")
        yield LocalPlace(console, parallel_seeds, ranks)
        return
    from confitune.experiments.cluster import ray_place

    with ray_place(on, console, parallel_seeds, gpus_per_run, cpus_per_run) as place:
        yield place
