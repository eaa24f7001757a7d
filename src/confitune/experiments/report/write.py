"""Where the report goes."""

from __future__ import annotations

from pathlib import Path

from confitune.errors import ConfituneError
from confitune.experiments.report.data import collect_report
from confitune.experiments.report.markdown import report_markdown
from confitune.experiments.report.page import report_page
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
