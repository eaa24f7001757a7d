"""The figures: accuracy curves, storage, and what the moments of the ablation's runs say.

Representational shift per convolution and accuracy with the test set's true moments are measured while runs go on.
"""

from itertools import product
from typing import Any

import numpy as np

from confitune.analysis.storage import measure_storage
from confitune.experiments.paper.numbers import reported
from confitune.experiments.paper.outcome import Outcome
from confitune.experiments.paper.plan import TABLE1, Part, Parts, Scope
from confitune.experiments.reporting.figures import matrices, overview_figure, panels_figure, save_figure
from confitune.experiments.reporting.table import shown
from confitune.experiments.runs.identity import file_name
from confitune.metrics import average_accuracy_curve
from confitune.nn import without_memory
from confitune.tasks import dataset_info


def add_picture(outcome: Outcome, scope: Scope, dataset: str, figure: Any) -> None:
    """Write a dataset's picture beside the page, and show it there."""
    path = scope.out / f"{outcome.what}-{file_name(dataset)}.png"
    save_figure(figure, path)
    outcome.pictures.append(path.name)


def curves(outcome: Outcome, scope: Scope, parts: Parts) -> None:
    """Average accuracy over the tasks learned so far, after each task."""
    for dataset, of_it in parts.items():
        found = matrices({part.method: part.results for part in of_it})
        if found:
            add_picture(outcome, scope, dataset, overview_figure(found, title=f"{dataset}, {of_it[0].recipe.model}"))
            means = {m: np.mean([average_accuracy_curve(run) for run in s], 0).tolist() for m, s in found.items()}
            outcome.data[dataset] = means
            head = ["method", *(f"task {i + 1}" for i in range(len(next(iter(means.values())))))]
            outcome.table(dataset, head, [[m, *(f"{acc:.1f}" for acc in curve)] for m, curve in means.items()])


def storage(outcome: Outcome, scope: Scope, parts: Parts) -> None:
    """Numbers stored in addition to the pre-trained network as tasks grow."""
    told = reported("storage_numbers")
    for dataset in scope.datasets:
        recipe = scope.recipe(dataset, "confit")
        tasks = list(range(1, 1 + (recipe.tasks or dataset_info(dataset).tasks or 10)))
        methods = {name: recipe.method(name) for name in scope.chosen(TABLE1)}
        found = {n: measure_storage(m, m.network(without_memory(recipe.model))) for n, m in methods.items()}
        kept = {name: [storage.kept(count) for count in tasks] for name, storage in found.items()}
        heading = f"{recipe.model}, heads not counted"
        head = ["method", "a task", "once", f"kept after {tasks[-1]} tasks"]
        rows = [[m, *(f"{n:,}" for n in (s.per_task, s.once, s.kept(tasks[-1])))] for m, s in found.items()]
        outcome.table(f"{dataset}: {heading}", head, rows)
        title = f"{dataset}: numbers kept between tasks"
        y = "numbers (logarithmic above 1,000)"
        figure = panels_figure({heading: kept}, title=title, x="tasks", y=y, scale="symlog")
        add_picture(outcome, scope, dataset, figure)
        outcome.data[dataset] = {"model": recipe.model, "kept": kept}
        for name in scope.chosen(("confit", "ccll")) if recipe.model.startswith("resnet18") else ():
            one = found[name].per_task
            near = abs(one - told[name]) / told[name] <= 0.25
            outcome.claim(f"a task of {name} adds {told[name] / 1e6:.2f}M numbers", f"{one:,}", near)


def _measured(part: Part, name: str, outcome: Outcome) -> list[Any]:
    """What was measured in each run of the part; a run without it is noted."""
    for result in part.results:
        if name not in result.measured:
            outcome.notes.append(
                f"{part.recipe.dataset}, {part.method}, seed {result.seed} was run without this measurement: delete "
                "its line in runs.jsonl and run again"
            )
    return [result.measured[name] for result in part.results if name in result.measured]


