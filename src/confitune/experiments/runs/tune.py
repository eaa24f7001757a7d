"""Hyperparameter search: what is tried, which value wins, and the winner on everything.

As in the paper (appendix): a tenth of every task's training images is held out, each value of the grid is trained on
the rest and tested on the held-out images, and the best one is trained again on everything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.catalog import method_options, paper_search
from confitune.experiments.paper.numbers import searched
from confitune.experiments.reporting.report import write_text
from confitune.experiments.runs.identity import Value, value_text
from confitune.experiments.runs.job import TrainingError
from confitune.experiments.runs.recipe import Recipe, make_recipe, read_value
from confitune.experiments.runs.runner import Place, plan_recipe, run_plans, run_recipe

HELD_OUT = 0.1  # the paper's share


@dataclass(frozen=True)
class Search:
    """One option of one method, and the values to try."""

    recipe: Recipe  # of that method, with the option as it was before; all training images are trained on
    held_out: float
    option: str  # with its part, as `--set` takes it
    grid: tuple[Value, ...]

    def name(self, value: Value) -> str:
        """Of a grid point, as `--set` takes it.

        >>> search = plan_search("ewc", {})
        >>> [search.name(value) for value in search.grid[-2:]]
        ['ewc.strength=100000', 'ewc.strength=300000']
        """
        return f"{self.option}={value_text(value)}"

    def retraining(self, value: Any, **more: Any) -> Recipe:
        """The recipe with this value, on all training images."""
        (part, _, name), options = self.option.rpartition("."), self.recipe.options
        changed = {**options, part: {**options.get(part, {}), name: value}}
        return Recipe(**{**self.recipe.model_dump(exclude_unset=True), **more, "options": changed})

    def validation(self, value: Value) -> Recipe:
        """The same with the held-out images as its test set."""
        return self.retraining(value, held_out=self.held_out)


Points = Mapping[Value, Sequence[RunResult]]  # results by seed of every value that could be trained


def winner(points: Points) -> Value:
    """Highest mean accuracy; of equal ones the least forgetting, then the first."""
    # Rounded: sums of the same accuracies in another order differ in their last bits.
    return max(points, key=lambda v: (round(_mean(points[v], "acc"), 9), -round(_mean(points[v], "fgt"), 9)))


def _mean(runs: Sequence[RunResult], metric: str) -> float:
    return float(np.mean([getattr(run, metric) or 0.0 for run in runs]))


def plan_search(
    method: str,
    values: Mapping[str, Any],
    option: str | None = None,
    grid: Sequence[str] = (),
    source: str = "the options given",
) -> Search:
    """What to try, checked before anything is trained.

    Args:
        values: of the recipe; its methods are not used.
        option: 'part.option'; default: what the paper searched for the method.
        grid: values as texts; default: the paper's for the option.
        source: of the recipe's values, for messages.

    >>> plan_search("mas-cpr", {"dataset": "flowers102"}).grid
    (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    """
    checked = make_recipe({**values, "methods": [method]}, source)
    recipe = Recipe(**checked.model_dump(exclude_unset=True, exclude={"held_out"}))
    choices = [choice.name for choice in method_options(method)]
    there = ", ".join(choices)
    paper = paper_search(method)
    if not choices:
        run = f"`confitune run --method {method}` is all there is to do"
        raise ConfituneError(f"{method} has no options to search: {run}")
    if option is None and paper is None:
        raise ConfituneError(f"the paper searched no option of {method}; choose one with --option: {there}")
    option = option or f"{paper.part}.{paper.option}"  # type: ignore[union-attr]
    if option not in choices:
        raise ConfituneError(f"{method} has no option {option!r}; there are {there}")
    known = {f"{row.part}.{row.option}": row.grid for row in searched()}
    if not grid and option not in known:
        raise ConfituneError(f"the paper has no grid for {option}: give its values with --grid")
    untried = Search(recipe, checked.held_out or HELD_OUT, option, ())
    tried = list[Value]()
    part, _, name = option.rpartition(".")
    for value in map(read_value, grid) if grid else known[option]:
        hooks = untried.retraining(value).method(method).hooks
        tried += [getattr(hook.options, name) for hook in hooks if type(hook).name == part]  # as the method takes it
    if len(set(tried)) < 2:
        given = ", ".join(grid)
        raise ConfituneError(f"a search needs two or more values to choose from, got {given}: add --grid")
    if all(isinstance(value, int | float) for value in tried):
        tried.sort()
    return Search(recipe, untried.held_out, option, tuple(dict.fromkeys(tried)))


def run_search(
    search: Search, out: Path, *, place: Place | None = None, resume: bool = False, retrain: bool = True
) -> tuple[Points, list[RunResult]]:
    """Try every value, and train the winner again on all training images (`retrain`).

    In `out`: all runs as `run_recipe` writes them and, for `confitune run`, `winner.yaml`.

    Returns:
        What each value gave on the held-out images, and the results of the retraining.
    """
    place = place or Place()
    plans = []
    for number, value in enumerate(search.grid, 1):
        note = f"{search.name(value)}, {number} of {len(search.grid)}"
        plans.append(plan_recipe(search.validation(value), out, place, resume=resume, note=note))
    given = dict(zip(search.grid, run_plans(plans, place), strict=True))
    points = {value: results for value, results in given.items() if not isinstance(results, TrainingError)}
    if not points:
        raise ConfituneError(f"no value of {search.option} could be trained; the first said: {given[search.grid[0]]}")
    best = winner(points)
    recipe = search.retraining(best)
    told = f"# {search.name(best)}: the best of {', '.join(map(value_text, search.grid))}\n"
    told += f"# on {search.held_out:.0%} of the training images, held out (ACC {_mean(points[best], 'acc'):.2f}).\n"
    given_ones = yaml.safe_dump(recipe.model_dump(mode="json", exclude_unset=True), sort_keys=False)
    write_text(out / "winner.yaml", told + given_ones)
    if not retrain:
        return points, []
    place.say(f"retraining {recipe.methods[0]} with {search.name(best)} on all training images")
    return points, run_recipe(recipe, out, place=place, resume=True)


def edge_note(search: Search, points: Points) -> str:
    """What to say where the best value is the grid's smallest or largest: a better one may lie beyond."""
    best, (first, *_, last) = winner(points), search.grid
    if isinstance(best, bool | str) or best not in (first, last):
        return ""
    end, beyond = ("smallest", "smaller") if best == first else ("largest", "larger")
    return f"{search.name(best)} is the {end} value tried; a {beyond} one may be better: try it with --grid"
