"""What runs say together: of one folder a table, a JSON file and pictures; of many configurations what differs."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.reporting.figures import overview_figure, save_figure
from confitune.experiments.reporting.render import markdown_table, terminal_table
from confitune.experiments.runs.identity import filled
from confitune.experiments.runs.job import RESULT, file_name
from confitune.files import write_whole
from confitune.metrics import mean_and_interval

Runs = Mapping[str, Sequence[RunResult]]  # by method, all seeds

# What a table can say of runs that differ only in their seed.
COLUMNS: Mapping[str, Callable[[Sequence[RunResult]], str]] = {
    "ACC ↑": lambda runs: shown([run.acc for run in runs]),
    "FGT ↓": lambda runs: shown([run.fgt for run in runs]),
    "when learned": lambda runs: shown([run.learning_acc for run in runs]),
    "BWT ↑": lambda runs: shown([run.bwt for run in runs]),
    "numbers a task": lambda runs: f"{max(_numbers_per_task(runs)):,}",
    "seconds": lambda runs: f"{np.mean([run.seconds for run in runs]):.0f}",
    "seeds": lambda runs: str(len(runs)),
}
USUAL = ("ACC ↑", "FGT ↓", "when learned", "numbers a task")
_METRICS = ("acc", "fgt", "learning_acc", "bwt")
_NOT_COMPARED = ("seed", "weights_sha256", "dataset")


def best_first(methods: Runs) -> dict[str, Sequence[RunResult]]:
    """By mean accuracy."""
    return dict(sorted(methods.items(), key=lambda item: -np.mean([run.acc for run in item[1]])))


def result_rows(methods: Runs, columns: Iterable[str]) -> list[list[str]]:
    """A row for each method, with what these columns say of its runs."""
    return [[name, *(COLUMNS[column](runs) for column in columns)] for name, runs in methods.items()]


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
    found = collect_results(out)
    summary = {dataset: {m: summarised(runs) for m, runs in methods.items()} for dataset, methods in found.items()}
    pages = [
        f"**{dataset}**, {details(methods)}\n\n"
        f"{markdown_table(['method', *USUAL], result_rows(best_first(methods), USUAL))}\n"
        for dataset, methods in found.items()
    ]
    write_whole(out / "summary.json", lambda file: file.write(json.dumps(summary, indent=1).encode()))
    write_whole(out / "summary.md", lambda file: file.write("\n".join(pages).encode()))
    return summary


def draw_pictures(out: Path, methods: tuple[str, ...] | None = None) -> list[Path]:
    """An overview per dataset below `out`, of all results there or of `methods` in that order."""
    drawn = []
    for dataset, found in collect_results(out).items():
        chosen = {name: found[name] for name in map(file_name, methods or found) if name in found}
        if figure := overview_of(dataset, chosen):
            drawn.append(out / dataset / "overview.png")
            save_figure(figure, drawn[-1])
    return drawn


def overview_of(dataset: str, found: Runs) -> Figure | None:
    """None where no method learned task after task."""
    measured = {
        label: np.stack([result.matrix for result in results])
        for label, results in zip(_labels(found), found.values(), strict=True)
    }
    sequential = {name: stack for name, stack in measured.items() if not np.isnan(stack[:, 0, 0]).any()}
    config = filled(next(iter(found.values()))[0].config)
    title = ", ".join([dataset, *_scenarios([config]), config["model"]])
    return overview_figure(sequential, title=title) if sequential else None


def _labels(found: Mapping[str, Sequence[RunResult]]) -> list[str]:
    """What methods are called in pictures: files of a user's own without their folders, where that tells them apart."""
    short = [re.sub(r"[^+]*/", "", results[0].method) for results in found.values()]
    return [name if short.count(label) > 1 else label for name, label in zip(found, short, strict=True)]


def summary_table(results: Sequence[RunResult]) -> Table:
    """Methods as rows, best first, mean and 95% interval over seeds."""
    methods: dict[str, list[RunResult]] = defaultdict(list)
    for result in results:
        methods[result.method].append(result)
    first, seeds = results[0], max(map(len, methods.values()))
    config, tasks = filled(first.config), f"{len(first.accuracy_matrix)} tasks"
    about = ", ".join([tasks, *_scenarios([config]), config["model"], f"{seeds} seed(s)"])
    return terminal_table(
        ["method", *USUAL, "seconds"],
        result_rows(best_first(methods), [*USUAL, "seconds"]),
        title=f"{first.dataset}: {about}",
        caption="ACC: accuracy over all tasks at the end. FGT: what earlier tasks lost since their best. In percent.",
        bold=0,
    )


