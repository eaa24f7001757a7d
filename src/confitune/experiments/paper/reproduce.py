"""Reproduce tables and figures: run what is missing, then write each with the paper's numbers beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.paper import figures, moments, tables
from confitune.experiments.paper.outcome import Outcome, write_outcome
from confitune.experiments.paper.plan import ABLATION, Part, Scope, parts_of
from confitune.experiments.runs.identity import filled, require_same_run
from confitune.experiments.runs.job import TrainingError
from confitune.experiments.runs.place import LocalPlace, Place
from confitune.experiments.runs.runner import finish_plan, plan_recipe
from confitune.files import require_writable

# What can be reproduced, in the order of `all`: from a scope and finished runs to an outcome.
WRITERS: Mapping[str, Callable[[Scope, Sequence[Part], Place], Outcome]] = {
    "datasets": tables.datasets,
    "theory": figures.theory,
    "storage": figures.storage,
    "table2": tables.table2,
    "shift": moments.shift,
    "transductive": moments.transductive,
    "table1": tables.table1,
    "curves": figures.curves,
    "controls": tables.controls,
    "search": tables.search,
    "deeper": tables.deeper,
    "deeper-lite": tables.deeper,
}
WHATS = tuple(WRITERS)


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
    watched = parts_of("shift", scope) if scope.chosen(ABLATION) else []
    failures = _run_missing([part for needed in parts.values() for part in needed], watched, place)
    outcomes = []
    for what in wanted:
        place.console.print(f"writing {what}", style="bold", highlight=False)
        outcome = WRITERS[what](scope, parts[what], place)
        outcome.notes += [note for part, note in failures if part in parts[what]]
        write_outcome(scope.out, outcome)
        outcomes.append(outcome)
    return outcomes


def _run_missing(parts: Sequence[Part], watched: Sequence[Part], place: Place) -> list[tuple[Part, str]]:
    """Do what is not done, and measure moments of watched runs on the way; what could not be trained, and why."""
    unique = list({(part.folder, part.recipe.dataset, part.method): part for part in parts}.values())
    plans = []
    for part in unique:
        if all(result.exists() for result in part.runs().values()):
            _require_same(part)
            continue
        watch = moments.watch_moments if part in watched else None
        plans.append((part, plan_recipe(part.recipe, part.folder, place, resume=True, watch=watch)))
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


def _require_same(part: Part) -> None:
    """Refuse results that were made with other options, whatever device made them."""
    for seed, path in part.runs().items():
        made = filled(RunResult.load(path).config)
        wanted = part.recipe.identity(part.method, seed, made["weights_sha256"])
        if part.recipe.precision == "auto":
            wanted["precision"] = made["precision"]
        require_same_run(made, wanted, path)
