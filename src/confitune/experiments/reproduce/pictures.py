"""Pictures of the analyses, in the style of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from confitune.experiments.drawing import COLOURS, GRID, INK, LINE_STYLES, MUTED, save_figure
from confitune.experiments.job import file_name

Scale = Literal["linear", "log", "symlog"]
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # name -> x and y


def draw_panels(
    panels: Mapping[str, Lines], path: Path, *, title: str, x: str, y: Mapping[str, str], scale: Scale = "linear"
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
    for axes, (heading, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _panel(axes, lines, heading, x, y[heading], scale)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    save_figure(figure, path)


def _panel(axes: Axes, lines: Lines, heading: str, x: str, y: str, scale: Scale) -> None:
    for place, (name, (across, up)) in enumerate(lines.items()):
        style = LINE_STYLES[place // len(COLOURS) % len(LINE_STYLES)]
        colour = COLOURS[place % len(COLOURS)]
        marker = MARKERS[place % len(MARKERS)]
        axes.plot(across, up, style, color=colour, label=name, linewidth=1.4, marker=marker, markersize=4)
    axes.set_title(heading, loc="left", color=INK, fontsize=9)
    axes.set_xlabel(x, color=MUTED, fontsize=8)
    axes.set_ylabel(y, color=MUTED, fontsize=8)
    axes.tick_params(labelsize=8, color=GRID, labelcolor=MUTED)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if scale == "symlog":
        axes.set_yscale("symlog", linthresh=1000)
    else:
        axes.set_yscale(scale)
    if all(float(value).is_integer() for across, _ in lines.values() for value in across):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def picture_name(what: str, dataset: str) -> str:
    """The file of a dataset's picture."""
    return f"{what}-{file_name(dataset)}.png"
