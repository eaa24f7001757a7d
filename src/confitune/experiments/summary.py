"""What runs say together: of one folder a table, a JSON file and pictures; of many configurations what differs."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.drawing import save_figure
from confitune.experiments.identity import filled
from confitune.experiments.job import RESULT, file_name
from confitune.experiments.plots import accuracy_matrix_figure, curves_figure, overview_figure
from confitune.files import write_whole
from confitune.metrics import average_accuracy_curve, mean_and_interval

_METRICS = ("acc", "fgt", "learning_acc", "bwt")
_COLUMNS = ("acc", "fgt", "learning_acc")
_HEAD = ("method", "ACC ↑", "FGT ↓", "when learned")
_NOT_COMPARED = ("seed", "weights_sha256", "dataset")


def collect_results(out: Path) -> dict[str, dict[str, list[RunResult]]]:
    """Every result below `out`: dataset folder -> method -> results by seed."""
    found: dict[str, dict[str, list[RunResult]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(out.glob(f"*/*/seed-*/{RESULT}")):
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
        chosen = {name: found[name] for name in map(file_name, methods or found) if name in found}
        measured = {
            label: np.stack([result.matrix for result in results])
            for label, results in zip(_labels(chosen), chosen.values(), strict=True)
        }
        sequential = {name: stack for name, stack in measured.items() if not np.isnan(stack[:, 0, 0]).any()}
        if not sequential:
            continue
        first = next(iter(chosen.values()))[0]
        title = f"{dataset}, {filled(first.config)['model']}"
        curves = {k: np.stack([average_accuracy_curve(matrix) for matrix in v]) for k, v in sequential.items()}
        figures = {
            "accuracy_matrix.png": accuracy_matrix_figure({k: v.mean(0) for k, v in sequential.items()}, title=title),
            "curves.png": curves_figure(curves, title=title),
            "overview.png": overview_figure(sequential, title=title),
        }
        for name, figure in figures.items():
            save_figure(figure, out / dataset / name)
            drawn.append(out / dataset / name)
    return drawn


def _labels(found: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """What methods are called in pictures: files of a user's own without their folders, where that tells them apart."""
    short = [re.sub(r"[^+]*/", "", results[0].method) for results in found.values()]
    return [name if short.count(label) > 1 else label for name, label in zip(found, short, strict=True)]


