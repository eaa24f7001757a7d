"""Pictures: how accuracy develops over a task sequence, and plain line plots.

Figures are built without pyplot, so nothing is shared between calls and no display is needed. Colours are those of
Okabe and Ito, which stay apart for colour-blind readers.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from confitune.engine import RunResult
from confitune.experiments.reporting.table import FEW
from confitune.files import write_whole
from confitune.methods import METHODS
from confitune.metrics import average_accuracy, average_accuracy_curve, average_forgetting, mean_and_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PIXELS_PER_INCH = 200
INK, MUTED, GRID = "#222222", "#6b6b6b", "#e4e4e4"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Each of these has one look in all pictures: the first are compared most often, and get the plainest.
NAMED = tuple(dict.fromkeys(["confit", "finetune", "best", "mas-cpr", "mas-afec", *METHODS]))
SMALL: dict[str, Any] = {"x": 0.02, "ha": "left", "color": INK, "fontsize": 9}

Array = NDArray[np.floating]


def looks(names: Collection[str]) -> dict[str, dict[str, Any]]:
    """Colour and style of each line: the method's own; other names take what is free in this picture."""
    pairs = [{"linestyle": style, "color": colour} for style, colour in product(("-", "--", ":", "-."), COLOURS)]
    own = {name: pairs[NAMED.index(name)] for name in names if name in NAMED}
    free = cycle([pair for pair in pairs if pair not in own.values()])
    return {name: own[name] if name in own else next(free) for name in names}


def matrices(runs: Mapping[str, Sequence[RunResult]]) -> dict[str, Array]:
    """Accuracy matrices (seeds x T x T) by name, of methods that learn task after task; joint training does not."""
    stacks = {name: np.stack([run.matrix for run in of_name]) for name, of_name in runs.items()}
    return {name: stack for name, stack in stacks.items() if not np.isnan(stack[:, 0, 0]).any()}


def overview_figure(runs: Mapping[str, Array], *, title: str) -> Figure:
    """The whole comparison at a glance: curves on the left, on the right what each task lost since it was learned.

    Args:
        runs: method -> seeds x T x T accuracy matrices, percent; the right side shows their mean over seeds.
    """
    height = max(3.8, 1.1 + 0.85 * len(runs))
    figure = _figure(9.0, height, title)
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.05), wspace=0.04, squeeze=False)[0]

    left.suptitle("Average accuracy on the tasks learned so far (%)", **SMALL)
    curves = {method: np.stack([average_accuracy_curve(run) for run in seeds]) for method, seeds in runs.items()}
    _curves(left.subplots(), curves, height=height - 1.3)

    right.suptitle("Accuracy of each task (%):  \u25cb when learned   \u25cf at the end", **SMALL)
    rows = right.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    lowest = 100.0
    for axes, (method, seeds), look in zip(rows, runs.items(), looks(runs).values(), strict=True):
        lowest = min(lowest, _learned_and_left(axes, method, seeds, look["color"]))
    rows[-1].set_ylim(_axis_floor(lowest, step=10), 100)
    rows[-1].set_xlabel("task", color=INK, fontsize=9)
    return figure


def _curves(axes: Axes, curves: Mapping[str, Array], height: float) -> None:
    """Of each method (seeds x tasks) the mean line, and from 3 seeds on its 95% band."""
    tasks = max(seeds.shape[1] for seeds in curves.values())
    # The limits follow the seeds, not the bands: with few seeds a 95% band spans far more than the data.
    lowest = _axis_floor(min(float(np.nanmin(seeds)) for seeds in curves.values()) - 1, step=5)
    axes.set_ylim(lowest, 100)
    _plain_axes(axes, tasks, levels=5)
    by_name = looks(curves)
    ends = dict[str, float]()
    for method, seeds in curves.items():
        mean, half = np.array([mean_and_interval(column)[:2] for column in np.transpose(seeds)]).T
        dots: dict[str, Any] = {"marker": "o", "markersize": 4.5 if tasks <= 12 else 3, "markeredgewidth": 0}
        after = np.arange(1, len(mean) + 1)
        look = by_name[method]
        axes.plot(after, mean, linewidth=2, clip_on=False, zorder=3, label=method, **look, **dots)
        if len(seeds) >= FEW:
            axes.fill_between(after, mean - half, mean + half, color=look["color"], alpha=0.12, linewidth=0, zorder=2)
        ends[method] = float(mean[-1])
    axes.set_xlabel("tasks learned", color=INK, fontsize=9)
    # Every line is named where it ends; where lines end together, names are moved apart.
    names = sorted(ends, key=lambda name: -ends[name])
    places = _spread([ends[name] for name in names], gap=0.19 / height * (100 - lowest), highest=100)
    for name, place in zip(names, places, strict=True):
        end = "100" if round(ends[name], 1) == 100 else f"{ends[name]:.1f}"
        there = (tasks + 2 * max(0.03 * (tasks - 1), 0.03), place)
        text: dict[str, Any] = {"color": by_name[name]["color"], "fontsize": 8.5, "fontweight": "bold", "va": "center"}
        axes.annotate(f"{name}  {end}", xy=(tasks, ends[name]), xytext=there, annotation_clip=False, **text)


