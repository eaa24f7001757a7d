"""A report of the runs below a folder: one page that loads nothing.

A content security policy forbids every request and every script, so that a name which got past the escaping could not
run.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.reporting.figures import write_png
from confitune.experiments.reporting.table import (
    COLUMNS,
    Runs,
    best_first,
    collect_results,
    details,
    overview_of,
    result_rows,
    shown,
)
from confitune.experiments.runs.identity import filled
from confitune.experiments.runs.job import RESULT
from confitune.files import write_whole
from confitune.metrics import average_accuracy_curve

EXPLAINED = (
    "ACC: accuracy over all tasks at the end. FGT: what earlier tasks lost since their best. When learned: accuracy of "
    "each task right after it was learned. BWT: how later tasks changed earlier ones. All in percent. Numbers a task: "
    "what a task added to what is stored, its head included, at most (joint has one task, all of them). Mean ± 95% "
    "interval over seeds."
)


def write_report(folder: Path, out: Path | None = None, title: str | None = None) -> Path:
    """Write a page about every result below `folder`, and return its path.

    The page is one file: it loads nothing and can be sent as it is. The same results give the same bytes.

    Args:
        folder: what `confitune run` wrote: `<dataset>/<method>/seed-<k>/result.json`, finished or not.
        out: the page, `*.html`; default `report.html` in `folder`.
        title: its heading; default: the folder's name.
    """
    out = out or folder / "report.html"
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfituneError(f"{out} is to be an HTML page: give it a name that ends in .html")
    found = collect_results(folder)
    if not found:
        hint = f"`confitune run --out {folder}` writes them as <dataset>/<method>/seed-<k>/{RESULT}"
        elsewhere = next(iter(sorted(folder.rglob(f"seed-*/{RESULT}"))), None)
        raise ConfituneError(f"no results in {folder}: {f'but there is {elsewhere}' if elsewhere else hint}")
    parts = [part for name, methods in found.items() for part in _dataset(folder / name, best_first(methods))]
    title = escape(title or folder.resolve().name)
    page = Template(files("confitune.experiments.reporting").joinpath("report.html").read_text(encoding="utf-8"))
    text = page.substitute(title=title, body="\n".join(parts))
    out.parent.mkdir(parents=True, exist_ok=True)
    # A folder's name may hold bytes that are no text.
    write_whole(out, lambda file: file.write(text.encode(errors="replace")))
    return out


def _dataset(folder: Path, methods: Runs) -> Iterator[str]:
    """All that is said of one dataset, the best method first."""
    for method, results in methods.items():
        if len(counts := {len(result.accuracy_matrix) for result in results}) > 1:
            raise ConfituneError(
                f"{folder / method}: its seeds differ in their number of tasks ({sorted(counts)}), so there is "
                "no mean over them; keep those of one experiment"
            )
    yield _heading(2, folder.name)
    yield _paragraph(f"{details(dict(sorted(methods.items())))}.")
    started = (path for path in sorted(folder.glob("*/seed-*")) if path.is_dir())
    unfinished = [f"{path.parent.name}/{path.name}" for path in started if not (path / RESULT).exists()]
    if unfinished:
        yield _paragraph(f"Not finished, and not counted: {', '.join(unfinished)}.")
    yield _table(["method", *COLUMNS], result_rows(methods, COLUMNS))
    yield _paragraph(EXPLAINED)
    if figure := overview_of(folder.name, methods):
        png = io.BytesIO()
        write_png(figure, png)
        yield f'<img alt="overview" src="data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}">'
    yield _heading(3, "Average accuracy on the tasks learned so far (%)")
    tasks, rows = max(len(runs[0].accuracy_matrix) for runs in methods.values()), []
    for method, runs in methods.items():
        curves = np.stack([average_accuracy_curve(run.matrix) for run in runs])
        rows.append([method, *map(_shown, curves.T), *["-"] * (tasks - curves.shape[1])])
    yield _table(["method", *(f"after {k + 1}" for k in range(tasks))], rows)
    yield _heading(3, "Accuracy of each task after each task (%)")
    for method, runs in methods.items():
        matrices = np.stack([run.matrix for run in runs])
        cells = [
            [f"task {i + 1}", *("" if np.isnan(row[:, k]).all() else _shown(row[:, k]) for k in range(row.shape[1]))]
            for i, row in enumerate(matrices.swapaxes(0, 1))
        ]
        yield _heading(4, method)
        yield _table(["", *(f"after {k + 1}" for k in range(matrices.shape[1]))], cells)
    yield _heading(3, "Tasks")
    learned = max((runs[0].tasks for runs in methods.values()), key=len)
    yield _table(
        ["task", "classes", "training images", "test images"],
        [[t["name"], ", ".join(t["classes"]), str(t["train_images"]), str(t["test_images"])] for t in learned],
    )
    yield _heading(3, "Runs")
    for method, runs in methods.items():
        for run in runs:
            yield _heading(4, f"{method}, seed {run.seed}")
            facts = "".join(f"<li>{escape(name)}: {escape(text)}</li>" for name, text in _facts(run).items())
            yield f"<ul>{facts}</ul>"


def _facts(result: RunResult) -> dict[str, str]:
    """What it takes to judge a run and to repeat it."""
    known = filled(result.config)
    options = known.pop("options")
    set_options = [f"{part}.{name}={value}" for part, values in options.items() for name, value in values.items()]
    return {
        "accuracy": _shown([result.acc]),
        "seconds": _shown([result.seconds]),
        "device": result.device,
        "execution": result.execution,
        "command": result.command,
        "options": ", ".join(set_options) or "none",
        "configuration": ", ".join(f"{name}={value}" for name, value in known.items() if value is not None),
        "versions": ", ".join(f"{package} {version}" for package, version in result.versions.items()),
        "weights": result.weights,
        "weights hash": result.weights_sha256,
        "final hash": result.final_sha256,
    }


def _shown(values: Sequence[float] | np.ndarray) -> str:
    """Mean and 95% interval, '-' where a value is NaN."""
    return shown([None if np.isnan(value) else float(value) for value in values])


def _heading(level: int, text: str) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first cell of a row names it."""
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
