"""The figures: accuracy curves, storage, the propositions, and what the moments of the ablation's runs say.

Representational shift per convolution and accuracy with the test set's true moments are measured while runs go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel

from confitune.analysis import (
    ShiftRecorder,
    ShiftResult,
    TransductiveResult,
    check_proposition1,
    check_proposition2,
    check_proposition3,
    measure_storage,
    transductive_accuracy,
)
from confitune.engine import Listener
from confitune.experiments.paper.numbers import reported_counts
from confitune.experiments.paper.outcome import Outcome, picture_name
from confitune.experiments.paper.plan import ABLATION, TABLE1, Part, Scope, by_dataset, by_method, reproduces
from confitune.experiments.reporting.figures import Lines, curves_figure, draw_panels, save_figure
from confitune.experiments.reporting.render import markdown_table, shown
from confitune.experiments.runs.place import Place
from confitune.metrics import average_accuracy_curve
from confitune.nn import ContinualNet, without_memory
from confitune.settings import TrainSettings
from confitune.tasks import TaskSequence, dataset_info

Measured = TypeVar("Measured", bound=BaseModel)


@reproduces("curves", (TABLE1, {}))
def curves(scope: Scope, parts: Sequence[Part], place: Place) -> Outcome:
    """Average accuracy over the tasks learned so far, after each task."""
    outcome = Outcome(what="curves", title="Average accuracy after each task")
    for dataset, of_it in by_dataset(parts).items():
        found = {
            method: np.stack([average_accuracy_curve(run.matrix) for run in runs])
            for method, runs in by_method(of_it).items()
            if not np.isnan(runs[0].matrix[0, 0])
        }
        if not found:
            continue
        outcome.pictures.append(picture_name("curves", dataset))
        figure = curves_figure(found, title=f"{dataset}: average accuracy on the tasks learned so far")
        save_figure(figure, scope.out / outcome.pictures[-1])
        outcome.data[dataset] = {method: seeds.mean(0).tolist() for method, seeds in found.items()}
        steps = len(next(iter(found.values()))[0])
        rows = [[method, *(f"{acc:.1f}" for acc in seeds.mean(0))] for method, seeds in found.items()]
        outcome.tables[dataset] = markdown_table(["method", *(f"task {i + 1}" for i in range(steps))], rows)
    return outcome


@reproduces("storage")
def storage(scope: Scope, parts: Sequence[Part], place: Place) -> Outcome:
    """Numbers stored in addition to the pre-trained network as tasks grow."""
    outcome = Outcome(what="storage", title="Numbers stored as tasks grow")
    told = reported_counts("storage_numbers")
    for dataset in scope.datasets:
        recipe = scope.recipe(dataset, "confit")
        tasks = list(range(1, 1 + (recipe.tasks or dataset_info(dataset).tasks or 10)))
        found = {}
        for name in scope.chosen(TABLE1):
            method = recipe.method(name)
            found[name] = measure_storage(method, method.network(without_memory(recipe.model)))
        kept = {name: [storage.kept(count) for count in tasks] for name, storage in found.items()}
        heading = f"{recipe.model}, heads not counted"
        head = ["method", "a task", "once", f"kept after {tasks[-1]} tasks"]
        rows = [[m, *(f"{n:,}" for n in (s.per_task, s.once, s.kept(tasks[-1])))] for m, s in found.items()]
        outcome.tables[f"{dataset}: {heading}"] = markdown_table(head, rows)
        outcome.pictures.append(picture_name("storage", dataset))
        lines: Lines = {name: (tasks, numbers) for name, numbers in kept.items()}
        draw_panels(
            {heading: lines},
            scope.out / outcome.pictures[-1],
            title=f"{dataset}: numbers kept between tasks",
            x="tasks",
            y="numbers (logarithmic above 1,000)",
            scale="symlog",
        )
        outcome.data[dataset] = {"model": recipe.model, "kept": kept}
        for name in scope.chosen(("confit", "ccll")) if recipe.model.startswith("resnet18") else ():
            one = found[name].per_task
            near = abs(one - told[name]) / told[name] <= 0.25
            outcome.claim(f"a task of {name} adds {told[name] / 1e6:.2f}M numbers", f"{one:,}", near)
    return outcome


@reproduces("theory")
def theory(scope: Scope, parts: Sequence[Part], place: Place) -> Outcome:
    """Propositions 1 to 3 as numerical checks."""
    first, second, third = check_proposition1(), check_proposition2(), check_proposition3()
    outcome = Outcome(what="theory", title="Propositions 1 to 3, checked by numbers")
    outcome.claim(
        "1: the mean of a convolution's output is the convolution of the mean (padding K - 1, any stride)",
        f"largest difference {first.worst_violation:.1e} in {first.cases} random cases",
        first.holds,
    )
    outcome.claim(
        "2: the loss of an earlier task is bounded below by how badly the head was aligned",
        f"largest violation {second.worst_violation:.1e} in {second.instances} instances",
        second.holds,
    )
    tightness = ", ".join(f"{level.distance:.2f}: {level.tightness:.2f}" for level in second.levels)
    text = "2: the bound is tighter the better the features are"
    outcome.claim(text, tightness, second.tighter_with_better_features)
    text = "3: probing first, then fine-tuning moves no features and forgets nothing"
    outcome.claim(text, f"largest move or loss {third.worst_violation:.1e}", third.holds)
    outcome.data = {"proposition 1": asdict(first), "proposition 2": asdict(second), "proposition 3": asdict(third)}
    return outcome


def watch_moments(
    net: ContinualNet, sequence: TaskSequence, settings: TrainSettings, folder: Path
) -> tuple[Sequence[Listener], Callable[[], dict[str, Any]]]:
    """Measures shift and transductive accuracy of a run."""
    recorder = ShiftRecorder(net, sequence, settings, folder)

    def measured() -> dict[str, Any]:
        found = {"shift": recorder.result(), "transductive": transductive_accuracy(net, sequence.tasks, settings)}
        return {name: result.model_dump(mode="json") for name, result in found.items()}

    return (recorder,), measured


@reproduces("shift", (ABLATION, {}))
def shift(scope: Scope, parts: Sequence[Part], place: Place) -> Outcome:
    """Representational shift per convolution: D1 and D2 - D0, in the cases of the ablation."""
    outcome = Outcome(what="shift", title="Representational shift")
    for dataset, of_it in by_dataset(parts).items():
        found = {part.method: _measured(part, "shift", ShiftResult, outcome) for part in of_it}
        found = {method: results for method, results in found.items() if results}
        if not found:
            continue
        layers = next(iter(found.values()))[0].layers
        d1 = {m: np.mean([r.d1 for r in results], 0) for m, results in found.items()}
        added = {m: np.mean([r.added for r in results], 0) for m, results in found.items()}
        across = [float(place) for place in range(1, len(layers) + 1)]
        panels: dict[str, dict[str, tuple[list[float], list[float]]]] = {
            heading: {m: (across, values.tolist()) for m, values in measured.items()}
            for heading, measured in (("D1: how far representations moved", d1), ("D2 - D0: what was added", added))
        }
        picture = picture_name("shift", dataset)
        y = "Euclidean norm over channels"
        title = f"{dataset}: the first task's representation after the last task"
        draw_panels(panels, scope.out / picture, title=title, x="convolution, from the input on", y=y)
        outcome.pictures.append(picture)
        head = ["convolution", *(title for m in found for title in (f"{m}: D1", "D2 - D0"))]
        rows = [
            [layer, *(f"{values[m][i]:.3f}" for m in found for values in (d1, added))] for i, layer in enumerate(layers)
        ]
        outcome.tables[dataset] = markdown_table(head, rows)
        outcome.data[dataset] = {
            "layers": layers,
            "d1": {m: values.tolist() for m, values in d1.items()},
            "d2_minus_d0": {m: values.tolist() for m, values in added.items()},
            "seeds": {m: len(results) for m, results in found.items()},
            "networks": {part.method: part.form for part in of_it if part.method in found},
        }
        ran = [[p.method, p.form or "-", str(len(found[p.method]))] for p in of_it if p.method in found]
        outcome.tables[f"{dataset}: what was run"] = markdown_table(["method", "Xconv BN", "seeds"], ran)
        _claim_shift(outcome, dataset, d1, added)
    return outcome


def _claim_shift(outcome: Outcome, dataset: str, d1: dict[str, np.ndarray], added: dict[str, np.ndarray]) -> None:
    for plain, hierarchical in (("finetune", "hierarchical"), ("finetune-xconv", "confit")):
        if {plain, hierarchical} <= set(d1):
            lower, of = int((d1[hierarchical] < d1[plain]).sum()), len(d1[plain])
            text = f"{dataset}: hierarchical fine-tuning lowers D1 ({hierarchical} against {plain})"
            outcome.claim(text, f"in {lower} of {of} convolutions", lower >= 0.75 * of)  # half of them is chance
    for plain, xconv in (("finetune", "finetune-xconv"), ("hierarchical", "confit")):
        if {plain, xconv} <= set(added):
            first = np.maximum(added[xconv][:5], 0).sum() / max(added[plain][:5].sum(), 1e-12)
            half = len(added[plain]) // 2
            shallow, deep = (
                1 - added[xconv][part].sum() / max(added[plain][part].sum(), 1e-12)
                for part in (slice(None, half), slice(half, None))
            )
            text = f"{dataset}: Xconv BN lowers D2 - D0 of {plain} to under a tenth in the first five layers"
            outcome.claim(text, f"to {100 * first:.1f}%", bool(first < 0.1))
            text = f"{dataset}: Xconv BN helps most in shallow layers ({xconv} against {plain})"
            measured = f"lower by {100 * shallow:.0f}% in the first half, {100 * deep:.0f}% in the second"
            outcome.claim(text, measured, bool(shallow > deep))


@reproduces("transductive", (ABLATION, {}))
def transductive(scope: Scope, parts: Sequence[Part], place: Place) -> Outcome:
    """Accuracy with the test set's true mean and/or variance in place of the running ones."""
    outcome = Outcome(what="transductive", title="Transductive moments")
    cases = [(mean, variance) for mean in ("running", "true") for variance in ("running", "true")]
    for dataset, of_it in by_dataset(parts).items():
        rows = []
        for part in of_it:
            results = _measured(part, "transductive", TransductiveResult, outcome)
            if not results:
                continue
            measured = {
                (m, v): [r.of(m, v).acc for r in results]  # type: ignore[arg-type]
                for m, v in cases
            }
            rows.append([part.method, *(shown(values, 2) for values in measured.values())])
            acc = {case: float(np.mean(values)) for case, values in measured.items()}
            outcome.data[f"{dataset}/{part.method}"] = {f"{m} mean, {v} variance": acc[m, v] for m, v in cases}
            gain = acc["running", "true"] - acc["running", "running"]
            both = acc["true", "true"] - acc["running", "running"]
            if part.method == "confit":
                outcome.claim(f"{dataset}: a true variance gains less than 1 point (confit)", f"{gain:+.2f}", gain < 1)
            text = f"{dataset}: true mean and variance beat running ones ({part.method})"
            outcome.claim(text, f"{both:+.2f}", both > 0)
        outcome.tables[dataset] = markdown_table(["method", *(f"{m} mean, {v} variance" for m, v in cases)], rows)
    return outcome


def _measured(part: Part, name: str, kind: type[Measured], outcome: Outcome) -> list[Measured]:
    """What was measured in each run of the part; a run without it is noted."""
    for result in part.results:
        if name not in result.measured:
            outcome.notes.append(
                f"{part.recipe.dataset}, {part.method}, seed {result.seed} was run without this measurement: delete "
                "its line in runs.jsonl and run again"
            )
    return [kind.model_validate(result.measured[name]) for result in part.results if name in result.measured]
