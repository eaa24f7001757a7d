"""Results in memory: runs that differ only in their seed are a row, and each column is defined once.

Rows stand in sections. In a section the data and the network are the same, and so is whatever else one method was run
with in several ways; so it has each method once for each choice of the method's own options.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.runs.identity import DEFAULTS, RUNS, XCONV, filled, finished_runs
from confitune.metrics import mean_and_interval
from confitune.settings import DataSettings, NetworkSettings

FEW = 3  # runs: below that an interval says more of Student's t than of them


def shown(values: Sequence[float | None], digits: int = 1) -> str:
    """Mean and 95% interval, of few runs each; '-' where a value is not defined (or NaN), nothing of nothing.

    >>> shown([86.0, 87.0, 85.5]), shown([86.0, 87.0]), shown([2.0], 2), shown([None])
    ('86.2 ± 1.9', '86.0, 87.0', '2.00', '-')
    """
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known or len(known) < len(values):
        return "-" if len(values) else ""
    if len(known) < FEW:
        return ", ".join(f"{value:.{digits}f}" for value in known)
    mean, half, _ = mean_and_interval(known)
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown with these column titles."""
    lines = ["".join(f"| {cell} " if cell else "| " for cell in cells) + "|" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def terminal_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", caption: str = "", bold: int | None = None
) -> Table:
    """For a terminal; columns of numbers are aligned on the right, the row `bold` stands out."""
    table = Table(title=Text(title) if title else None, caption=caption or None)
    table.title_justify = table.caption_justify = "left"
    for place, name in enumerate(head):
        numbers = all(re.match(r"[-+]?\d|-?$", row[place]) for row in rows if place < len(row))
        title = name.replace(" ", "\n", 1) if len(name) > 8 else name  # most cells are narrower than that
        table.add_column(title, justify="right" if numbers else "left", no_wrap=numbers or place == 0, overflow="fold")
    for place, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold" if place == bold else "")
    return table


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """HTML in which no text is markup; the first cell of a row names it."""
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


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
_IN_WORDS = {"model", "tasks", "pipeline", "scenario", "held_out", *XCONV}  # what a section's words say of each


def numbers_per_task(runs: Sequence[RunResult]) -> int:
    """The most of any task and run: some methods decide anew for each what it keeps."""
    return max(task["norm_numbers"] + task["head_numbers"] for run in runs for task in run.tasks)


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed."""

    method: str
    settings: Mapping[str, str]  # the method, its options as part.option, and all settings; None is left out
    config: Mapping[str, Any]  # of its first run, with all defaults
    runs: list[RunResult] = field(default_factory=list)


@dataclass(frozen=True)
class Section:
    """Rows side by side, best first."""

    dataset: str
    about: str  # what was run, in words
    names: list[str]  # of the rows
    rows: list[Row]
    columns: Sequence[str] = USUAL
    settings: Sequence[str] = ()  # of each row, where that is a column
    note: str = ""  # below the table

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Titles of columns, and a list of cells for each row."""
        told = {"method": self.names, **({"settings": self.settings} if any(self.settings) else {})}
        told |= {name: [COLUMNS[name](row.runs) for row in self.rows] for name in self.columns}
        return list(told), [list(cells) for cells in zip(*told.values(), strict=True)]

    def markdown(self) -> str:
        """For a page."""
        note = f"\n{self.note}\n" if self.note else ""
        return f"**{self.dataset}**, {self.about}\n\n{markdown_table(*self.table())}\n{note}"

    def terminal(self) -> Table:
        """For a terminal; the best row stands out."""
        return terminal_table(*self.table(), title=f"{self.dataset}: {self.about}", caption=self.note, bold=0)


def rows_of(results: Iterable[RunResult]) -> list[Row]:
    """Results by what was run, in the order in which that first appears; seeds in order."""
    found: dict[str, Row] = {}
    for result in results:
        config = filled(result.config)
        options = config["options"].items()
        asked = {f"{part}.{name}": value for part, of_part in options for name, value in of_part.items()}
        asked |= {n: v for n, v in config.items() if n not in ("options", "seed", "weights_sha256", "dataset")}
        told = {n: f"{v:g}" if isinstance(v, float) else str(v) for n, v in asked.items() if v is not None}
        # The number of tasks as it was: a folder may have got more classes since an earlier seed.
        measured = {"tasks": str(len(result.accuracy_matrix)), "weights": result.weights_sha256[:8]}
        settings = {"method": result.method, **told, **measured}
        key = json.dumps([result.dataset, settings], sort_keys=True)
        found.setdefault(key, Row(result.method, settings, config)).runs.append(result)
    for row in found.values():
        row.runs.sort(key=lambda result: result.seed)
    return list(found.values())


def best_first(rows: Iterable[Row]) -> list[Row]:
    """By mean accuracy."""
    return sorted(rows, key=lambda row: -float(np.mean([run.acc for run in row.runs])))


def _grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def _differing(rows: Sequence[Row]) -> list[str]:
    """The settings that are not the same in all rows."""
    names = dict.fromkeys(name for row in rows for name in row.settings)
    return [name for name in names if len({row.settings.get(name) for row in rows}) > 1]


