"""From a recipe to results: every (method, seed) a run, and a line in the experiment's `runs.jsonl`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from confitune.engine import BEFORE, CHECKPOINT, Checkpoint, RunResult, command_line, differences
from confitune.errors import ConfituneError
from confitune.experiments.reporting.report import write_pages
from confitune.experiments.runs.identity import filled, shortened
from confitune.experiments.runs.job import Job, TrainingError, Watch, finished_runs, load_backbone
from confitune.experiments.runs.place import LocalPlace, Place
from confitune.experiments.runs.recipe import Recipe
from confitune.files import require_writable


def run_recipe(
    recipe: Recipe,
    out: Path,
    *,
    place: Place | None = None,
    resume: bool = False,
    checkpoint_seconds: float = 30.0,
    watch: Watch | None = None,
) -> list[RunResult]:
    """Run what the recipe asks for and is not done yet; results, logs and tables go below `out`.

    A run that fails does not stop the others; what failed is said when they are done.

    Args:
        place: where runs are done (`open_place`); default: here, one after the other, without a word.
        resume: take finished runs as they are and go on with broken-off ones; without it, an `out` that holds any of
            them is refused, so nothing is overwritten.
        checkpoint_seconds: a run that is killed loses at most this much work and an epoch's.
        watch: makes listeners that measure something while a run goes on.
    """
    place = place or LocalPlace()
    plan = plan_recipe(recipe, out, place, resume=resume, checkpoint_seconds=checkpoint_seconds, watch=watch)
    if resume and (note := _other_settings(plan)):
        place.console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    place.begin(plan.left)
    return finish_plan(plan, place)


@dataclass(frozen=True)
class Plan:
    """What a recipe asks for, in order: all runs, and the results of those that are done."""

    out: Path
    jobs: Sequence[Job]
    done: dict[str, RunResult]  # by key
    others: list[RunResult]  # other runs that are in `out`

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
) -> Plan:
    """Find out what is done and what is left; whatever is wrong with that is refused before any work is done."""
    recipe = place.settled(recipe)
    backbone = load_backbone(recipe)
    jobs = [
        Job(recipe, out, method, seed, backbone.weights_sha256, command_line(), checkpoint_seconds, watch)
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
        Checkpoint.load(job.folder, job.config)  # one of another configuration is refused before any work is done
    if plan.left:
        require_writable(out)
    return plan


def finish_plan(plan: Plan, place: Place) -> list[RunResult]:
    """Results of all runs of a plan whose jobs the place has begun."""
    done = dict(plan.done)
    if done:
        with suppress(OSError):  # nothing may be left to do on a disk that is read-only by now
            write_pages(plan.out)  # a run that was killed right after its result may have left an older one
    failures: list[tuple[Job, ConfituneError]] = []
    for job, outcome in place.results(plan.left):
        if isinstance(outcome, RunResult):
            done[job.key] = outcome
            write_pages(plan.out)
        else:
            failures.append((job, outcome))
    if failures:
        error = _in_one(sorted(failures, key=lambda failure: plan.jobs.index(failure[0])))
        if isinstance(error, TrainingError):
            error.results = [done[job.key] for job in plan.jobs if job.key in done]
        raise error
    return [done[job.key] for job in plan.jobs]


def _in_one(failures: Sequence[tuple[Job, ConfituneError]]) -> ConfituneError:
    """One error that says all of them; runs that were stopped by the same one are named by the first."""
    errors = {id(error): (job, error) for job, error in reversed(failures)}
    first, *more = reversed(errors.values())
    if not more:
        return first[1]
    message = "\n".join(f"{job.label}: {error}" for job, error in (first, *more))
    diverged = all(isinstance(error, TrainingError) for _, error in errors.values())
    return TrainingError(message) if diverged else ConfituneError(message)


def _refuse_existing(jobs: Sequence[Job], finished: Mapping[str, RunResult]) -> None:
    """Refuse to do what is done or begun."""
    for job in jobs:
        begun = any((job.folder / name).exists() for name in (CHECKPOINT, BEFORE))
        if begun or job.key in finished:
            what = f"{job.out} holds a {'finished' if job.key in finished else 'broken-off'} run of {job.label}"
            raise ConfituneError(f"{what}: add --resume to take it as it is and go on, or choose another --out folder")


def _other_settings(plan: Plan) -> str:
    """What to say where a run will be done that is there with other settings: these may not have been meant."""
    for job in plan.left:
        for other in plan.others:
            if (other.dataset, other.method, other.seed) == (job.recipe.dataset, job.method, job.seed):
                differing = differences(*(filled(shortened(config)) for config in (other.config, job.config)))
                return f"{plan.out} has {job.label} with other settings ({differing}); it stays, this is another run"
    return ""
