"""What the page's script draws, as JSON: places as numbers, and every text that it shows.

The script computes places in the picture and nothing else. Cells of matrices are rounded here, because JavaScript
rounds halves up and Python to even.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from confitune.experiments.report.data import Array, DatasetRuns, MethodRuns, Report, shown_known
from confitune.metrics import mean_and_interval


def charts_json(report: Report) -> str:
    """The report's pictures as JSON that may stand inside a script element, whatever names it holds.

    `<` would let a name end the element, so it is written as its escape, which JSON reads back as the same text.
    """
    text = json.dumps(
        {"datasets": [_dataset(data) for data in report.datasets]}, allow_nan=False, separators=(",", ":")
    )
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _dataset(data: DatasetRuns) -> dict[str, Any]:
    return {"name": data.name, "tasks": data.tasks, "methods": [_method(method) for method in data.methods]}


def _method(method: MethodRuns) -> dict[str, Any]:
    mean, half_width = np.array([mean_and_interval(column)[:2] for column in method.curves.T]).T
    average = method.matrices.mean(axis=0)
    seeds = [result.seed for result in method.results]
    return {
        "name": method.name,
        "curve": {
            "mean": _numbers(mean, 4),
            "half": _numbers(half_width, 4),
            "lowest": _numbers(method.curves.min(axis=0), 4),
            "texts": method.curve_texts(),
        },
        "tasks": {
            "learned": _numbers(average.diagonal(), 4),
            "kept": _numbers(average[:, -1], 4),
            "texts": [
                {"learned": learned, "kept": kept, "lost": lost}
                for learned, kept, lost in zip(
                    method.learned_texts(), method.kept_texts(), method.lost_texts(), strict=True
                )
            ],
        },
        "views": {
            "mean": {"cells": _cells(average), "averages": method.curve_texts()},
            **{
                str(seed): {"cells": _cells(matrix), "averages": [shown_known([value]) for value in curve]}
                for seed, matrix, curve in zip(seeds, method.matrices, method.curves, strict=True)
            },
        },
        "stored": method.stored,
        "stored_text": f"{method.stored:,}",
    }


def _cells(matrix: Array) -> list[list[float | None]]:
    return [_numbers(row, 1) for row in matrix]


def _numbers(values: Array, digits: int) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), digits) for value in values]