def _learned_and_left(axes: Axes, method: str, seeds: Array, colour: str) -> float:
    """One method's tasks; the lowest accuracy that is shown."""
    mean = np.asarray(seeds, dtype=float).mean(axis=0)
    learned, left = mean.diagonal(), mean[:, -1]
    task = np.arange(1, len(learned) + 1)
    _plain_axes(axes, len(learned), levels=3)
    axes.vlines(task, left, learned, color=colour, alpha=0.35, linewidth=4, zorder=2)
    dots: dict[str, Any] = {"color": colour, "markersize": 5.5, "markeredgewidth": 1.2, "clip_on": False}
    axes.plot(task, learned, "o", markerfacecolor="white", zorder=3, label="when learned", **dots)
    axes.plot(task, left, "o", zorder=4, label="at the end", **dots)
    axes.set_title(method, loc="left", color=colour, fontsize=9, fontweight="bold", pad=5)
    final, forgotten = (np.mean([metric(run) for run in seeds]) for metric in (average_accuracy, average_forgetting))
    summary = f"accuracy {final:.1f}" + ("" if np.isnan(forgotten) else f",  forgetting {forgotten:.1f}")
    axes.set_title(summary, loc="right", color=MUTED, fontsize=8, pad=5)
    return float(np.nanmin([learned, left]))


def panels_figure(
    panels: Mapping[str, Mapping[str, Sequence[float] | Array]], *, title: str, x: str, y: str, scale: str = "linear"
) -> Figure:
    """Line plots by their headings side by side, over 1, 2, ...; 'symlog' is a logarithmic scale with a place for 0."""
    figure = _figure(max(4.6 * len(panels), 5.2), 3.9, title)
    for axes, (name, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for line, look in looks(lines).items():
            across = range(1, len(lines[line]) + 1)
            axes.plot(across, lines[line], label=line, linewidth=1.4, marker="o", markersize=3.5, **look)
        axes.set_title(name, loc="left", color=INK, fontsize=9)
        axes.set_xlabel(x, color=MUTED, fontsize=8)
        axes.set_ylabel(y, color=MUTED, fontsize=8)
        axes.set_yscale(scale, **({"linthresh": 1000} if scale == "symlog" else {}))
        _plain_axes(axes, max(map(len, lines.values())))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _spread(positions: Sequence[float], gap: float, highest: float) -> list[float]:
    """Move falling positions down until each is at least `gap` below the one before it.

    >>> _spread([99.0, 98.0, 80.0], gap=3.0, highest=100.0)
    [99.0, 96.0, 80.0]
    """
    spread: list[float] = []
    for position in positions:
        spread.append(min(position, spread[-1] - gap) if spread else min(position, highest))
    return spread


def _axis_floor(lowest: float, step: int) -> float:
    """A round number below the lowest value, far enough from 100 to leave the axis a range."""
    return max(0.0, min(90.0, step * math.floor(lowest / step)))


def _plain_axes(axes: Axes, places: int, levels: int | None = None) -> None:
    """Axes with little ink: numbered places below (where there are many, the first and every fifth), level lines."""
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8, labelcolor=MUTED)
    axes.set_xticks(range(1, places + 1) if places <= 12 else [1, *range(5, places + 1, 5)])
    if levels:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=levels, steps=[1, 2, 5, 10]))


def _figure(width: float, height: float, title: str) -> Figure:
    """An empty one, in inches. matplotlib is imported where something is drawn: most commands draw nothing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold", wrap=True)
    return figure


def png_of(figure: Figure) -> bytes:
    """The same data give the same bytes: matplotlib's version stays out of the metadata."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=PIXELS_PER_INCH, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def save_figure(figure: Figure, path: Path) -> None:
    """Write as a PNG, whole or not at all."""
    data = png_of(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda out: out.write(data))
