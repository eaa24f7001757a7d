"""Pictures of a search: accuracy and forgetting over the values of an option."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from confitune.experiments.drawing import COLOURS, INK, MUTED, heading, plain_axes, save_figure
from confitune.metrics import mean_and_interval


def draw_search(
    points: Mapping[Any, tuple[Sequence[float], Sequence[float]]],
    path: str | os.PathLike[str],
    *,
    title: str,
    option: str,
    best: object,
) -> None:
    """Write `search_figure` to `path` as a PNG."""
    save_figure(search_figure(points, title=title, option=option, best=best), path)


def search_figure(
    points: Mapping[Any, tuple[Sequence[float], Sequence[float]]], *, title: str, option: str, best: object
) -> Figure:
    """Accuracy and forgetting over the values of an option: mean and 95% interval over seeds, the best value marked.

    Args:
        points: value -> accuracies and forgettings by seed, percent; both empty where training failed.
        title: heading of the picture.
        option: name of the axis.
        best: the value that won.
    """
    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    heading(figure, title)
    panels = figure.subplots(2, 1, sharex=True)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in points)
    places = {value: float(value) if numbers else float(place) for place, value in enumerate(points)}
    measured = {value: seeds for value, seeds in points.items() if seeds[0]}
    failed = [value for value in points if value not in measured]
    for index, (axes, name) in enumerate(zip(panels, ("accuracy (%)", "forgetting (%)"), strict=True)):
        plain_axes(axes, 1, levels=5)
        mean, half_width = np.array([mean_and_interval(seeds[index])[:2] for seeds in measured.values()]).T
        x = [places[value] for value in measured]
        line = "-" if numbers else ""  # words have no order
        axes.errorbar(x, mean, np.nan_to_num(half_width), color=COLOURS[index], fmt=f"o{line}", linewidth=2, capsize=3)
        axes.axvline(places[best], color=MUTED, linestyle=":", linewidth=1.2, zorder=1)
        for value in failed:
            axes.plot(places[value], 0.04, "x", color=MUTED, transform=axes.get_xaxis_transform())
        axes.set_ylabel(name, color=INK, fontsize=9)
    if numbers:
        _scale_of_values(panels[-1], list(places.values()))
    labels = [f"{value:g}" if numbers else str(value) for value in points]
    panels[-1].set_xticks(list(places.values()), labels=labels)
    panels[-1].minorticks_off()
    panels[-1].set_xlabel(option, color=INK, fontsize=9)
    _mark(panels[0], places[best], 1.02, "best")
    for value in failed:
        _mark(panels[0], places[value], 0.08, "failed")
    return figure


def _mark(axes: Axes, x: float, height: float, text: str) -> None:
    """A word above a value, at a share of the axes' height."""
    where = axes.get_xaxis_transform()
    axes.text(x, height, text, transform=where, color=MUTED, fontsize=8, ha="center", va="bottom")


def _scale_of_values(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic where the values span more than 30 times, with room for 0 where it is one of them."""
    positive = [value for value in values if value > 0]
    if not positive or max(positive) <= 30 * min(positive) or min(values) < 0:
        return
    if len(positive) == len(values):
        axes.set_xscale("log")
    else:
        axes.set_xscale("symlog", linthresh=min(positive))
