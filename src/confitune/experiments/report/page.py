"""The report as one HTML page that loads nothing.

Tables and provenance are written here; pictures are drawn by the page's script from `charts_json`. A content security
policy forbids every request and every script but that one, so that a name which got past the escaping could not run.
The script computes places in the picture and nothing else: cells of matrices are rounded here, because JavaScript
rounds halves up and Python to even.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np

from confitune.experiments.drawing import COLOURS
from confitune.experiments.report.data import (
    EXPLAINED,
    Array,
    DatasetRuns,
    MethodRuns,
    Report,
    TextTable,
    run_facts,
    shown_known,
)
from confitune.metrics import mean_and_interval

_SCRIPTS = ("plots.js", "heatmaps.js", "report.js")


def report_page(report: Report) -> str:
    """The page's HTML."""
    script = "\n" + "\n".join(_asset(name) for name in _SCRIPTS)
    return Template(_asset("report.html")).substitute(
        title=escape(report.title),
        what=escape(report.what),
        contents=_contents(report),
        datasets="\n".join(_dataset(index, data) for index, data in enumerate(report.datasets)),
        style=_series() + _asset("report.css"),
        data=charts_json(report),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _asset(name: str) -> str:
    return files("confitune.experiments.report").joinpath(name).read_text(encoding="utf-8")


def _series() -> str:
    """The colours of methods; black becomes the ink of the theme, or it would be lost in the dark."""
    colours = ("var(--ink)" if colour == "#000000" else colour for colour in COLOURS)
    return ":root { " + " ".join(f"--series-{i}: {colour};" for i, colour in enumerate(colours)) + " }\n"


def _contents(report: Report) -> str:
    if len(report.datasets) == 1:
        return ""
    links = (f'<li><a href="#dataset-{i}">{escape(data.name)}</a></li>' for i, data in enumerate(report.datasets))
    return f'<nav aria-label="Datasets"><ul>{"".join(links)}</ul></nav>'


def _dataset(index: int, data: DatasetRuns) -> str:
    options = "".join(f'<option value="{seed}">seed {seed}</option>' for seed in data.seeds)
    return Template(_asset("dataset.html")).substitute(
        id=f"dataset-{index}",
        name=escape(data.name),
        details=escape(data.details),
        unfinished=_unfinished(data),
        commands="\n".join(f"<pre><code>{escape(command)}</code></pre>" for command in data.commands),
        tasks=data.tasks,
        task_table=_table(data.task_table()),
        explained=escape(EXPLAINED),
        columns="".join(_column(title) for title in ("method", *data.methods[0].cells())),
        rows="\n".join(_row(method, best=data.is_best(method)) for method in data.methods),
        curve_table=_table(data.curve_table()),
        lost_table=_table(data.lost_table()),
        storage_table=_table(data.storage_table()),
        seeds=options,
        runs="\n".join(_method_runs(method) for method in data.methods),
    )


def _unfinished(data: DatasetRuns) -> str:
    if not data.unfinished:
        return ""
    return f'<p class="note">Not finished, and not counted: {escape(", ".join(data.unfinished))}.</p>'


def _column(title: str) -> str:
    order = "descending" if title.startswith("ACC") else "none"  # the order that rows are written in
    return f'<th scope="col" aria-sort="{order}"><button type="button">{escape(title)}</button></th>'


def _row(method: MethodRuns, *, best: bool) -> str:
    mark = ' <span class="mark">★ best ACC</span>' if best else ""
    cells = [f'<th scope="row" data-value="{escape(method.name)}">{escape(method.name)}{mark}</th>']
    for text, value in method.cells().values():
        cells.append(f'<td data-value="{"" if value is None else repr(float(value))}">{escape(text)}</td>')
    return f'<tr class="{"best" if best else "other"}">{"".join(cells)}</tr>'


def _table(table: TextTable) -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in table.columns)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in table.rows
    )
    caption = escape(table.caption)
    return (
        f'<div class="scroll" role="region" aria-label="{caption}" tabindex="0"><table><caption>{caption}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>"
    )


def _method_runs(method: MethodRuns) -> str:
    runs = "\n".join(
        f"<details><summary>seed {result.seed}</summary><dl>"
        + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in run_facts(result).items())
        + "</dl></details>"
        for result in method.results
    )
    count = len(method.results)
    word = "run" if count == 1 else "runs"
    return f"<details><summary>{escape(method.name)}: {count} {word}</summary>\n{runs}\n</details>"


def charts_json(report: Report) -> str:
    """The report's pictures as JSON that may stand inside a script element, whatever names it holds.

    `<` would let a name end the element, so it is written as its escape, which JSON reads back as the same text.
    """
    text = json.dumps({"datasets": [_chart(data) for data in report.datasets]}, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _chart(data: DatasetRuns) -> dict[str, Any]:
    return {"name": data.name, "tasks": data.tasks, "methods": [_lines(method) for method in data.methods]}


def _lines(method: MethodRuns) -> dict[str, Any]:
    mean, half_width = np.array([mean_and_interval(column)[:2] for column in method.curves.T]).T
    average = method.matrices.mean(axis=0)
    seeds = [result.seed for result in method.results]
    return {
        "name": method.name,
        "curve": {
            "mean": _numbers(mean, 4),
            "half": _numbers(half_width, 4),
            "lowest": _numbers(method.curves.min(axis=0), 4),
            "texts": method.curve_texts(),
        },
        "tasks": {
            "learned": _numbers(average.diagonal(), 4),
            "kept": _numbers(average[:, -1], 4),
            "texts": [
                {"learned": learned, "kept": kept, "lost": lost}
                for learned, kept, lost in zip(
                    method.learned_texts(), method.kept_texts(), method.lost_texts(), strict=True
                )
            ],
        },
        "views": {
            "mean": {"cells": _cells(average), "averages": method.curve_texts()},
            **{
                str(seed): {"cells": _cells(matrix), "averages": [shown_known([value]) for value in curve]}
                for seed, matrix, curve in zip(seeds, method.matrices, method.curves, strict=True)
            },
        },
        "stored": method.stored,
        "stored_text": f"{method.stored:,}",
    }


def _cells(matrix: Array) -> list[list[float | None]]:
    return [_numbers(row, 1) for row in matrix]


def _numbers(values: Array, digits: int) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), digits) for value in values]
