"""Results in memory: runs that differ only in their seed are a row, and each column is defined once.

Rows stand in sections. In a section the data and the network are the same, and so is whatever else one method was run
with in several ways; so it has each method once for each choice of the method's own options.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.reporting.render import markdown_table, shown, terminal_table
from confitune.experiments.runs.identity import DEFAULTS, XCONV, filled
from confitune.experiments.runs.job import RUNS, finished_runs
from confitune.settings import DataSettings, NetworkSettings

# What a table can say of runs that differ only in their seed.
COLUMNS: Mapping[str, Callable[[Sequence[RunResult]], str]] = {
    "ACC ↑": lambda runs: shown([run.acc for run in runs]),
    "FGT ↓": lambda runs: shown([run.fgt for run in runs]),
    "when learned": lambda runs: shown([run.learning_acc for run in runs]),
    "BWT ↑": lambda runs: shown([run.bwt for run in runs]),
    "numbers a task": lambda runs: f"{numbers_per_task(runs):,}",
    "seconds": lambda runs: f"{np.mean([run.seconds for run in runs]):.0f}",
    "seeds": lambda runs: str(len(runs)),
}
USUAL = ("ACC ↑", "FGT ↓", "when learned", "numbers a task")
_SHARED = {*DataSettings.model_fields, *NetworkSettings.model_fields} & set(DEFAULTS) - {"dataset"}
_IN_WORDS = {"model", "tasks", "pipeline", "scenario", "held_out", *XCONV}  # what a section's heading says of each


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed."""

    settings: Mapping[str, str]  # the method, its options as part.option, and all settings; None is left out
    runs: list[RunResult] = field(default_factory=list)

    @property
    def method(self) -> str:
        """The method's name."""
        return self.runs[0].method

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of its first run, with all defaults."""
        return filled(self.runs[0].config)

    def cells(self, columns: Iterable[str]) -> list[str]:
        """What these columns say of its runs."""
        return [COLUMNS[column](self.runs) for column in columns]


def best_first(rows: Iterable[Row]) -> list[Row]:
    """By mean accuracy."""
    return sorted(rows, key=lambda row: -float(np.mean([run.acc for run in row.runs])))


@dataclass(frozen=True)
class Section:
    """Rows with the same data and network, best first, by what they are called."""

    dataset: str
    rows: dict[str, Row]
    apart: Mapping[str, str | None]  # settings in which its methods were run otherwise in other sections

    def cells(self, columns: Sequence[str]) -> list[list[str]]:
        """A row for each method, with what these columns say of its runs."""
        return [[name, *row.cells(columns)] for name, row in self.rows.items()]

    def heading(self) -> str:
        """What was run, in words: network, tasks, seeds, device and whatever is unusual about it."""
        rows = [self.rows[name] for name in sorted(self.rows)]
        configs = [row.config for row in rows]
        config, seeds = configs[0], max(len(row.runs) for row in rows)
        words = [config["model"], f"{max(len(row.runs[0].tasks) for row in rows)} tasks"]
        if config["pipeline"] != "clean":
            words.append(f"{config['pipeline']} pipeline")
        words += scenario_words(config)
        if config["held_out"]:
            words.append(f"tested on {config['held_out']:.0%} of the training images")
        words += sorted({f"{c['means']} means, {c['statistics']} statistics" for c in configs if c["means"]})
        words += [f"{name} {value}" for name, value in self.apart.items() if value and name not in _IN_WORDS]
        devices = dict.fromkeys(row.runs[0].device for row in rows)
        return ", ".join([*words, f"{seeds} seed{'s' if seeds > 1 else ''}", f"on {' and '.join(devices)}"])


def rows_of(results: Iterable[RunResult]) -> list[Row]:
    """Results by what was run, in the order in which that first appears; seeds in order."""
    found: dict[str, Row] = {}
    for result in results:
        config = {n: v for n, v in filled(result.config).items() if n not in ("seed", "weights_sha256", "dataset")}
        settings = {"method": result.method, **_flat(config), "weights": result.weights_sha256[:8]}
        found.setdefault(json.dumps([result.dataset, settings], sort_keys=True), Row(settings)).runs.append(result)
    for row in found.values():
        row.runs.sort(key=lambda result: result.seed)
    return list(found.values())


def sections_of(results: Iterable[RunResult]) -> list[Section]:
    """All results, each dataset's sections in the order in which they first appear."""
    by_dataset = _grouped(rows_of(results), lambda row: row.runs[0].dataset)
    return [section for dataset, rows in by_dataset.items() for section in _sections(dataset, rows)]


def _sections(dataset: str, rows: Sequence[Row]) -> list[Section]:
    of_method = _grouped(rows, lambda row: row.method)
    varied = {name for same in of_method.values() for name in _differing(same) if "." not in name}
    found: list[tuple[dict[str, str | None], list[Row]]] = []
    for row in sorted(rows, key=lambda row: "means" not in row.settings):  # others go with the first that fits them
        where = {name: row.settings.get(name) for name in sorted(_SHARED | varied)}
        for there, members in found:
            if all(there[name] == value or (name in XCONV and value is None) for name, value in where.items()):
                members.append(row)
                break
        else:
            found.append((where, [row]))
    sections = []
    for _, members in found:
        names = {name for row in members for name in _differing(of_method[row.method]) if "." not in name}
        apart = {name: members[0].settings.get(name) for name in sorted(names)}
        sections.append(Section(dataset, named(best_first(members), rows), apart))
    return sections


