"""The figures that need no more than finished runs: accuracy curves, storage; and the propositions, which need none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from confitune.analysis import check_proposition1, check_proposition2, check_proposition3, measure_storage
from confitune.experiments.paper.numbers import reported_storage
from confitune.experiments.paper.outcome import Outcome, picture_name
from confitune.experiments.paper.plan import TABLE1, Part, Scope, by_dataset, results_of
from confitune.experiments.reporting.figures import Lines, curves_figure, draw_panels, save_figure
from confitune.experiments.reporting.render import markdown_table
from confitune.experiments.runs.place import Place
from confitune.metrics import average_accuracy_curve
from confitune.nn import without_memory
from confitune.tasks import dataset_info


def curves(scope: Scope, parts: Sequence[Part], place: Place) -> Outcome:
    """Average accuracy over the tasks learned so far, after each task."""
    outcome = Outcome(what="curves", title="Average accuracy after each task")
    for dataset, of_it in by_dataset(parts).items():
        found = {
            method: np.stack([average_accuracy_curve(run.matrix) for run in runs])
            for method, runs in results_of(of_it).items()
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


def storage(scope: Scope, parts: Sequence[Part], place: Place) -> Outcome:
    """Numbers stored in addition to the pre-trained network as tasks grow."""
    outcome = Outcome(what="storage", title="Numbers stored as tasks grow")
    told = reported_storage()
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
            y={heading: "numbers (logarithmic above 1,000)"},
            scale="symlog",
        )
        outcome.data[dataset] = {"model": recipe.model, "kept": kept}
        for name in scope.chosen(("confit", "ccll")) if recipe.model.startswith("resnet18") else ():
            one = found[name].per_task
            near = abs(one - told[name]) / told[name] <= 0.25
            outcome.claim(f"a task of {name} adds {told[name] / 1e6:.2f}M numbers", f"{one:,}", near)
    return outcome


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
