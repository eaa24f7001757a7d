"""Hyperparameter search: what is tried, which value wins, and the winner on everything.

As in the paper (appendix): a tenth of every task's training images is held out, each value of the grid is trained on
the rest and tested on the held-out images, and the best one is trained again on everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel
from rich.table import Table

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.catalog import paper_search
from confitune.experiments.paper.numbers import searched
from confitune.experiments.reporting.render import shown, terminal_table
from confitune.experiments.runs.identity import Value, options_of, options_set, value_text
from confitune.experiments.runs.job import TrainingError
from confitune.experiments.runs.place import LocalPlace, Place
from confitune.experiments.runs.recipe import Recipe, make_recipe, read_value
from confitune.experiments.runs.runner import finish_plan, plan_recipe
from confitune.files import write_whole
from confitune.methods import create_method

HELD_OUT = 0.1  # the paper's share


@dataclass(frozen=True)
class Search:
    """One option of one method, and the values to try."""

    recipe: Recipe  # of the retraining: nothing held out, the option as it was before
    held_out: float
    part: str
    option: str
    grid: tuple[Value, ...]

    @property
    def method(self) -> str:
        """The method's name."""
        return self.recipe.methods[0]

    @property
    def place(self) -> str:
        """The option with its part, as `--set` takes it."""
        return f"{self.part}.{self.option}"

    def name(self, value: Value) -> str:
        """Of a grid point, as `--set` takes it.

        >>> search = plan_search("ewc", {})
        >>> [search.name(value) for value in search.grid[-2:]]
        ['ewc.strength=100000', 'ewc.strength=300000']
        """
        return f"{self.place}={value_text(value)}"

    def retraining(self, value: Value) -> Recipe:
        """The recipe with this value, on all training images."""
        given = self.recipe.model_dump(exclude_unset=True)
        return Recipe(**{**given, "options": _with_option(self.recipe, self.method, self.part, self.option, value)})

    def validation(self, value: Value) -> Recipe:
        """The same with the held-out images as its test set."""
        return Recipe(**{**self.retraining(value).model_dump(exclude_unset=True), "held_out": self.held_out})


@dataclass(frozen=True)
class Point:
    """What a value of the grid gave: results by seed, or why there are none."""

    value: Value
    results: tuple[RunResult, ...] = ()
    failure: str = ""

    @property
    def acc(self) -> float:
        """Mean accuracy over seeds on the held-out images."""
        return float(np.mean([result.acc for result in self.results]))

    @property
    def fgt(self) -> float:
        """Mean forgetting over seeds."""
        return float(np.mean([result.fgt or 0.0 for result in self.results]))


def winner(points: Sequence[Point]) -> Point | None:
    """Highest mean accuracy; of equal ones the least forgetting, then the first. What failed never wins."""
    # Rounded: sums of the same accuracies in another order differ in their last bits.
    trained = [point for point in points if not point.failure]
    return min(trained, key=lambda point: (-round(point.acc, 9), round(point.fgt, 9)), default=None)


def plan_search(
    method: str,
    values: Mapping[str, Any],
    option: str | None = None,
    grid: Sequence[str] = (),
    source: str = "the options given",
) -> Search:
    """What to try, checked before anything is trained.

    Args:
        method: the name of one method, e.g. 'ewc', 'mas-cpr' or 'ewc+confit'.
        values: of the recipe; its methods are not used.
        option: 'part.option'; default: what the paper searched for the method.
        grid: values as texts; default: the paper's for the option.
        source: of the recipe's values, for messages.

    >>> plan_search("mas-cpr", {"dataset": "flowers102"}).grid
    (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
    """
    checked = make_recipe({**values, "methods": [method]}, source)
    recipe = Recipe(**checked.model_dump(exclude_unset=True, exclude={"held_out"}))
    choices = options_of(create_method(method))
    if not choices:
        raise ConfituneError(
            f"{method} has no option to search, it needs none: `confitune run --method {method}` is all there is to do"
        )
    part, name = _place(method, option, choices)
    paper = next((entry for entry in searched() if (entry.part, entry.option) == (part, name)), None)
    if not grid and paper is None:
        raise ConfituneError(f"the paper has no grid for {part}.{name}: give its values with --grid")
    texts = list(grid) or [value_text(value) for value in (paper.grid if paper else ())]
    tried = [_checked(recipe, method, part, name, text) for text in texts]
    if all(isinstance(value, int | float) for value in tried):
        tried = sorted(tried)
    if len(set(tried)) < 2:
        raise ConfituneError(f"a search needs two or more values to choose from, got {', '.join(texts)}: add --grid")
    return Search(recipe, checked.held_out or HELD_OUT, part, name, tuple(dict.fromkeys(tried)))