def shift(outcome: Outcome, scope: Scope, parts: Parts) -> None:
    """Representational shift per convolution: D1 and D2 - D0, in the cases of the ablation."""
    for dataset, of_it in parts.items():
        results = {part.method: _measured(part, "shift", outcome) for part in of_it}
        forms = {part.method: part.form for part in of_it if results[part.method]}
        if not forms:
            continue
        layers = results[next(iter(forms))][0]["layers"]
        d1 = {m: np.mean([r["d1"] for r in results[m]], 0) for m in forms}
        added = {m: np.mean([np.subtract(r["d2"], r["d0"]) for r in results[m]], 0) for m in forms}
        figure = panels_figure(
            {"D1: how far representations moved": d1, "D2 - D0: what was added": added},
            title=f"{dataset}: the first task's representation after the last task",
            x="convolution, from the input on",
            y="Euclidean norm over channels",
        )
        add_picture(outcome, scope, dataset, figure)
        head = ["convolution", *(title for m in forms for title in (f"{m}: D1", "D2 - D0"))]
        both = [values[m] for m in forms for values in (d1, added)]
        rows = [[layer, *(f"{values[i]:.3f}" for values in both)] for i, layer in enumerate(layers)]
        outcome.table(dataset, head, rows)
        seeds = {m: len(results[m]) for m in forms}
        outcome.data[dataset] = {
            "layers": layers,
            "d1": {m: values.tolist() for m, values in d1.items()},
            "d2_minus_d0": {m: values.tolist() for m, values in added.items()},
            "seeds": seeds,
            "networks": forms,
        }
        ran = [[method, form or "-", str(seeds[method])] for method, form in forms.items()]
        outcome.table(f"{dataset}: what was run", ["method", "Xconv BN", "seeds"], ran)
        _claim_shift(outcome, dataset, d1, added)


def _claim_shift(outcome: Outcome, dataset: str, d1: dict[str, np.ndarray], added: dict[str, np.ndarray]) -> None:
    for plain, hierarchical in (("finetune", "hierarchical"), ("finetune-xconv", "confit")):
        if {plain, hierarchical} <= set(d1):
            lower = int((d1[hierarchical] < d1[plain]).sum())
            of = len(d1[plain])
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
            outcome.claim(text, f"to {100 * first:.1f}%", first < 0.1)
            text = f"{dataset}: Xconv BN helps most in shallow layers ({xconv} against {plain})"
            measured = f"lower by {100 * shallow:.0f}% in the first half, {100 * deep:.0f}% in the second"
            outcome.claim(text, measured, shallow > deep)


def transductive(outcome: Outcome, scope: Scope, parts: Parts) -> None:
    """Accuracy with the test set's true mean and/or variance in place of the running ones."""
    cases = [f"{mean} mean, {variance} variance" for mean, variance in product(("running", "true"), repeat=2)]
    for dataset, of_it in parts.items():
        rows = []
        for part in of_it:
            results = _measured(part, "transductive", outcome)
            if not results:
                continue
            found = [
                {f"{a['mean']} mean, {a['variance']} variance": a["acc"] for a in result["accuracies"]}
                for result in results
            ]
            by_case = {case: [accuracies[case] for accuracies in found] for case in cases}
            rows.append([part.method, *(shown(accs, 2) for accs in by_case.values())])
            means = {case: float(np.mean(accs)) for case, accs in by_case.items()}
            outcome.data[f"{dataset}/{part.method}"] = means
            running, true_variance, _, both_true = means.values()
            if part.method == "confit":
                gain = true_variance - running
                outcome.claim(f"{dataset}: a true variance gains less than 1 point (confit)", f"{gain:+.2f}", gain < 1)
            text = f"{dataset}: true mean and variance beat running ones ({part.method})"
            outcome.claim(text, f"{both_true - running:+.2f}", both_true > running)
        outcome.table(dataset, ["method", *cases], rows)
