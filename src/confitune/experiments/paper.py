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


@cache
def searched() -> tuple[Searched, ...]:
    """All hyperparameters that the paper searched."""
    found = json.loads(files("confitune.experiments").joinpath("paper.json").read_text())["hyperparameters"]
    return tuple(Searched(**{**entry, "grid": tuple(entry["grid"])}) for entry in found)


def chosen_options(dataset: str) -> dict[str, dict[str, Any]]:
    """What the paper chose for a dataset, by part; empty where it has none.

    >>> chosen_options("flowers102")["ewc"]
    {'strength': 100000.0}
    >>> chosen_options("photos")
    {}
    """
    return {entry.part: {entry.option: entry.chosen[dataset]} for entry in searched() if dataset in entry.chosen}
