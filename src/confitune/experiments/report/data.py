"""What a report shows, numbers and tables, computed once for the page and for its Markdown twin.

Texts are made here and nowhere else, by the functions that make the summary's, so that a number reads the same wherever
it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.identity import filled
from confitune.experiments.job import RESULT
from confitune.experiments.summary import collect_results, details, shown, summarised
from confitune.metrics import average_accuracy_curve, mean_and_interval

Array = NDArray[np.float64]

METRICS = {"acc": "ACC ↑", "fgt": "FGT ↓", "learning_acc": "when learned ↑", "bwt": "BWT ↑"}
EXPLAINED = (
    "ACC: accuracy over all tasks at the end. FGT: what earlier tasks lost since their best. When learned: accuracy of "
    "each task right after it was learned. BWT: how later tasks changed earlier ones. All in percent. Numbers a task: "
    "what the first task added to what is stored (joint has one task, all of them). Mean ± 95% interval over seeds."
)


@dataclass(frozen=True)
class TextTable:
    """A caption, column titles and rows; the first cell of a row names it."""

    caption: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class MethodRuns:
    """All runs of one method on one dataset."""

    name: str
    results: Sequence[RunResult]

    @cached_property
    def entry(self) -> dict[str, Any]:
        """What the summary says of them."""
        return summarised(self.results)

    @cached_property
    def matrices(self) -> Array:
        """Accuracy matrices, seeds x T x T."""
        return np.stack([result.matrix for result in self.results])

    @cached_property
    def curves(self) -> Array:
        """Average accuracy on the tasks learned so far, seeds x T."""
        return np.stack([average_accuracy_curve(matrix) for matrix in self.matrices])

    @property
    def tasks(self) -> int:
        """How many tasks were learned; joint learns them as one, and is tested on each."""
        return int(self.matrices.shape[1])

    @property
    def stored(self) -> int:
        """Numbers that all tasks together added."""
        return sum(self.entry["numbers_per_task"])

    def cells(self) -> dict[str, tuple[str, float | None]]:
        """A row of the table: column -> text, and what to sort it by (None where not defined)."""
        seconds = self.entry["seconds"]
        found = {
            title: (shown([getattr(r, name) for r in self.results]), self.entry[name] and self.entry[name]["mean"])
            for name, title in METRICS.items()
        }
        numbers = max(self.entry["numbers_per_task"])
        return {
            **found,
            "numbers a task": (f"{numbers:,}", numbers),
            "seconds": (shown(seconds), mean_and_interval(seconds).mean),
            "seeds": (str(len(seconds)), len(seconds)),
        }

    def curve_texts(self) -> list[str]:
        """Average accuracy after each task."""
        return [shown_known(column) for column in self.curves.T]

    def learned_texts(self) -> list[str]:
        """Accuracy of each task when it was learned."""
        return [shown_known(self.matrices[:, i, i]) for i in range(self.tasks)]

    def kept_texts(self) -> list[str]:
        """Accuracy of each task at the end."""
        return [shown_known(self.matrices[:, i, -1]) for i in range(self.tasks)]

    def lost_texts(self) -> list[str]:
        """What each task lost between these two; negative is a gain."""
        return [shown_known(self.matrices[:, i, i] - self.matrices[:, i, -1]) for i in range(self.tasks)]

    def matrix_table(self) -> TextTable:
        """Mean accuracy matrix over seeds, blank where nothing was measured."""
        rows = [
            [f"task {i + 1}", *("" if np.isnan(value) else shown_known([value]) for value in row)]
            for i, row in enumerate(self.matrices.mean(axis=0))
        ]
        return TextTable(self.name, ["", *(f"after {k}" for k in range(1, self.tasks + 1))], rows)


@dataclass(frozen=True)
class DatasetRuns:
    """All methods on one dataset, best accuracy first, and what of them is not finished."""

    name: str
    methods: Sequence[MethodRuns]
    unfinished: Sequence[str]

    @property
    def tasks(self) -> int:
        """The longest sequence that was learned."""
        return max(method.tasks for method in self.methods)

    @property
    def seeds(self) -> list[int]:
        """Every seed of any method."""
        return sorted({result.seed for method in self.methods for result in method.results})

    @property
    def details(self) -> str:
        """What was run, in the words of the summary."""
        by_name = sorted(self.methods, key=lambda method: method.name)  # the summary's order
        return details([method.entry for method in by_name])

    @property
    def commands(self) -> list[str]:
        """The commands that made it, each once."""
        return list(dict.fromkeys(result.command for method in self.methods for result in method.results))

    def is_best(self, method: MethodRuns) -> bool:
        """Whether no method has a higher accuracy."""
        highest = max(other.entry["acc"]["mean"] for other in self.methods)
        return bool(method.entry["acc"]["mean"] == highest)

    def curve_table(self) -> TextTable:
        """Average accuracy after each task."""
        rows = {method.name: method.curve_texts() for method in self.methods}
        return self._by_task("Average accuracy on the tasks learned so far (%)", "after", rows)

    def lost_table(self) -> TextTable:
        """What each task lost since it was learned."""
        rows = {method.name: method.lost_texts() for method in self.methods}
        caption = "What each task lost between the moment it was learned and the end (percentage points)"
        return self._by_task(caption, "task", rows)

    def _by_task(self, caption: str, word: str, rows: dict[str, list[str]]) -> TextTable:
        """A column for each task; methods that learned fewer have '-' for the others."""
        columns = ["method", *(f"{word} {k}" for k in range(1, self.tasks + 1))]
        filled_up = [[name, *texts, *["-"] * (self.tasks - len(texts))] for name, texts in rows.items()]
        return TextTable(caption, columns, filled_up)

    def storage_table(self) -> TextTable:
        """What is stored."""
        rows = [[m.name, f"{m.stored:,}", f"{max(m.entry['numbers_per_task']):,}"] for m in self.methods]
        return TextTable("Numbers stored beside the shared network", ["method", "all tasks", "first task"], rows)

    def task_table(self) -> TextTable:
        """What was learned, as a method says that learned all tasks if there is one."""
        tasks = max((method.results[0].tasks for method in self.methods), key=len)
        rows = [[t["name"], ", ".join(t["classes"]), str(t["train_images"]), str(t["test_images"])] for t in tasks]
        return TextTable("Tasks", ["task", "classes", "training images", "test images"], rows)


@dataclass(frozen=True)
class Report:
    """Everything below a folder."""

    title: str
    datasets: Sequence[DatasetRuns]

    @property
    def what(self) -> str:
        """How much was run."""
        runs = [result for data in self.datasets for method in data.methods for result in method.results]
        methods = {method.name for data in self.datasets for method in data.methods}
        counts = ((len(runs), "run"), (len(self.datasets), "dataset"), (len(methods), "method"))
        return ", ".join(f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts)


def collect_report(folder: Path, title: str | None = None) -> Report:
    """Every result below `folder`; a clear error where there is none."""
    if not folder.is_dir():
        raise ConfituneError(f"there is no folder {folder}: name one that `confitune run` wrote")
    found = collect_results(folder)
    if not found:
        raise ConfituneError(f"no results in {folder}: {_hint(folder)}")
    datasets = [_dataset(folder, name, methods) for name, methods in found.items()]
    return Report(title or folder.resolve().name, datasets)


def shown_known(values: Iterable[float]) -> str:
    """Mean and 95% interval, '-' where a value is NaN."""
    return shown([None if np.isnan(value) else float(value) for value in values])


def _dataset(folder: Path, name: str, methods: dict[str, list[RunResult]]) -> DatasetRuns:
    for method, results in methods.items():
        counts = {len(result.accuracy_matrix) for result in results}
        if len(counts) > 1:
            raise ConfituneError(
                f"{folder / name / method}: its seeds differ in their number of tasks ({sorted(counts)}), so there is "
                "no mean over them; keep those of one experiment"
            )
    runs = [MethodRuns(method, results) for method, results in methods.items()]
    runs.sort(key=lambda method: -method.entry["acc"]["mean"])
    started = (path for path in sorted((folder / name).glob("*/seed-*")) if path.is_dir())
    unfinished = [f"{path.parent.name}/{path.name}" for path in started if not (path / RESULT).exists()]
    return DatasetRuns(name, runs, unfinished)


def _hint(folder: Path) -> str:
    """Results that lie elsewhere below it, as those of `confitune tune` do, or how to make some."""
    for path in sorted(folder.rglob("seed-*/result.json")):
        if len(path.relative_to(folder).parts) > 4:
            return f"but there are some in {path.parents[3]}; name that folder"
        return f"but {path} is one; name the folder that holds <dataset>/<method>/seed-<k>"
    return f"`confitune run --out {folder}` writes them as <dataset>/<method>/seed-<k>/result.json"


def run_facts(result: RunResult) -> dict[str, str]:
    """What it takes to judge a run and to repeat it."""
    known = filled(result.config)
    options = known.pop("options")
    set_options = [f"{part}.{name}={value}" for part, values in options.items() for name, value in values.items()]
    config = [f"{name}={value}" for name, value in known.items() if value is not None]
    return {
        "accuracy": shown_known([result.acc]),
        "seconds": shown_known([result.seconds]),
        "device": result.device,
        "execution": result.execution,
        "command": result.command,
        "options": ", ".join(set_options) or "none",
        "configuration": ", ".join(config),
        "versions": ", ".join(f"{package} {version}" for package, version in result.versions.items()),
        "weights": result.weights,
        "weights hash": result.weights_sha256,
        "final hash": result.final_sha256,
    }
