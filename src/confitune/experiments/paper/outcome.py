"""One reproduced table or figure: what was measured beside what the paper reports, with a verdict, as Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confitune.engine import RunResult
from confitune.engine.result import command_line, summary_of, versions
from confitune.experiments.reporting.table import FEW, markdown_table
from confitune.metrics import mean_and_interval


@dataclass(frozen=True)
class Cell:
    """One number of a table, in percent."""

    dataset: str
    method: str
    metric: str
    measured: float
    interval: float | None  # 95%, over seeds; one or two runs have none
    seeds: int
    paper: float | None
    paper_interval: float | None
    difference: float | None  # measured minus the paper's
    verdict: str
    recovered: float | None = None  # measured with the mean of a task that was just learned recovered, too

    def row(self) -> list[str]:
        """Measured, the paper's, the difference, the verdict; and what our own protocol gives."""
        difference = "-" if self.difference is None else f"{self.difference:+.2f}"
        measured, paper = _told(self.measured, self.interval), _told(self.paper, self.paper_interval)
        told = [measured, str(self.seeds), paper, difference, self.verdict, _told(self.recovered)]
        return [self.dataset, self.method, self.metric, *told]


def _told(value: float | None, interval: float | None = None) -> str:
    """A number with its interval, if it has one."""
    return "-" if value is None else f"{value:.2f}" + ("" if interval is None else f" ± {interval:.2f}")


def verdict(measured: float, paper: float | None, interval: float | None) -> str:
    """Where the measured mean lies: inside the paper's interval, above or below it.

    A single run of the paper's has no interval; then half a point counts as inside.

    >>> verdict(87.24, 86.99, 0.25), verdict(87.25, 86.99, 0.25), verdict(64.5, 64.13, None), verdict(50.0, None, None)
    ('inside', 'higher', 'inside', 'not reported')
    """
    if paper is None:
        return "not reported"
    if abs(measured - paper) <= (0.5 if interval is None else interval) + 1e-9:
        return "inside"
    return "higher" if measured > paper else "lower"


def cells_of(dataset: str, method: str, runs: Sequence[RunResult], paper: Mapping[str, Any]) -> list[Cell]:
    """ACC and FGT, measured as the paper's code does, beside what the paper has of it (none: an empty mapping)."""
    cells, as_published = [], [summary_of(run.published_matrix) for run in runs]
    for metric in ("acc", "fgt"):
        known = [summary[metric] for summary in as_published if summary[metric] is not None]
        if known:
            measured, interval, seeds = mean_and_interval(known)
            own = [getattr(run, metric) for run in runs if run.as_learned is not None]
            told, half = paper.get(metric), paper.get(f"{metric}_interval")
            shown = (measured, None if seeds < FEW else interval, seeds, told, half)
            difference = None if told is None else measured - told
            judged = verdict(measured, told, half)
            recovered = mean_and_interval(own).mean if own else None
            cells.append(Cell(dataset, method, metric.upper(), *shown, difference, judged, recovered))
    return cells


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper that its figures support, and what was measured of it."""

    text: str
    measured: str
    holds: bool | None  # None: not measured, or not enough to say


_CELLS = ["dataset", "method", "", "measured", "seeds", "paper", "difference", "verdict", "all means recovered"]
_HOLDS = {True: "holds", False: "does not hold", None: "not judged"}


@dataclass
class Outcome:
    """What came out of one `confitune reproduce`."""

    what: str
    title: str
    cells: list[Cell] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    tables: dict[str, str] = field(default_factory=dict)  # heading -> Markdown
    pictures: list[str] = field(default_factory=list)  # files beside the page
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=versions)
    command: str = field(default_factory=command_line)

    def claim(self, text: str, measured: str, holds: Any) -> None:
        """Add what the paper says and what was measured of it."""
        self.claims.append(Claim(text, measured, None if holds is None else bool(holds)))

    def table(self, heading: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Add a table."""
        self.tables[heading] = markdown_table(head, rows)

    def markdown(self) -> str:
        """Its part of the page."""
        parts = [f"## {self.title}"]
        if self.cells:
            told = [_CELLS, *(cell.row() for cell in self.cells)]
            if all(cell.recovered is None for cell in self.cells):
                told = [row[:-1] for row in told]
            parts.append(markdown_table(told[0], told[1:]))
        parts += [f"### {heading}\n\n{table}" for heading, table in self.tables.items()]
        parts += [f"![{self.title}]({picture})" for picture in self.pictures]
        if self.claims:
            rows = [[claim.text, claim.measured, _HOLDS[claim.holds]] for claim in self.claims]
            head = ("the paper says", "measured", "verdict")
            parts.append("### What the paper says of it\n\n" + markdown_table(head, rows))
        parts += [f"Note: {note}" for note in self.notes]
        return "\n\n".join(parts) + "\n"
