"""What all pictures have in common: colours, axes, headings, and how a picture is written.

Figures are built without pyplot, so nothing is shared between calls and no display is needed. Colours are those of
Okabe and Ito, which stay apart for colour-blind readers.
"""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from confitune.files import write_whole

PIXELS_PER_INCH = 200
INK, MUTED, GRID = "#222222", "#6b6b6b", "#e4e4e4"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", ":")
LARGEST_NUMBERED_MATRIX = 12


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


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write as a PNG, whole or not at all."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Without matplotlib's version in the metadata, the same data gives the same bytes.
    metadata = {"Software": None}
    write_whole(
        target,
        lambda out: figure.savefig(out, format="png", dpi=PIXELS_PER_INCH, facecolor="white", metadata=metadata),
    )
