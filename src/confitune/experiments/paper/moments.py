"""The figures about moments: representational shift per convolution, and the test set's true moments.

Both are measured while the runs of the ablation go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from confitune.analysis import SavedResult, ShiftRecorder, ShiftResult, TransductiveResult, transductive_accuracy
from confitune.engine import Listener
from confitune.experiments.paper.outcome import Outcome, picture_name, shown
from confitune.experiments.paper.plan import Part, Scope, by_dataset
from confitune.experiments.reporting.figures import draw_panels
from confitune.experiments.reporting.render import markdown_table
from confitune.experiments.runs.place import Place
from confitune.metrics import mean_and_interval
from confitune.nn import ContinualNet
from confitune.settings import TrainSettings
from confitune.tasks import TaskSequence

SHIFT, TRANSDUCTIVE = "shift.json", "transductive.json"
Saved = TypeVar("Saved", bound=SavedResult)


def watch_moments(
    net: ContinualNet, sequence: TaskSequence, settings: TrainSettings, folder: Path
) -> Sequence[Listener]:
    """Listeners that leave `shift.json` and `transductive.json` in the run's folder."""
    shift = ShiftRecorder(net, sequence, settings, folder)

    def write() -> None:
        shift.result().save(folder / SHIFT)
        transductive_accuracy(net, sequence.tasks, settings).save(folder / TRANSDUCTIVE)

    return (shift, _AtEnd(len(sequence), write))


class _AtEnd(Listener):
    def __init__(self, tasks: int, call: Callable[[], None]) -> None:
        self._tasks, self._call = tasks, call

    def run_started(self, name: str, tasks: Sequence[str], epochs: int, first_task: int) -> None:
        if first_task == self._tasks:  # broken off between the last task and its result
            self._call()

    def task_ended(self, task: int, accuracies: Sequence[float]) -> None:
        if task == self._tasks - 1:
            self._call()


def shift(scope: Scope, parts: Sequence[Part], place: Place) -> Outcome:
    """Representational shift per convolution: D1 and D2 - D0, in the cases of the ablation."""
    outcome = Outcome(what="shift", title="Representational shift")
    for dataset, of_it in by_dataset(parts).items():
        found = {part.method: _saved(part, SHIFT, ShiftResult, outcome) for part in of_it}
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
        y = dict.fromkeys(panels, "Euclidean norm over channels")
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


def transductive(scope: Scope, parts: Sequence[Part], place: Place) -> Outcome:
    """Accuracy with the test set's true mean and/or variance in place of the running ones."""
    outcome = Outcome(what="transductive", title="Transductive moments")
    cases = [(mean, variance) for mean in ("running", "true") for variance in ("running", "true")]
    for dataset, of_it in by_dataset(parts).items():
        rows = []
        for part in of_it:
            results = _saved(part, TRANSDUCTIVE, TransductiveResult, outcome)
            if not results:
                continue
            measured = {
                (m, v): mean_and_interval([r.of(m, v).acc for r in results])  # type: ignore[arg-type]
                for m, v in cases
            }
            rows.append([part.method, *(shown(cell.mean, cell.half_width) for cell in measured.values())])
            acc = {case: cell.mean for case, cell in measured.items()}
            outcome.data[f"{dataset}/{part.method}"] = {f"{m} mean, {v} variance": acc[m, v] for m, v in cases}
            gain = acc["running", "true"] - acc["running", "running"]
            both = acc["true", "true"] - acc["running", "running"]
            if part.method == "confit":
                outcome.claim(f"{dataset}: a true variance gains less than 1 point (confit)", f"{gain:+.2f}", gain < 1)
            text = f"{dataset}: true mean and variance beat running ones ({part.method})"
            outcome.claim(text, f"{both:+.2f}", both > 0)
        outcome.tables[dataset] = markdown_table(["method", *(f"{m} mean, {v} variance" for m, v in cases)], rows)
    return outcome


def _saved(part: Part, name: str, kind: type[Saved], outcome: Outcome) -> list[Saved]:
    """What was measured in each run of the part; a run without it is noted."""
    found = []
    for seed, result in part.runs().items():
        path = result.with_name(name)
        if path.exists():
            found.append(kind.load(path))
        elif result.exists():
            outcome.notes.append(
                f"{part.recipe.dataset}, {part.method}, seed {seed} was run without this measurement: delete "
                f"{result.parent.name} of {part.method} and run again"
            )
    return found
