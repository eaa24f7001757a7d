"""One reproduced table or figure: what was measured beside what the paper reports, with a verdict, and its page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, computed_field

from confitune.engine import RunResult, command_line, summary_of, versions
from confitune.experiments.paper.numbers import Reported
from confitune.experiments.reporting.render import FEW, markdown_table
from confitune.experiments.reporting.report import write_readme
from confitune.experiments.runs.job import file_name
from confitune.files import write_whole
from confitune.metrics import mean_and_interval


class Cell(BaseModel):
    """One number of a table, in percent."""

    dataset: str
    method: str
    metric: Literal["ACC", "FGT"]
    measured: float
    interval: float | None  # 95%, over seeds; one or two runs have none
    seeds: int
    paper: float | None
    paper_interval: float | None
    recovered: float | None = None  # measured with the mean of a task that was just learned recovered, too

    @computed_field  # type: ignore[prop-decorator]
    @property
    def difference(self) -> float | None:
        """Measured minus the paper's."""
        return None if self.paper is None else self.measured - self.paper

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> str:
        """Where the measured mean lies: inside the paper's interval, above or below it.

        A single run of the paper's has no interval; then half a point counts as inside.
        """
        if self.paper is None:
            return "not reported"
        half = 0.5 if self.paper_interval is None else self.paper_interval
        if abs(self.measured - self.paper) <= half + 1e-9:
            return "inside"
        return "higher" if self.measured > self.paper else "lower"

    def row(self) -> list[str]:
        """Measured, the paper's, the difference, the verdict; and what our own protocol gives."""
        difference = "-" if self.difference is None else f"{self.difference:+.2f}"
        measured, paper = _told(self.measured, self.interval), _told(self.paper, self.paper_interval)
        told = [measured, str(self.seeds), paper, difference, self.verdict, _told(self.recovered)]
        return [self.dataset, self.method, self.metric, *told]


def cells_of(
    results: Mapping[str, Sequence[RunResult]], dataset: str, paper: Mapping[str, Mapping[str, Reported]]
) -> list[Cell]:
    """ACC and FGT of every method with results (by name), measured as the paper's code does, beside its table."""
    cells = []
    for method, runs in results.items():
        told = paper.get(method, {}).get(dataset)
        as_published = [summary_of(run.published_matrix) for run in runs]
        for metric in ("acc", "fgt"):
            known = [summary[metric] for summary in as_published if summary[metric] is not None]
            if not known:
                continue
            measured, interval, seeds = mean_and_interval(known)
            own = [getattr(run, metric) for run in runs if run.as_learned is not None]
            cells.append(
                Cell(
                    dataset=dataset,
                    method=method,
                    metric=metric.upper(),  # type: ignore[arg-type]
                    measured=measured,
                    interval=None if seeds < FEW else interval,
                    seeds=seeds,
                    paper=told and getattr(told, metric),
                    paper_interval=told and getattr(told, f"{metric}_interval"),
                    recovered=mean_and_interval(own).mean if own else None,
                )
            )
    return cells


class Claim(BaseModel):
    """A sentence of the paper that its figures support, and what was measured of it."""

    text: str
    measured: str
    holds: bool | None  # None: not measured


def _told(value: float | None, interval: float | None = None) -> str:
    """A number with its interval, if it has one."""
    return "-" if value is None else f"{value:.2f}" + ("" if interval is None else f" ± {interval:.2f}")


_CELLS = ("dataset", "method", "", "measured", "seeds", "paper", "difference", "verdict", "all means recovered")
_CLAIMS = ("the paper says", "measured", "verdict")
_HOLDS = {True: "holds", False: "does not hold", None: "not measured"}


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

    def claim(self, text: str, measured: str, holds: bool | None) -> None:
        """Add what the paper says and what was measured of it."""
        self.claims.append(Claim(text=text, measured=measured, holds=holds))

    def markdown(self) -> str:
        """The page."""
        parts = [f"# {self.title}"]
        if self.cells:
            parts.append(markdown_table(_CELLS, [cell.row() for cell in self.cells]))
        parts += [f"## {heading}\n\n{table}" for heading, table in self.tables.items()]
        parts += [f"![{self.title}]({picture})" for picture in self.pictures]
        if self.claims:
            rows = [[claim.text, claim.measured, _HOLDS[claim.holds]] for claim in self.claims]
            parts.append("## What the paper says of it\n\n" + markdown_table(_CLAIMS, rows))
        parts += [f"Note: {note}" for note in self.notes]
        return "\n\n".join(parts) + "\n"


def write_outcomes(out: Path, outcomes: Sequence[Outcome]) -> None:
    """Write a page `<what>.md` for each, `outcomes.json` with all that were ever written there, and `README.md`."""
    path = out / "outcomes.json"
    records = json.loads(path.read_bytes()) if path.exists() else {}
    for outcome in outcomes:
        made = {"versions": versions(), "command": command_line()}
        records[outcome.what] = outcome.model_dump(mode="json") | made
        _write(out / f"{outcome.what}.md", outcome.markdown())
    _write(path, json.dumps(records, indent=1))
    pages = "\n".join(f"- [{record['title']}]({what}.md)" for what, record in records.items())
    table = "[table.md](table.md) compares its runs, `runs.jsonl` has a line for each."
    text = f"Tables and figures of the paper, made again:\n\n{pages}\n\n`outcomes.json` has their numbers."
    has_runs = (out / "table.md").exists()
    write_readme(out, f"{text} {table}" if has_runs else text, [record["command"] for record in records.values()])


def _write(path: Path, text: str) -> None:
    write_whole(path, lambda file: file.write(text.encode()))


def picture_name(what: str, dataset: str) -> str:
    """The file of a dataset's picture."""
    return f"{what}-{file_name(dataset)}.png"
