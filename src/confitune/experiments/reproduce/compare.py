"""What was measured beside what the paper reports, with a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel

from confitune.engine import RunResult
from confitune.experiments.paper import Reported
from confitune.metrics import mean_and_interval

Verdict = Literal["inside", "higher", "lower", "not reported"]


class Cell(BaseModel):
    """One number of a table, in percent."""

    dataset: str
    method: str
    metric: Literal["ACC", "FGT"]
    measured: float
    interval: float | None  # 95%, over seeds; one run has none
    seeds: int
    paper: float | None
    paper_interval: float | None

    @property
    def difference(self) -> float | None:
        """Measured minus the paper's."""
        return None if self.paper is None else self.measured - self.paper

    @property
    def verdict(self) -> Verdict:
        """Where the measured mean lies: inside the paper's interval, above or below it.

        A single run of the paper's has no interval; then half a point counts as inside.
        """
        if self.paper is None:
            return "not reported"
        half = 0.5 if self.paper_interval is None else self.paper_interval
        if abs(self.measured - self.paper) <= half + 1e-9:
            return "inside"
        return "higher" if self.measured > self.paper else "lower"


def cells_of(
    results: Mapping[str, Sequence[RunResult]], dataset: str, paper: Mapping[str, Mapping[str, Reported]]
) -> list[Cell]:
    """ACC and FGT of every method with results (by name), beside the paper's table."""
    cells = []
    for method, runs in results.items():
        told = paper.get(method, {}).get(dataset)
        for metric, values, mean, half in (
            ("ACC", [run.acc for run in runs], told and told.acc, told and told.acc_interval),
            ("FGT", [run.fgt for run in runs], told and told.fgt, told and told.fgt_interval),
        ):
            known = [value for value in values if value is not None]
            if not known:
                continue
            measured, interval, seeds = mean_and_interval(known)
            cells.append(
                Cell(
                    dataset=dataset,
                    method=method,
                    metric=metric,  # type: ignore[arg-type]
                    measured=measured,
                    interval=None if math.isnan(interval) else interval,
                    seeds=seeds,
                    paper=mean,
                    paper_interval=half,
                )
            )
    return cells


class Claim(BaseModel):
    """A sentence of the paper that its figures support, and what was measured of it."""

    text: str
    measured: str
    holds: bool | None  # None: not measured


def shown(value: float | None, interval: float | None = None) -> str:
    """A number with its interval, if it has one (a single run's is NaN), as tables show it.

    >>> shown(86.0412, 0.594), shown(2.0), shown(None)
    ('86.04 ± 0.59', '2.00', '-')
    """
    if value is None:
        return "-"
    known = interval is not None and not math.isnan(interval)
    return f"{value:.2f}" + (f" ± {interval:.2f}" if known else "")


def table_markdown(cells: Sequence[Cell]) -> str:
    """One row a cell: measured, the paper's, the difference, the verdict."""
    lines = [
        "| dataset | method | | measured | seeds | paper | difference | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        difference = "-" if cell.difference is None else f"{cell.difference:+.2f}"
        lines.append(
            f"| {cell.dataset} | {cell.method} | {cell.metric} | {shown(cell.measured, cell.interval)} | {cell.seeds} "
            f"| {shown(cell.paper, cell.paper_interval)} | {difference} | {cell.verdict} |"
        )
    return "\n".join(lines)


def claims_markdown(claims: Sequence[Claim]) -> str:
    """One row a claim."""
    words = {True: "holds", False: "does not hold", None: "not measured"}
    lines = ["| the paper says | measured | verdict |", "|---|---|---|"]
    lines += [f"| {claim.text} | {claim.measured} | {words[claim.holds]} |" for claim in claims]
    return "\n".join(lines)
