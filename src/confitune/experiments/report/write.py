"""The report as Markdown, and where both forms of it go."""

from __future__ import annotations

import html
import re
from pathlib import Path

from confitune.errors import ConfituneError
from confitune.experiments.report.data import EXPLAINED, DatasetRuns, Report, TextTable, collect_report, run_facts
from confitune.experiments.report.page import report_page
from confitune.experiments.summary import markdown_table
from confitune.files import write_whole


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
    report = collect_report(folder, title)
    texts = {out: report_page(report), out.with_suffix(".md"): report_markdown(report)}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            # A folder's name may hold bytes that are no text.
            data = text.encode(errors="replace")
            write_whole(path, lambda file, data=data: file.write(data))  # type: ignore[misc]
    except OSError as error:
        why = f"{error.strerror}; choose another place with --out"
        raise ConfituneError(f"the report cannot be written to {out}: {why}") from error
    return out, out.with_suffix(".md")


def report_markdown(report: Report) -> str:
    """Everything the page shows of all seeds, and every run's provenance."""
    parts = [f"# {plain(report.title)}", f"{report.what}."]
    for data in report.datasets:
        parts += _dataset(data)
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    r"""A text that Markdown shows as it is, on one line.

    >>> print(plain("a|b <img> [x](y) *z*"))
    a\|b &lt;img&gt; \[x\](y) \*z\*
    """
    return re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(" ".join(text.splitlines()), quote=False))


def _dataset(data: DatasetRuns) -> list[str]:
    parts = [f"## {plain(data.name)}", f"{plain(data.details)}."]
    if data.unfinished:
        parts.append(f"Not finished, and not counted: {plain(', '.join(data.unfinished))}.")
    columns = ["method", *data.methods[0].cells()]
    rows = []
    for method in data.methods:
        name = f"**{plain(method.name)}** (best ACC)" if data.is_best(method) else plain(method.name)
        rows.append([name, *(text for text, _ in method.cells().values())])
    parts += [markdown_table(columns, rows, numbers=True), EXPLAINED]
    for table in (data.curve_table(), data.lost_table(), data.storage_table()):
        parts += [f"### {table.caption}", _table(table)]
    parts.append("### Accuracy of each task after each task (%), mean over seeds")
    for table in (method.matrix_table() for method in data.methods):
        parts += [f"#### {plain(table.caption)}", _table(table)]
    parts += ["### Tasks", _table(data.task_table()), "### Runs"]
    for method in data.methods:
        for result in method.results:
            facts = [f"- {name}: {plain(value)}" for name, value in run_facts(result).items()]
            parts += [f"#### {plain(method.name)}, seed {result.seed}", "\n".join(facts)]
    return parts


def _table(table: TextTable) -> str:
    return markdown_table(table.columns, [[plain(cell) for cell in row] for row in table.rows], numbers=True)
