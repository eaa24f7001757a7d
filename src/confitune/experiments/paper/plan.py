"""What can be reproduced: each table and figure registers itself with the runs that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.paper.numbers import reported
from confitune.experiments.paper.outcome import Outcome
from confitune.experiments.runs.identity import run_key
from confitune.experiments.runs.place import Place
from confitune.experiments.runs.recipe import Recipe, make_recipe, merge_settings, read_recipe
from confitune.tasks import dataset_info

TABLE1 = tuple(reported("table1"))
ABLATION = tuple(reported("table2"))
QUICK: Mapping[str, Any] = {"epochs": 5, "seeds": 1, "tasks": 2}  # the fewest epochs with all three stages


@dataclass(frozen=True)
class Scope:
    """What is asked for."""

    out: Path  # where everything goes
    datasets: tuple[str, ...] = ("flowers102",)  # of the paper, or any other that `load_tasks` knows
    methods: tuple[str, ...] | None = None  # only these, of those that an experiment compares; None: all
    quick: bool = False  # as in `QUICK`, where nothing else is asked for, to see that everything works
    given: Mapping[str, Any] = field(default_factory=dict)  # recipe values for every run, in place of the paper's
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # more for the runs of some methods, by name

    def recipe(self, dataset: str, method: str, **values: Any) -> Recipe:
        """One experiment as the paper does it: its network, images, phase means, running statistics, 5 seeds."""
        info = dataset_info(dataset)
        paper = {
            "dataset": dataset,
            "model": "resnet18.tv_in1k" if info.from_paper else "tf_efficientnet_lite0",
            "pipeline": "published",
            "seeds": 5,
            "means": "phase",
            "statistics": "running",
            "pull_limit": None,
        }
        quick = {name: value for name, value in QUICK.items() if name not in self.given} if self.quick else {}
        asked = {**paper, **self.given, **self.rows.get(method, {}), **values, **quick, "methods": [method]}
        if asked["pipeline"] == "published" and "published" not in info.pipelines:
            asked["pipeline"] = "clean"
        return make_recipe(asked)

    def chosen(self, methods: Sequence[str]) -> tuple[str, ...]:
        """Those of `methods` that are asked for."""
        return tuple(m for m in methods if self.methods is None or m in self.methods)


def read_scope(
    what: Sequence[str],
    out: Path,
    *,
    datasets: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    quick: bool = False,
    given: Mapping[str, Any] | None = None,
    changes: Sequence[str] = (),
) -> tuple[Scope, list[str]]:
    """What is asked for on the command line, or in a YAML file that it names: the scope, and which tables and figures.

    Args:
        what: tables and figures, or files that name them; what is given here wins over what files say.
        given: recipe values by name.
        changes: more of them, as texts: 'lr=0.1'.
    """
    whats: list[str] = []
    values: dict[str, Any] = {}
    for name in what:
        if not name.endswith((".yaml", ".yml")):
            whats.append(name)
            continue
        read = read_recipe(Path(name))
        whats += _listed("what", read.pop("what", None))
        values |= {name: value for name, value in read.items() if not (quick and name in QUICK)}
    rows = values.pop("rows", {})
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ConfituneError("rows must be recipe values by method, e.g. {ewc: {clip_norm: 10}}")
    values = merge_settings({**values, **(given or {})}, changes)
    of_file = {name: _listed(name, values.pop(name, None)) for name in ("datasets", "methods")}
    scope = Scope(
        out=out,
        datasets=_listed("datasets", datasets) or of_file["datasets"] or Scope.datasets,
        methods=_listed("methods", methods) or of_file["methods"] or None,
        quick=quick,
        given=values,
        rows=rows,
    )
    return scope, whats


def _listed(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConfituneError(f"{name} must be names, with commas or as a list: got {repr(value)[:200]}")
    return tuple(name for text in texts for name in text.split(",") if name)


@dataclass(frozen=True)
class Part:
    """Runs of one method, all seeds."""

    recipe: Recipe  # with this one method
    results: Sequence[RunResult] = ()  # of the runs that are done

    @property
    def method(self) -> str:
        """The method's name."""
        return self.recipe.methods[0]

    @property
    def form(self) -> str:
        """What Xconv BN keeps of a task, in words; empty where the method has another batch norm."""
        options = self.recipe.method(self.method).options
        return f"{options.means} means, {options.statistics} statistics" if hasattr(options, "means") else ""

    def found(self, results: Iterable[RunResult]) -> Part:
        """With those of the results that are its runs, whichever device did them and whatever file had the weights."""
        apart = ["weights_sha256", *(["precision"] if self.recipe.precision == "auto" else [])]
        known = {run_key(result.config, apart): result for result in results}
        wanted = [run_key(self.recipe.identity(self.method, seed, ""), apart) for seed in self.recipe.run_seeds]
        return Part(self.recipe, [known[key] for key in wanted if key in known])


Write = Callable[[Scope, Sequence[Part], Place], Outcome]
Needs = tuple[Sequence[str], Mapping[str, Any]]  # methods, and recipe values


# By name, in the order of `all`: what makes an outcome of runs, and which it needs.
REPRODUCTIONS: dict[str, tuple[Write, Sequence[Needs]]] = {}


def reproduces(what: str, *needs: Needs) -> Callable[[Write], Write]:
    """Register a table or figure under this name."""

    def register(write: Write) -> Write:
        REPRODUCTIONS[what] = write, needs
        return write

    return register


def parts_of(what: str, scope: Scope) -> list[Part]:
    """The runs that `what` needs; some of them may be done."""
    (_, needs), parts = REPRODUCTIONS[what], []
    for dataset in scope.datasets:
        for methods, values in needs:
            if "model" in values and (scope.quick or scope.given.get("weights")):  # given weights are another network's
                values = {**values, "weights": "none" if scope.quick else None}
            for method in scope.chosen(methods):
                once = {"seeds": 1} if method == "ccll" and "seeds" not in scope.given else {}  # as in the paper
                parts.append(Part(scope.recipe(dataset, method, **values, **once)))
    if needs and not parts:
        raise ConfituneError(f"none of the methods asked for is part of {what}")
    return parts


def by_method(parts: Sequence[Part]) -> dict[str, Sequence[RunResult]]:
    """Results by method, of the runs that are done."""
    return {part.method: part.results for part in parts if part.results}


def by_dataset(parts: Sequence[Part]) -> dict[str, list[Part]]:
    """Parts by their dataset, in order."""
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.recipe.dataset, []).append(part)
    return found
