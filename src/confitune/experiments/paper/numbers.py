"""What the paper reports of its own experiments (data file `paper.json`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Searched:
    """One hyperparameter that the paper searched (appendix, table 2)."""

    method: str  # the paper's row
    part: str  # the part of the method that has it
    option: str
    grid: tuple[float, ...]
    chosen: dict[str, float]  # by dataset


@dataclass(frozen=True)
class Reported:
    """A cell of a table: mean and 95% interval over 5 runs (CCLL: one run, no interval), in percent."""

    acc: float
    acc_interval: float | None = None
    fgt: float | None = None
    fgt_interval: float | None = None


@cache
def _data() -> dict[str, Any]:
    return dict(json.loads(files("confitune.experiments.paper").joinpath("numbers.json").read_text()))


@cache
def searched() -> tuple[Searched, ...]:
    """All hyperparameters that the paper searched."""
    return tuple(Searched(**{**entry, "grid": tuple(entry["grid"])}) for entry in _data()["hyperparameters"])


def reported(table: str) -> dict[str, dict[str, Reported]]:
    """A table of the paper: 'table1' (main results) or 'table2' (ablation); method -> dataset -> cell.

    >>> reported("table1")["confit"]["flowers102"].acc
    86.99
    """
    return {method: {d: Reported(**cell) for d, cell in row.items()} for method, row in _data()[table].items()}


def reported_counts(of: str) -> dict[str, Any]:
    """'datasets': tasks, classes a task, training and test images of each (appendix, table 1).

    'storage_numbers': that a task adds (confit, ccll), or that are kept once (regularisation), as the text rounds them.
    """
    return dict(_data()[of])


def chosen_options(dataset: str) -> dict[str, dict[str, Any]]:
    """What the paper chose for a dataset, by part; empty where it has none.

    Strengths have a meaning only with the estimate of importance they were chosen with: the paper built on the CPR
    code, which has batch norm in training mode meanwhile, and for paths its own damping, signs and gradients.

    >>> chosen_options("flowers102")["mas"]
    {'strength': 30, 'mode': 'train'}
    >>> chosen_options("flowers102")["si"]
    {'strength': 20, 'damping': 0.01, 'positive': False, 'gradient': 'total'}
    >>> chosen_options("photos")
    {}
    """
    estimated: dict[str, dict[str, Any]] = _data()["estimated_with"]
    chosen = {entry.part: {entry.option: entry.chosen[dataset]} for entry in searched() if dataset in entry.chosen}
    return {part: {**values, **estimated.get(part, {})} for part, values in chosen.items()}
