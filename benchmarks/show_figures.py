"""The benchmarks' numbers as pictures: bars from zero, in the colours of Okabe and Ito, without pyplot."""

from __future__ import annotations

import math
import statistics

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from show_tables import (
    MIB,
    PUBLISHED,
    STAGES,
    Numbers,
    about_growth,
    about_space,
    batches_and_modes,
    best_seconds,
    count,
    execution,
    find,
    longer,
    memory_words,
    percent,
    seconds,
    times,
    where,
    whole_tasks,
)

from confitune.experiments.reporting.figures import COLOURS, GRID, INK, MUTED

GREY = "#9a9a9a"
MODES = {"eager": COLOURS[5], "graph": COLOURS[0], "compile": COLOURS[1]}
NORMS = {"plain BN": GREY, "silent": COLOURS[2], "tracking": COLOURS[1]}
STATISTICS = {"running": COLOURS[1], "pass": COLOURS[3]}


def stages_figure(numbers: Numbers) -> Figure:
    """Images a second: a panel for each batch size, a group for each stage, a bar for each mode and the baseline."""
    batches = list(numbers["published"])
    columns = min(2, len(batches))
    rows = math.ceil(len(batches) / columns)
    bars = {batch: _stage_bars(numbers, batch) for batch in batches}
    most = max(sum(map(len, groups.values())) for groups in bars.values())
    title = "Training steps: images a second, and times the published way"
    figure = _figure(title, numbers, rows * (0.24 * most + 1.1) + 0.7)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[len(batches) :]:
        axes.set_axis_off()
    highest = max(speed for groups in bars.values() for group in groups.values() for _, _, speed in group)
    for axes, (batch, groups) in zip(panels, bars.items(), strict=False):
        published = numbers["published"][batch]
        _plain(axes, f"batch {batch}", grid="x")
        axes.axvline(published, color=GREY, linestyle="--", linewidth=1.2, zorder=1)
        place, middles = 0.0, []
        for group in groups.values():
            middles.append(place - (len(group) - 1) / 2)
            for label, colour, speed in group:
                axes.barh(place, speed, 0.88, color=colour, label=label, zorder=2)
                text = f" {count(speed)}  {times(speed / published)}"
                axes.text(speed, place, text, va="center", color=INK, fontsize=8.5)
                place -= 1
            place -= 0.6
        axes.set_yticks(middles, labels=[f"trains\n{STAGES[stage]}" for stage in groups])
        axes.set_xlim(0, 1.38 * highest)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel("images a second", color=INK, fontsize=9)
    _legend(figure, columns=4)
    return figure


def _stage_bars(numbers: Numbers, batch: str) -> dict[str, list[tuple[str, str, float]]]:
    """Stage -> its bars: label, colour, images a second. The published way was timed with everything trained."""
    modes = [mode for size, mode in batches_and_modes(numbers) if str(size) == batch]
    groups = {}
    for stage in STAGES:
        published = (f"{PUBLISHED}, everything trained", GREY, numbers["published"][batch])
        steps = {mode: find(numbers, int(batch), mode, "silent", stage) for mode in modes}
        ours = [(execution(numbers, m), MODES[m], step["images_per_second"]) for m, step in steps.items() if step]
        groups[stage] = [published, *ours] if stage == "all" else ours
    return {stage: group for stage, group in groups.items() if group}


def tracking_figure(numbers: Numbers) -> Figure:
    """Above: steps with plain batch norm, silent and tracking trackers. Below: what whole tasks take longer."""
    figure = _figure("What the input statistics cost", numbers, 6.6)
    above, below = figure.subplots(2, 1)
    pairs = batches_and_modes(numbers)
    _plain(
        above, "One step that trains everything: images a second, and how much longer it takes than plain batch norm"
    )
    for place, (batch, mode) in enumerate(pairs):
        for i, (norm, colour) in enumerate(NORMS.items()):
            step, cost = find(numbers, batch, mode, norm), longer(numbers, batch, mode, norm)
            if step:
                x, speed = place + (i - 1) * 0.3, step["images_per_second"]
                above.bar(x, speed, 0.28, color=colour, label=f"step: {norm}")
                more = "" if norm == "plain BN" or cost is None else f"\n{percent(cost)}"
                _above(above, x, speed, count(speed) + more)
    tasks = whole_tasks(numbers)
    _plain(below, "A whole task: how much longer it takes than with plain batch norm, in percent (lines: all repeats)")
    below.axhline(0, color=GREY, linewidth=1)
    reach = [0.0]
    for place, entries in enumerate(tasks.values()):
        base = statistics.median(entries["plain BN"]["seconds"])
        for i, (name, colour) in enumerate(STATISTICS.items()):
            if name in entries:
                x, cost = place + (i - 0.5) * 0.34, entries[name]["cost_against_plain_bn"]
                extremes = [100 * (f(entries[name]["seconds"]) / base - 1) for f in (min, max)]
                reach += [100 * cost, *extremes]
                below.bar(x, 100 * cost, 0.3, color=colour, label=f"whole task: {name}")
                below.vlines(x, *extremes, color=INK, linewidth=1)
                _above(below, x, max(extremes[1], 0), percent(cost))
    for axes, keys in ((above, pairs), (below, list(tasks))):
        labels = [f"batch {batch}\n{execution(numbers, mode)}" for batch, mode in keys]
        axes.set_xticks(range(len(keys)), labels=labels)
        axes.set_xlim(-0.6, len(keys) - 0.4)
    above.set_ylim(0, 1.25 * max(patch.get_height() for patch in above.patches))
    below.set_ylim(1.1 * min(reach), 1.25 * max(*reach, 1))
    _legend(figure, columns=5)
    return figure


