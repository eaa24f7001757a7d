"""From a recipe to results: every (method, seed) is a run, and a line in the experiment's `runs.jsonl`.

Runs are done in a `Place`: on this machine, or on a cluster. Planning, results and tables are the same for both.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from confitune.engine.checkpoint import BEFORE, CHECKPOINT, Checkpoint, differences
from confitune.engine.progress import LiveProgress, decoding_bar, progress_board
from confitune.engine.result import RunResult, command_line
from confitune.errors import ConfituneError
from confitune.experiments.reporting.report import write_pages
from confitune.experiments.runs.identity import filled, finished_runs, shortened
from confitune.experiments.runs.job import Job, TrainingError, groups_of, load, load_backbone, side_by_side
from confitune.experiments.runs.recipe import Recipe
from confitune.files import require_writable

Outcomes = Iterator[tuple[Job, RunResult | ConfituneError]]


class Place:
    """This machine: one run after the other, or `parallel_seeds` seeds of a method at once; each gives the same.

    Other places derive from it.
    """

    def __init__(self, console: Console | None = None, parallel_seeds: int = 1) -> None:
        self.console = console or Console(quiet=True)  # where progress is shown
        self.parallel_seeds = parallel_seeds

    def say(self, text: str, style: str = "") -> None:
        """Print a text as it is."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def settled(self, recipe: Recipe) -> Recipe:
        """The recipe with everything fixed that depends on the machine that will do its runs."""
        return recipe

    def results(self, jobs: Sequence[Job]) -> Outcomes:
        """What became of each job, as it ends: a result, or why there is none.

        A run that fails stops those that share its process, and no others.
        """
        for _, of_recipe in groupby(jobs, lambda job: job.recipe):
            alike = list(of_recipe)
            with decoding_bar(self.console) as bar:
                loaded = load(alike[0], bar)
            for group in groups_of(alike, self.parallel_seeds):
                board = progress_board(self.console) if len(group) > 1 and self.console.is_terminal else None
                listeners = [LiveProgress(self.console, job.label, board) for job in group]
                try:
                    with board or nullcontext(), ExitStack() as afterwards:
                        for listener in listeners:
                            afterwards.callback(listener.close)
                        done = side_by_side(group, *loaded, listeners, wait=False)
                    yield from zip(group, done, strict=True)
                except TrainingError as error:
                    yield from ((job, error) for job in group)
            del loaded  # or the device would hold the images of two recipes


@contextmanager
def open_place(
    on: str = "local",
    console: Console | None = None,
    *,
    parallel_seeds: int = 1,
    gpus_per_run: float | None = None,
    cpus_per_run: int | None = None,
) -> Iterator[Place]:
    """Where runs are done, as `confitune run --help` explains; those that are not finished at the end are stopped."""
    if on == "local":
        if gpus_per_run is not None or cpus_per_run is not None:
            raise ConfituneError("--gpus-per-run and --cpus-per-run are a run's share of a cluster: add --on ray")
        yield Place(console, parallel_seeds)
        return
    from confitune.experiments.runs.cluster import RayPlace, connect

    ray = connect(on)
    place = RayPlace(ray, console, parallel_seeds, gpus_per_run, cpus_per_run)
    try:
        yield place
    finally:
        place.close()
        ray.shutdown()


def run_recipe(
    recipe: Recipe, out: Path, *, place: Place | None = None, resume: bool = False, **how: Any
) -> list[RunResult]:
    """Run what the recipe asks for and is not done yet; results, logs and tables go below `out`.

    A run that fails does not stop the others; the error comes when they are done.

    Args:
        place: where runs are done (`open_place`); default: here, one after the other, without output.
        resume: take finished runs as they are and go on with interrupted ones; without it, an `out` that holds any of
            them is refused, so nothing is overwritten.
        how: `checkpoint_seconds`, `watch` and `note` of each `Job`.
    """
    place = place or Place()
    jobs = plan_recipe(recipe, out, place, resume=resume, **how)
    if resume and (note := _other_settings(jobs)):
        place.say(f"note: {note}", "yellow")
    (outcome,) = run_plans([jobs], place)
    if isinstance(outcome, TrainingError):
        raise outcome
    return outcome


def plan_recipe(recipe: Recipe, out: Path, place: Place, *, resume: bool = False, **how: Any) -> list[Job]:
    """The runs of a recipe, in order; whatever is wrong with those that are left is refused before any work is done.

    `how` are the last fields of `Job`, which have defaults.
    """
    recipe = place.settled(recipe)
    backbone = load_backbone(recipe)
    jobs = [
        Job(recipe, out, method, seed, backbone.weights_sha256, command_line(), **how)
        for method in recipe.methods
        for seed in recipe.run_seeds
    ]
    finished = finished_runs(out)
    for job in () if resume else jobs:
        begun = any((job.folder / name).exists() for name in (CHECKPOINT, BEFORE))
        if begun or job.key in finished:
            what = f"{out} holds a {'finished' if job.key in finished else 'broken-off'} run of {job.label}"
            raise ConfituneError(f"{what}: add --resume to take it as it is and go on, or choose another --out folder")
    left = [job for job in jobs if job.key not in finished]
    for method in dict.fromkeys(job.method for job in left):  # now, not after those that can do it were trained
        recipe.method(method).network(copy.deepcopy(backbone.module))
    for job in left:
        Checkpoint.load(job.folder, job.config)
    if left:
        require_writable(out)
    return jobs


def run_plans(plans: Sequence[Sequence[Job]], place: Place) -> list[list[RunResult] | TrainingError]:
    """What each plan gives, or why some of its runs could not be trained; any other error is raised."""
    outcomes: dict[str, RunResult | ConfituneError] = {}  # by key
    jobs = [job for plan in plans for job in plan]
    for out in dict.fromkeys(job.out for job in jobs):
        if finished := finished_runs(out):
            outcomes |= finished
            with suppress(OSError):  # nothing may be left to do on a disk that is read-only by now
                write_pages(out)  # a run that was killed right after its result may have left an older one
    for job, outcome in place.results([job for job in jobs if job.key not in outcomes]):
        outcomes[job.key] = outcome
        if isinstance(outcome, RunResult):
            write_pages(job.out)
        else:
            place.say(f"{job.label} failed: {outcome}", "yellow")
    return [_finished((job, outcomes[job.key]) for job in plan) for plan in plans]


def _finished(outcomes: Outcomes) -> list[RunResult] | TrainingError:
    results = []
    failed = dict[ConfituneError, Job]()  # runs that were stopped by the same error: the first of them
    for job, outcome in outcomes:
        if isinstance(outcome, RunResult):
            results.append(outcome)
        else:
            failed.setdefault(outcome, job)
    if not failed:
        return results
    message = "\n".join(f"{job.label}: {error}" if len(failed) > 1 else str(error) for error, job in failed.items())
    if not all(isinstance(error, TrainingError) for error in failed):
        raise ConfituneError(message)
    return TrainingError(message, results)


def _other_settings(jobs: Sequence[Job]) -> str:
    """What to say where a run will be done that is there with other settings: these may not have been meant."""
    finished = finished_runs(jobs[0].out)
    for job in (job for job in jobs if job.key not in finished):
        for other in finished.values():
            if (other.dataset, other.method, other.seed) == (job.recipe.dataset, job.method, job.seed):
                differing = differences(*(filled(shortened(config)) for config in (other.config, job.config)))
                return f"{job.out} has {job.label} with other settings ({differing}); it stays, this is another run"
    return ""
