"""From a recipe to results: every (method, seed) is a run, and a line in the experiment's `runs.jsonl`.

Runs are done in a `Place`: on this machine, or on a cluster. Planning, results and tables are the same for both.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from confitune import engine
from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.reporting.report import write_pages
from confitune.experiments.runs.identity import filled, finished_runs, shortened
from confitune.experiments.runs.job import Job, TrainingError, Watch, groups_of, load, load_backbone, side_by_side
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
        for _, alike in groupby(jobs, lambda job: job.recipe):
            yield from self._results_of_recipe(list(alike))

    def _results_of_recipe(self, jobs: Sequence[Job]) -> Outcomes:
        with engine.decoding_bar(self.console) as bar:
            loaded = load(jobs[0], bar)
        for group in groups_of(jobs, self.parallel_seeds):
            board = engine.progress_board(self.console) if len(group) > 1 and self.console.is_terminal else None
            show = partial(_progress, self.console, board)
            try:
                with board or nullcontext():
                    done = side_by_side(group, *loaded, show, wait=False)
                yield from zip(group, done, strict=True)
            except TrainingError as error:
                yield from ((job, error) for job in group)


def _progress(console: Console, board: Progress | None, job: Job) -> AbstractContextManager[engine.LiveProgress]:
    return closing(engine.LiveProgress(console, job.label, board))


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
        how: more of `plan_recipe`.
    """
    place = place or Place()
    plan = plan_recipe(recipe, out, place, resume=resume, **how)
    if resume and (note := _other_settings(plan)):
        place.say(f"note: {note}", "yellow")
    (outcome,) = run_plans([plan], place)
    if isinstance(outcome, TrainingError):
        raise outcome
    return outcome


@dataclass(frozen=True)
class Plan:
    """The runs of a recipe, in order, and what is known of them."""

    out: Path
    jobs: Sequence[Job]
    done: dict[str, RunResult]  # by key
    others: list[RunResult]  # of other runs in `out`

    @property
    def left(self) -> list[Job]:
        """What is not done yet."""
        return [job for job in self.jobs if job.key not in self.done]


def plan_recipe(
    recipe: Recipe,
    out: Path,
    place: Place,
    *,
    resume: bool = False,
    checkpoint_seconds: float = 30.0,
    watch: Watch | None = None,
    note: str = "",
) -> Plan:
    """Find out what is done and what is left; whatever is wrong is refused before any work is done."""
    recipe = place.settled(recipe)
    backbone = load_backbone(recipe)
    jobs = [
        Job(recipe, out, method, seed, backbone.weights_sha256, engine.command_line(), checkpoint_seconds, watch, note)
        for method in recipe.methods
        for seed in recipe.run_seeds
    ]
    finished = finished_runs(out)
    if not resume:
        _refuse_existing(jobs, finished)
    done = {job.key: finished.pop(job.key) for job in jobs if job.key in finished}
    plan = Plan(out, jobs, done, list(finished.values()))
    for method in dict.fromkeys(job.method for job in plan.left):  # now, not after those that can do it were trained
        recipe.method(method).network(copy.deepcopy(backbone.module))
    for job in plan.left:
        engine.Checkpoint.load(job.folder, job.config)  # a damaged one is refused before any work is done
    if plan.left:
        require_writable(out)
    return plan


def run_plans(plans: Sequence[Plan], place: Place) -> list[list[RunResult] | TrainingError]:
    """What each plan gives, or why some of its runs could not be trained; any other error is raised."""
    outcomes: dict[str, RunResult | ConfituneError] = {}  # by key
    for plan in plans:
        outcomes |= plan.done
        if plan.done:
            with suppress(OSError):  # nothing may be left to do on a disk that is read-only by now
                write_pages(plan.out)  # a run that was killed right after its result may have left an older one
    for job, outcome in place.results([job for plan in plans for job in plan.left]):
        outcomes[job.key] = outcome
        if isinstance(outcome, RunResult):
            write_pages(job.out)
        else:
            place.say(f"{job.label} failed: {outcome}", "yellow")
    return [_finished(plan, outcomes) for plan in plans]


def _finished(plan: Plan, outcomes: Mapping[str, RunResult | ConfituneError]) -> list[RunResult] | TrainingError:
    results = []
    failed = dict[ConfituneError, Job]()  # runs that were stopped by the same error: the first of them
    for job in plan.jobs:
        outcome = outcomes[job.key]
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


def _refuse_existing(jobs: Sequence[Job], finished: Mapping[str, RunResult]) -> None:
    """Refuse to do what is done or begun."""
    for job in jobs:
        begun = any((job.folder / name).exists() for name in (engine.CHECKPOINT, engine.BEFORE))
        if begun or job.key in finished:
            what = f"{job.out} holds a {'finished' if job.key in finished else 'broken-off'} run of {job.label}"
            raise ConfituneError(f"{what}: add --resume to take it as it is and go on, or choose another --out folder")


def _other_settings(plan: Plan) -> str:
    """What to say where a run will be done that is there with other settings: these may not have been meant."""
    for job in plan.left:
        for other in plan.others:
            if (other.dataset, other.method, other.seed) == (job.recipe.dataset, job.method, job.seed):
                differing = engine.differences(*(filled(shortened(config)) for config in (other.config, job.config)))
                return f"{plan.out} has {job.label} with other settings ({differing}); it stays, this is another run"
    return ""
