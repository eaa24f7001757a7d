"""Tables of texts, as Markdown and for a terminal: column titles and rows, the first cell of a row names it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text


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