def summary_table(results: list[RunResult]) -> Table:
    """Methods as rows, mean and 95% interval over seeds."""
    by_method: dict[str, list[RunResult]] = defaultdict(list)
    for result in results:
        by_method[result.method].append(result)
    first = results[0]
    seeds = max(map(len, by_method.values()))
    table = Table(
        title=escape(
            f"{first.dataset}: {len(first.accuracy_matrix)} tasks, {filled(first.config)['model']}, {seeds} seed(s)"
        ),
        caption="ACC: accuracy over all tasks at the end. FGT: what earlier tasks lost since their best. In percent.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("method")
    for column in (*_HEAD[1:], "numbers a task", "seconds"):
        table.add_column(column, justify="right")
    best = max(np.mean([r.acc for r in group]) for group in by_method.values())
    for method, group in by_method.items():
        style = "bold" if np.mean([r.acc for r in group]) == best else ""
        numbers = max(task["norm_numbers"] + task["head_numbers"] for result in group for task in result.tasks)
        seconds = float(np.mean([r.seconds for r in group]))
        cells = _cells([getattr(r, name) for r in group] for name in _COLUMNS)
        table.add_row(escape(method), *cells, f"{numbers:,}", f"{seconds:.0f}", style=style)
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
        "config": {key: value for key, value in filled(same.config).items() if key != "seed"},
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


def summary_markdown(summary: dict[str, dict[str, dict[str, Any]]]) -> str:
    """One table per dataset: methods as rows, mean ± 95% interval over seeds, best accuracy first.

    Args:
        summary: dataset -> method -> what `summarised` gave.
    """
    return "\n".join(_table(dataset, methods) for dataset, methods in summary.items())


def _table(dataset: str, methods: dict[str, dict[str, Any]]) -> str:
    best_first = sorted(methods.items(), key=lambda item: -item[1]["acc"]["mean"])
    rows = [
        [
            method,
            *_cells(entry[name] and entry[name]["values"] for name in _COLUMNS),
            f"{max(entry['numbers_per_task']):,}",
        ]
        for method, entry in best_first
    ]
    return f"**{dataset}**, {details(list(methods.values()))}\n\n{markdown_table([*_HEAD, 'numbers a task'], rows)}\n"


def details(entries: Sequence[Mapping[str, Any]]) -> str:
    """What was run, in words: network, tasks, seeds, device and whatever is unusual about it."""
    config, seeds = entries[0]["config"], len(entries[0]["seeds"])
    words = [config["model"], f"{max(len(entry['numbers_per_task']) for entry in entries)} tasks"]
    if config["pipeline"] != "clean":
        words.append(f"{config['pipeline']} pipeline")
    if config["held_out"]:
        words.append(f"tested on {config['held_out']:.0%} of the training images")
    configs = [entry["config"] for entry in entries]
    words += sorted({f"{c['means']} means, {c['statistics']} statistics" for c in configs if c["means"]})
    devices = dict.fromkeys(entry["device"] for entry in entries)
    return ", ".join([*words, f"{seeds} seed{'s' if seeds > 1 else ''}", f"on {' and '.join(devices)}"])


@dataclass(frozen=True)
class Setting:
    """The runs of one configuration, all seeds."""

    options: Mapping[str, str]
    results: tuple[RunResult, ...]

    @property
    def acc(self) -> float:
        """Their mean."""
        return sum(result.acc for result in self.results) / len(self.results)


def compare(folders: Sequence[Path]) -> dict[str, list[Setting]]:
    """All runs below the folders: dataset and pipeline -> settings, best first; seeds of one setting are one."""
    paths = sorted({path for folder in folders for path in folder.rglob(RESULT)})
    if not paths:
        where = ", ".join(map(str, folders))
        raise ConfituneError(f"no results below {where}: `confitune run --out FOLDER` writes some")
    groups: dict[tuple[str, str], list[RunResult]] = {}
    options: dict[tuple[str, str], dict[str, str]] = {}
    for result in map(RunResult.load, paths):
        config = filled(result.config)
        dataset = result.dataset + (f" ({config['pipeline']})" if config["pipeline"] != "clean" else "")
        flat = {"method": result.method, **_flat({n: v for n, v in config.items() if n not in _NOT_COMPARED})}
        key = dataset, json.dumps(flat, sort_keys=True)
        groups.setdefault(key, []).append(result)
        options[key] = flat
    settings: dict[str, list[Setting]] = {}
    for key, results in groups.items():
        settings.setdefault(key[0], []).append(Setting(options[key], tuple(results)))
    return {dataset: sorted(found, key=lambda s: -s.acc) for dataset, found in settings.items()}


def comparison_page(folders: Sequence[Path]) -> str:
    """One table a dataset, best accuracy first, with what its settings have in common in words."""
    parts = []
    for dataset, settings in compare(folders).items():
        first = settings[0].results[0]
        devices = ", ".join(dict.fromkeys(r.device for setting in settings for r in setting.results))
        about = f"{filled(first.config)['model']}, {len(first.accuracy_matrix)} tasks, on {devices}"
        parts.append(f"**{dataset}**, {about}\n\n{comparison_table(settings)}\n")
    return "\n".join(parts)


def comparison_table(settings: Sequence[Setting]) -> str:
    """One dataset's as Markdown; an option that is the same in all settings is not shown."""
    names = dict.fromkeys(name for setting in settings for name in setting.options)
    differing = [name for name in names if len({setting.options.get(name) for setting in settings}) > 1]
    rows = []
    for setting in settings:
        numbers = max(task["norm_numbers"] for result in setting.results for task in result.tasks)
        cells = _cells([getattr(r, name) for r in setting.results] for name in _COLUMNS)
        rows.append(
            [*(setting.options.get(n, "") for n in differing), *cells, f"{numbers:,}", str(len(setting.results))]
        )
    return markdown_table([*differing, *_HEAD[1:], "numbers a task", "seeds"], rows)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> str:
    """Markdown with these column titles; `numbers`: all columns but the first are.

    >>> print(markdown_table(["method", "ACC"], [["confit", "94.0"]]))
    | method | ACC |
    |---|---|
    | confit | 94.0 |
    """
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" + ("|---:" if numbers else "|---") * (len(head) - 1) + "|", *lines[1:]])


def _cells(values: Iterable[Sequence[float | None] | None]) -> list[str]:
    return ["-" if found is None else shown(found) for found in values]


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Options by dotted name, as text; what is not set is not there."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, "" if name == "options" else f"{prefix}{name}.")
        elif value is not None:
            flat[f"{prefix}{name}"] = f"{value:.3g}" if isinstance(value, float) else str(value)
    return flat
