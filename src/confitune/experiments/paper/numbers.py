"""What the paper reports of its own experiments (data file `numbers.json`)."""

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple


class Searched(NamedTuple):
    """One hyperparameter that the paper searched (appendix, table 2)."""

    method: str  # the paper's row
    part: str  # the part of the method that has it
    option: str
    grid: tuple[float, ...]
    chosen: dict[str, float]  # by dataset


@cache
def reported(what: str) -> dict[str, Any]:
    """What the paper says of something.

    'table1' (main results), 'table2' (ablation): method -> dataset -> mean and 95% interval over 5 runs (CCLL: one
    run, no interval) of ACC and FGT, in percent. 'datasets': tasks, classes a task, training and test images of each
    (appendix, table 1). 'storage_numbers': that a task adds (confit, ccll), or that are kept once (regularisation), as
    the text rounds them.

    >>> reported("table1")["confit"]["flowers102"]["acc"]
    86.99
    """
    found: dict[str, Any] = json.loads(files(__package__).joinpath("numbers.json").read_text())[what]
    return found


@cache
def searched() -> tuple[Searched, ...]:
    """All hyperparameters that the paper searched."""
    rows: Any = reported("hyperparameters")
    return tuple(Searched(**{**row, "grid": tuple(row["grid"])}) for row in rows)


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
    estimated = reported("estimated_with")
    rows = (row for row in searched() if dataset in row.chosen)
    return {row.part: {row.option: row.chosen[dataset], **estimated.get(row.part, {})} for row in rows}
