"""Pictures of accuracy matrices and of how accuracy develops over a task sequence.

Each function builds a matplotlib Figure; `drawing.save_figure` writes it. Methods take colours in the order given.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray

from confitune.experiments.drawing import (
    COLOURS,
    GRID,
    INK,
    LARGEST_NUMBERED_MATRIX,
    MUTED,
    heading,
    line_look,
    plain_axes,
    task_ticks,
)
from confitune.metrics import average_accuracy, average_accuracy_curve, average_forgetting, mean_and_interval

Array = NDArray[np.floating]

# Without its palest end, so that the lowest accuracy still differs from an empty cell.
BLUES = ListedColormap(colormaps["Blues"](np.linspace(0.12, 1, 256)))
PANELS_PER_ROW = 4


def accuracy_matrix_figure(matrices: Mapping[str, Array], *, title: str) -> Figure:
    """One heatmap a method, all on one colour scale, at most four side by side.

    Args:
        matrices: method -> T x T, percent; NaN stays blank. Up to 12 tasks the cells carry their numbers.
        title: heading of the picture.
    """
    tasks = max(map(len, matrices.values()))
    rows = math.ceil(len(matrices) / PANELS_PER_ROW)
    columns = math.ceil(len(matrices) / rows)
    side = min(max(0.4 * tasks, 2.2), 4.6)
    size = (columns * (side + 0.3) + 1.3, rows * (side + 0.8) + 0.4)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(compress=True, h_pad=0.09))
    heading(figure, title)
    panels = figure.subplots(rows, columns, squeeze=False)
    lowest = _axis_floor(np.concatenate([np.ravel(matrix) for matrix in matrices.values()]), step=10)
    images = [
        _heatmap(panel, method, np.asarray(matrix, dtype=float), lowest)
        for panel, (method, matrix) in zip(panels.flat, matrices.items(), strict=False)
    ]
    for panel in panels.flat[len(matrices) :]:
        panel.set_axis_off()
    for panel in panels[:, 0]:
        panel.set_ylabel("accuracy on task", color=INK, fontsize=9)
    bar = figure.colorbar(images[0], ax=panels, shrink=0.8, aspect=25, pad=0.02)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=8, color=GRID, labelcolor=MUTED)
    bar.set_label("accuracy (%)", color=MUTED, fontsize=9)
    return figure


def curves_figure(curves: Mapping[str, Array], *, title: str) -> Figure:
    """Average accuracy on the tasks learned so far, after each task: mean line and 95% band over seeds.

    Args:
        curves: method -> seeds x T, percent (see `confitune.metrics.average_accuracy_curve`). One seed has no band.
        title: heading of the picture.
    """
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    heading(figure, title)
    axes = figure.subplots()
    _curves(axes, curves, height=3.0)
    axes.set_ylabel("average accuracy on\nthe tasks learned so far (%)", color=INK, fontsize=9)
    return figure


def overview_figure(runs: Mapping[str, Array], *, title: str) -> Figure:
    """The whole comparison at a glance: curves on the left, on the right what each task lost since it was learned.

    Args:
        runs: method -> seeds x T x T accuracy matrices, percent; the right side shows their mean over seeds.
        title: heading of the picture.
    """
    height = max(3.8, 1.1 + 0.85 * len(runs))
    figure = Figure(figsize=(9.0, height), layout="constrained")
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


def _heatmap(axes: Axes, method: str, matrix: Array, lowest: float) -> AxesImage:
    tasks = len(matrix)
    image = axes.imshow(np.ma.masked_invalid(matrix), cmap=BLUES, vmin=lowest, vmax=100)
    axes.set_title(method, color=INK, fontsize=10, fontweight="bold", pad=6)
    axes.set_xlabel("after training task", color=INK, fontsize=9)
    ticks = task_ticks(tasks)
    axes.set_xticks([task - 1 for task in ticks], labels=[str(task) for task in ticks])
    axes.set_yticks([task - 1 for task in ticks], labels=[str(task) for task in ticks])
    axes.tick_params(length=0, labelsize=8, labelcolor=MUTED)
    axes.spines[:].set_visible(False)
    for edge in np.arange(tasks - 1) + 0.5:
        axes.axhline(edge, color="white", linewidth=1)
        axes.axvline(edge, color="white", linewidth=1)
    if tasks <= LARGEST_NUMBERED_MATRIX:
        for (task, after), colour in zip(np.ndindex(matrix.shape), image.to_rgba(matrix).reshape(-1, 4), strict=True):
            value = float(matrix[task, after])
            if not np.isnan(value):
                ink = _readable_on(colour)
                axes.text(after, task, _number(value), ha="center", va="center", fontsize=7.5, color=ink)
    return image


def _curves(axes: Axes, curves: Mapping[str, Array], height: float) -> None:
    tasks = max(seeds.shape[1] for seeds in curves.values())
    everything = np.concatenate([np.ravel(seeds) for seeds in curves.values()])
    # The limits follow the seeds, not the bands: with two seeds a 95% band spans far more than the data.
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
        if len(seeds) > 1:
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
        text, there = f"{name}  {_number(ends[name])}", (tasks + 2 * offset, position)
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
    axes.set_title(_summary(seeds), loc="right", color=MUTED, fontsize=8, pad=5)


def _summary(seeds: Array) -> str:
    final = np.mean([average_accuracy(run) for run in seeds])
    forgotten = np.mean([average_forgetting(run) for run in seeds])
    return f"accuracy {final:.1f}" + ("" if np.isnan(forgotten) else f",  forgetting {forgotten:.1f}")


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


def _readable_on(colour: Array) -> str:
    """White or dark ink, whichever stands out more on `colour` (relative luminance and contrast of WCAG 2)."""
    rgb = colour[:3]
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return "white" if linear @ (0.2126, 0.7152, 0.0722) < 0.21 else INK


def _axis_floor(values: Array, step: int) -> float:
    """A round number below all values, far enough from 100 to leave the axis a range."""
    return max(0.0, min(90.0, step * math.floor(np.nanmin(values) / step)))


def _number(value: float) -> str:
    return "100" if round(value, 1) == 100 else f"{value:.1f}"
