"""What all pictures have in common: colours, axes, headings, how a picture is written; and plain line plots.

Figures are built without pyplot, so nothing is shared between calls and no display is needed. Colours are those of
Okabe and Ito, which stay apart for colour-blind readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from confitune.files import write_whole
from confitune.metrics import mean_and_interval

PIXELS_PER_INCH = 200
INK, MUTED, GRID = "#222222", "#6b6b6b", "#e4e4e4"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LARGEST_NUMBERED_MATRIX = 12

Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # name -> x and y


def plain_axes(axes: Axes, tasks: int, *, levels: int) -> None:
    """Axes with little ink: numbered tasks below, so many level lines."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8, labelcolor=MUTED)
    axes.set_xticks(task_ticks(tasks))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=levels, steps=[1, 2, 5, 10]))


def heading(figure: Figure, title: str) -> None:
    """Above everything, on the left."""
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold", wrap=True)


def task_ticks(tasks: int) -> list[int]:
    """Every task while there is room, else the first and every fifth.

    >>> task_ticks(20)
    [1, 5, 10, 15, 20]
    """
    return list(range(1, tasks + 1)) if tasks <= LARGEST_NUMBERED_MATRIX else [1, *range(5, tasks + 1, 5)]


def line_look(index: int) -> tuple[str, str]:
    """Style and colour of the line of this number."""
    return LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)], COLOURS[index % len(COLOURS)]


def write_png(figure: Figure, out: IO[bytes]) -> None:
    """The same data give the same bytes: matplotlib's version stays out of the metadata."""
    figure.savefig(out, format="png", dpi=PIXELS_PER_INCH, facecolor="white", metadata={"Software": None})


def save_figure(figure: Figure, path: Path) -> None:
    """Write as a PNG, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda out: write_png(figure, out))


def draw_panels(
    panels: Mapping[str, Lines],
    path: Path,
    *,
    title: str,
    x: str,
    y: Mapping[str, str],
    scale: str = "linear",
) -> None:
    """Line plots side by side, one legend.

    Args:
        panels: heading -> lines.
        x: what the horizontal axis shows.
        y: heading -> what the vertical axis shows.
        scale: of the vertical axes; 'symlog' is logarithmic with a place for 0.
    """
    figure = Figure(figsize=(max(4.6 * len(panels), 5.2), 3.9), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11, fontweight="bold")
    for axes, (name, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _panel(axes, lines, name, x, y[name], scale)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save_figure(figure, path)


def _panel(axes: Axes, lines: Lines, title: str, x: str, y: str, scale: str) -> None:
    for place, (name, (across, up)) in enumerate(lines.items()):
        (style, colour), marker = line_look(place), MARKERS[place % len(MARKERS)]
        axes.plot(across, up, style, color=colour, label=name, linewidth=1.4, marker=marker, markersize=4)
    axes.set_title(title, loc="left", color=INK, fontsize=9)
    axes.set_xlabel(x, color=MUTED, fontsize=8)
    axes.set_ylabel(y, color=MUTED, fontsize=8)
    axes.tick_params(labelsize=8, color=GRID, labelcolor=MUTED)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_yscale(scale, **({"linthresh": 1000} if scale == "symlog" else {}))
    if all(float(value).is_integer() for across, _ in lines.values() for value in across):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


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
    for index, (axes, name) in enumerate(zip(panels, ("accuracy (%)", "forgetting (%)"), strict=True)):
        plain_axes(axes, 1, levels=5)
        mean, half_width = np.array([mean_and_interval(seeds[index])[:2] for seeds in measured.values()]).T
        x = [places[value] for value in measured]
        line = "o-" if numbers else "o"  # words have no order
        axes.errorbar(x, mean, np.nan_to_num(half_width), color=COLOURS[index], fmt=line, linewidth=2, capsize=3)
        axes.axvline(places[best], color=MUTED, linestyle=":", linewidth=1.2, zorder=1)
        axes.set_ylabel(name, color=INK, fontsize=9)
    positive = [value for value in places.values() if value > 0]
    if numbers and positive and max(positive) > 30 * min(positive):
        panels[-1].set_xscale("symlog", linthresh=min(positive))  # logarithmic, with room for 0
    labels = [f"{value:g}" if numbers else str(value) for value in points]
    labels = [text if value in measured else f"{text}\nfailed" for text, value in zip(labels, points, strict=True)]
    panels[-1].set_xticks(list(places.values()), labels=labels)
    panels[-1].minorticks_off()
    panels[-1].set_xlabel(f"{option} (dotted: best)", color=INK, fontsize=9)
    return figure
