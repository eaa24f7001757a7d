"""Tables of a report as rows of text, for the page and for its Markdown twin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from confitune.engine import RunResult
from confitune.experiments.report.data import DatasetRuns, MethodRuns, shown_known


@dataclass(frozen=True)
class TextTable:
    """A caption, column titles and rows; the first cell of a row names it."""

    caption: str
    columns: list[str]
    rows: list[list[str]]


def curve_table(data: DatasetRuns) -> TextTable:
    """Average accuracy after each task."""
    columns = ["method", *(f"after {k}" for k in range(1, data.tasks + 1))]
    rows = [[method.name, *method.curve_texts()] for method in data.methods]
    return TextTable("Average accuracy on the tasks learned so far (%)", columns, _filled(rows, len(columns)))


def lost_table(data: DatasetRuns) -> TextTable:
    """What each task lost since it was learned."""
    columns = ["method", *(f"task {k}" for k in range(1, data.tasks + 1))]
    rows = [[method.name, *method.lost_texts()] for method in data.methods]
    caption = "What each task lost between the moment it was learned and the end (percentage points)"
    return TextTable(caption, columns, _filled(rows, len(columns)))


def storage_table(data: DatasetRuns) -> TextTable:
    """What is stored."""
    rows = [[m.name, f"{m.stored:,}", f"{max(m.entry['numbers_per_task']):,}"] for m in data.methods]
    return TextTable("Numbers stored beside the shared network", ["method", "all tasks", "first task"], rows)


def matrix_table(method: MethodRuns) -> TextTable:
    """Mean accuracy matrix over seeds, blank where nothing was measured."""
    mean = method.matrices.mean(axis=0)
    rows = [
        [f"task {i + 1}", *("" if np.isnan(value) else shown_known([value]) for value in row)]
        for i, row in enumerate(mean)
    ]
    return TextTable(f"{method.name}", ["", *(f"after {k}" for k in range(1, method.tasks + 1))], rows)


def task_table(data: DatasetRuns) -> TextTable:
    """What was learned."""
    rows = [
        [task["name"], ", ".join(task["classes"]), str(task["train_images"]), str(task["test_images"])]
        for task in data.task_details
    ]
    return TextTable("Tasks", ["task", "classes", "training images", "test images"], rows)


def run_facts(result: RunResult) -> dict[str, str]:
    """What it takes to judge a run and to repeat it."""
    options = result.config.get("options") or {}
    set_options = [f"{part}.{name}={value}" for part, values in options.items() for name, value in values.items()]
    config = [f"{key}={value}" for key, value in result.config.items() if key != "options" and value is not None]
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


def _filled(rows: list[list[str]], length: int) -> list[list[str]]:
    """Rows of methods that learned fewer tasks, made as long as the others."""
    return [row + ["-"] * (length - len(row)) for row in rows]
