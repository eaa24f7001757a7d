"""Pictures: how accuracy develops over a task sequence, and plain line plots.

Figures are built without pyplot, so nothing is shared between calls and no display is needed. Colours are those of
Okabe and Ito, which stay apart for colour-blind readers; methods take them in the order given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from confitune.experiments.reporting.render import FEW
from confitune.files import write_whole
from confitune.metrics import average_accuracy, average_accuracy_curve, average_forgetting, mean_and_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PIXELS_PER_INCH = 200
INK, MUTED, GRID = "#222222", "#6b6b6b", "#e4e4e4"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # name -> x and y
Array = NDArray[np.floating]


def curves_figure(curves: Mapping[str, Array], *, title: str) -> Figure:
    """Average accuracy on the tasks learned so far, after each task: mean line and 95% band over seeds.

    Args:
        curves: method -> seeds x T, percent (see `confitune.metrics.average_accuracy_curve`). Below 3 seeds: no band.
    """
    figure = _figure(6.4, 4.0)
    heading(figure, title)
    axes = figure.subplots()
    _curves(axes, curves, height=3.0)
    axes.set_ylabel("average accuracy on\nthe tasks learned so far (%)", color=INK, fontsize=9)
    return figure


def overview_figure(runs: Mapping[str, Array], *, title: str) -> Figure:
    """The whole comparison at a glance: curves on the left, on the right what each task lost since it was learned.

    Args:
        runs: method -> seeds x T x T accuracy matrices, percent; the right side shows their mean over seeds.
    """
    height = max(3.8, 1.1 + 0.85 * len(runs))
    figure = _figure(9.0, height)
    heading(figure, title)
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.05), wspace=0.04, squeeze=False)[0]

    subheading: dict[str, Any] = {"x": 0.02, "ha": "left", "color": INK, "fontsize": 9}
    left.suptitle("Average accuracy on the tasks learned so far (%)", **subheading)
    curves = {method: np.stack([average_accuracy_curve(run) for run in seeds]) for method, seeds in runs.items()}
    _curves(left.subplots(), curves, height=height - 1.3)

    right.suptitle("Accuracy of each task (%):  \u25cb when learned   \u25cf at the end", **subheading)
    rows = right.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for index, (method, seeds) in enumerate(runs.items()):
        _learned_and_left(rows[index], method, seeds, COLOURS[index % len(COLOURS)])
    learned_and_left = np.concatenate([_diagonal_and_last(seeds).ravel() for seeds in runs.values()])
    rows[-1].set_ylim(_axis_floor(learned_and_left, step=10), 100)
    rows[-1].set_xlabel("task", color=INK, fontsize=9)
    return figure


def _curves(axes: Axes, curves: Mapping[str, Array], height: float) -> None:
    tasks = max(seeds.shape[1] for seeds in curves.values())
    everything = np.concatenate([np.ravel(seeds) for seeds in curves.values()])
    # The limits follow the seeds, not the bands: with few seeds a 95% band spans far more than the data.
    lowest = _axis_floor(everything - 1, step=5)
    axes.set_ylim(lowest, 100)
    plain_axes(axes, tasks, levels=5)
    ends: dict[str, float] = {}
    for index, (method, seeds) in enumerate(curves.items()):
        mean, half = np.array([mean_and_interval(column)[:2] for column in np.transpose(seeds)]).T
        style, colour = line_look(index)
        dots: dict[str, Any] = {"marker": "o", "markersize": 4.5 if tasks <= 12 else 3, "markeredgewidth": 0}
        after = np.arange(1, len(mean) + 1)
        axes.plot(after, mean, style, color=colour, linewidth=2, clip_on=False, zorder=3, label=method, **dots)
        if len(seeds) >= FEW:
            axes.fill_between(after, mean - half, mean + half, color=colour, alpha=0.12, linewidth=0, zorder=2)
        ends[method] = float(mean[-1])
    _label_ends(axes, ends, tasks, gap=0.19 / height * (100 - lowest))
    axes.set_xlabel("tasks learned", color=INK, fontsize=9)


def _label_ends(axes: Axes, ends: Mapping[str, float], tasks: int, gap: float) -> None:
    """Name every line where it ends, moved apart by at least `gap` where lines end together."""
    names = sorted(ends, key=lambda name: -ends[name])
    positions = _spread([ends[name] for name in names], gap, highest=100)
    offset = max(0.03 * (tasks - 1), 0.03)
    colours = {name: line_look(index)[1] for index, name in enumerate(ends)}
    for name, position in zip(names, positions, strict=True):
        end = "100" if round(ends[name], 1) == 100 else f"{ends[name]:.1f}"
        text, there = f"{name}  {end}", (tasks + 2 * offset, position)
        look: dict[str, Any] = {"color": colours[name], "fontsize": 8.5, "fontweight": "bold", "va": "center"}
        axes.annotate(text, xy=(tasks, ends[name]), xytext=there, annotation_clip=False, **look)


def _learned_and_left(axes: Axes, method: str, seeds: Array, colour: str) -> None:
    learned, left = _diagonal_and_last(seeds)
    task = np.arange(1, len(learned) + 1)
    plain_axes(axes, len(learned), levels=3)
    axes.vlines(task, left, learned, color=colour, alpha=0.35, linewidth=4, zorder=2)
    dots: dict[str, Any] = {"color": colour, "markersize": 5.5, "markeredgewidth": 1.2, "clip_on": False}
    axes.plot(task, learned, "o", markerfacecolor="white", zorder=3, label="when learned", **dots)
    axes.plot(task, left, "o", zorder=4, label="at the end", **dots)
    axes.set_title(method, loc="left", color=colour, fontsize=9, fontweight="bold", pad=5)
    final, forgotten = (np.mean([metric(run) for run in seeds]) for metric in (average_accuracy, average_forgetting))
    summary = f"accuracy {final:.1f}" + ("" if np.isnan(forgotten) else f",  forgetting {forgotten:.1f}")
    axes.set_title(summary, loc="right", color=MUTED, fontsize=8, pad=5)


def _diagonal_and_last(seeds: Array) -> Array:
    mean = np.asarray(seeds, dtype=float).mean(axis=0)
    return np.stack([mean.diagonal(), mean[:, -1]])


def _spread(positions: Sequence[float], gap: float, highest: float) -> list[float]:
    """Move falling positions down until each is at least `gap` below the one before it.

    >>> _spread([99.0, 98.0, 80.0], gap=3.0, highest=100.0)
    [99.0, 96.0, 80.0]
    """
    spread: list[float] = []
    for position in positions:
        spread.append(min(position, spread[-1] - gap) if spread else min(position, highest))
    return spread


def _axis_floor(values: Array, step: int) -> float:
    """A round number below all values, far enough from 100 to leave the axis a range."""
    return max(0.0, min(90.0, step * math.floor(np.nanmin(values) / step)))


def plain_axes(axes: Axes, tasks: int, *, levels: int) -> None:
    """Axes with little ink: numbered tasks below, so many level lines."""
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8, labelcolor=MUTED)
    axes.set_xticks(task_ticks(tasks))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=levels, steps=[1, 2, 5, 10]))


def _figure(width: float, height: float) -> Figure:
    """An empty one, in inches. matplotlib is imported where something is drawn: most commands draw nothing."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def heading(figure: Figure, title: str) -> None:
    """Above everything, on the left."""
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold", wrap=True)


def task_ticks(tasks: int) -> list[int]:
    """Every task while there is room, else the first and every fifth.

    >>> task_ticks(20)
    [1, 5, 10, 15, 20]
    """
    return list(range(1, tasks + 1)) if tasks <= 12 else [1, *range(5, tasks + 1, 5)]


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


def draw_panels(panels: Mapping[str, Lines], path: Path, *, title: str, x: str, y: str, scale: str = "linear") -> None:
    """Line plots by their headings side by side, one legend; the scale 'symlog' is logarithmic with a place for 0."""
    figure = _figure(max(4.6 * len(panels), 5.2), 3.9)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11, fontweight="bold")
    for axes, (name, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _panel(axes, lines, name, x, y, scale)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save_figure(figure, path)


def _panel(axes: Axes, lines: Lines, title: str, x: str, y: str, scale: str) -> None:
    from matplotlib.ticker import MaxNLocator

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
