"""What a hyperparameter search tries, and which value wins.

As in the paper (appendix): a tenth of every task's training images is held out, each value of the grid is trained on
the rest and tested on the held-out images, and the best one is trained again on everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.job import file_name
from confitune.experiments.methods import Value, options_of, options_set, paper_search, value_text
from confitune.experiments.paper import searched
from confitune.experiments.recipe import Recipe, make_recipe, read_value
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

    def folder(self, value: Value) -> str:
        """What the folder of a grid point is called."""
        return f"{file_name(self.part)}.{self.option}={value_text(value)}"

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
    """Highest mean accuracy; of equal ones the least forgetting, then the smallest value (the first, for words).

    A point that failed never wins; None where all did.
    """
    places = {id(point): place for place, point in enumerate(points)}

    def rank(point: Point) -> tuple[float, float, float]:
        number = isinstance(point.value, int | float)
        # Rounded: sums of the same accuracies in another order differ in their last bits.
        return -round(point.acc, 9), round(point.fgt, 9), float(point.value) if number else places[id(point)]

    return min((point for point in points if not point.failure), key=rank, default=None)


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
        raise ConfituneError(
            f"the paper has no grid for {part}.{name}: give its values, e.g. --grid {_example(choices[part], name)}"
        )
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


def _example(options: type[BaseModel], name: str) -> str:
    default = options.model_fields[name].default
    return " --grid ".join(map(value_text, (default, 10 * default) if isinstance(default, float) else (default,)))
