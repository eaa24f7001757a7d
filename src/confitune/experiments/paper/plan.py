"""What is asked for, and the runs that it takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.paper.numbers import reported
from confitune.experiments.runs.identity import run_key
from confitune.experiments.runs.recipe import Recipe, make_recipe, merge_settings, read_recipe
from confitune.experiments.runs.runner import Place
from confitune.tasks import dataset_info

TABLE1 = tuple(reported("table1"))
ABLATION = tuple(reported("table2"))
_XCONV = {"means": "phase", "statistics": "running"}
PAPER: Mapping[str, Any] = {"pipeline": "published", "seeds": 5, "pull_limit": None, **_XCONV}
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
    place: Place = field(default_factory=Place)  # where runs are done

    def recipe(self, dataset: str, method: str, **values: Any) -> Recipe:
        """One experiment as the paper does it, with these values where nothing else was asked for."""
        info = dataset_info(dataset)
        network = {"model": "resnet18.tv_in1k" if info.from_paper else "tf_efficientnet_lite0"}
        quick = {name: value for name, value in QUICK.items() if name not in self.given} if self.quick else {}
        asked = {**network, **PAPER, **self.given, **self.rows.get(method, {}), **values, **quick}
        if asked["pipeline"] == "published" and "published" not in info.pipelines:
            asked["pipeline"] = "clean"
        return make_recipe({**asked, "dataset": dataset, "methods": [method]})

    def chosen(self, methods: Iterable[str]) -> tuple[str, ...]:
        """Those of `methods` that are asked for."""
        return tuple(m for m in methods if self.methods is None or m in self.methods)


def read_scope(
    what: Sequence[str],
    out: Path,
    quick: bool = False,
    given: Mapping[str, Any] | None = None,
    changes: Sequence[str] = (),
) -> tuple[Scope, list[str]]:
    """The scope, and which tables and figures: as given, or as files among `what` say where nothing else is given.

    Args:
        given: `datasets`, `methods` and recipe values by name.
        changes: more recipe values, as texts: 'lr=0.1'.
    """
    whats: list[str] = []
    values: dict[str, Any] = {}
    for name in what:
        read = read_recipe(name) if name.endswith((".yaml", ".yml")) else {"what": name}
        whats += _listed("what", read.pop("what", None))
        values |= {name: value for name, value in read.items() if not (quick and name in QUICK)}
    rows = values.pop("rows", {})
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ConfituneError("rows must be recipe values by method, e.g. {ewc: {clip_norm: 10}}")
    values = merge_settings({**values, **(given or {})}, changes)
    datasets, methods = (_listed(name, values.pop(name, None)) for name in ("datasets", "methods"))
    return Scope(out, datasets or Scope.datasets, methods or None, quick, values, rows), whats


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


Parts = Mapping[str, Sequence[Part]]  # with runs that are done, by dataset
