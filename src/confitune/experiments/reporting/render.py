"""Tables of texts as Markdown, for a terminal and as HTML: column titles and rows, the first cell of a row names it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape

from rich.table import Table
from rich.text import Text

from confitune.metrics import mean_and_interval

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
    """Markdown with these column titles.

    >>> print(markdown_table(["method", "ACC"], [["confit", "94.0"]]))
    | method | ACC |
    |---|---|
    | confit | 94.0 |
    """
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
        table.add_column(name, justify="right" if numbers else "left", no_wrap=numbers or place == 0, overflow="fold")
    for place, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold" if place == bold else "")
    return table


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """HTML in which no text is markup.

    >>> html_table(["method"], [["<b>"]]).splitlines()[1]
    '<tr><th scope="row">&lt;b&gt;</th></tr>'
    """
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    body = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in rows
    )
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
