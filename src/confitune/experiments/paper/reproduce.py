"""Reproduce tables and figures: run what is missing, then write each with the paper's numbers beside it."""

from __future__ import annotations

from collections.abc import Sequence

from confitune.errors import ConfituneError
from confitune.experiments.paper import figures, tables
from confitune.experiments.paper.outcome import Outcome, write_outcomes
from confitune.experiments.paper.plan import ABLATION, REPRODUCTIONS, Part, Scope, parts_of
from confitune.experiments.runs.job import TrainingError, finished_runs
from confitune.experiments.runs.place import LocalPlace, Place
from confitune.experiments.runs.recipe import Recipe
from confitune.experiments.runs.runner import finish_plan, plan_recipe
from confitune.files import require_writable

_REGISTERED = (tables, figures)  # importing them has filled the registry
WHATS = tuple(REPRODUCTIONS)


def reproduce(whats: Sequence[str], scope: Scope, *, place: Place | None = None) -> list[Outcome]:
    """Every table or figure of `whats` ('all': all of them) below `scope.out`: Markdown, JSON and pictures.

    Runs that are done are taken as they are, wherever they were needed before; one that was broken off goes on. By
    default runs are done here, one after the other, without a word; see `open_place`.
    """
    place = place or LocalPlace()
    unknown = [what for what in whats if what not in (*WHATS, "all")]
    if unknown or not whats:
        raise ConfituneError(f"nothing to reproduce called {', '.join(unknown)}: there are {', '.join(WHATS)} and all")
    wanted = WHATS if "all" in whats else tuple(dict.fromkeys(whats))
    parts = {what: parts_of(what, scope) for what in wanted}
    require_writable(scope.out)
    watched = [part.recipe for part in parts_of("shift", scope)] if scope.chosen(ABLATION) else []
    failures = _run_missing([part for needed in parts.values() for part in needed], watched, scope, place)
    results = finished_runs(scope.out).values()
    outcomes = []
    for what in wanted:
        place.console.print(f"writing {what}", style="bold", highlight=False)
        write, _ = REPRODUCTIONS[what]
        outcome = write(scope, [part.found(results) for part in parts[what]], place)
        outcome.notes += [note for part, note in failures if part in parts[what]]
        outcomes.append(outcome)
    write_outcomes(scope.out, outcomes)
    return outcomes


def _run_missing(
    parts: Sequence[Part], watched: Sequence[Recipe], scope: Scope, place: Place
) -> list[tuple[Part, str]]:
    """Do what is not done, and measure moments of watched runs on the way; what could not be trained, and why."""
    results, plans, planned = finished_runs(scope.out).values(), [], []
    for part in parts:
        if part.recipe in planned or len(part.found(results).results) == part.recipe.seeds:
            continue
        planned.append(part.recipe)
        watch = figures.watch_moments if part.recipe in watched else None
        plans.append((part, plan_recipe(part.recipe, scope.out, place, resume=True, watch=watch)))
    place.begin([job for _, plan in plans for job in plan.left])
    failures = []
    for number, (part, plan) in enumerate(plans, 1):
        what = f"{part.recipe.dataset}, {part.recipe.model}: {part.method} ({number} of {len(plans)})"
        place.console.print(what, style="bold", highlight=False, markup=False)
        try:
            finish_plan(plan, place)
        except TrainingError as error:
            failures.append((part, f"{part.recipe.dataset}, {part.method}: {error}"))
            place.console.print(failures[-1][1], style="yellow", highlight=False, markup=False)
    return failures