def space_figure(numbers: Numbers) -> Figure:
    """What is found of strange images, by how many known ones are said to be unknown."""
    figure = _figure("Said to be unknown", numbers, 3.6, about_space(numbers))
    axes = figure.subplots()
    _plain(axes, "Strange images that are found, in percent, by false alarms in percent of known ones")
    for colour, (name, shares) in zip(COLOURS, list(numbers["unknown"].items())[1:], strict=False):
        points = {float(alarms): found for alarms, found in shares.items() if alarms != "as set"}
        axes.plot(list(points), list(points.values()), "o-", color=colour, label=name, markersize=3.5)
    axes.set_ylim(0, 102)
    axes.legend(frameon=False, loc="lower right")
    return figure


def growth_figure(numbers: Numbers) -> Figure:
    """Left: seconds of each task. Right: memory in use, and of it the tasks' states."""
    figure = _figure("Task after task: time and memory", numbers, 3.6, about_growth(numbers))
    left, right = figure.subplots(1, 2)
    points = numbers["points"]
    tasks = [point["tasks"] for point in points]
    _plain(left, "Seconds a task")
    left.plot(tasks, [point["seconds"] for point in points], "o", color=COLOURS[0], markersize=3.5, clip_on=True)
    later = max(point["seconds"] for point in points[1:] or points)
    left.set_ylim(0, 1.25 * later)
    if points[0]["seconds"] > 1.25 * later:
        note = f"↑ the first task: {seconds(points[0]['seconds'])} s"
        left.text(tasks[0], 1.17 * later, note, color=COLOURS[0], fontsize=9, va="center")
    _plain(right, "Memory (MiB)")
    memory = {
        memory_words(numbers): ("memory_bytes", COLOURS[1]),
        "states of all tasks so far": ("stored_bytes", COLOURS[2]),
    }
    highest = max(point["memory_bytes"] for point in points) / MIB
    for label, (key, colour) in memory.items():
        values = [point[key] / MIB for point in points]
        right.plot(tasks, values, color=colour, linewidth=2.2)
        right.text(
            tasks[-1],
            values[-1] + 0.03 * highest,
            f"{label}: {values[-1]:,.0f}",
            color=colour,
            fontsize=9,
            ha="right",
            va="bottom",
        )
    right.set_ylim(0, 1.2 * highest)
    for axes in (left, right):
        axes.set_xlim(0, 1.02 * tasks[-1])
        axes.set_xlabel("tasks learned", color=INK, fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


def whole_figure(numbers: Numbers) -> Figure:
    """Seconds from zero: on the left one seed, the straightforward loop and ours; on the right several seeds."""
    ours = numbers.get("execution", "")
    figure = _figure("End to end: seconds of a whole sequence", numbers, 2.5, numbers["dataset"], numbers["model"])
    best = best_seconds(numbers)
    bars = {"straightforward loop\nfp32, eager": (best.get("straightforward"), GREY)}
    bars[f"confitune\n{ours}"] = (best["confitune"], COLOURS[0])
    panels = [("One seed", bars)]
    if "parallel" in numbers:
        side = numbers["parallel"]
        alone = side["seeds"] * best["confitune"]
        several = {"one after\nthe other": (alone, COLOURS[0]), "side by side": (side["seconds"], COLOURS[2])}
        panels.append((f"{side['seeds']} seeds with confitune", several))
    for axes, (title, shown) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _plain(axes, title, grid="x")
        shown = {label: bar for label, bar in shown.items() if bar[0] is not None}
        first = next(iter(shown.values()))[0]
        for place, (value, colour) in enumerate(shown.values()):
            axes.barh(-place, value, 0.62, color=colour)
            ratio = f"  ({times(first / value)} as fast)" if place else ""
            axes.text(value, -place, f" {seconds(value)} s{ratio}", va="center", color=INK, fontsize=9)
        axes.set_yticks([-place for place in range(len(shown))], labels=list(shown))
        axes.set_xlim(0, 1.55 * max(value for value, _ in shown.values()))
        axes.set_ylim(-len(shown) + 0.4, 0.6)
        axes.set_xlabel("seconds", color=INK, fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    return figure


# Drawing


def _figure(title: str, numbers: Numbers, height: float, *details: str) -> Figure:
    figure = Figure(figsize=(9.0, height), layout="constrained")
    what = ", ".join((*(details or (numbers["model"], f"{numbers['pixels']} pixels")), where(numbers)))
    figure.suptitle(f"{title}\n", x=0.01, ha="left", color=INK, fontsize=12, fontweight="bold")
    figure.text(0.01, 1 - 0.36 / height, what, color=MUTED, fontsize=9, va="center")
    return figure


def _plain(axes: Axes, title: str, grid: str = "y") -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=9.5)
    axes.spines[["top", "right", "left" if grid == "y" else "bottom"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color("#bbbbbb")
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=MUTED)
    numbered = axes.yaxis if grid == "y" else axes.xaxis
    numbered.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}".replace("-", "−")))


def _above(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=7.2, color=INK)


def _legend(figure: Figure, columns: int) -> None:
    """Each label once, below all panels."""
    named = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    figure.legend(
        named.values(), named, loc="outside lower left", ncols=columns, frameon=False, fontsize=8.5, labelcolor=INK
    )