def named(rows: Sequence[Row], among: Sequence[Row] | None = None) -> dict[str, Row]:
    """Rows by their method, with its options where those of others differ; a method's file stands without folders."""
    short = {method: re.sub(r"[^+]*/", "", method) for method in {row.method for row in rows}}
    by_name = {}
    for row in rows:
        same = [other for other in among or rows if other.method == row.method]
        options = [f"{name}={row.settings.get(name, 'none')}" for name in _differing(same) if "." in name]
        label = short[row.method] if list(short.values()).count(short[row.method]) == 1 else row.method
        by_name[f"{label} ({', '.join(options)})" if options else label] = row
    return by_name


def _grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def _differing(rows: Sequence[Row]) -> list[str]:
    """The settings that are not the same in all rows."""
    names = dict.fromkeys(name for row in rows for name in row.settings)
    return [name for name in names if len({row.settings.get(name) for row in rows}) > 1]


def numbers_per_task(runs: Sequence[RunResult]) -> int:
    """The most of any task and run: some methods decide anew for each what it keeps."""
    return max(task["norm_numbers"] + task["head_numbers"] for run in runs for task in run.tasks)


def scenario_words(config: Mapping[str, Any]) -> list[str]:
    """In words, where the task of a test image is not given."""
    return [] if config["scenario"] == "task" else [f"{config['scenario']}-incremental (task not given)"]


def summary_table(results: Sequence[RunResult]) -> Table:
    """Methods as rows, best first: what `confitune run` ends with."""
    section, columns = Section(results[0].dataset, named(best_first(rows_of(results))), {}), [*USUAL, "seconds"]
    caption = "ACC: accuracy over all tasks at the end. FGT: what earlier tasks lost since their best. In percent."
    title = f"{section.dataset}: {section.heading()}"
    return terminal_table(["method", *columns], section.cells(columns), title=title, caption=caption, bold=0)


@dataclass(frozen=True)
class Comparison:
    """All settings of one dataset side by side, best accuracy first, with the settings that differ."""

    dataset: str
    about: str
    head: list[str]
    cells: list[list[str]]

    def markdown(self) -> str:
        """For a page."""
        return f"**{self.dataset}**, {self.about}\n\n{markdown_table(self.head, self.cells)}\n"

    def terminal(self) -> Table:
        """For a terminal."""
        return terminal_table(self.head, self.cells, title=f"{self.dataset}: {self.about}", bold=0)


def compare(folders: Sequence[Path]) -> list[Comparison]:
    """All runs below the folders, a table for each dataset; seeds of one setting are one row."""
    paths = sorted({path for folder in folders for path in folder.rglob(RUNS)})
    results = {key: result for path in paths for key, result in finished_runs(path.parent).items()}.values()
    if not results:
        where = ", ".join(map(str, folders))
        raise ConfituneError(f"no results below {where}: `confitune run --out FOLDER` writes some")
    return [_compared(title, rows) for title, rows in _grouped(rows_of(results), _data_words).items()]


def _data_words(row: Row) -> str:
    pipeline = f" ({row.config['pipeline']})" if row.config["pipeline"] != "clean" else ""
    return ", ".join([row.runs[0].dataset + pipeline, *scenario_words(row.config)])


def _compared(title: str, rows: Sequence[Row]) -> Comparison:
    """A column for each setting that some method was run with in several ways; in the last what else is unusual."""
    varied = {name for same in _grouped(rows, lambda row: row.method).values() for name in _differing(same)}
    columns = ["method", *(name for name in _differing(rows) if name in varied)]
    usual = {}
    for name in _differing(rows):
        if name not in columns:
            (usual[name], _), *_ = Counter(row.settings[name] for row in rows if name in row.settings).most_common(1)
    cells = []
    for row in best_first(rows):
        other = [f"{name}={row.settings[name]}" for name in usual if row.settings.get(name, usual[name]) != usual[name]]
        settings = [row.settings.get(name, "") for name in columns]
        cells.append([*settings, *row.cells([*USUAL, "seeds"]), ", ".join(other)])
    runs = [run for row in rows for run in row.runs]
    devices = ", ".join(dict.fromkeys(run.device for run in runs))
    about = f"{rows[0].config['model']}, {len(runs[0].accuracy_matrix)} tasks, on {devices}"
    head = [*columns, *USUAL, "seeds", "otherwise"]
    if not any(row[-1] for row in cells):
        head, cells = head[:-1], [row[:-1] for row in cells]
    return Comparison(title, about, head, cells)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Options by dotted name, as text; what is not set is not there."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, "" if name == "options" else f"{prefix}{name}.")
        elif value is not None:
            flat[f"{prefix}{name}"] = f"{value:g}" if isinstance(value, float) else str(value)
    return flat
