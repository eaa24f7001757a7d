"""What the runs below a folder say together: a table, a JSON file, pictures."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from confitune.engine import RunResult
from confitune.experiments.markdown import summary_markdown
from confitune.experiments.plots import draw_accuracy_matrix, draw_curves, draw_overview
from confitune.files import write_whole
from confitune.metrics import average_accuracy_curve, mean_and_interval

_METRICS = ("acc", "fgt", "learning_acc", "bwt")


def collect_results(out: Path) -> dict[str, dict[str, list[RunResult]]]:
    """Every result below `out`: dataset folder -> method -> results by seed."""
    found: dict[str, dict[str, list[RunResult]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(out.glob("*/*/seed-*/result.json")):
        found[path.parts[-4]][path.parts[-3]].append(RunResult.load(path))
    for methods in found.values():
        for results in methods.values():
            results.sort(key=lambda result: result.seed)
    return {dataset: dict(methods) for dataset, methods in found.items()}


def write_summary(out: Path) -> dict[str, Any]:
    """Write `summary.json` and its Markdown twin over everything below `out`, and return it."""
    summary = {
        dataset: {method: summarised(results) for method, results in methods.items()}
        for dataset, methods in collect_results(out).items()
    }
    write_whole(out / "summary.json", lambda file: file.write(json.dumps(summary, indent=1).encode()))
    write_whole(out / "summary.md", lambda file: file.write(summary_markdown(summary).encode()))
    return summary


def draw_pictures(out: Path, methods: tuple[str, ...] | None = None) -> list[Path]:
    """Heatmaps, curves and an overview per dataset below `out`, of all results there or of `methods` in that order."""
    drawn = []
    for dataset, found in collect_results(out).items():
        chosen = {name: found[name] for name in methods or found if name in found}
        measured = {name: np.stack([result.matrix for result in results]) for name, results in chosen.items()}
        sequential = {name: stack for name, stack in measured.items() if not np.isnan(stack[:, 0, 0]).any()}
        if not sequential:
            continue
        first = next(iter(chosen.values()))[0]
        title = f"{dataset}, {first.config.get('model', '')}"
        folder = out / dataset
        draw_accuracy_matrix({k: v.mean(0) for k, v in sequential.items()}, folder / "accuracy_matrix.png", title=title)
        curves = {k: np.stack([average_accuracy_curve(matrix) for matrix in v]) for k, v in sequential.items()}
        draw_curves(curves, folder / "curves.png", title=title)
        draw_overview(sequential, folder / "overview.png", title=title)
        drawn += [folder / name for name in ("accuracy_matrix.png", "curves.png", "overview.png")]
    return drawn


def summary_table(results: list[RunResult]) -> Table:
    """Methods as rows, mean and 95% interval over seeds."""
    by_method: dict[str, list[RunResult]] = defaultdict(list)
    for result in results:
        by_method[result.method].append(result)
    first = results[0]
    seeds = max(map(len, by_method.values()))
    table = Table(
        title=escape(
            f"{first.dataset}: {len(first.accuracy_matrix)} tasks, {first.config.get('model', '')}, {seeds} seed(s)"
        ),
        caption="ACC: accuracy over all tasks at the end. FGT: what earlier tasks lost since their best. In percent.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("method")
    for column in ("ACC ↑", "FGT ↓", "when learned", "numbers a task", "seconds"):
        table.add_column(column, justify="right")
    best = max(np.mean([r.acc for r in group]) for group in by_method.values())
    for method, group in by_method.items():
        style = "bold" if np.mean([r.acc for r in group]) == best else ""
        numbers = max(task["norm_numbers"] + task["head_numbers"] for result in group for task in result.tasks)
        seconds = float(np.mean([r.seconds for r in group]))
        cells = [shown([getattr(r, m) for r in group]) for m in ("acc", "fgt", "learning_acc")]
        table.add_row(method, *cells, f"{numbers:,}", f"{seconds:.0f}", style=style)
    return table


def shown(values: Sequence[float | None]) -> str:
    """Mean and 95% interval, '-' where a value is not defined."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    mean, half, n = mean_and_interval(known)
    return f"{mean:.1f}" + (f" ± {half:.1f}" if n > 1 else "")


def summarised(results: Sequence[RunResult]) -> dict[str, Any]:
    """What runs that differ only in their seed say together, and all it takes to repeat them."""
    entry: dict[str, Any] = {"seeds": [result.seed for result in results]}
    for name in _METRICS:
        values = [getattr(result, name) for result in results]
        if None in values:
            entry[name] = None
            continue
        mean, half, _ = mean_and_interval(values)
        entry[name] = {"mean": mean, "ci95": None if math.isnan(half) else half, "values": values}
    same = results[0]
    entry |= {
        "config": {key: value for key, value in same.config.items() if key != "seed"},
        # Some methods decide anew in each run what a task keeps.
        "numbers_per_task": [
            max(task["norm_numbers"] + task["head_numbers"] for task in tasks)
            for tasks in zip(*(result.tasks for result in results), strict=True)
        ],
        "seconds": [result.seconds for result in results],
        "images_per_second": [result.images_per_second for result in results],
        "device": same.device,
        "weights": same.weights,
        "weights_sha256": same.weights_sha256,
        "versions": same.versions,
        "command": same.command,
    }
    return entry
