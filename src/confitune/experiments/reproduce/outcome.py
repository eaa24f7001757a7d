"""One reproduced table or figure: what is written of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from confitune.engine.result import command_line, versions
from confitune.errors import ConfituneError
from confitune.experiments.reproduce.compare import Cell, Claim, claims_markdown, table_markdown
from confitune.files import write_whole


class Outcome(BaseModel):
    """What came out of one `confitune reproduce`."""

    what: str
    title: str
    cells: list[Cell] = Field(default_factory=list)
    claims: list[Claim] = Field(default_factory=list)
    tables: dict[str, str] = Field(default_factory=dict)  # heading -> Markdown
    pictures: list[str] = Field(default_factory=list)  # files beside the page
    notes: list[str] = Field(default_factory=list)
    data: dict[str, Any] = Field(default_factory=dict)

    def markdown(self) -> str:
        """The page."""
        parts = [f"# {self.title}"]
        if self.cells:
            parts.append(table_markdown(self.cells))
        parts += [f"## {heading}\n\n{table}" for heading, table in self.tables.items()]
        parts += [f"![{self.title}]({picture})" for picture in self.pictures]
        if self.claims:
            parts.append("## What the paper says of it\n\n" + claims_markdown(self.claims))
        parts += [f"Note: {note}" for note in self.notes]
        return "\n\n".join(parts) + "\n"


def write_outcome(out: Path, outcome: Outcome) -> None:
    """Write `<what>.json` with provenance, and `<what>.md`."""
    record = outcome.model_dump(mode="json")
    for cell, told in zip(record["cells"], outcome.cells, strict=True):
        cell |= {"difference": told.difference, "verdict": told.verdict}
    record |= {"versions": versions(), "command": command_line()}
    write_whole(out / f"{outcome.what}.json", lambda file: file.write(json.dumps(record, indent=1).encode()))
    write_whole(out / f"{outcome.what}.md", lambda file: file.write(outcome.markdown().encode()))


def write_index(out: Path) -> None:
    """`index.md`: everything that was reproduced in this folder, with counts of verdicts."""
    lines = [
        "# Reproduced",
        "",
        "| | inside the paper's interval | higher | lower | claims that hold |",
        "|---|---|---|---|---|",
    ]
    for path in sorted(out.glob("*.json")):
        try:
            line = _index_line(json.loads(path.read_bytes()))
            line.encode()
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfituneError(f"{path} is damaged, or none of these pages: {error!r:.200}; remove it") from error
        lines += filter(None, [line])
    write_whole(out / "index.md", lambda file: file.write(("\n".join(lines) + "\n").encode()))


def _index_line(record: dict[str, Any]) -> str:
    """A page's line; empty for other files."""
    if "what" not in record:
        return ""
    verdicts = [cell["verdict"] for cell in record["cells"]]
    claims = [bool(claim["holds"]) for claim in record["claims"] if claim["holds"] is not None]
    counts = [verdicts.count(verdict) for verdict in ("inside", "higher", "lower")]
    told = [str(count) if sum(counts) else "-" for count in counts]
    held = f"{sum(claims)} of {len(claims)}" if claims else "-"
    return f"| [{record['title']}]({record['what']}.md) | {' | '.join(told)} | {held} |"