def shown(values: Sequence[float | None]) -> str:
    """Mean and 95% interval, '-' where a value is not defined, nothing of nothing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return "-" if values else ""
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
    return entry | {
        "config": {key: value for key, value in filled(same.config).items() if key != "seed"},
        "numbers_per_task": _numbers_per_task(results),
        "seconds": [result.seconds for result in results],
        "images_per_second": [result.images_per_second for result in results],
        "device": same.device,
        "weights": same.weights,
        "weights_sha256": same.weights_sha256,
        "versions": same.versions,
        "command": same.command,
    }


def _numbers_per_task(results: Sequence[RunResult]) -> list[int]:
    """The most of any run: some methods decide anew in each what a task keeps."""
    return [
        max(task["norm_numbers"] + task["head_numbers"] for task in tasks)
        for tasks in zip(*(result.tasks for result in results), strict=True)
    ]


def details(methods: Runs) -> str:
    """What was run, in words: network, tasks, seeds, device and whatever is unusual about it."""
    configs = [filled(runs[0].config) for runs in methods.values()]
    config, seeds = configs[0], len(next(iter(methods.values())))
    words = [config["model"], f"{max(len(runs[0].tasks) for runs in methods.values())} tasks"]
    if config["pipeline"] != "clean":
        words.append(f"{config['pipeline']} pipeline")
    words += _scenarios(configs)
    if config["held_out"]:
        words.append(f"tested on {config['held_out']:.0%} of the training images")
    words += sorted({f"{c['means']} means, {c['statistics']} statistics" for c in configs if c["means"]})
    devices = dict.fromkeys(runs[0].device for runs in methods.values())
    return ", ".join([*words, f"{seeds} seed{'s' if seeds > 1 else ''}", f"on {' and '.join(devices)}"])


def _scenarios(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """In words, where the task of a test image is not given."""
    unusual = {config["scenario"] for config in configs} - {"task"}
    return [f"{scenario}-incremental (task not given)" for scenario in sorted(unusual)]


def comparison_page(folders: Sequence[Path]) -> str:
    """All runs below the folders: one table a dataset, best accuracy first, with the options that differ.

    Seeds of one setting are one row.
    """
    paths = sorted({path for folder in folders for path in folder.rglob(RESULT)})
    if not paths:
        where = ", ".join(map(str, folders))
        raise ConfituneError(f"no results below {where}: `confitune run --out FOLDER` writes some")
    found: dict[str, dict[str, list[RunResult]]] = defaultdict(lambda: defaultdict(list))
    options: dict[str, dict[str, str]] = {}
    for result in map(RunResult.load, paths):
        config = filled(result.config)
        dataset = result.dataset + (f" ({config['pipeline']})" if config["pipeline"] != "clean" else "")
        dataset = ", ".join([dataset, *_scenarios([config])])
        flat = {"method": result.method, **_flat({n: v for n, v in config.items() if n not in _NOT_COMPARED})}
        setting = json.dumps(flat, sort_keys=True)
        found[dataset][setting].append(result)
        options[setting] = flat
    return "\n".join(f"**{dataset}**, {_compared(settings, options)}\n" for dataset, settings in found.items())


def _compared(settings: Runs, options: Mapping[str, Mapping[str, str]]) -> str:
    """One dataset's; an option that is the same in all settings is not shown."""
    names = dict.fromkeys(name for setting in settings for name in options[setting])
    differing = [name for name in names if len({options[setting].get(name) for setting in settings}) > 1]
    rows = result_rows(best_first(settings), [*USUAL, "seeds"])
    shown_rows = [[*(options[setting].get(name, "") for name in differing), *cells] for setting, *cells in rows]
    results = [run for runs in settings.values() for run in runs]
    devices = ", ".join(dict.fromkeys(run.device for run in results))
    about = f"{filled(results[0].config)['model']}, {len(results[0].accuracy_matrix)} tasks, on {devices}"
    return f"{about}\n\n{markdown_table([*differing, *USUAL, 'seeds'], shown_rows)}"


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Options by dotted name, as text; what is not set is not there."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, "" if name == "options" else f"{prefix}{name}.")
        elif value is not None:
            flat[f"{prefix}{name}"] = f"{value:.3g}" if isinstance(value, float) else str(value)
    return flat