def names_of(rows: Sequence[Row], among: Sequence[Row] = ()) -> list[str]:
    """Each row's method, with its options where those of others differ; a method's file stands without folders."""
    short = {method: re.sub(r"[^+]*/", "", method) for method in {row.method for row in rows}}
    names = []
    for row in rows:
        same = [other for other in among or rows if other.method == row.method]
        options = [f"{name}={row.settings.get(name, 'none')}" for name in _differing(same) if "." in name]
        label = short[row.method] if list(short.values()).count(short[row.method]) == 1 else row.method
        names.append(f"{label} ({', '.join(options)})" if options else label)
    return names


def sections_of(results: Iterable[RunResult]) -> list[Section]:
    """All results, each dataset's sections in the order in which they first appear."""
    by_dataset = _grouped(rows_of(results), lambda row: row.runs[0].dataset)
    return [section for dataset, rows in by_dataset.items() for section in _sections(dataset, rows)]


def _sections(dataset: str, rows: Sequence[Row]) -> Iterator[Section]:
    of_method = _grouped(rows, lambda row: row.method)
    varied = {method: [name for name in _differing(same) if "." not in name] for method, same in of_method.items()}
    apart = sorted(_SHARED.union(*varied.values()))
    found: list[tuple[dict[str, str | None], list[Row]]] = []
    for row in sorted(rows, key=lambda row: "means" not in row.settings):  # others go with the first that fits them
        where = {name: row.settings.get(name) for name in apart}
        for there, members in found:
            if all(there[name] == value or (name in XCONV and value is None) for name, value in where.items()):
                members.append(row)
                break
        else:
            found.append((where, [row]))
    for where, members in found:
        told = sorted({name for row in members for name in varied[row.method]} - _IN_WORDS)
        words = [f"{name} {where[name]}" for name in told if where[name]]
        ordered = best_first(members)
        yield Section(dataset, _words(ordered, words), names_of(ordered, rows), ordered)


def _words(rows: Sequence[Row], apart: Sequence[str] = ()) -> str:
    """What was run: network, tasks, seeds, device and whatever is unusual about it."""
    rows = sorted(rows, key=lambda row: row.method)
    configs = [row.config for row in rows]
    config, counts = configs[0], sorted({len(row.runs) for row in rows})
    seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    words = [_each(c["model"] for c in configs), f"{_each(row.settings['tasks'] for row in rows)} tasks"]
    if config["pipeline"] != "clean":
        words.append(f"{config['pipeline']} pipeline")
    words += scenario_words(config)
    if config["held_out"]:
        words.append(f"tested on {config['held_out']:.0%} of the training images")
    forms = {f"{c['means']} means, {c['statistics']} statistics" for c in configs if c["means"]}
    words += forms if len(forms) == 1 else ()
    devices = _each(row.runs[0].device for row in rows)
    return ", ".join([*words, *apart, f"{seeds} seed{'s' if counts[-1] > 1 else ''}", f"on {devices}"])


def _each(texts: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(texts))


def scenario_words(config: Mapping[str, Any]) -> list[str]:
    """In words, where the task of a test image is not given."""
    return [] if config["scenario"] == "task" else [f"{config['scenario']}-incremental (task not given)"]


def summary_tables(results: Sequence[RunResult]) -> list[Table]:
    """Methods as rows, best first: what `confitune run` ends with."""
    note = (
        "ACC: accuracy over all tasks at the end. FGT: what earlier tasks lost since their best. In percent. "
        "Numbers a task: what it adds to what is stored, its head included."
    )
    columns = (*USUAL, "seconds")
    return [replace(section, columns=columns, note=note).terminal() for section in sections_of(results)]


def compare(folders: Sequence[Path]) -> list[Section]:
    """All runs below the folders, a section for each dataset, with the settings that differ."""
    paths = sorted({path for folder in folders for path in folder.rglob(RUNS)})
    results = {key: result for path in paths for key, result in finished_runs(path.parent).items()}.values()
    if not results:
        where = ", ".join(map(str, folders))
        raise ConfituneError(f"no results below {where}: `confitune run --out FOLDER` writes some")
    # Accuracies on other test images, or in another scenario, are not comparable.
    apart = ("pipeline", "scenario", "held_out")
    tables = _grouped(rows_of(results), lambda row: str([row.runs[0].dataset, *(row.config[name] for name in apart)]))
    return [_compared(rows) for rows in tables.values()]


def _compared(rows: Sequence[Row]) -> Section:
    """A row says what its method was run with in several ways; the note, what is unusual about a method otherwise."""
    differing = _differing(rows)
    rows = best_first(rows)
    varied = {name for same in _grouped(rows, lambda row: row.method).values() for name in _differing(same)}
    told = [name for name in differing if name in varied]
    settings = [", ".join(f"{name}={row.settings[name]}" for name in told if name in row.settings) for row in rows]
    unusual: dict[str, list[str]] = defaultdict(list)
    for name in (name for name in differing if name not in (*varied, "method")):
        of_method = {row.method: row.settings[name] for row in rows if name in row.settings}
        usual = Counter(of_method.values()).most_common(1)[0][0]
        for method, value in of_method.items():
            if value != usual:
                unusual[method].append(f"{name}={value}")
    note = "\n".join(f"{method}: {', '.join(values)}" for method, values in unusual.items())
    columns = ("ACC ↑", "FGT ↓", "numbers a task", "seeds")
    return Section(rows[0].runs[0].dataset, _words(rows), [row.method for row in rows], rows, columns, settings, note)
