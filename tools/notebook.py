"""Writes docs/tutorial.ipynb from docs/tutorial.md.

    python tools/notebook.py

Blocks of Python and of shell commands become cells that can be run, everything else text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
SELF = "This page is also a [notebook](tutorial.ipynb).\n\n"


def notebook(page: str) -> str:
    """The notebook of a page, as JSON; the same page gives the same text."""
    cells = []
    # Text, language and code by turns; the last text has no code behind it.
    pieces = BLOCK.split(page.replace(SELF, ""))
    for start in range(0, len(pieces), 3):
        text, language, code = (*pieces[start : start + 3], "", "")[:3]
        cells.append({"cell_type": "markdown", "metadata": {}, "source": _lines(text)})
        if code:
            source = code if language == "python" else f"%%bash\n{code}"
            empty = {"execution_count": None, "metadata": {}, "outputs": []}
            cells.append({"cell_type": "code", **empty, "source": _lines(source)})
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps(
        {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5},
        ensure_ascii=False,
        indent=1,
        sort_keys=True,
    )


def _lines(text: str) -> list[str]:
    return text.strip("\n").splitlines(keepends=True)


if __name__ == "__main__":
    (DOCS / "tutorial.ipynb").write_text(notebook((DOCS / "tutorial.md").read_text()) + "\n")
