"""A report of the runs below a folder: one page that loads nothing, and its Markdown twin with the same numbers.

A report is a list of blocks, and each form of it writes every kind of block in its own way. In the page a content
security policy forbids every request and every script, so that a name which got past the escaping could not run.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np
from matplotlib.figure import Figure

from confitune.engine import RunResult
from confitune.errors import ConfituneError
from confitune.experiments.drawing import write_png
from confitune.experiments.identity import filled
from confitune.experiments.job import RESULT
from confitune.experiments.summary import (
    COLUMNS,
    Runs,
    best_first,
    collect_results,
    details,
    figures_of,
    result_rows,
    shown,
)
from confitune.experiments.tables import markdown_table, plain
from confitune.files import write_whole
from confitune.metrics import average_accuracy_curve

EXPLAINED = (
    "ACC: accuracy over all tasks at the end. FGT: what earlier tasks lost since their best. When learned: accuracy of "
    "each task right after it was learned. BWT: how later tasks changed earlier ones. All in percent. Numbers a task: "
    "what a task added to what is stored, at most (joint has one task, all of them). Mean ± 95% interval over seeds."
)


@dataclass(frozen=True)
class Heading:
    """Of a section; 2 is a dataset's."""

    level: int
    text: str


@dataclass(frozen=True)
class TextTable:
    """The first cell of a row names it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """What the page shows of a figure; Markdown has the numbers."""

    text: str
    figure: Figure


Facts = Mapping[str, str]
Block = Heading | TextTable | Picture | Facts | str


def write_report(folder: Path, out: Path | None = None, title: str | None = None) -> tuple[Path, Path]:
    """Write a page and its Markdown twin about every result below `folder`, and return both paths.

    The page is one file: it loads nothing and can be sent as it is. The same results give the same bytes.

    Args:
        folder: what `confitune run` wrote: `<dataset>/<method>/seed-<k>/result.json`, finished or not.
        out: the page, `*.html`; default `report.html` in `folder`. The twin stands beside it as `*.md`.
        title: heading of both; default: the folder's name.
    """
    out = out or folder / "report.html"
    if out.suffix.lower() not in (".html", ".htm"):
        raise ConfituneError(f"{out} is to be an HTML page: give it a name that ends in .html")
    found = collect_results(folder)
    if not found:
        hint = f"`confitune run --out {folder}` writes them as <dataset>/<method>/seed-<k>/{RESULT}"
        elsewhere = next(iter(sorted(folder.rglob(f"seed-*/{RESULT}"))), None)
        raise ConfituneError(f"no results in {folder}: {f'but there is {elsewhere}' if elsewhere else hint}")
    blocks = [block for name, methods in found.items() for block in _dataset(folder / name, best_first(methods))]
    title = title or folder.resolve().name
    page = Template(files("confitune.experiments").joinpath("report.html").read_text(encoding="utf-8"))
    texts = {
        out: page.substitute(title=escape(title), body="\n".join(map(_html, blocks))),
        out.with_suffix(".md"): "\n\n".join([f"# {plain(title)}", *filter(None, map(_markdown, blocks))]) + "\n",
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        data = text.encode(errors="replace")  # a folder's name may hold bytes that are no text
        write_whole(path, lambda file, data=data: file.write(data))  # type: ignore[misc]
    return out, out.with_suffix(".md")


def _dataset(folder: Path, methods: Runs) -> Iterator[Block]:
    """All that is said of one dataset, the best method first."""
    for method, results in methods.items():
        if len(counts := {len(result.accuracy_matrix) for result in results}) > 1:
            raise ConfituneError(
                f"{folder / method}: its seeds differ in their number of tasks ({sorted(counts)}), so there is "
                "no mean over them; keep those of one experiment"
            )
    yield Heading(2, folder.name)
    yield f"{details(dict(sorted(methods.items())))}."
    started = (path for path in sorted(folder.glob("*/seed-*")) if path.is_dir())
    unfinished = [f"{path.parent.name}/{path.name}" for path in started if not (path / RESULT).exists()]
    if unfinished:
        yield f"Not finished, and not counted: {', '.join(unfinished)}."
    yield TextTable(["method", *COLUMNS], result_rows(methods, COLUMNS))
    yield EXPLAINED
    pictures = figures_of(folder.name, methods)
    for name in ("overview.png", "accuracy_matrix.png"):  # curves are part of the overview
        if name in pictures:
            yield Picture(name, pictures[name])
    yield Heading(3, "Average accuracy on the tasks learned so far (%)")
    tasks, rows = max(len(runs[0].accuracy_matrix) for runs in methods.values()), []
    for method, runs in methods.items():
        curves = np.stack([average_accuracy_curve(run.matrix) for run in runs])
        rows.append([method, *map(_shown, curves.T), *["-"] * (tasks - curves.shape[1])])
    yield TextTable(["method", *(f"after {k + 1}" for k in range(tasks))], rows)
    yield Heading(3, "Accuracy of each task after each task (%)")
    for method, runs in methods.items():
        matrices = np.stack([run.matrix for run in runs])
        cells = [
            [f"task {i + 1}", *("" if np.isnan(row[:, k]).all() else _shown(row[:, k]) for k in range(row.shape[1]))]
            for i, row in enumerate(matrices.swapaxes(0, 1))
        ]
        yield Heading(4, method)
        yield TextTable(["", *(f"after {k + 1}" for k in range(matrices.shape[1]))], cells)
    yield Heading(3, "Tasks")
    learned = max((runs[0].tasks for runs in methods.values()), key=len)
    yield TextTable(
        ["task", "classes", "training images", "test images"],
        [[t["name"], ", ".join(t["classes"]), str(t["train_images"]), str(t["test_images"])] for t in learned],
    )
    yield Heading(3, "Runs")
    for method, runs in methods.items():
        for run in runs:
            yield Heading(4, f"{method}, seed {run.seed}")
            yield _facts(run)


def _facts(result: RunResult) -> Facts:
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


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {plain(block.text)}"
    if isinstance(block, TextTable):
        return markdown_table([*block.head], [[plain(cell) for cell in row] for row in block.rows])
    if isinstance(block, str):
        return plain(block)
    return "" if isinstance(block, Picture) else "\n".join(f"- {name}: {plain(text)}" for name, text in block.items())


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{escape(block.text)}</h{block.level}>"
    if isinstance(block, TextTable):
        head = "".join(f'<th scope="col">{escape(title)}</th>' for title in block.head)
        rows = "\n".join(
            f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
            for name, *cells in block.rows
        )
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    if isinstance(block, Picture):
        png = io.BytesIO()
        write_png(block.figure, png)
        data = base64.b64encode(png.getvalue()).decode()
        return f'<img alt="{escape(block.text)}" src="data:image/png;base64,{data}">'
    return "<ul>" + "".join(f"<li>{escape(name)}: {escape(text)}</li>" for name, text in block.items()) + "</ul>"
