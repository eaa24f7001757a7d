"""The figures that need no more than finished runs: accuracy curves, and storage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from confitune.analysis import measure_storage
from confitune.experiments.paper import reported_storage
from confitune.experiments.place import Place
from confitune.experiments.plots import draw_curves
from confitune.experiments.reproduce.compare import Claim
from confitune.experiments.reproduce.outcome import Outcome
from confitune.experiments.reproduce.pictures import draw_panels, picture_name
from confitune.experiments.reproduce.plan import TABLE1, Part, Scope, by_dataset, results_of
from confitune.metrics import average_accuracy_curve
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
        picture = picture_name("curves", dataset)
        draw_curves(found, scope.out / picture, title=f"{dataset}: average accuracy on the tasks learned so far")
        outcome.pictures.append(picture)
        outcome.data[dataset] = {method: seeds.mean(0).tolist() for method, seeds in found.items()}
        steps = len(next(iter(found.values()))[0])
        head = "| method | " + " | ".join(f"task {i + 1}" for i in range(steps)) + " |"
        rows = [f"| {m} | " + " | ".join(f"{a:.1f}" for a in seeds.mean(0)) + " |" for m, seeds in found.items()]
        outcome.tables[dataset] = "\n".join([head, "|---" * (steps + 1) + "|", *rows])
    return outcome


def storage(scope: Scope, parts: Sequence[Part], place: Place) -> Outcome:
    """Numbers stored in addition to the pre-trained network as tasks grow."""
    outcome = Outcome(what="storage", title="Numbers stored as tasks grow")
    told = reported_storage()
    for dataset in scope.datasets:
        recipe, info = scope.recipe(dataset, "confit"), dataset_info(dataset)
        tasks, classes = recipe.tasks or info.tasks or 10, recipe.classes_per_task or info.classes_per_task or 10
        found = measure_storage(
            recipe.model,
            scope.chosen(TABLE1),
            classes_per_task=classes,
            tasks=tasks,
            image_size=info.image_size,
            means=recipe.means,
        )
        lines: dict[str, tuple[list[float], list[float]]] = {}
        rows = [
            "| method | kept after 1 task | kept after all | peak while training | heads |",
            "|---|---|---|---|---|",
        ]
        for method in scope.chosen(TABLE1):
            of_it = found.of(method)
            lines[method] = ([row.tasks for row in of_it], [float(row.kept or 0) for row in of_it])
            first, last = of_it[0], of_it[-1]
            rows.append(
                f"| {method} | {first.kept or 0:,} | {last.kept or 0:,} | {last.peak or 0:,} | {last.heads:,} |"
            )
        picture = picture_name("storage", dataset)
        heading = f"{recipe.model}, {classes} classes a task, heads not counted"
        draw_panels(
            {heading: lines},
            scope.out / picture,
            title=f"{dataset}: numbers kept between tasks",
            x="tasks",
            y={heading: "numbers (logarithmic above 1,000)"},
            scale="symlog",
        )
        outcome.pictures.append(picture)
        outcome.tables[f"{dataset}: {heading}"] = "\n".join(rows)
        outcome.data[dataset] = found.model_dump(mode="json")
        if recipe.variance != "stored" or recipe.follow != "weights" or recipe.rank is not None:
            outcome.notes.append(f"{dataset}: counted with stored variances and without a rank, whatever is asked for")
        if recipe.model.startswith("resnet18"):
            for method in ("confit", "ccll"):
                kept = next((row.kept for row in found.of(method) if row.tasks == 1), None)
                if kept is not None:
                    near = abs(kept - told[method]) / told[method] <= 0.25
                    text = f"a task of {method} adds {told[method] / 1e6:.2f}M numbers"
                    outcome.claims.append(Claim(text=text, measured=f"{kept:,}", holds=near))
    return outcome