def _place(method: str, option: str | None, choices: Mapping[str, type[BaseModel]]) -> tuple[str, str]:
    there = ", ".join(f"{part}.{name}" for part, options in choices.items() for name in options.model_fields)
    if option is None:
        paper = paper_search(method)
        if paper is None:
            raise ConfituneError(f"the paper searched no option of {method}; choose one with --option: {there}")
        return paper.part, paper.option
    part, _, name = option.partition(".")
    if part not in choices or name not in choices[part].model_fields:
        raise ConfituneError(f"{method} has no option {option!r}; there are {there}")
    return part, name


def _with_option(recipe: Recipe, method: str, part: str, option: str, value: Value) -> dict[str, dict[str, Any]]:
    """All options that were given for the method, by the recipe or by the paper, with one of them anew."""
    options = options_set(recipe.method(method), only_given=True)
    options.setdefault(part, {})[option] = value
    return {name: given for name, given in options.items() if given}


def _checked(recipe: Recipe, method: str, part: str, option: str, text: str) -> Value:
    """The value as the method takes it, or the method's own words on what is wrong with it."""
    options = _with_option(recipe, method, part, option, read_value(text))
    taken: Value = options_set(recipe.model_copy(update={"options": options}).method(method))[part][option]
    return taken


def run_search(
    search: Search, out: Path, *, place: Place | None = None, resume: bool = False, retrain: bool = True
) -> tuple[list[Point], list[RunResult]]:
    """Try every value, write what came out below `out`, and train the winner again on all training images.

    In `out`: all runs as `run_recipe` writes them and, for `confitune run`, `winner.yaml`.

    Args:
        place: where runs are done (`open_place`); default: here, one after the other, without a word.
        resume: take what is finished there as it is, and do what is missing; what failed is tried from its checkpoint.
        retrain: else nothing is said of the test images.

    Returns:
        What each value gave on the held-out images, and the results of the retraining (none without it).
    """
    place = place or LocalPlace()
    plans = [plan_recipe(search.validation(value), out, place, resume=resume) for value in search.grid]
    place.begin([job for plan in plans for job in plan.left])
    points: list[Point] = []
    for value, plan in zip(search.grid, plans, strict=True):
        where = f"grid point {len(points) + 1} of {len(search.grid)}: {search.name(value)}"
        place.console.print(where, markup=False, highlight=False, style="bold")
        try:
            points.append(Point(value, tuple(finish_plan(plan, place))))
        except TrainingError as error:
            points.append(Point(value, failure=str(error)))
            place.console.print(f"failed: {error}", style="yellow", markup=False, highlight=False)
    best = winner(points)
    if best is None:
        raise ConfituneError(f"no value of {search.place} could be trained; the first said: {points[0].failure}")
    recipe = yaml.safe_dump(search.retraining(best.value).model_dump(mode="json", exclude_unset=True), sort_keys=False)
    text = (
        f"# {search.name(best.value)}: the best of {', '.join(map(value_text, search.grid))}\n"
        f"# on {search.held_out:.0%} of the training images, held out (ACC {best.acc:.2f}, FGT {best.fgt:.2f}).\n"
        f"{recipe}"
    )
    write_whole(out / "winner.yaml", lambda file: file.write(text.encode()))
    results: list[RunResult] = []
    if retrain:
        what = f"retraining {search.method} with {search.name(best.value)} on all training images"
        place.console.print(what, markup=False, highlight=False)
        plan = plan_recipe(search.retraining(best.value), out, place, resume=True)
        place.begin(plan.left)
        results = finish_plan(plan, place)
    return points, results


def search_table(search: Search, points: Sequence[Point], retrained: Sequence[RunResult]) -> Table:
    """Values as rows, mean and 95% interval over seeds; the winner in bold, with its test accuracy after retraining."""
    recipe, best = search.recipe, winner(points)
    rows = []
    for point in points:
        both = (point.results, retrained if point is best else ())
        cells = [shown([getattr(r, metric) for r in runs]) for runs in both for metric in ("acc", "fgt")]
        note = f"failed: {point.failure}" if point.failure else "best" if point is best else ""
        rows.append([value_text(point.value), *cells, f"{sum(r.seconds for r in point.results):.0f}", note])
    return terminal_table(
        [search.place, "ACC ↑", "FGT ↓", "test ACC ↑", "test FGT ↓", "seconds", "note"],
        rows,
        title=f"{recipe.dataset}: {search.method}, {recipe.model}, {recipe.seeds} seed(s)",
        caption=f"ACC and FGT in percent, on the {search.held_out:.0%} of the training images that were held out. "
        "Test ACC and FGT: retrained on all of them.",
        bold=None if best is None else points.index(best),
    )


def edge_note(search: Search, points: list[Point]) -> str:
    """What to say where the best value is the grid's smallest or largest: a better one may lie beyond."""
    best = winner(points)
    if best is None or isinstance(best.value, bool | str) or best.value not in (search.grid[0], search.grid[-1]):
        return ""
    end, beyond = ("smallest", "smaller") if best.value == search.grid[0] else ("largest", "larger")
    return f"{search.name(best.value)} is the {end} value tried; a {beyond} one may be better: try it with --grid"
